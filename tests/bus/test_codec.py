"""Messages as bytes: what goes in comes out, and nothing else ever does."""

import dataclasses
import math
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rrfp_async.bus import codec
from rrfp_async.bus.codec import decode, encode
from rrfp_async.bus.messages import (
    Envelope,
    Failure,
    Farewell,
    Header,
    Hello,
    Message,
    PeerLost,
    RankDone,
    StepBegin,
)
from rrfp_async.errors import CodecError
from rrfp_async.ids import Edge, Link, TaskId, TensorSpec
from tests.bus.strategies import envelopes

HEADER = Header(
    3,
    Link(0, 1),
    7,
    Edge(0, 1),
    TaskId.parse("0F5"),
    (TensorSpec((2, 3), "float32", True), None),
)


def pack(*parts: Any) -> bytes:
    return msgpack.packb(list(parts))


def test_every_message_type_has_a_schema_with_its_own_fields() -> None:
    """A message added without an entry, or a field without a check, is found here."""
    kinds = set(typing.get_args(Message)) - {PeerLost}  # made by a bus, never sent
    assert set(codec._SCHEMA) == set(kinds)
    for kind in kinds:
        assert [field.name for field in dataclasses.fields(kind)] == list(codec._SCHEMA[kind])


@given(envelopes)
def test_every_message_comes_out_as_it_went_in(envelope: Envelope) -> None:
    """Encode then decode is the identity, types of all fields included."""
    decoded = decode(encode(envelope))
    assert decoded == envelope
    assert repr(decoded) == repr(envelope)
    assert hash(decoded) == hash(envelope)


@pytest.mark.parametrize("loss", [math.inf, -math.inf, -0.0, 5e-324])
def test_odd_floats_keep_their_bits(loss: float) -> None:
    """Losses may be infinite, or a negative zero."""
    [back] = [decode(encode(Envelope(0, 0, RankDone(0, loss)))).message.loss]
    assert repr(back) == repr(loss)


def test_a_loss_that_is_no_number_travels() -> None:
    """NaN is a loss like any other."""
    assert math.isnan(decode(encode(Envelope(0, 0, RankDone(0, math.nan)))).message.loss)


def test_long_and_broken_texts_are_cut_and_mended() -> None:
    """A cause of a megabyte, lone surrogates in it, still tells the first 16,384 characters."""
    cause = "x\ud800é" * 400_000
    message = decode(encode(Envelope(0, 0, Failure(0, 0, None, None, None, cause)))).message
    assert message.cause == ("x?é" * 400_000)[:16_384]


def test_a_frame_past_the_limit_is_refused_where_it_is_made() -> None:
    """Too large a message is the sender's error, with its type, its size and a remedy."""
    settings = (("x" * 16_384, "y" * 16_384),) * 40
    with pytest.raises(CodecError, match=r"Hello takes \d+ bytes, more than 1048576: use fewer"):
        encode(Envelope(0, 0, Hello(settings)))


def test_what_encode_makes_decode_takes() -> None:
    """A step of 65,537 microbatches is refused by encode, or arrives: never lost on the way."""
    envelope = Envelope(0, 0, StepBegin(0, training=True, update=True, seed=0, sizes=(1,) * 65_537))
    try:
        frame = encode(envelope)
    except CodecError:
        return
    assert decode(frame) == envelope


GOOD: list[Any] = [codec.VERSION, 0, 0, 7, [1]]
BAD_FRAMES: dict[str, Any] = {
    "no list": 3,
    "too short": GOOD[:4],
    "too long": [*GOOD, 0],
    "other version": [codec.VERSION + 1, *GOOD[1:]],
    "no version": [None, *GOOD[1:]],
    "negative source": [codec.VERSION, -1, *GOOD[2:]],
    "source no int": [codec.VERSION, "0", *GOOD[2:]],
    "source a bool": [codec.VERSION, True, *GOOD[2:]],
    "sequence a float": [codec.VERSION, 0, 0.0, *GOOD[3:]],
    "unknown kind": [*GOOD[:3], 10, [1]],
    "negative kind": [*GOOD[:3], -1, [1]],
    "kind a string": [*GOOD[:3], "7", [1]],
    "fields no list": [*GOOD[:4], 1],
    "a field too many": [*GOOD[:4], [1, 1]],
    "a field too few": [*GOOD[:4], []],
    "a field of another type": [*GOOD[:4], ["1"]],
    "a negative count": [*GOOD[:4], [-1]],
    "a bool for a count": [*GOOD[:4], [True]],
    "an int for a bool": [*GOOD[:3], 1, [0, 1, []]],
    "an int for a loss": [*GOOD[:3], 3, [0, 1]],
    "no pair": [*GOOD[:3], 0, [[["a"]]]],
    "a pair of ints": [*GOOD[:3], 0, [[[1, 2]]]],
    "a task that is none": [*GOOD[:3], 2, [0, [0, 1], 0, [0, 1], "0X1", []]],
    "a task of endless digits": [*GOOD[:3], 2, [0, [0, 1], 0, [0, 1], "9" * 9999 + "F1", []]],
    "a spec of two": [*GOOD[:3], 2, [0, [0, 1], 0, [0, 1], "0F1", [[[], "float32"]]]],
    "a map": [*GOOD[:4], [{}]],
}


