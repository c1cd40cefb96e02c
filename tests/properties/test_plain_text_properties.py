"""Whatever arrives, in whatever pieces: the plain text of it is the same, and bounded while it is made."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from prorl_daemon.plain_text import MAX_LINE_CHARS, MAX_SEQUENCE_CHARS, CommandOutput, PlainText

ATOMS = st.sampled_from(
    [
        *"\r\n\b\x1b[]();?mKGCDHJP\\\x07\x18\0\t\x9b019 aé€",
        "\x1b[1;31m",
        "\x1b[K",
        "\x1b[2K",
        "\x1b[1K",
        "\x1b[3G",
        "\x1b[2C",
        "\x1b[9999G",
        "\x1b]0;title\x07",
        "\x1b]8;;x\x1b\\",
        "\x1bP",
        "\x1b(B",
        "x" * 60,
        "x" * (MAX_LINE_CHARS - 3),
        "\x1b]" + "t" * (MAX_SEQUENCE_CHARS - 2),
    ]
)
STREAMS = st.lists(ATOMS, max_size=30).map("".join)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


def pieces(stream, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


def plain(parts):
    resolver = PlainText()
    return "".join(resolver.feed(part) for part in parts) + resolver.flush()[0]


@given(stream=STREAMS, cuts=CUTS)
def test_how_the_stream_is_cut_into_pieces_makes_no_difference(stream, cuts):
    assert plain(pieces(stream, cuts)) == plain([stream])


@given(stream=st.text(alphabet="\x1b[]KGCDH\r\b\nax12;\x07\\", max_size=60))
def test_character_by_character_is_the_same_too(stream):
    assert plain(stream) == plain([stream])


@given(stream=STREAMS)
def test_no_control_character_is_left_but_white_space(stream):
    assert not re.search("[\x00-\x08\x0d-\x1f\x7f]", plain([stream]))


@given(stream=st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs"]) | st.sampled_from("\n\t"), max_size=300))
def test_plain_text_passes_unchanged(stream):
    assert plain([stream]) == stream


@given(stream=STREAMS, cuts=CUTS)
def test_what_is_held_is_bounded(stream, cuts):
    resolver = PlainText()
    for piece in pieces(stream, cuts):
        resolver.feed(piece)
        assert len(resolver._line) <= MAX_LINE_CHARS
        assert len(resolver._sequence) <= MAX_SEQUENCE_CHARS + 4


@given(parts=st.lists(st.binary(max_size=30), max_size=20), raw=st.booleans())
def test_bytes_in_pieces_give_what_they_give_at_once(parts, raw):
    in_pieces, at_once = CommandOutput(10_000, raw=raw), CommandOutput(10_000, raw=raw)
    for part in parts:
        in_pieces.append(part)
    at_once.append(b"".join(parts))
    assert in_pieces.end() == at_once.end()


@given(text=st.text(max_size=60), cut=st.integers(0, 200))
def test_a_call_that_ends_inside_a_character_leaves_it_to_the_next(text, cut):
    stream = text.encode(errors="replace")
    first, second = CommandOutput(10_000, raw=True), CommandOutput(10_000, raw=True)
    first.append(stream[:cut])
    so_far, rest = first.leave()
    second.append(rest + stream[cut:])
    assert so_far.text + second.end().text == stream.decode()


def test_a_call_that_ends_inside_a_sequence_leaves_it_to_the_next():
    first, second = CommandOutput(100), CommandOutput(100)
    first.append(b"red: \x1b[3")
    so_far, rest = first.leave()
    assert (so_far.text, rest) == ("red: ", b"\x1b[3")
    second.append(rest + b"1mrose\x1b[0m\n")
    assert second.end().text == "rose\n"
