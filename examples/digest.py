"""One hash for all gradients of a model, whichever ranks hold them."""

import ctypes
import hashlib
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.tensor import DTensor


def gradient_digests(module: nn.Module) -> dict[str, str]:
    """SHA-256 over name, dtype, shape and bytes of every parameter's gradient, by name."""
    return {name: _digest(name, parameter) for name, parameter in module.named_parameters()}


def combined_digest(names: Iterable[str], digests: Mapping[str, str]) -> str:
    """SHA-256 over the parameters' own hashes in the order of `names`."""
    whole = hashlib.sha256()
    for name in names:
        whole.update(bytes.fromhex(digests[name]))
    return whole.hexdigest()


def _digest(name: str, parameter: nn.Parameter) -> str:
    digest = hashlib.sha256(name.encode())
    if parameter.grad is None:
        digest.update(b"no gradient")
        return digest.hexdigest()
    gradient = parameter.grad.detach()
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()  # this rank's shard
    gradient = gradient.cpu().contiguous()
    digest.update(f"{gradient.dtype} {tuple(gradient.shape)}".encode())
    digest.update(ctypes.string_at(gradient.data_ptr(), gradient.nbytes))
    return digest.hexdigest()
