"""Whether a stage's backward is split: what is wanted, what is possible, and who was told.

What stands in the way may come or be found out later: a hook, a compilation, a checkpoint that only
a forward's graph shows. It does not know how a backward is split.
"""

import warnings
from collections.abc import Iterable

import torch

from rrfp_async.tasks.split import Deferral
from rrfp_async.tasks.split_support import SplitSupport, split_support


class SplitChoice:
    """The choice for one stage.

    Args:
        module: The stage's.
        index: The stage's.
        wanted: Whether the hint splits backwards.
        insist: Whether to split also where that does not pay, and to warn where it cannot be done.

    Attributes:
        support: What is known of the module.
    """

    def __init__(
        self, module: torch.nn.Module, index: int, *, wanted: bool, insist: bool = True
    ) -> None:
        self.support = split_support(module, insist=insist)
        self._module = module
        self._index = index
        self._wanted = wanted
        self._insists = insist
        self._found: SplitSupport | None = None
        self._told: SplitSupport | None = None

    @property
    def splits(self) -> bool:
        """Whether the backward is I and W, not B: wanted, possible, and with something for W."""
        possible = self._wanted and self.support.mode == "deferral"
        return possible and any(p.requires_grad for p in self._module.parameters())

    def look_again(self) -> None:
        """Before a step: a hook, a wrapper or a compilation may have come since."""
        if self._wanted:
            self.support = self._found or split_support(self._module, insist=self._insists)
            self.warn_if_whole()

    def look_closer(
        self, deferral: Deferral, roots: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]
    ) -> None:
        """After a forward: know what its graph tells."""
        found = deferral.study(roots, inputs)
        if found is not None:
            self._found = self.support = found
            self.warn_if_whole()

    def warn_if_whole(self) -> None:
        """Warn once, naming the stage, if its backward must be split and cannot be."""
        told, self._told = self._told, self.support
        must = self._wanted and self._insists
        if must and self.support.mode == "full" and told != self._told:
            warnings.warn(
                f"the backward of stage {self._index} is not split, {self.support.reason}: it "
                f"runs as a whole (B)",
                RuntimeWarning,
                stacklevel=2,
            )
