"""I and W by deferral: bit for bit the fused backward, and no `.grad` touched before W."""

from collections.abc import Iterator

import pytest
import torch

from tests.tasks.split_cases import BLOCKS, KNOWN
from tests.tasks.split_harness import PUT_OFF, Case, assert_bitwise


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_i_and_w_are_the_fused_backward_bit_for_bit(case: Case) -> None:
    """Loss, input gradients and every parameter's, in any order of I and with W put off."""
    assert_bitwise(case)


@pytest.mark.parametrize("case", [case for case in BLOCKS if "2,048" in case.name], ids=str)
def test_i_and_w_are_the_fused_backward_on_two_threads(case: Case) -> None:
    """As above where torch really shares the work out."""
    torch.set_num_threads(2)
    assert_bitwise(case, [PUT_OFF])


@pytest.mark.slow
@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_all_cases_on_two_threads(case: Case) -> None:
    """As above, for every case."""
    torch.set_num_threads(2)
    assert_bitwise(case)
