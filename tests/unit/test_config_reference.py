"""docs/node-toml.md is what the code makes of the tables of node.toml, and leaves nothing out."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_trio.config import reference
from prorl_trio.config.quantities import Table

PAGE = Path(__file__).parents[2] / "docs" / "node-toml.md"


def test_the_page_is_what_the_code_makes():
    assert PAGE.read_text() == reference.make_reference(), (
        "write it anew: python -m prorl_trio.config.reference > docs/node-toml.md"
    )


class Inner(Table, frozen=True):
    """The table inside.

    Attributes:
        path: where it is, `|` included.
    """

    path: str


class Outer(Table, frozen=True):
    """The table around it.

    A second paragraph, of
    two lines.

    Attributes:
        inner: not a row, but a table of its own.
        wait_s: time until
            it gives up.
        kinds: several.
        limit: none or a number.
    """

    inner: Inner
    wait_s: float = 1e6
    kinds: tuple[str, ...] = ("a",)
    limit: int | None = None


def test_a_row_says_type_default_unit_and_meaning(monkeypatch):
    monkeypatch.setattr(reference, "NodeConfig", Outer)
    assert reference.make_reference().partition("## ")[2].splitlines() == [
        "Fields outside tables",
        "",
        "The table around it.",
        "",
        "A second paragraph, of two lines.",
        "",
        *reference.COLUMNS.splitlines(),
        "| `wait_s` | number | `1_000_000` | s | Time until it gives up. |",
        '| `kinds` | array of strings | `["a"]` |  | Several. |',
        "| `limit` | integer | none |  | None or a number. |",
        "",
        "## [inner]",
        "",
        "The table inside.",
        "",
        *reference.COLUMNS.splitlines(),
        r"| `path` | string | required |  | Where it is, `\|` included. |",
    ]


class Silent(Table, frozen=True):
    """A table that does not say what its field is.

    Attributes:
        known: this one.
    """

    known: int = 1
    unknown: int = 1


class Gone(Table, frozen=True):
    """A table that describes a field that it had once.

    Attributes:
        old: this one.
    """


@pytest.mark.parametrize(("table", "message"), [(Silent, "does not describe unknown"), (Gone, "does not have: old")])
def test_a_field_without_words_and_words_without_a_field_are_errors(monkeypatch, table, message):
    monkeypatch.setattr(reference, "NodeConfig", table)
    with pytest.raises(LookupError, match=message):
        reference.make_reference()
