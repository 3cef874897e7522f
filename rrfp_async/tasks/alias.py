"""Two stages of one rank that share a parameter: for a step, one gets a stand-in over its memory.

So each stage's gradients are accumulated on their own, in microbatch order, and are summed once
(tied_sums.py) in one order. Whatever is done between steps sees the one parameter.
"""

import torch


class Alias:
    """A stand-in for `parameter` in one module, with the same memory and a gradient of its own."""

    def __init__(self, module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        self._original = parameter
        self._places = [
            (part, name)
            for part in module.modules()
            for name, held in part._parameters.items()
            if held is parameter
        ]
        self._stand_in = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)

    def stands_in_as(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is the stand-in."""
        return parameter is self._stand_in

    def install(self) -> None:
        """Put the stand-in where the parameter is, until `remove`."""
        self._stand_in.data = self._original.data
        self._stand_in.requires_grad_(self._original.requires_grad)
        for part, name in self._places:
            part._parameters[name] = self._stand_in

    def remove(self) -> None:
        """Put the parameter back."""
        for part, name in self._places:
            part._parameters[name] = self._original
