"""What one rank holds of the pipeline's state: flat, under the unpartitioned model's names.

    model.<name>                          a parameter or persistent buffer
    optimizer.state.<name>.<field>        what the optimizer keeps for a parameter
    optimizer.param_groups.<name>.<field> a hyperparameter of the group that a parameter is in

So nothing in it says which rank or stage held what. (Within `optimizer.` the form is that of
torch's flattened optimizer state dicts.) How ranks agree and where state is kept is not known here.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

MODEL, STATE, GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."

Names = Callable[[int, str], str]
"""From a stage's index and a name in its module to the name in the unpartitioned model."""

_PER_GROUP = ("params", "param_names")
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_COMPILED = "_orig_mod."  # what torch.compile adds to names

Fields = dict[str, dict[str, Any]]
"""By parameter name, then by field."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer of a stage.

    Attributes:
        name: Its name in the unpartitioned model.
        stage: The stage that holds it.
        kind: Its shape and dtype in words, such as `(8, 4) torch.float32`; see `kind_of`.
    """

    name: str
    stage: int
    kind: str


def kind_of(value: Any) -> str:
    """Shape and dtype of a tensor in words; of anything else, that it is none."""
    return tensor_kind(value.shape, value.dtype) if torch.is_tensor(value) else "no tensor"


def tensor_kind(shape: torch.Size, dtype: torch.dtype) -> str:
    """A tensor's kind, see `kind_of`."""
    return f"{tuple(shape)} {dtype}"


def parameter_of(key: str) -> str | None:
    """The parameter or buffer that `key` of a flat state speaks of; None for other keys."""
    if key.startswith(MODEL):
        return key.removeprefix(MODEL)
    for section in (STATE, GROUPS):
        if key.startswith(section):
            return key.removeprefix(section).rpartition(".")[0]
    return None


def check_plain(key: str, value: Any) -> None:
    """Refuse a value that a checkpoint does not take.

    Raises:
        ValueError: If it is, or contains, anything but tensors, numbers, strings, None and
            lists, tuples, sets and dicts of them.
    """
    if type(value) in _SCALARS or torch.is_tensor(value):
        return
    if type(value) in (dict, OrderedDict):
        value = [*value, *value.values()]
    if type(value) not in (list, tuple, set):
        raise ValueError(
            f"{key} holds a {type(value).__name__}, which a checkpoint does not take: give a "
            f"tensor, a number, a string, None, or lists and dicts of them"
        )
    for part in value:
        check_plain(key, part)


