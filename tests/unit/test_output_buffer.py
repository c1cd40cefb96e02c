"""`OutputBuffer` and `BarrierSplitter` on chosen cases; general properties are in test_output_buffer_properties."""

from __future__ import annotations

import pytest

from prorl_daemon.output import BarrierSplitter, OutputBuffer, cap_text


def filled(max_bytes: int, *pieces: bytes) -> OutputBuffer:
    buffer = OutputBuffer(max_bytes)
    for piece in pieces:
        buffer.append(piece)
    return buffer


def test_short_output_is_kept_as_it_is():
    capped = filled(10, b"hello", b"world").capped()
    assert (capped.text, capped.dropped_bytes) == ("helloworld", 0)


def test_long_output_keeps_its_first_and_last_half_and_says_what_is_missing():
    capped = filled(10, b"0123456789", b"abcdefghij").capped()
    assert capped.text == "01234\n[... 10 bytes left out ...]\nfghij"
    assert capped.dropped_bytes == 10


def test_nothing_kept_still_says_how_much_there_was():
    assert filled(0, b"12345").capped().text == "\n[... 5 bytes left out ...]\n"


def test_the_cut_never_splits_a_character():
    capped = filled(10, "€€€€€€".encode()).capped()  # 18 bytes; halves of 5 would end and begin inside a character
    assert capped.text == "€\n[... 12 bytes left out ...]\n€"
    assert capped.dropped_bytes == 12


def test_bytes_that_are_not_utf8_are_replaced():
    assert filled(10, b"a\xff\xfeb").capped().text == "a\ufffd\ufffdb"


def test_memory_is_bounded_while_much_flows():
    buffer = OutputBuffer(1000)
    for _ in range(10_000):
        buffer.append(b"x" * 777)
    held = len(buffer._head) + len(buffer._tail)
    assert held <= 1500
    assert buffer.capped().dropped_bytes == 7_770_000 - 1000


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="-1"):
        OutputBuffer(-1)


def test_cap_text_escapes_what_utf8_has_no_form_for():
    assert cap_text("a\udc80", 100).text == "a\\udc80"


def test_splitter_passes_everything_but_the_barrier_on_at_once():
    splitter = BarrierSplitter(b"\x1eabc")
    assert splitter.feed(b"out\x1eab") == (b"out", None)
    assert splitter.feed(b"x\x1e") == (b"\x1eabx", None)
    assert splitter.feed(b"abcrest") == (b"", b"rest")


def test_splitter_gives_back_what_it_held_at_the_end():
    splitter = BarrierSplitter(b"\x1eabc")
    splitter.feed(b"\x1ea")
    assert splitter.flush() == b"\x1ea"
    assert splitter.flush() == b""


@pytest.mark.parametrize("barrier", [b"", b"aba"])
def test_a_barrier_that_cannot_be_held_back_exactly_is_refused(barrier):
    with pytest.raises(ValueError, match="first byte"):
        BarrierSplitter(barrier)
