"""Skipped tests: why, and what to do about it, in one table at the end; and no unknown ones where that is asked for.

A reason reads "WHY. What to do: DO". With `PRORL_ALLOWED_SKIPS=FILE` (continuous integration) the run fails if a test
was skipped that no line of the file names. A line is a test id, in which `*` stands for anything; `ID because REASON`
is for skips with that reason alone. After `#` comes why.
"""

from __future__ import annotations

import os
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

REMEDY = "What to do: "
NO_REMEDY = "(the reason does not say)"
ALLOWED = "PRORL_ALLOWED_SKIPS"
SHOWN_TESTS = 3


def because(why: str, what_to_do: str) -> str:
    """The reason of a skip."""
    return f"{why}. {REMEDY}{what_to_do}"


def lost_reason(error):
    """What was said when a fixture of trio's skipped: pytest-trio skips again, and says nothing."""
    if not isinstance(error, pytest.skip.Exception) or str(error) not in {"", "Skipped"}:
        return None
    pending = [error.__context__]
    while pending:
        found = pending.pop()
        if isinstance(found, BaseExceptionGroup):
            pending.extend(found.exceptions)
        elif isinstance(found, pytest.skip.Exception):
            return found.msg
    return None


class Skips:
    """A plugin of pytest's. Where tests run in several processes, it counts in the one that leads them."""

    def __init__(self, allowed):
        self.allowed = allowed
        self.reasons = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.excinfo is not None and (reason := lost_reason(call.excinfo.value)) is not None:
            path, line, _ = item.reportinfo()
            report.longrepr = (str(path), line + 1, f"Skipped: {reason}")
        return report

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            self._add(report)

    def pytest_collectreport(self, report):
        if report.skipped:
            self._add(report)

    def _add(self, report):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.reasons[report.nodeid] = text.removeprefix("Skipped: ")

    def unknown(self):
        """The ids of what was skipped and may not be."""
        if self.allowed is None:
            return []
        return sorted(
            test
            for test, said in self.reasons.items()
            if not any(fnmatchcase(test, ids) and fnmatchcase(said, reason) for ids, reason in self.allowed)
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.unknown() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.reasons:
            terminalreporter.section("skipped")
            terminalreporter.write("\n".join(table(self.reasons)) + "\n")
        if unknown := self.unknown():
            terminalreporter.section(f"skipped, and not on the list of {os.environ[ALLOWED]}: this run has failed")
            terminalreporter.write("\n".join(unknown) + "\n")


def table(reasons):
    """Lines: for each reason how many tests it skipped, which, and what to do."""
    tests = defaultdict(list)
    for test, reason in reasons.items():
        tests[reason].append(test)
    for reason, skipped in sorted(tests.items(), key=lambda found: -len(found[1])):
        why, _, what_to_do = reason.partition(REMEDY)
        yield f"{len(skipped):4}  {why.strip()}"
        yield f"      what to do: {what_to_do or NO_REMEDY}"
        yield from (f"        {test}" for test in sorted(skipped)[:SHOWN_TESTS])
        if len(skipped) > SHOWN_TESTS:
            yield f"        and {len(skipped) - SHOWN_TESTS} more"


def read_allowed():
    """The lines of the file that the environment names, parsed; None where every skip is allowed."""
    if not (name := os.environ.get(ALLOWED)):
        return None
    return parse_allowed(Path(name).read_text().splitlines())


def parse_allowed(lines):
    """The pattern of ids and that of reasons of each line."""
    stripped = (line.partition("#")[0].strip() for line in lines)
    pairs = (line.replace("[", "[[]").partition(" because ")[::2] for line in stripped if line)
    return [(ids, reason or "*") for ids, reason in pairs]
