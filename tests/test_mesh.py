"""Which interface gloo's own groups use, and whose process group a mesh is made over."""

import socket
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rrfp_async.mesh import choose_interface, device_mesh
from rrfp_async.topology import Topology

linux = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found on Linux only")


@linux
def test_gloo_is_told_the_interface_that_has_the_address() -> None:
    """The loopback's name, for its address."""
    environment: dict[str, str] = {}
    choose_interface(environment, "127.0.0.1")
    assert environment["GLOO_SOCKET_IFNAME"] in {name for _, name in socket.if_nameindex()}
    assert environment["GLOO_SOCKET_IFNAME"].startswith("lo")


@linux
def test_an_interface_that_the_user_chose_stays() -> None:
    """Whatever the address is."""
    environment = {"GLOO_SOCKET_IFNAME": "theirs"}
    choose_interface(environment, "203.0.113.1")
    assert environment == {"GLOO_SOCKET_IFNAME": "theirs"}


@linux
def test_an_address_that_no_interface_has_is_refused() -> None:
    """With the variable to set."""
    with pytest.raises(ValueError, match=r"203.0.113.1: set GLOO_SOCKET_IFNAME to the name"):
        choose_interface({}, "203.0.113.1")


@pytest.fixture
def alone() -> Iterator[None]:
    """A default process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_default_process_group_of_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers, and what to do."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(ValueError, match=r"as rank 0 of 1, torchrun as 1 of 2: initialise it with"):
        device_mesh(
            Topology(1, dp=2), rank=1, store=None, host="127.0.0.1", device=torch.device("cpu")
        )
