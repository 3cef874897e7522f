"""The names things go by: task kinds, tasks, edges, links, and the shape of one tensor.

Pure values, torch-free, shared by every room. Nothing here knows what is done with them. Tasks and
edges are named tuples: they are looked up many times a task, and tuples are hashed and compared
without running Python.
"""

import enum
import re
from dataclasses import dataclass
from typing import NamedTuple

_TASK = re.compile(r"(0|[1-9][0-9]*)([FBIWR])(0|[1-9][0-9]*)")


class TaskKind(enum.Enum):
    """What a task does to a microbatch on a stage."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # backward for the input gradient only  # noqa: E741 - the field's letter
    W = "W"  # backward for the weight gradient only
    R = "R"  # gradient reduction over copies of a stage

    __hash__ = object.__hash__  # members are singletons; the inherited hash runs Python code


class TaskId(NamedTuple):
    """One task; its repr is a word: `2F5` is stage 2, forward, microbatch 5."""

    stage: int
    kind: TaskKind
    microbatch: int

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind._value_}{self.microbatch}"

    @classmethod
    def parse(cls, word: str) -> "TaskId":
        """Read the word that `repr` writes.

        Raises:
            ValueError: If `word` is not a stage, one of the letters F B I W R, and a microbatch.
        """
        match = _TASK.fullmatch(word)
        if match is None:
            raise ValueError(
                f"task {word!r} is no task: write stage, kind (F, B, I, W or R) and microbatch, "
                f"such as '2F5'"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), TaskKind(kind), int(microbatch))


class Edge(NamedTuple):
    """A data dependency between stages; activations run along it, gradients against it."""

    source: int
    target: int

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


@dataclass(frozen=True, slots=True)
class Link:
    """A directed connection between ranks; tensors on it are received in the order sent."""

    source: int
    target: int

    def __repr__(self) -> str:
        return f"{self.source}=>{self.target}"

    __str__ = __repr__


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a receiver must know of a tensor before it comes.

    Attributes:
        shape: The tensor's sizes.
        dtype: torch's name of the element type without the prefix, such as `"float32"`.
        requires_grad: Whether the sender wants a gradient back for it.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False


Plain = bool | int | float | str | bytes | None
"""What travels beside tensors, as it is."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the arguments that an edge brings are put together from its tensors.

    Attributes:
        structure: The tree of the arguments, as torch's pytree writes it. None: the tensors are
            the arguments.
        plain: The leaves of the tree that are no tensors, each with its place among all leaves.
    """

    structure: str | None = None
    plain: tuple[tuple[int, Plain], ...] = ()


TENSORS_ONLY = Layout()
"""The tensors are the arguments."""
