"""Whatever arrives, in whatever pieces: heads, tails and barriers come out right."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from prorl_daemon.output import BarrierSplitter, OutputBuffer

PIECES = st.lists(st.binary(max_size=40), max_size=30)
TEXT_PIECES = st.lists(st.text(max_size=20).map(lambda text: text.encode(errors="replace")), max_size=20)
BARRIER = b"\x1ebar"
NEAR_BARRIER = st.lists(
    st.sampled_from([b"\x1e", b"\x1eb", b"ba", b"ar", b"r", b"x", b"\x1eba", b"\x1ebax"]), max_size=20
)


@given(pieces=PIECES, max_bytes=st.integers(0, 200))
def test_kept_bytes_are_a_prefix_and_a_suffix_and_the_rest_is_counted(pieces, max_bytes):
    whole = b"".join(pieces)
    buffer = OutputBuffer(max_bytes)
    for piece in pieces:
        buffer.append(piece)
    capped = buffer.capped()
    assert buffer.total_bytes == len(whole)
    if len(whole) <= max_bytes:
        assert capped.data == whole
        assert capped.dropped_bytes == 0
        return
    marker = b"\n[... %d bytes left out ...]\n" % capped.dropped_bytes
    kept_bytes = len(whole) - capped.dropped_bytes
    assert max_bytes - 6 <= kept_bytes <= max_bytes
    assert len(capped.data) == kept_bytes + len(marker)
    splits = [found.start() for found in re.finditer(re.escape(marker), capped.data)]
    assert any(whole.startswith(capped.data[:at]) and whole.endswith(capped.data[at + len(marker) :]) for at in splits)


@given(pieces=PIECES, max_bytes=st.integers(0, 200))
def test_how_the_stream_is_cut_into_pieces_makes_no_difference(pieces, max_bytes):
    in_pieces, at_once = OutputBuffer(max_bytes), OutputBuffer(max_bytes)
    for piece in pieces:
        in_pieces.append(piece)
    at_once.append(b"".join(pieces))
    assert in_pieces.capped() == at_once.capped()


@given(pieces=TEXT_PIECES, max_bytes=st.integers(0, 100))
def test_valid_utf8_never_gets_a_replacement_character(pieces, max_bytes):
    whole = b"".join(pieces)
    buffer = OutputBuffer(max_bytes)
    for piece in pieces:
        buffer.append(piece)
    assert buffer.capped().text.count("\ufffd") <= whole.decode().count("\ufffd")


@given(before=NEAR_BARRIER, after=NEAR_BARRIER, cuts=st.lists(st.integers(0, 200), max_size=10))
def test_the_barrier_is_found_wherever_the_stream_is_cut_and_nothing_else_is_lost(before, after, cuts):
    head, tail = b"".join(before), b"".join(after)
    if BARRIER in head + BARRIER[:-1]:
        return
    stream = head + BARRIER + tail
    splitter = BarrierSplitter(BARRIER)
    passed, rest, start = b"", None, 0
    for end in [*sorted(cut for cut in cuts if cut < len(stream)), len(stream)]:
        piece, start = stream[start:end], end
        if rest is not None:
            rest += piece
            continue
        out, rest = splitter.feed(piece)
        assert BARRIER not in out
        passed += out
    assert (passed, rest) == (head, tail)


@given(pieces=st.lists(NEAR_BARRIER.map(b"".join), max_size=10))
def test_a_stream_without_the_barrier_passes_unchanged(pieces):
    whole = b"".join(pieces)
    if BARRIER in whole:
        return
    splitter = BarrierSplitter(BARRIER)
    assert b"".join(splitter.feed(piece)[0] for piece in pieces) + splitter.flush() == whole
