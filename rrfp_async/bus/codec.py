"""Messages as bytes and back: a versioned msgpack list, checked field by field.

No pickle, no maps, no extension types. Whatever does not decode to exactly one of the known
messages with fields of the right types is a `CodecError`, and its bytes have had no effect.
"""

import reprlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgpack

from rrfp_async.bus.messages import (
    ClockAsk,
    ClockTold,
    Envelope,
    Failure,
    Farewell,
    GradientReport,
    Header,
    Hello,
    Message,
    Norms,
    Progress,
    RankDone,
    Spent,
    StepBegin,
    StepEnd,
    TpArrival,
    TpDecision,
    TpProposal,
    Verdict,
)
from rrfp_async.errors import CodecError
from rrfp_async.ids import Edge, Layout, Link, Plain, TaskId, TaskKind, TensorSpec

VERSION = 6
"""Version of the wire format; frames of another are refused."""

FRAME_MOST_BYTES = 1 << 20
"""Frames above a mebibyte are refused, on both ends."""

PAYLOAD_MOST_BYTES = 65_536
"""Tensors above 64 KiB do not travel with their header."""

_TEXT_MOST = 16_384
_KIND_OF_LETTER: Mapping[str, TaskKind] = MappingProxyType({kind.value: kind for kind in TaskKind})
_LIST_MOST = 65_536


def _refuse(what: str, value: object) -> CodecError:
    return CodecError(f"{what} expected, got {reprlib.repr(value)}")


def _int(value: Any) -> int:
    if type(value) is not int:
        raise _refuse("an int", value)
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _refuse("an int of at least 0", value)
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _refuse("a bool", value)
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _refuse("a string", value)
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise _refuse("bytes", value)
    return value


