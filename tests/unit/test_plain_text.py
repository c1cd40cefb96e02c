"""`PlainText` on chosen cases; general properties are in test_plain_text_properties."""

from __future__ import annotations

import pytest

from prorl_daemon.plain_text import MAX_LINE_CHARS, CommandOutput, PlainText

CASES = [
    ("plain", "a\nb", "a\nb"),
    ("crlf", "a\r\nb\r\n", "a\nb\n"),
    ("progress bar", "\r 10%\r 50%\r100%\ndone\n", "100%\ndone\n"),
    ("shorter state", "downloading\rdone\n", "doneloading\n"),
    ("erased to the end", "downloading\r\x1b[Kdone\n", "done\n"),
    ("blanked with spaces", "downloading\r           \rdone\n", "done\n"),
    ("erased whole", "abc\x1b[2Kd\n", "   d\n"),
    ("erased to the cursor", "abcdef\x1b[3G\x1b[1K\n", "   def\n"),
    ("trailing spaces of the program are kept", "a  \nb\n", "a  \nb\n"),
    ("backspace", "abd\bc\n", "abc\n"),
    ("overstrike", "_\bu_\bn\n", "un\n"),
    ("backspace at the margin", "\b\b\ba\n", "a\n"),
    ("characters, not bytes", "é€\b\bxy\n", "xy\n"),
    ("column", "abc\x1b[1Gx\x1b[5Gy\n", "xbc y\n"),
    ("left and right", "abc\x1b[2Dx\x1b[2Cy\n", "axc y\n"),
    ("colours", "\x1b[1;31mred\x1b[0m \x1b[38;5;12mblue\x1b[m\n", "red blue\n"),
    ("private modes", "\x1b[?25l\x1b[?2004hx\x1b[?1049l\n", "x\n"),
    ("title by bell", "\x1b]0;a title\x07x\n", "x\n"),
    ("link by string terminator", "\x1b]8;;http://x/\x1b\\text\x1b]8;;\x1b\\\n", "text\n"),
    ("title that does not end", "\x1b]0;a title\nx\n", "\nx\n"),
    ("device control string", "\x1bPq#0\x1b\\x\n", "x\n"),
    ("character set", "\x1b(Bx\x1b=\x1b>\x1b7\n", "x\n"),
    ("broken sequence", "\x1b[12\ny\n", "\ny\n"),
    ("lone escape at the end", "x\x1b", "x"),
    ("rows", "\x1b[H\x1b[2Jone\x1b[2;1Htwo\x1b[3dthree\n", "one\ntwo\nthree\n"),
    ("bell, NUL, shift out", "a\x07b\0c\x0ed\n", "abcd\n"),
    ("tab, form feed", "a\tb\x0cc\n", "a\tb\x0cc\n"),
    ("C1 as text", "a\x9bb\n", "a\x9bb\n"),
]


@pytest.mark.parametrize(("stream", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_plain_text(stream, expected):
    resolver = PlainText()
    assert resolver.feed(stream) + resolver.flush()[0] == expected


def test_a_finished_line_is_passed_on_at_once_and_an_unfinished_one_when_asked():
    resolver = PlainText()
    assert resolver.feed("one\ntwo") == "one\n"
    assert resolver.flush() == ("two", "")
    assert resolver.feed("\rthree\n") == "three\n"


def test_an_endless_line_is_passed_on_and_then_out_of_reach():
    resolver = PlainText()
    assert resolver.feed("a" * (MAX_LINE_CHARS + 2)) == "a" * MAX_LINE_CHARS
    assert resolver.feed("\rb\n") == "ba\n"


def test_a_huge_column_is_the_last_one():
    resolver = PlainText()
    assert resolver.feed("\x1b[99999999Gx") == " " * (MAX_LINE_CHARS - 1) + "x"


def test_raw_output_is_only_decoded():
    output = CommandOutput(100, raw=True)
    output.append(b"\x1b[1ma\rb\xff\n")
    assert output.end().text == "\x1b[1ma\rb\ufffd\n"


def test_the_cap_is_on_what_is_shown():
    output = CommandOutput(100)
    for percent in range(10_000):
        output.append(b"\rprogress %d" % percent)
    capped = output.end()
    assert (capped.text, capped.dropped_bytes) == ("progress 9999", 0)
