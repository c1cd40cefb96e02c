"""Tests of graders open a host each; how its sandboxes are forked is no matter of theirs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _forks(lent_forks):
    """Have them forked by the one server of all tests."""