def _float(value: Any) -> float:
    if type(value) is not float:
        raise _refuse("a float", value)
    return value


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _list_of(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def read_list(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _refuse("a list", value)
        return tuple(read(item) for item in value)

    return read_list


def _items(value: Any, count: int) -> list[Any]:
    if type(value) is not list or len(value) != count:
        raise _refuse(f"a list of {count}", value)
    return value


def _pair(value: Any) -> list[Any]:
    return _items(value, 2)


def _setting(value: Any) -> tuple[str, str]:
    name, word = _pair(value)
    return _text(name), _text(word)


def _edge(value: Any) -> Edge:
    source, target = _pair(value)
    return Edge(_count(source), _count(target))


def _link(value: Any) -> Link:
    source, target = _pair(value)
    return Link(_count(source), _count(target))


def _task(value: Any) -> TaskId:
    stage, kind, microbatch = _items(value, 3)
    if type(kind) is not str or kind not in _KIND_OF_LETTER:
        raise _refuse("a task's kind", kind)
    return TaskId(_count(stage), _KIND_OF_LETTER[kind], _count(microbatch))


def _spec(value: Any) -> TensorSpec:
    shape, dtype, requires_grad = _items(value, 3)
    return TensorSpec(_list_of(_count)(shape), _text(dtype), _bool(requires_grad))


def _plain_value(value: Any) -> Plain:
    if value is not None and type(value) not in (bool, int, float, str, bytes):
        raise _refuse("a plain value", value)
    plain: Plain = value
    return plain


def _leaf(value: Any) -> tuple[int, Plain]:
    place, plain = _pair(value)
    return _count(place), _plain_value(plain)


def _layout(value: Any) -> Layout:
    structure, plain = _pair(value)
    return Layout(_optional(_text)(structure), _list_of(_leaf)(plain))


def _norms(value: Any) -> Norms:
    stage, dtype, norms = _items(value, 3)
    return _count(stage), _text(dtype), _list_of(_float)(norms)


def _gradients(value: Any) -> GradientReport:
    norms, finite, scale = _items(value, 3)
    return GradientReport(
        _optional(_list_of(_norms))(norms), _bool(finite), _optional(_float)(scale)
    )


def _spent(value: Any) -> Spent:
    compute_s, blocking_s, coordination_s = map(_float, _items(value, 3))
    return compute_s, blocking_s, coordination_s


def _verdict(value: Any) -> Verdict:
    norm, dtype, finite = _items(value, 3)
    return Verdict(_optional(_float)(norm), _optional(_text)(dtype), _bool(finite))


_SCHEMA: Mapping[type[Message], dict[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        Hello: {"settings": _list_of(_setting)},
        StepBegin: {
            "step": _count,
            "training": _bool,
            "update": _bool,
            "seed": _count,
            "sizes": _list_of(_count),
        },
        Header: {
            "step": _count,
            "link": _link,
            "sequence": _count,
            "edge": _edge,
            "task": _task,
            "specs": _list_of(_optional(_spec)),
            "payload": _optional(_bytes),
            "layout": _layout,
        },
        RankDone: {
            "step": _count,
            "loss": _optional(_float),
            "gradients": _optional(_gradients),
            "spent_s": _spent,
        },
        StepEnd: {"step": _count, "loss": _optional(_float), "verdict": _optional(_verdict)},
        Failure: {
            "step": _count,
            "rank": _count,
            "stage": _optional(_count),
            "task": _optional(_text),
            "microbatch": _optional(_count),
            "cause": _text,
            "records": _list_of(_text),
        },
        Progress: {"step": _count, "events": _count, "report": _text},
        Farewell: {"steps": _count},
        ClockAsk: {"number": _count},
        ClockTold: {"number": _count, "time_s": _float},
        TpArrival: {"step": _count, "edge": _edge, "task": _task, "time_s": _float},
        TpDecision: {"step": _count, "number": _count, "task": _task, "ready_s": _float},
        TpProposal: {"step": _count, "round": _count, "task": _task, "ready_s": _float},
    }
)
_NUMBER_OF: Mapping[type[Message], int] = MappingProxyType(
    {kind: number for number, kind in enumerate(_SCHEMA)}
)
_KIND_OF: tuple[type[Message], ...] = tuple(_SCHEMA)


def _plain_list(value: tuple[Any, ...]) -> list[Any]:
    if len(value) > _LIST_MOST:
        raise CodecError(
            f"a list of {len(value)} entries passes the limit of {_LIST_MOST}: use fewer "
            f"microbatches, or tensors per edge"
        )
    return [_plain(item) for item in value]


def _plain_text(value: str) -> str:
    return value[:_TEXT_MOST].encode(errors="replace").decode()  # no lone surrogates


_PLAIN: Mapping[type, Callable[[Any], Any]] = MappingProxyType(
    {
        TaskId: lambda task: (task.stage, task.kind.value, task.microbatch),
        Edge: lambda edge: (edge.source, edge.target),
        Link: lambda link: (link.source, link.target),
        TensorSpec: lambda spec: (spec.shape, spec.dtype, spec.requires_grad),
        GradientReport: lambda told: (_plain(told.norms), told.finite, told.scale),
        Verdict: lambda verdict: (verdict.grad_norm, verdict.dtype, verdict.finite),
        Layout: lambda layout: (layout.structure, layout.plain),  # whole, or it is another
        tuple: _plain_list,
        str: _plain_text,
    }
)


def _plain(value: Any) -> Any:
    """A message's value in msgpack's types."""
    make = _PLAIN.get(type(value))
    return value if make is None else make(value)


def encode(envelope: Envelope) -> bytes:
    """An envelope as one frame. Texts past 16,384 characters are cut.

    Raises:
        CodecError: If a list would pass 65,536 entries or the frame `FRAME_MOST_BYTES`.
    """
    message = envelope.message
    fields = [_plain(getattr(message, name)) for name in _SCHEMA[type(message)]]
    number = _NUMBER_OF[type(message)]
    frame: bytes = msgpack.packb([VERSION, envelope.source, envelope.sequence, number, fields])
    if len(frame) > FRAME_MOST_BYTES:
        raise CodecError(
            f"{type(message).__name__} takes {len(frame)} bytes, more than {FRAME_MOST_BYTES}: "
            f"use fewer microbatches or tensors per message"
        )
    return frame


def decode(frame: bytes) -> Envelope:
    """The envelope that `frame` holds.

    Raises:
        CodecError: If it holds anything else.
    """
    if len(frame) > FRAME_MOST_BYTES:
        raise CodecError(f"a frame of {len(frame)} bytes passes the limit of {FRAME_MOST_BYTES}")
    try:
        value = msgpack.unpackb(
            frame,
            strict_map_key=True,
            max_str_len=4 * _TEXT_MOST,
            max_array_len=_LIST_MOST,
            max_bin_len=PAYLOAD_MOST_BYTES,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise CodecError(f"a frame of {len(frame)} bytes is not msgpack: {error}") from error
    return _read_envelope(value)


def _read_envelope(value: Any) -> Envelope:
    if type(value) is not list or len(value) != 5:
        raise _refuse("a list of version, source, sequence, kind and fields", value)
    version, source, sequence, number, fields = value
    if type(version) is not int or version != VERSION:
        raise CodecError(f"wire version {version!r} met version {VERSION}: run one release")
    if not 0 <= _int(number) < len(_KIND_OF) or type(fields) is not list:
        raise _refuse("a known message", value)
    kind = _KIND_OF[number]
    schema = _SCHEMA[kind]
    if len(fields) != len(schema):
        raise _refuse(f"{len(schema)} fields of {kind.__name__}", fields)
    values = [read(field) for read, field in zip(schema.values(), fields, strict=True)]
    return Envelope(_count(source), _count(sequence), kind(*values))
