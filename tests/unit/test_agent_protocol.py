"""The wire format: any bytes, in pieces of any size, arrive as what was sent; anything else is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.agent import protocol
from backend.agent.protocol import Chunk, Decoder, Heartbeat, ProtocolError, Reply, Request, encode, pack, unpack

ids = st.integers(min_value=0, max_value=2**53)
bodies = st.binary(max_size=300)
messages = st.one_of(
    st.builds(Request, id=ids, verb=st.text(max_size=40), body=bodies),
    st.builds(Reply, id=ids, ok=st.booleans(), body=bodies),
    st.builds(Chunk, id=ids, ch=st.sampled_from(protocol.CHANNELS), off=ids, body=bodies),
    st.just(Heartbeat()),
)
# Names on a host may be any bytes; Python shows the undecodable ones as lone surrogates.
any_text = st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
any_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(messages, max_size=8), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_frames_cut_anywhere_arrive_whole_and_in_order(sent: list[protocol.Message], cuts: list[int]) -> None:
    wire, decoder, got, at, turn = b"".join(map(encode, sent)), Decoder(), [], 0, 0
    while at < len(wire):
        step = cuts[turn % len(cuts)]
        got += list(decoder.feed(wire[at : at + step]))
        at, turn = at + step, turn + 1
    assert got == sent
    assert decoder.idle


@given(st.dictionaries(any_text, any_json, max_size=5))
def test_any_file_name_survives_the_way_through_a_body(value: dict[str, object]) -> None:
    (arrived,) = Decoder().feed(encode(Request(1, "plan", pack(value))))
    assert isinstance(arrived, Request)
    assert unpack(arrived.body) == value


@given(bodies)
def test_a_body_that_looks_like_a_frame_is_not_taken_for_one(body: bytes) -> None:
    inside = encode(Chunk(7, "log", 3, body)) + b'{"id":1,"verb":"stop","len":0}\n'
    assert list(Decoder().feed(encode(Chunk(1, "log", 0, inside)))) == [Chunk(1, "log", 0, inside)]


@pytest.mark.parametrize(
    "wire",
    [
        b"not json\n",
        b"[1]\n",
        b"{}\n",
        b'{"id":"1","verb":"x","len":0}\n',
        b'{"id":true,"verb":"x","len":0}\n',
        b'{"id":1,"verb":"x","len":-1}\n',
        b'{"id":1,"verb":"x","len":1.5}\n',
        b'{"id":1,"len":0}\n',
        b'{"id":1,"ch":"log","off":-4,"len":0}\n',
        json.dumps({"id": 1, "verb": "x", "len": protocol.MAX_BODY + 1}).encode() + b"\n",
        b"x" * (protocol.MAX_HEAD + 1),
    ],
)
def test_what_is_no_frame_ends_the_connection_instead_of_shifting_it(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Decoder().feed(wire))


def test_a_frame_of_a_newer_version_with_more_keys_is_still_read() -> None:
    assert list(Decoder().feed(b'{"id":1,"verb":"plan","len":2,"trace":"x"}\n{}')) == [Request(1, "plan", b"{}")]


def test_a_cut_in_the_middle_of_a_frame_is_seen() -> None:
    decoder = Decoder()
    assert list(decoder.feed(encode(Reply(1, True, b"abcdef"))[:-1])) == []
    assert not decoder.idle


@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b"\xff\xfe"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(body)


def test_nan_does_not_leave_as_something_that_is_not_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        pack({"loss": float("nan")})
