"""Gradients as flat tensors: nothing is lost on the way there and back."""

import pytest
import torch
from torch import nn

from rrfp_async.tasks.buckets import Bucket, buckets_of, layout_word, value_word

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def parameter(*shape: int, dtype: torch.dtype = F32, gradient: float | None = 1.0) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape, dtype=dtype))
    if gradient is not None:
        made.grad = torch.full(shape, gradient, dtype=dtype)
    return made


def shapes(buckets: tuple[Bucket, ...]) -> list[list[tuple[int, ...]]]:
    return [[tuple(p.shape) for p in bucket.parameters] for bucket in buckets]


def test_parameters_fill_buckets_of_one_dtype_in_order() -> None:
    """A bucket ends before it would be too large; a frozen parameter is in none."""
    frozen = nn.Parameter(torch.zeros(9), requires_grad=False)
    held = [parameter(2), parameter(3, dtype=F64), frozen, parameter(4), parameter(5), parameter(1)]
    assert shapes(buckets_of(held, most_bytes=24)) == [[(2,), (4,)], [(5,), (1,)], [(3,)]]


def test_one_that_is_too_large_has_a_bucket_of_its_own() -> None:
    """It is not cut."""
    held = [parameter(2), parameter(100), parameter(2)]
    assert shapes(buckets_of(held, most_bytes=16)) == [[(2,)], [(100,)], [(2,)]]


def test_no_parameters_make_no_bucket() -> None:
    """A stage may have none."""
    assert buckets_of([]) == ()


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16, torch.complex64])
def test_the_mean_is_what_all_replicas_gradients_average_to(dtype: torch.dtype) -> None:
    """A gradient that is missing on one counts as zero; one that is missing on both stays None."""
    here = [parameter(2, 3, dtype=dtype, gradient=g) for g in (3.0, None, None, 5.0)]
    there = [parameter(2, 3, dtype=dtype, gradient=g) for g in (1.0, None, 4.0, None)]
    total = Bucket(tuple(here)).flatten(2) + Bucket(tuple(there)).flatten(2)
    for held in (here, there):
        Bucket(tuple(held)).give_mean(total, 2)
        means = [None if p.grad is None else p.grad.real.unique().tolist() for p in held]
        assert means == [[2.0], None, [2.0], [2.5]]


def test_the_mean_of_large_float16_gradients_does_not_overflow() -> None:
    """60000 is near its largest number, twice that is beyond it."""
    held, empty = parameter(3, dtype=F16, gradient=60000.0), parameter(2, dtype=F16, gradient=None)
    bucket = Bucket((held, empty))
    bucket.give_mean(bucket.flatten(2) + bucket.flatten(2), 2)
    assert held.grad is not None
    assert held.grad.tolist() == [60000.0] * 3
    assert empty.grad is None


def test_gradients_keep_their_strides_and_share_no_memory() -> None:
    """Not with what they were, which may be on its way to another rank, nor with each other."""
    first, second = parameter(2, 3), parameter(2, 3)
    first.grad = torch.arange(6.0).view(3, 2).t()
    before = first.grad
    bucket = Bucket((first, second))
    bucket.give_mean(bucket.flatten(2) * 2, 2)
    assert first.grad is not before
    assert torch.equal(first.grad, before)
    assert first.grad.stride() == before.stride()
    memories = {p.grad.untyped_storage().data_ptr() for p in (first, second) if p.grad is not None}
    assert len(memories) == 2
    assert before._version == 0


def test_words_tell_layouts_and_values_apart() -> None:
    """One changed bit is another word; the gradient is no part of it."""
    one, other = [parameter(2, 3), parameter(4)], [parameter(2, 3, gradient=None), parameter(4)]
    assert layout_word(buckets_of(one)) == layout_word(buckets_of(other))
    assert value_word(one) == value_word(other)
    other[1].data[3] = 1e-45
    assert value_word(one) != value_word(other)
    assert layout_word(buckets_of(one)) != layout_word(buckets_of([parameter(3, 2), parameter(4)]))
    assert layout_word(buckets_of(one)) != layout_word(buckets_of(one, most_bytes=1))


def test_what_cannot_be_averaged_is_refused() -> None:
    """A sparse gradient; the message says what to use."""
    held = parameter(3)
    held.grad = torch.zeros(3).to_sparse()
    with pytest.raises(ValueError, match=r"layout torch.sparse_coo .* use a dense one"):
        Bucket((held,)).flatten(2)
