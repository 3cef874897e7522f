"""How many bytes a forward leaves for its backward, counted where autograd saves them.

Knows tensors and storages; not what the number is used for.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch


class SavedBytes:
    """A context in which what autograd saves is counted: distinct storages, in bytes.

    Parameters and buffers of the module do not count, nor what the user holds anyway (the batch),
    nor what a checkpoint recomputes. Writing to a saved tensor is still an error, as without.

    Args:
        module: Whose forward it is.
        given: Tensors of the user's.

    Attributes:
        storages: Size of every counted storage, by address.
    """

    def __init__(self, module: torch.nn.Module, given: Iterable[torch.Tensor] = ()) -> None:
        self.storages: dict[int, int] = {}
        self._own = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*module.parameters(), *module.buffers(), *given)
            if _has_storage(tensor)
        }
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count `tensors` too, those of an own storage once."""
        for tensor in tensors:
            if not _has_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self.storages[storage.data_ptr()] = storage.nbytes()

    @property
    def total(self) -> int:
        """The sum, in bytes."""
        return sum(self.storages.values())

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.add((tensor,))
        return tensor, tensor._version


class KeptBytes:
    """The most that a stage's microbatches were seen to keep until their gradient is accumulated.

    Attributes:
        most: In bytes; None before the first was seen, or where nothing is counted.
    """

    def __init__(self, module: torch.nn.Module, *, counts: bool) -> None:
        self.most: int | None = None
        self._module = module
        self._counts = counts

    @contextmanager
    def in_forward(
        self, given: Iterable[torch.Tensor], arrived: Iterable[torch.Tensor], *, kept: bool
    ) -> Iterator[SavedBytes | None]:
        """Note what a forward keeps for its backward, if there is to be one.

        Args:
            given: Tensors of the user's, which do not count.
            arrived: Tensors that came for the forward.
            kept: Whether a backward is to come.
        """
        if not (self._counts and kept):
            yield None
            return
        with SavedBytes(self._module, given) as saved:
            yield saved
        saved.add(arrived)
        self._note(saved)

    def after_input_gradient(
        self, given: Iterable[torch.Tensor], tensors: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        """Note what I leaves for W."""
        if self._counts:
            kept = SavedBytes(self._module, given)
            kept.add(tensors())
            self._note(kept)

    def _note(self, saved: SavedBytes) -> None:
        self.most = max(self.most or 0, saved.total)


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = packed
    if tensor._version != version:  # torch leaves this to whoever has hooks
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs was modified in "
            f"place: it is at version {tensor._version}, expected was {version}"
        )
    return tensor


def _has_storage(tensor: torch.Tensor) -> bool:
    """Sparse and nested tensors have none of their own to tell apart."""
    return tensor.layout is torch.strided and not tensor.is_nested
