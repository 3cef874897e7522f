"""From what `torch.distributed.pipelining.pipeline` returns to stages that run in a chain.

A pipe's graph hands a value from the stage that makes it to any later one, and the model's
arguments to any stage. Here a value goes from stage to stage as far as it is needed, and all
arguments enter at the first one. So each crosses each boundary once, and its gradients add up in
the order in which the unpartitioned model's do. Knows torch.fx graphs; neither ranks nor how a
model was traced, and torch's own pipelining is not imported.
"""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx, nn

_CALLED_AGAIN = re.compile(r"@\d+(?=\.)")


class Pipe(Protocol):
    """What is used of a `torch.distributed.pipelining.Pipe`.

    Attributes:
        split_gm: The graph of stages, a child module each.
        replicated_params: For each parameter that several stages use, its name in each of them.
    """

    split_gm: fx.GraphModule
    replicated_params: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of the pipe's graph: the stage it comes from, and the last one that needs it."""

    node: fx.Node
    source: int
    last: int

    def arrives(self, stage: int) -> bool:
        """Whether `stage` needs it, or a later one does, and it comes from an earlier one."""
        return self.source < stage <= self.last


def stages_from_pipe(pipe: Pipe) -> list[nn.Module]:
    """The stages of `pipe`, lowest first, for a chain: `Topology(pp, chunks=...)` without edges.

    The first takes the model's arguments, also those that only later stages use. The last returns
    the model's output: a tensor, or a tuple of several, whatever structure they had. In between
    a stage returns all that later ones need, so it takes what it hands on along with its own.

    A stage is a flat graph of torch operations over the pipe's own parameters, no copies, under
    the names that they have in the model. (So are buffers, and as the pipe keeps no note of which
    are not persistent, a `state_dict` has those too.) As torch.export traced the model, a
    microbatch has the shapes of `mb_args`, nested arguments are taken one by one, and dropout is
    on or off as it was then, whatever `train()` and `eval()` say. There is no `nn.Linear` left
    whose weight gradient could be put off: hints that split the backward gain nothing by it.

    Args:
        pipe: What `torch.distributed.pipelining.pipeline(module, mb_args=...)` returned.

    Raises:
        ValueError: If `pipe` is no such object, or a parameter that is trained is in two stages.
    """
    calls = _calls_of(pipe)
    _check_untied(pipe, calls)
    graph = pipe.split_gm.graph
    values = _values(graph, calls)
    stages = range(len(calls))
    arriving = [[value.node for value in values if value.arrives(stage)] for stage in stages]
    arriving[0] = graph.find_nodes(op="placeholder")
    leaving: list[Any] = [*map(tuple, arriving[1:]), graph.output_node().args[0]]
    modules = [pipe.split_gm.get_submodule(str(call.target)) for call in calls]
    return list(map(_stage, modules, calls, arriving, leaving))


def _calls_of(pipe: Pipe) -> list[fx.Node]:
    """The node of each stage, in the order in which the model computes.

    That is by number: stages that do not depend on each other stand in the graph in any order, and
    a number is left out where a split left nothing before it.
    """
    graph = getattr(getattr(pipe, "split_gm", None), "graph", None)
    if not isinstance(graph, fx.Graph):
        raise ValueError(
            f"pipe of type {type(pipe).__name__} has no graph of stages (split_gm): give what "
            f"torch.distributed.pipelining.pipeline() returned"
        )
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_module", "output") and not _is_getitem(node):
            raise ValueError(
                f"the graph of pipe has the node {node.format_node()}, and only calls of stages "
                f"can be split: give what torch.distributed.pipelining.pipeline() returned"
            )
    return sorted(graph.find_nodes(op="call_module"), key=_number_of)


def _number_of(call: fx.Node) -> int:
    """The number in a stage's name, `submod_pp_3`."""
    return int(str(call.target).rpartition("_")[2])


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _check_untied(pipe: Pipe, calls: Sequence[fx.Node]) -> None:
    """Refuse a trained parameter of several stages: the pipe has made a copy for each."""
    stages = {str(call.target): stage for stage, call in enumerate(calls)}
    for name_in in pipe.replicated_params:
        places = [
            f"{_CALLED_AGAIN.sub('', name)!r} in stage {stages[stage]}"
            for stage, name in name_in.items()
        ]
        stage, name = next(iter(name_in.items()))
        if pipe.split_gm.get_submodule(stage).get_parameter(name).requires_grad:
            raise ValueError(
                f"{' and '.join(places)} are the same parameter, and weights tied between stages "
                f"are not supported: untie them, or split where one stage uses them all"
            )


def _values(graph: fx.Graph, calls: Sequence[fx.Node]) -> list[_Value]:
    """Every value that stages could hand on: arguments, outputs, and the entries of outputs."""
    stage_of = {call: stage for stage, call in enumerate(calls)}
    source = dict(stage_of)
    values = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node not in source:
            source[node] = max((source[made] for made in node.all_input_nodes), default=0)
        users = [user for user in node.users if not _is_getitem(user)]
        last = max((stage_of.get(user, len(calls) - 1) for user in users), default=-1)
        values.append(_Value(node, source[node], last))
    return values


def _stage(
    module: nn.Module, call: fx.Node, arriving: Sequence[fx.Node], leaving: Any
) -> fx.GraphModule:
    """What `module` computes, with all that arrives as arguments and all that leaves as output.

    Args:
        module: The pipe's stage; its parameters are shared.
        call: Where the pipe's graph calls it.
        arriving: The values that the stage before hands over, in order.
        leaving: The values to return, a node or any structure of nodes.
    """
    graph, attributes = fx.Graph(), dict[str, Any]()
    here: dict[fx.Node, Any] = {node: _placeholder(graph, node) for node in arriving}
    output = _inline(graph, module, fx.map_arg(call.args, here.__getitem__), "", attributes)
    here[call] = output
    here |= {user: output[user.args[1]] for user in call.users if _is_getitem(user)}
    single = isinstance(leaving, tuple | list) and len(leaving) == 1
    graph.output(fx.map_arg(leaving[0] if single else leaving, here.__getitem__))
    return fx.GraphModule(attributes, graph)


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """An argument for the value of `node`, called as the model's argument if it is one."""
    return graph.node_copy(node) if node.op == "placeholder" else graph.placeholder(node.name)


def _inline(
    graph: fx.Graph, module: nn.Module, given: Any, path: str, attributes: dict[str, Any]
) -> Any:
    """Append to `graph` what `module` and its children compute from `given`; return the output.

    Their tensors are noted in `attributes` by the model's names: a child called again is traced
    into another one, `layer@1`, over the same parameters.
    """
    inner: fx.Graph = module.graph  # type: ignore[assignment] # traced, as are its children
    here: dict[fx.Node, Any] = dict(zip(inner.find_nodes(op="placeholder"), given, strict=True))
    for node in inner.nodes:
        args: Any = fx.map_arg(node.args, here.__getitem__)
        name = f"{path}{node.target}"
        if node.op == "output":
            return args[0]
        if node.op == "call_module":
            child = module.get_submodule(str(node.target))
            here[node] = _inline(graph, child, args, f"{name}.", attributes)
        elif node.op == "get_attr":
            name = _CALLED_AGAIN.sub("", name)
            attributes[name] = operator.attrgetter(str(node.target))(module)
            here[node] = graph.create_node("get_attr", name)
        elif node.op != "placeholder":
            here[node] = graph.node_copy(node, here.__getitem__)
    return None
