"""The check of style finds what it is for, and lets ordinary text pass."""

from __future__ import annotations

from support.prose import ROOT, Line, excess

PAGE = ROOT / "docs/page.md"


def test_a_phrase_above_its_limit_is_named_with_its_places():
    lines = [Line(PAGE, 1, "Return the cursor. " * 400), Line(PAGE, 7, "Those that nobody reads shall go on.")]
    found = "\n".join(excess(lines))
    for place in ("7: Those that", "7: nobody", "7: shall", "7: go on"):
        assert f"docs/page.md:{place}" in found
    assert "write: continue, resume" in found
    assert excess(lines[:1]) == []


def test_one_use_in_a_long_text_is_no_habit():
    assert excess([Line(PAGE, 1, "Return the cursor after it. " * 4000), Line(PAGE, 2, "They go on.")]) == []
