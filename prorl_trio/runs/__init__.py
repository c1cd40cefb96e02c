"""Recorded outcomes: written, read, reported, compared, and evaluated.

For notebooks, `read_outcomes` reads a run, and `to_columns` makes a table of it.
"""

from __future__ import annotations

from prorl_trio.runs.columns import to_columns
from prorl_trio.runs.recording import read_outcomes

__all__ = ["read_outcomes", "to_columns"]
