"""Small tensors as the bytes behind their header: whole, in memory of their own, or an error."""

import pytest
import torch

from rrfp_async.errors import TransferError
from rrfp_async.gpu.transfer import packed, spec_of, unpacked
from rrfp_async.ids import TensorSpec

TENSORS = {
    "float32": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "bfloat16": torch.arange(7, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([-(2**62), 2**62]),
    "complex64": torch.tensor([1 + 2j, -3j]),
    "scalar": torch.tensor(0.25, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_out_as_it_went_in(name: str) -> None:
    """Bit for bit, between two others, and aligned to 64 bytes."""
    odd = torch.tensor([7], dtype=torch.uint8)
    sent = [odd, TENSORS[name], odd]
    came = unpacked(packed(sent), [spec_of(tensor) for tensor in sent])
    for mine, theirs in zip(came, sent, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert (
            mine.flatten().view(torch.uint8).tolist() == theirs.flatten().view(torch.uint8).tolist()
        )
        assert mine.data_ptr() % 64 == 0


def test_what_came_is_nobody_else_s() -> None:
    """Writing to the received tensor changes neither the sent one nor another receipt."""
    sent = torch.ones(4)
    payload = packed([sent])
    first, second = (unpacked(payload, [spec_of(sent)])[0] for _ in range(2))
    first.zero_()
    assert sent.tolist() == second.tolist() == [1.0] * 4


@pytest.mark.parametrize("size", [3, 5])
def test_more_or_fewer_bytes_than_announced_are_an_error(size: int) -> None:
    """The length is checked before anything is copied."""
    with pytest.raises(TransferError, match="brought 16 bytes and announced"):
        unpacked(packed([torch.ones(4)]), [TensorSpec((size,), "float32")])


def test_a_dtype_that_torch_has_not_is_an_error() -> None:
    """A header from a stranger release, say."""
    with pytest.raises(TransferError, match="'float31', which torch has not"):
        unpacked(b"", [TensorSpec((0,), "float31")])
