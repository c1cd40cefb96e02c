"""A cell that is looked at for IPython's syntax only where a character says so becomes what IPython makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from prorl_daemon.ipython_shell import CellSyntax

PIECES = st.sampled_from(
    [
        *"%!?,;/=()[]{}\\'\"#:. \t\n\r\f\v",
        "x",
        "f",
        "1",
        "é",
        "x = ",
        "x?",
        "%time ",
        "%%bash\n",
        "!ls",
        "if x:\n    ",
        "return ",
        "'''",
        "\\\n",
        "\u2028",
        "\x1c",
        ">>> ",
        "... ",
        "In [1]: ",
        "$",
        "\0",
    ]
)
CELLS = st.lists(PIECES, max_size=12).map("".join)


def by_ipython(cell: str) -> str | None:
    """What it becomes; None where IPython fails with it, which it does with what is no Python."""
    try:
        return TransformerManager().transform_cell(cell)
    except (SyntaxError, IndexError):
        return None


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::UserWarning")  # of what is no Python
@given(CELLS)
def test_every_cell_becomes_what_ipython_makes_of_it(cell: str):
    expected = by_ipython(cell)
    if expected is not None:
        assert CellSyntax().transform_cell(cell) == expected
    else:
        with pytest.raises((SyntaxError, IndexError, ValueError)):  # ValueError: a NUL
            compile(CellSyntax().transform_cell(cell), "a cell", "exec")


@pytest.mark.parametrize(
    "cell", ["x %= 2\n", "a = %time\n", "!ls\n", "x?\n", ",f a b\n", "  ;f a b\n", "/f a\n", "x = 1\n"]
)
def test_every_kind_of_syntax_becomes_what_ipython_makes_of_it(cell: str):
    assert CellSyntax().transform_cell(cell) == by_ipython(cell)


def test_transformers_that_were_added_see_every_cell():
    seen = []

    class Added:
        @staticmethod
        def find(tokens_by_line):
            seen.append(tokens_by_line)

    syntax = CellSyntax()
    assert syntax.transform_cell("x = 1") == "x = 1\n"
    assert not seen
    syntax.token_transformers.append(Added)
    assert syntax.transform_cell("x = 1") == "x = 1\n"
    assert seen
