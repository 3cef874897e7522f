"""Gradients of a stage as a few flat tensors, there and back: one collective for many parameters.

Which parameters go together depends on their shapes and dtypes only, so it is the same on every
replica. What is done with the flat tensors is not known here. Of a DTensor this rank's shard
counts: the replicas of a rank hold the same one.
"""

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

BUCKET_BYTES = 25 * 2**20
"""As many bytes as torch's DistributedDataParallel sends at once by default."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one dtype, whose gradients travel as one tensor."""

    parameters: tuple[Parameter, ...]

    @torch.no_grad()
    def flatten(self, replicas: int) -> torch.Tensor:
        """All gradients, one after another, then for each whether it is there (1) or None (0).

        In float16, where a sum overflows that the mean fits in, they are divided here.

        Args:
            replicas: How many will be summed up.

        Returns:
            A tensor `(elements + parameters,)` of its own, in the parameters' dtype, on their
            device.

        Raises:
            ValueError: If a gradient is sparse, or of another dtype than its parameter.
        """
        parts = [_flat_gradient(parameter) for parameter in self.parameters]
        there = [float(parameter.grad is not None) for parameter in self.parameters]
        flat = torch.cat([*parts, parts[0].new_tensor(there)])
        if self._divides_first:
            flat[: -len(there)] /= replicas
        return flat

    @torch.no_grad()
    def give_mean(self, total: torch.Tensor, replicas: int) -> None:
        """Make the mean the gradient of each parameter, in memory of its own.

        Args:
            total: The sum of all replicas' `flatten()`. A gradient that some have is the mean with
                zeros in place of the others'; one that none has stays None.
            replicas: How many there are.
        """
        after = 1 if self._divides_first else replicas
        sizes = [_local(parameter).numel() for parameter in self.parameters]
        *sums, there = torch.split(total, [*sizes, len(sizes)])
        wanted = (there != 0).tolist()
        for parameter, each, known in zip(self.parameters, sums, wanted, strict=True):
            if known:
                like = parameter if parameter.grad is None else parameter.grad
                mean = torch.empty_like(like)
                local = _local(mean)
                torch.div(each.view(local.shape), after, out=local)
                parameter.grad = mean

    @property
    def _divides_first(self) -> bool:
        return self.parameters[0].dtype == torch.float16


def buckets_of(
    parameters: Iterable[Parameter], most_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """The trainable ones of `parameters`, in order, in buckets of at most about `most_bytes`."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    buckets = []
    for held in by_kind.values():
        run: list[Parameter] = []
        size_bytes = 0
        for parameter in held:
            if run and size_bytes + _local(parameter).nbytes > most_bytes:
                buckets.append(Bucket(tuple(run)))
                run, size_bytes = [], 0
            run.append(parameter)
            size_bytes += _local(parameter).nbytes
        buckets.append(Bucket(tuple(run)))
    return tuple(buckets)


def layout_word(buckets: Sequence[Bucket]) -> int:
    """A 64-bit digest of which shapes and dtypes travel together, in which order."""
    shapes = [[(tuple(_local(p).shape), p.dtype) for p in b.parameters] for b in buckets]
    return _word(hashlib.blake2b(repr(shapes).encode(), digest_size=8))


@torch.no_grad()
def value_word(parameters: Iterable[Parameter]) -> int:
    """A 64-bit digest of the bits of `parameters`, trainable or not. Waits for their device."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in parameters:
        values = _local(parameter.detach()).cpu().contiguous()
        if values.numel():
            digest.update((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
    return _word(digest)


def _word(digest: "hashlib.blake2b") -> int:
    return int.from_bytes(digest.digest(), signed=True)


def _flat_gradient(parameter: Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(_local(parameter)).reshape(-1)
    if gradient.layout != torch.strided or gradient.dtype != parameter.dtype:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} and dtype {parameter.dtype} has a "
            f"gradient of layout {gradient.layout} and dtype {gradient.dtype}, which is not "
            f"averaged over replicas: use a dense one of the parameter's dtype (sparse=False)"
        )
    return _local(gradient).reshape(-1)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's shard on this rank; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():  # the shard itself, not a view of it
        local: torch.Tensor = to_local()
        return local
