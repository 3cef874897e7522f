"""Any pytree between stages: what leaves one is what enters the next, and gradients find back."""

import collections
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import rrfp_async as r
from rrfp_async.errors import ProtocolError
from rrfp_async.ids import Layout
from rrfp_async.tasks.layout import assembled, flattened
from tests.runtime.parity import assert_parity, chain_case, pipelined


class Pair(NamedTuple):
    """A node that is not registered under a name."""

    left: Any
    right: Any


TREES = {
    "a dict": {"hidden": 0, "mask": 1},
    "None and numbers": (0, None, {"scale": 2.5, "on": True, "count": 3, "name": "ä", "raw": b"x"}),
    "nested": {"a": [(0, {"b": 1}), []], "c": ((), {})},
    "ordered": collections.OrderedDict(z=0, a=1),
    "one number": (7,),
    "no tensor": {"a": None},
    "integer keys": {1: 0, 2: 1},
    "bare": 0,
}


def _with_tensors(tree: Any) -> Any:
    """0 and 1, alone in their types, stand for tensors."""
    torch.manual_seed(1)
    tensors = [torch.randn(2, 3), torch.tensor([[True], [False]])]
    return pytree.tree_map(
        lambda leaf: tensors[leaf] if type(leaf) is int and leaf in (0, 1) else leaf, tree
    )


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_a_tree_comes_out_as_it_went_in(tree: Any) -> None:
    """Types, order, values, and the tensors themselves."""
    output = _with_tensors(tree)
    tensors, layout = flattened(output)
    arguments = assembled(layout, tensors)
    wanted = tuple(output) if type(output) in (tuple, list) else (output,)
    assert pytree.tree_structure(arguments) == pytree.tree_structure(wanted)
    for ours, theirs in zip(pytree.tree_leaves(arguments), pytree.tree_leaves(wanted), strict=True):
        assert ours is theirs or ours == theirs
        assert type(ours) is type(theirs)


def test_tensors_alone_need_no_tree() -> None:
    """The usual case costs nothing in the header."""
    assert flattened(torch.ones(1))[1] == Layout()
    assert flattened((torch.ones(1), torch.ones(2)))[1] == Layout()
    assert flattened([torch.ones(1)])[1] == Layout()


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (object(), "a object"),
        ({"a": {1, 2}}, "a set"),
        ((torch.ones(1), torch.float32), "a dtype"),
        ((1 << 63,), "63 bits"),
        (("x" * 20_000,), "16384 at most"),
        (("\ud800",), "UTF-8"),
        ({(1, 2): torch.ones(1), (3, 4): 1}, "keys"),
        (Pair(torch.ones(1), 1), "register"),
        ([[] for _ in range(3000)] + [1], "characters to write down"),
    ],
)
def test_what_cannot_be_sent_is_told(output: Any, told: str) -> None:
    """A TypeError that says what it is and what to use instead."""
    with pytest.raises(TypeError, match=told):
        flattened(output)


def test_a_layout_that_does_not_fit_its_tensors_is_an_error() -> None:
    """As is one that names what is not known here."""
    _, layout = flattened({"a": torch.ones(1), "b": 1})
    with pytest.raises(ProtocolError, match="3 leaves came for a tree of 2"):
        assembled(layout, [torch.ones(1), torch.ones(1)])
    for structure in ("nonsense", '[1, {"type": "no.such", "context": "null"}]', "[1]", "3"):
        with pytest.raises(ProtocolError, match="not known here"):
            assembled(Layout(structure), [torch.ones(1)])


class First(nn.Module):
    """Sends a dict whose shape differs by microbatch, with a mask, ids and plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        hidden = self.layer(x)
        ids = torch.arange(len(x))
        extra = [hidden * 2] * (len(x) % 3)
        return {"hidden": (hidden, extra), "mask": x > 0, "ids": ids, "n": len(x), "none": None}


class Second(nn.Module):
    """Uses some of it, hands on the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, state: dict[str, Any]) -> Any:
        hidden, extra = state["hidden"]
        assert state["none"] is None
        for more in extra:
            hidden = hidden + more
        hidden = self.layer(hidden * state["mask"])
        return hidden, {"ids": state["ids"], "scale": 1.0 / state["n"]}


class Third(nn.Module):
    """Ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, more: dict[str, Any]) -> Tensor:
        return self.layer(hidden) * more["scale"] + more["ids"][:, None]


@pytest.mark.parametrize("hint", ["bf", "bfw", "auto"])
async def test_trees_between_stages_have_parity(hint: str, tmp_path: Path) -> None:
    """Structures, dtypes and values that change by microbatch; bitwise, in any order."""
    torch.manual_seed(2)
    stages = [First(), Second(), Third()]
    case = chain_case(3, microbatches=3, batch=10, stages=stages, options={"hint": hint})
    await assert_parity(case, tmp_path, seeds=range(5))


@pytest.mark.parametrize("placement", ["loop", "v"])
async def test_trees_are_handed_over_on_a_rank(placement: str, tmp_path: Path) -> None:
    """As over a link."""
    torch.manual_seed(2)
    stages = [First(), Second(), nn.Linear(8, 8), Third()]
    stages[2] = _Passing(stages[2])
    case = chain_case(4, microbatches=3, batch=10, stages=stages, chunks=2, placement=placement)
    await assert_parity(case, tmp_path, seeds=range(5))


class _Passing(nn.Module):
    """Changes the tensor, hands on the rest."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, more: dict[str, Any]) -> Any:
        return self.layer(hidden), more


class _Odd(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"x": x, "device": x.device}


async def test_a_leaf_that_cannot_be_sent_names_type_and_stage(tmp_path: Path) -> None:
    """On every rank, as the task's failure."""
    case = chain_case(2, microbatches=2, stages=[_Odd(), Third()])
    with pytest.raises(r.StepFailed, match="stage 0 returned a device: return tensors, numbers"):
        await pipelined(case, tmp_path)
