"""No text of a policy or a stranger sends anything to a terminal but characters that are seen."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import unicodedata
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

import prorl_launch
import prorl_trio
from prorl_ipc.portable_text import printable, printable_json
from prorl_launch import commands, progress
from prorl_launch.doctor import Check, Report
from prorl_trio import cli
from prorl_trio.client.terminal import Console, one_line, say, say_json
from prorl_trio.observe.logs import open_logging
from prorl_trio.runs import report, transcript
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import Outcome, Segment, Timing, ToolCall, Trajectory, Turn

HOSTILE = (
    "a\x1b[2J\x1b]0;title\x07\x9b31m\x00\x7f\x85\r\b\u202e\u2066\u200b\u200d\u2060\ufeff\u00ad\u2028\u2029\U000e0041"
    "\ufe0f\u3164\u115f\ufff9 é漢\u3000👍"
)
CONTROLS = {"\n"}
OUTSIDE = {
    "cli/__init__.py": "the commands' own error, made printable there",
    "runs/progress.py": "the pager gets what the console has printed",
    "client/terminal.py": "the way itself",
    "tasks/grading/drivers": "programs inside of sandboxes",
    "sandbox/images/pull.py": "frames to the node",
    "observe/logs.py": "formatters make records printable",
    "tasks/sets/task_checks.py": "a bar without words of others",
    "prorl_launch/bundle.py": "words of its own, without any package",
    "prorl_launch/slurm/commands.py": "the batch script, exactly, for a file",
    "prorl_launch/image_commands.py": "a definition file, exactly, for a file",
    "prorl_launch/slurm/sweep.py": "its usage; it has the standard library alone",
    "prorl_launch/slurm/pulse.py": "words of its own, without any package",
    "prorl_launch/slurm/leash.py": "words of its own, without any package",
    "prorl_launch/supervisor.py": "words of its own, without any package",
    "prorl_launch/progress.py": "made printable there, without any package",
}
"""Where something is printed in another way than by `client.terminal`, and why that is fine."""


def is_safe(text: str) -> bool:
    """Whether all of `text` is seen; rich's own styles are not in it."""
    return all(char in CONTROLS or char.isprintable() or unicodedata.category(char) == "Zs" for char in text)


@given(st.text())
def test_printable_text_is_seen_and_nothing_is_lost(text):
    shown = printable(text)
    assert all(char in "\n\t" or char.isprintable() or unicodedata.category(char) == "Zs" for char in shown)
    assert printable(shown) == shown
    assert is_safe(printable(text, keep=""))
    assert "\n" not in printable(text, keep="")
    if "\\" not in text:
        assert shown.encode("latin-1", "backslashreplace").decode("unicode_escape") == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_printable_json_means_the_same(text):
    encoded = printable_json(msgspec.json.encode({text: [text]}).decode())
    assert is_safe(encoded)
    assert json.loads(encoded) == {text: [text]}


def test_shapes_stay():
    for text in ("Déjà vu", "日本語\u3000テキスト", "a\u0301", "שלום", "مرحبا", "👍🏽", "x\u00a0y", "→ ∑ √"):
        assert printable(text) == text


def outcome():
    turn = Turn(
        segment=0,
        completion_start=0,
        completion_end=1,
        text=HOSTILE,
        finish_reason="stop",
        tool_calls=[ToolCall(name=HOSTILE, arguments={}, raw=HOSTILE)],
        observations=[HOSTILE],
        inference_s=0.0,
        tools_s=0.0,
    )
    segment = Segment.from_arrays([1], [0.0], [1], [])
    trajectory = Trajectory(segments=[segment], turns=[turn], stop_reason="finished")
    return Outcome(
        job_id=HOSTILE,
        group_id=HOSTILE,
        instance_id=HOSTILE,
        status="failed",
        cause="handler",
        reward=None,
        error=HOSTILE,
        error_code="handler_raised",
        trajectory=trajectory,
        timing=Timing(),
        details={HOSTILE: HOSTILE},
    )


class Tokens:
    """A chat format that decodes everything to the same text."""

    def decode(self, ids):
        return HOSTILE


def rendered(*parts):
    out = io.StringIO()
    console = Console(file=out, width=200)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
    return out.getvalue()


@contextmanager
def unseen_by_pytest():
    """pytest-xdist cannot send a report with half a character in it."""
    theirs = [each for each in logging.getLogger().handlers if type(each).__module__ == "_pytest.logging"]
    for handler in theirs:
        handler.addFilter(_is_not_of_the_test)
    try:
        yield
    finally:
        for handler in theirs:
            handler.removeFilter(_is_not_of_the_test)


def _is_not_of_the_test(record):
    return record.name != "a.test"


def logged(log_format):
    out = io.StringIO()
    with unseen_by_pytest(), open_logging(log_format=log_format, stream=out):
        try:
            raise ValueError(f"{HOSTILE}\n2026-01-01 00:00:00,000 INFO prorl_trio: forged \udce9")
        except ValueError:
            logging.getLogger("a.test").exception("of %s", f"{HOSTILE}\n2026-01-01 INFO prorl_trio: forged")
    return out.getvalue()