class Part:
    """The stages and the optimizer of one rank.

    Args:
        modules: The stages' modules by index, lowest first.
        optimizer: Over some of their parameters, or None.
        names: Where a name in a stage's module is not the unpartitioned model's already.
    """

    def __init__(
        self,
        modules: Mapping[int, torch.nn.Module],
        optimizer: torch.optim.Optimizer | None,
        names: Names | None,
    ) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._names = names

    def held(self) -> list[Held]:
        """Every parameter and persistent buffer, lowest stage first."""
        return [Held(name, stage, kind_of(value)) for stage, _, name, value in self._model()]

    @property
    def optimizer_is_sharded(self) -> bool:
        """Whether other ranks hold some of its state, as with ZeroRedundancyOptimizer."""
        return hasattr(self._optimizer, "consolidate_state_dict")

    def optimized(self) -> list[str]:
        """The names of the optimizer's parameters."""
        return [name for _, names in self._groups()[1] for name in names.values()]

    def state(self, *, leave_out: Collection[str]) -> dict[str, Any]:
        """This rank's flat state, as it is now, less the parameters that another rank gives.

        Tensors are the module's and the optimizer's own, not copies.

        Raises:
            ValueError: If something in it is of a type that a checkpoint does not take.
        """
        flat: dict[str, Any] = {}
        for _, _, name, value in self._model():
            flat.setdefault(MODEL + name, value)
        for key, value in self._optimizer_state():
            flat.setdefault(key, value)
        flat = {key: value for key, value in flat.items() if parameter_of(key) not in leave_out}
        for key, value in flat.items():
            check_plain(key, value)
        return flat

    def select(self, keys: Iterable[str], *, optimizer: bool) -> list[str]:
        """Those of a whole pipeline's keys that concern this rank, or no parameter at all.

        Args:
            keys: Of a flat state with all that this rank holds.
            optimizer: Whether what the optimizers hold is wanted too.
        """
        names = {held.name for held in self.held()}
        sections = (STATE, GROUPS) if not optimizer else ()
        return [
            key
            for key in keys
            if parameter_of(key) in {None, *names} and not key.startswith(sections)
        ]

    def prepare(self, state: Mapping[str, Any], *, optimizer: bool) -> Callable[[], None]:
        """What puts `state` in place when it is called. Changes nothing yet.

        Args:
            state: A flat state with all that this rank holds; tensors on any device.
            optimizer: Whether to put the optimizer's in place too.

        Raises:
            ValueError: If parameters of one group had different hyperparameters.
        """
        models: dict[int, dict[str, Any]] = {stage: {} for stage in self._modules}
        for stage, own, name, _ in self._model():
            models[stage][own] = state[MODEL + name]
        packed = self._packed(state) if optimizer and self._optimizer is not None else None
        return partial(self._put, models, packed)

    def _put(self, models: dict[int, dict[str, Any]], packed: dict[str, Any] | None) -> None:
        for stage, state in models.items():
            self._modules[stage].load_state_dict(state)
        if packed is not None and self._optimizer is not None:
            self._optimizer.load_state_dict(packed)

    def _model(self) -> Iterator[tuple[int, str, str, Any]]:
        """Stage, the module's own name, the unpartitioned name, and value."""
        for stage, module in self._modules.items():
            for own, value in module.state_dict().items():
                yield stage, own, self.name_of(stage, own), value

    def name_of(self, stage: int, own: str) -> str:
        """The unpartitioned model's name of what is called `own` in the stage's module."""
        own = own.replace(_COMPILED, "")
        name = own if self._names is None else self._names(stage, own)
        if not isinstance(name, str):
            raise ValueError(f"names({stage}, {own!r}) gave {name!r}: return the name as a string")
        return name

    def _groups(self) -> tuple[dict[Any, Any], list[tuple[dict[str, Any], dict[int, str]]]]:
        """The optimizer's packed state; its packed groups, each with its numbered names."""
        if self._optimizer is None:
            return {}, []
        names = {
            id(parameter): self.name_of(stage, own)
            for stage, module in self._modules.items()
            for own, parameter in module.named_parameters()
        }
        packed = self._optimizer.state_dict()
        groups = []
        for group, live in zip(packed["param_groups"], self._optimizer.param_groups, strict=True):
            held = [names[id(parameter)] for parameter in live["params"]]
            groups.append((group, dict(zip(group["params"], held, strict=True))))
        return packed["state"], groups

    def _optimizer_state(self) -> Iterator[tuple[str, Any]]:
        state, groups = self._groups()
        state = dict(state)
        for group, names in groups:
            shared = {field: value for field, value in group.items() if field not in _PER_GROUP}
            for number, name in names.items():
                for section, fields in ((STATE, state.pop(number, {})), (GROUPS, shared)):
                    for field, value in fields.items():
                        yield f"{section}{name}.{_checked_field(field)}", value
        if state:
            raise ValueError(
                f"the optimizer keeps state under {sorted(map(str, state))}, which belongs to no "
                f"parameter and so to no part of a checkpoint: keep it in extra="
            )

    def _packed(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state dict for a flat state."""
        state, shared = _fields(flat, STATE), _fields(flat, GROUPS)
        packed: dict[str, Any] = {"state": {}, "param_groups": []}
        for group, names in self._groups()[1]:
            for number, name in names.items():
                if name in state:
                    packed["state"][number] = state[name]
            own = {field: group[field] for field in _PER_GROUP if field in group}
            packed["param_groups"].append(
                _agreed(shared, [*names.values()]) | own if names else group
            )
        return packed


def _checked_field(field: Any) -> str:
    if not isinstance(field, str) or "." in field:
        raise ValueError(
            f"the optimizer has a field {field!r}, which a checkpoint cannot name: use a string "
            f"without a dot"
        )
    return field


def _fields(flat: Mapping[str, Any], section: str) -> Fields:
    """What a section of a flat state holds, by parameter."""
    found: Fields = {}
    for key, value in flat.items():
        if key.startswith(section):
            name, _, field = key.removeprefix(section).rpartition(".")
            found.setdefault(name, {})[field] = value
    return found


def _agreed(shared: Fields, names: list[str]) -> dict[str, Any]:
    """The hyperparameters of a group of parameters, which must have had the same."""
    first = shared[names[0]]
    for name in names[1:]:
        other = shared[name]
        differing = [f for f in first.keys() | other.keys() if not _same(first, other, f)]
        if differing:
            field = min(differing)
            raise ValueError(
                f"parameters {names[0]!r} and {name!r} are in one group of the optimizer, but were "
                f"saved with {field}={first.get(field)!r} and {field}={other.get(field)!r}: give "
                f"the optimizer the groups it had"
            )
    return dict(first)


def _same(first: dict[str, Any], second: dict[str, Any], field: str) -> bool:
    if field not in first or field not in second:
        return False
    a, b = first[field], second[field]
    return torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else bool(a == b)
