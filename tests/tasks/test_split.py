"""I and W by deferral: bit for bit the fused backward, and no `.grad` touched before W."""

from dataclasses import replace

import pytest
import torch

from tests.tasks.split_cases import BLOCKS, KNOWN
from tests.tasks.split_harness import ALL_ORDERS, PUT_OFF, Case, assert_bitwise
from tests.tasks.split_models import WIDTH, mlp, randn


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_i_and_w_are_the_fused_backward_bit_for_bit(case: Case) -> None:
    """Loss, input gradients and every parameter's, in any order of I and with W put off."""
    assert_bitwise(case)


@pytest.mark.parametrize("case", [case for case in BLOCKS if "of 2,048" in case.name], ids=str)
def test_i_and_w_are_the_fused_backward_on_two_threads(case: Case) -> None:
    """As above where torch really shares the work out."""
    torch.set_num_threads(2)
    assert_bitwise(replace(case, places=("last",)), [PUT_OFF])


@pytest.mark.slow
@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_all_cases_on_two_threads(case: Case) -> None:
    """As above, for every case and order."""
    torch.set_num_threads(2)
    assert_bitwise(case, ALL_ORDERS)


@pytest.mark.parametrize("shape", [(6, WIDTH), (2, 5, WIDTH), (1, WIDTH)], ids=str)
def test_gradients_are_tensors_of_their_own(shape: tuple[int, ...]) -> None:
    """As by autograd: no view of something else, in the parameter's layout, nothing more kept."""
    case = Case("mlp", mlp, randn(*shape))
    for module in assert_bitwise(case, [PUT_OFF]):
        for name, parameter in module.named_parameters():
            grad = parameter.grad
            assert grad._base is None, f"the gradient of {name} is a view"
            assert grad.stride() == parameter.stride()
            assert grad.untyped_storage().nbytes() == grad.nbytes
            grad.detach_()
