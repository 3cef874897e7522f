"""Where a layer with an autograd function of its own leaves its weight's gradient until W.

`nn.Linear` is deferred by itself. A fused, quantized or otherwise own layer says in its backward
how the gradient of its weight is computed, and W computes it. As the stores of Megatron-LM's and
DualPipe's zero-bubble schedules, but one for each microbatch, and a plain backward when nobody
collects. It knows neither stages nor when W runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

ComputeGradient = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class PutOff:
    """A weight's gradient that is yet to be computed from its operands."""

    weight: torch.nn.Parameter
    compute: ComputeGradient
    operands: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]  # of the operands, when they were kept

    cast: int = field(default=0, init=False)  # the gradient comes in the weight's own dtype

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is kept."""
        return self.operands

    def products(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Compute the gradient.

        Raises:
            RuntimeError: If an operand was written to since it was kept, or what was computed
                does not have the weight's shape and dtype.
        """
        if self.versions != tuple(operand._version for operand in self.operands):
            raise RuntimeError(
                f"an operand of the gradient of a weight {tuple(self.weight.shape)} was modified "
                f"in place before W: do not reuse it for another microbatch"
            )
        with torch.no_grad():
            gradient = self.compute(*self.operands)
        if gradient.shape != self.weight.shape:
            raise RuntimeError(
                f"the gradient computed for a weight {tuple(self.weight.shape)} has the shape "
                f"{tuple(gradient.shape)}: give WeightGradStore.put a function that returns the "
                f"weight's"
            )
        if gradient.dtype != self.weight.dtype:
            raise RuntimeError(
                f"the gradient computed for a weight of {self.weight.dtype} is of "
                f"{gradient.dtype}: cast it as autograd would"
            )
        yield self.weight, gradient


class WeightGradStore:
    """What a layer asks in its backward whether its weight's gradient can wait. See `put`."""

    def __init__(
        self,
        keep: Callable[[PutOff], None] | None = None,
        is_collecting: Callable[[], bool] = lambda: False,
        takes: Callable[[torch.Tensor], bool] = lambda _weight: False,
    ) -> None:
        self._keep = keep
        self._is_collecting = is_collecting
        self._takes = takes

    def put(
        self, weight: torch.nn.Parameter, compute: ComputeGradient, *operands: torch.Tensor
    ) -> bool:
        """Leave the gradient of `weight` until W, if W will come.

        Call it in the backward of the autograd function, with the same operations that the
        function would do otherwise, so that the bits are the same.

        Args:
            weight: The parameter itself, kept on `ctx` in the forward: what
                `ctx.saved_tensors` gives may be another tensor (under checkpointing, say), and is
                then not taken, nor is a frozen weight or one that is computed from others.
            compute: `compute(*operands)` returns the gradient: a new tensor of the weight's shape,
                dtype and device. It runs without gradients, on the device's thread.
            *operands: Tensors that are kept until W and must not be written to.

        Returns:
            Whether it was taken: then return None for the weight's gradient. Otherwise, in a
            backward that is not split, compute it at once.
        """
        if self._keep is None or not self._is_collecting() or not self._takes(weight):
            return False
        kept = tuple(operand.detach() for operand in operands)
        self._keep(PutOff(weight, compute, kept, tuple(operand._version for operand in kept)))
        return True


_NOBODY = WeightGradStore()
_CURRENT: ContextVar[WeightGradStore] = ContextVar("weight_grad_store", default=_NOBODY)


def weight_grad_store() -> WeightGradStore:
    """The store of the microbatch whose forward runs here.

    Call it in an autograd function's forward and keep it on `ctx` for the backward. Outside a
    stage that splits, it takes nothing.
    """
    return _CURRENT.get()


@contextmanager
def storing(store: WeightGradStore) -> Iterator[None]:
    """For the length of a forward, let `store` be the current one."""
    token = _CURRENT.set(store)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def has_store(node: object) -> bool:
    """Whether an autograd node is that of a layer that uses a store."""
    return any(
        isinstance(value, WeightGradStore) for value in getattr(node, "__dict__", {}).values()
    )
