"""IPython's own syntax in a cell (`%magic`, `!command`, `object?`), looked for only where a character says so."""

from __future__ import annotations

import re

from IPython.core.inputtransformer2 import TransformerManager

_ESCAPE = re.compile(r"[%!?]|^\s*[,;/]")
"""Signs of IPython's own syntax: one of the first anywhere in a line, or one of the others at its beginning."""


class CellSyntax(TransformerManager):
    """A faster IPython transformer: cells without IPython's syntax, which are most, are left as they are.

    IPython's own splits every cell into tokens to find that syntax: a seventh of the time of a short cell, and more
    with the cell's length.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own_transformers = list(self.token_transformers)

    def do_token_transforms(self, lines: list[str]) -> list[str]:
        """`lines` with that syntax made into Python. Transformers that an extension added see every cell."""
        if self.token_transformers == self._own_transformers and not any(map(_ESCAPE.search, lines)):
            return lines
        transformed: list[str] = super().do_token_transforms(lines)  # type: ignore[no-untyped-call]
        return transformed
