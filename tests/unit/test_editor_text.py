"""What the editor does to text, without files."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_daemon.editor import (
    CLIPPED,
    EditRefused,
    decode,
    encode,
    insert_lines,
    number_lines,
    replace_once,
    snippet,
    view_lines,
)


def document(text):
    return decode(text.encode(), "/f")


@pytest.mark.parametrize(
    ("text", "after_line", "new", "expected"),
    [
        ("a\nb\n", 0, "x", "x\na\nb\n"),
        ("a\nb\n", 1, "x", "a\nx\nb\n"),
        ("a\nb\n", 2, "x", "a\nb\nx\n"),
        ("a\nb\n", 1, "x\n", "a\nx\nb\n"),
        ("a\nb\n", 1, "x\ny", "a\nx\ny\nb\n"),
        ("a\nb\n", 1, "", "a\n\nb\n"),
        ("a\nb", 1, "x", "a\nx\nb"),
        ("a\nb", 2, "x", "a\nb\nx"),
        ("a\nb", 2, "x\n", "a\nb\nx\n"),
        ("a\n\n", 1, "x", "a\nx\n\n"),
        ("", 0, "x", "x\n"),
        ("a\r\nb\r\n", 1, "x", "a\nx\nb\n"),
    ],
)
def test_insert_puts_whole_lines_after_the_line(text, after_line, new, expected):
    assert insert_lines(document(text), after_line, new) == expected


@pytest.mark.parametrize("after_line", [-1, 3])
def test_insert_after_a_line_that_is_not_there_is_refused(after_line):
    with pytest.raises(EditRefused, match=r"`insert_line` parameter: -?\d\..*range of lines of the file: \[0, 2\]"):
        insert_lines(document("a\nb\n"), after_line, "x")


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        ("one two", "two", "three", ("one three", 1)),
        ("a\nb\nc\n", "b\nc", "", ("a\n\n", 2)),
        ("a\r\nb\r\n", "a\nb", "x\ny", ("x\ny\n", 1)),
        ("a\r\nb\r\n", "a\r\nb", "x", ("x\n", 1)),
        ("a\r\nb\n", "a\r\n", "x\n", ("x\nb\n", 1)),
        ("\tindent", "\tindent", "    indent", ("    indent", 1)),
    ],
)
def test_the_only_occurrence_is_replaced(text, old, new, expected):
    assert replace_once(document(text), old, new, "/f") == expected


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("none", "x", "No replacement was performed, old_str `none` did not appear verbatim in /f."),
        (
            "a",
            "x",
            "No replacement was performed. Multiple occurrences of old_str `a` in lines [1, 3]. Please ensure it is "
            "unique.",
        ),
        ("a\nb", "a\nb", "No replacement was performed. `new_str` and `old_str` must be different."),
        ("", "x", "No replacement was performed. `old_str` must not be empty."),
    ],
)
def test_what_is_not_exactly_once_is_refused_in_the_trained_words(old, new, said):
    with pytest.raises(EditRefused) as refused:
        replace_once(document("a a\nb\na\n"), old, new, "/f")
    assert str(refused.value) == said


def test_occurrences_that_overlap_are_several():
    with pytest.raises(EditRefused, match=r"(?s)Multiple occurrences.*lines \[1, 2\]"):
        replace_once(document("a\na\na\n"), "a\na\n", "x", "/f")


@pytest.mark.parametrize(
    ("view_range", "expected"),
    [(None, (["a", "b", "c"], 1)), ([2, 3], (["b", "c"], 2)), ([2, -1], (["b", "c"], 2)), ([3, 3], (["c"], 3))],
)
def test_a_range_of_lines(view_range, expected):
    assert view_lines(document("a\nb\nc\n"), view_range) == expected


@pytest.mark.parametrize(
    ("view_range", "said"),
    [
        ([1], "Invalid `view_range`. It should be a list of two integers."),
        ([0, 2], "Its first element `0` should be within the range of lines of the file: [1, 3]"),
        ([4, -1], "Its first element `4` should be within the range of lines of the file: [1, 3]"),
        ([1, 4], "Its second element `4` should be smaller than the number of lines in the file: `3`"),
        ([3, 2], "Its second element `2` should be larger or equal than its first `3`"),
        ([2, -2], "Its second element `-2` should be larger or equal than its first `2`"),
    ],
)
def test_a_range_that_is_none_is_refused_in_the_trained_words(view_range, said):
    with pytest.raises(EditRefused) as refused:
        view_lines(document("a\nb\nc\n"), view_range)
    assert str(refused.value).endswith(said)


def test_lines_are_numbered_as_cat_does_and_clipped_with_a_note():
    assert number_lines(["a", "", "c\x0cd"], 9, max_bytes=1000) == "     9\ta\n    10\t\n    11\tc\x0cd\n"
    clipped = number_lines(["x" * 50] * 100, 1, max_bytes=200)
    assert clipped.startswith("     1\txxx")
    assert clipped.endswith(CLIPPED)
    assert len(clipped) < 220 + len(CLIPPED)
    assert number_lines(["é" * 10_000_000], 1, max_bytes=50).startswith("     1\tééé")


def test_a_snippet_is_four_lines_around():
    text = "".join(f"{number}\n" for number in range(1, 21))
    assert snippet(text, 10, "10\n11") == ([str(number) for number in range(6, 16)], 6)
    assert snippet(text, 1, "1")[1] == 1


def test_what_is_no_text_is_refused():
    with pytest.raises(EditRefused, match="binary"):
        decode(b"PK\0\x01", "/f")


def test_a_character_the_encoding_lacks_is_refused():
    with pytest.raises(EditRefused, match=r"latin-1 text, which cannot hold '\\u20ac'"):
        encode(decode(b"caf\xe9", "/f"), "\u20ac", "/f")


@given(st.binary().filter(lambda content: b"\0" not in content))
def test_decoding_and_encoding_changes_no_byte(content):
    found = decode(content, "/f")
    assert encode(found, found.text, "/f") == content


@given(st.text(st.sampled_from("ab\r\n"), min_size=1), st.data())
def test_inserted_lines_are_where_they_belong_and_nothing_else_changes(text, data):
    found = document(text)
    after_line = data.draw(st.integers(0, len(found.lines)))
    lines = insert_lines(found, after_line, "new").split("\n")[: len(found.lines) + 1]
    assert lines == [*found.lines[:after_line], "new", *found.lines[after_line:]]


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"a\r\nb\nc\r\nd", "a\nb", "x\ny", b"x\r\ny\nc\r\nd"),
        (b"a\r\nb\nc\r\nd\n", "b\nc", "q", b"a\r\nq\r\nd\n"),
        (b"a\r\nb\nc\r\nd\n", "b\r\nc", "q\nr\ns\nt", b"a\r\nq\nr\r\ns\r\nt\r\nd\n"),
        (b"a\r\nb\nc\r\n", "c\n", "", b"a\r\nb\n"),
        (b"a\r\nb\n", "b\n", "b\nz\n", b"a\r\nb\nz\n"),
        (b"a\nb\r\n", "a", "1\n2", b"1\n2\nb\r\n"),
        ("é\r\nb\n".encode("latin-1"), "é\nb", "b\né", "b\r\né\n".encode("latin-1")),
    ],
)
def test_a_file_with_both_line_ends_matches_either_and_keeps_them(before, old, new, after):
    found = decode(before, "f")
    text, _ = replace_once(found, old, new, "f")
    assert encode(found, text, "f") == after
    assert "some in CR LF" in found.note


def test_any_file_with_both_line_ends_comes_back_as_it_was():
    dice = random.Random(16)
    for _ in range(3000):
        content = "".join(dice.choices(["a\n", "b\r\n", "\n", "\r\n", "\r", "c"], k=dice.randint(0, 7))).encode()
        found = decode(content, "f")
        assert encode(found, found.text, "f") == content
        at = dice.randint(0, content.count(b"\n"))
        added = encode(found, insert_lines(found, at, "new"), "f")
        lines, kept = added.split(b"\n"), content.split(b"\n")
        assert (lines[:at], lines[at + 1 :]) == (kept[:at], kept[at:]), (content, at, added)