def test_the_good_frame_is_good() -> None:
    """What the bad frames are made from decodes."""
    assert decode(pack(*GOOD)) == Envelope(0, 0, Farewell(1))


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_frame_that_is_no_message_is_a_codec_error(name: str) -> None:
    """Wrong versions, kinds, counts and types are told as what was expected and what came."""
    with pytest.raises(CodecError, match=r"expected, got|met version|not msgpack"):
        decode(msgpack.packb(BAD_FRAMES[name]))


@pytest.mark.parametrize("version", [True, 1.0])
def test_a_version_of_another_type_is_a_codec_error(version: object) -> None:
    """Every field is checked for its exact type, the version too."""
    with pytest.raises(CodecError):
        decode(pack(version, *GOOD[1:]))


def test_values_outside_the_wire_s_types_are_codec_errors() -> None:
    """Bytes, maps, timestamps and extension types are refused, empty ones too."""
    values = [b"", b"x", {}, {"a": 1}, msgpack.ExtType(5, b""), msgpack.Timestamp(1, 2)]
    for value in values:
        with pytest.raises(CodecError):
            decode(pack(*GOOD[:4], [value]))


@given(st.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xa4\xff\xff\xff\xff")
@example(pack(*GOOD) + b"\x00")
def test_arbitrary_bytes_are_a_message_or_a_codec_error(frame: bytes) -> None:
    """Nothing but CodecError leaves decode."""
    _decode_or_codec_error(frame)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner)
    ),
    max_leaves=20,
)


@given(values)
def test_arbitrary_values_are_a_message_or_a_codec_error(value: Any) -> None:
    """Nor any well-formed msgpack."""
    _decode_or_codec_error(msgpack.packb(value))


@given(st.integers(-1, 9), st.lists(values, max_size=7))
def test_arbitrary_fields_are_a_message_or_a_codec_error(kind: int, fields: list[Any]) -> None:
    """Nor the right envelope with any fields in it."""
    _decode_or_codec_error(pack(codec.VERSION, 0, 0, kind, fields))


@given(envelopes, st.data())
def test_damaged_messages_are_a_message_or_a_codec_error(
    envelope: Envelope, data: st.DataObject
) -> None:
    """Nor a frame cut short, grown, or with a byte changed."""
    frame = bytearray(encode(envelope))
    index = data.draw(st.integers(0, len(frame) - 1))
    _decode_or_codec_error(bytes(frame[:index]))
    _decode_or_codec_error(bytes(frame) + b"\x01")
    frame[index] = data.draw(st.integers(0, 255))
    _decode_or_codec_error(bytes(frame))


def _decode_or_codec_error(frame: bytes) -> None:
    try:
        envelope = decode(frame)
    except CodecError:
        return
    assert isinstance(envelope, Envelope)
    assert decode(encode(envelope)) == envelope or "nan" in repr(envelope)


@pytest.mark.parametrize("size", [(1 << 20) + 1, 1 << 24])
def test_a_frame_past_the_limit_is_refused_unread(size: int) -> None:
    """The size is looked at before the contents."""
    with pytest.raises(CodecError, match=f"frame of {size} bytes passes the limit"):
        decode(b"\x00" * size)


@pytest.mark.parametrize("depth", [10, 500, 1100, 100_000])
def test_deep_nesting_is_a_codec_error(depth: int) -> None:
    """Lists in lists in lists end as a CodecError."""
    with pytest.raises(CodecError):
        decode(b"\x91" * depth + b"\x01")


@pytest.mark.parametrize("depth", [1000, 1020])
def test_nesting_at_msgpack_s_own_limit_is_a_codec_error(depth: int) -> None:
    """A frame of a thousand bytes, as deep as msgpack allows, is no more than malformed."""
    with pytest.raises(CodecError):
        decode(b"\x91" * depth + b"\x01")


def test_no_pickle_is_ever_read() -> None:
    """The codec's module knows no pickle, marshal or eval."""
    names = set(vars(codec))
    assert names.isdisjoint({"pickle", "marshal", "eval", "loads"})
