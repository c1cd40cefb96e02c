"""What an evaluator says to a driver of a repository's tests, and what it reads of the report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from prorl_trio.tasks.grading.drivers.report import read_report

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

KEY = bytes(range(32))


def job_line(repository: Path, changed: Iterable[str] = (), **more: Any) -> str:
    """Return the line on a driver's standard input."""
    job = {"key": KEY.hex(), "repository": str(repository), "changed": [*changed], "added": [], "plugins": []}
    return json.dumps({**job, "options": [], **more}) + "\n"


def messages_of(report: Path) -> Any:
    """Return the messages of a report; None if it has no end."""
    return read_report(report.read_bytes() if report.exists() else b"", KEY)