class Terminal(io.StringIO):
    """What rich takes for a terminal without colours."""

    def isatty(self):
        return True


def logged_on_a_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    with open_logging(stream=out):
        logging.getLogger("a.test").error("of %s", HOSTILE)
    return out.getvalue()


def command_that(action):
    """What the root command prints when one of its commands does `action`."""

    @click.command()
    def broken():
        action()

    group = type("Group", (cli._Commands,), {"get_command": lambda *_: broken})("group", modules={}, plugins="none")
    result = CliRunner().invoke(group, ["broken"], color=False)
    return result.output


def _raise(error):
    raise error


def traceback_of_a_bug(capsys):
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError as error:
        cli._print_traceback(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def said(capsys, print_it):
    print_it()
    captured = capsys.readouterr()
    return captured.out + captured.err


def a_table():
    table = Table("a", "b")
    table.add_row(one_line(HOSTILE), HOSTILE)
    return table


DOCTOR = Report(usable=False, checks=[Check(name=HOSTILE, state="missing", detail=HOSTILE, remedy=HOSTILE)])
PLACES = {
    "show, by tokens": lambda **_: rendered(transcript.render_trajectory(outcome(), Tokens())),
    "show, by turns": lambda **_: rendered(transcript.render_trajectory(outcome(), None)),
    "show, side by side": lambda **_: rendered(transcript.render_trajectory(outcome(), Tokens(), sides=True)),
    "show, token by token": lambda **_: rendered(report.token_lines(outcome().trajectory, Tokens())),
    "show, all outcomes": lambda **_: rendered(report.outcome_list([outcome()])),
    "errors of a run": lambda **_: rendered(*report.errors([outcome()])),
    "groups of a run": lambda **_: rendered(report.group_table([(HOSTILE, [outcome()] * 2)])),
    "any table": lambda **_: rendered(a_table()),
    "any text without care": lambda **_: rendered(HOSTILE, Text(HOSTILE)),
    "a line": lambda capsys, **_: said(capsys, lambda: say(HOSTILE, err=True)),
    "JSON": lambda capsys, **_: said(capsys, lambda: say_json({HOSTILE: HOSTILE})),
    "the text log": lambda **_: logged("text"),
    "the JSON log": lambda **_: logged("json"),
    "the log on a terminal": lambda monkeypatch, **_: logged_on_a_terminal(monkeypatch),
    "an error of a command": lambda **_: command_that(lambda: _raise(ConfigError(HOSTILE))),
    "an error of a file": lambda **_: command_that(lambda: _raise(FileNotFoundError(2, "none", HOSTILE))),
    "an error of a plug-in's": lambda **_: command_that(lambda: _raise(click.ClickException(HOSTILE))),
    "a wrong command line": lambda **_: command_that(lambda: _raise(click.BadParameter(HOSTILE))),
    "a bug of a command": lambda capsys, **_: traceback_of_a_bug(capsys),
    "doctor": lambda capsys, **_: said(capsys, lambda: commands._print(DOCTOR)),
    "a step of set-up": lambda capsys, **_: said(capsys, lambda: progress.say(HOSTILE)),
}


@pytest.mark.parametrize("place", PLACES)
def test_nothing_unseen_is_printed(place, capsys, monkeypatch):
    text = PLACES[place](capsys=capsys, monkeypatch=monkeypatch)
    assert re.search(r"a\\(x|u00)1b\[2J", text), "the text itself is there, spelled out"
    assert is_safe(text), ascii(text)


def test_no_text_forges_another_record():
    assert [line for line in logged("text").splitlines() if "forged" in line and not line.startswith("    ")] == []
    (line,) = logged("json").splitlines()
    assert "forged" in json.loads(line)["exception"]


def test_styles_of_our_own_stay():
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="standard").print(Text("red", style="red"), Text(HOSTILE))
    assert out.getvalue().startswith("\x1b[31mred\x1b[0m")
    assert "\x1b[2J" not in out.getvalue()


def _printing(tree):
    """Calls that print by another way than `client.terminal`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("print", "click.echo", "click.secho", "click.echo_via_pager", "rich.print") or (
                called.startswith(("sys.stdout.", "sys.stderr.")) and called.endswith(("write", "writelines"))
            ):
                yield called
        if isinstance(node, ast.ImportFrom) and node.module == "rich.console":
            yield from (alias.name for alias in node.names if alias.name == "Console")


def test_everything_is_printed_in_one_way():
    """A new command that prints by itself has to say here why it may."""
    found = set()
    for package in (prorl_trio, prorl_launch):
        root = Path(package.__file__).parent
        for path in root.rglob("*.py"):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):  # names for types alone
                if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                    node.body = []
            if any(_printing(tree)):
                name = path.relative_to(root if package is prorl_trio else root.parent).as_posix()
                found.add("tasks/grading/drivers" if name.startswith("tasks/grading/drivers/") else name)
    assert found <= set(OUTSIDE), "use client.terminal"
    assert set(OUTSIDE) - found == set(), "no longer needed here"
