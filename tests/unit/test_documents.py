"""The tables of the documents are what the code makes of the structs and their docstrings."""

from __future__ import annotations

import sys

import pytest

from prorl_trio.config.quantities import Table
from support.documents import DOCUMENTS, ROOT, written


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_is_what_the_code_makes(document):
    text = (ROOT / document).read_text()
    assert text == written(text), "write it anew: make docs"


class Silent(Table, frozen=True):
    """A table that does not say what its field is.

    Attributes:
        known: this one, `|` included.
    """

    known: int = 1
    unknown: int = 1


class Gone(Table, frozen=True):
    """A table that describes a field that it had once.

    Attributes:
        old: this one.
    """


@pytest.mark.parametrize(
    ("kind", "table", "message"),
    [
        ("settings", "Silent", "does not describe unknown"),
        ("settings", "Gone", "does not have: old"),
        ("fields", "Gone", "does not have: old"),
        ("values", "Silent", "a comment for each value"),
    ],
)
def test_a_field_without_words_and_words_without_a_field_are_errors(monkeypatch, kind, table, message):
    monkeypatch.setitem(sys.modules, "these", sys.modules[__name__])
    with pytest.raises(LookupError, match=message):
        written(f"<!-- {kind} these {table} -->\n<!-- end -->")
