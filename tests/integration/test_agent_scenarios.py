"""Agents that people have, when things go otherwise: the trainer gets the segments of the specification."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.agent_recordings import read_tables, table, without_numbers
from support.agent_scenarios import EVERY, play
from support.agents import installed
from support.whole_node import usable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RECORD = os.environ.get("PRORL_RECORD_AGENTS")
TABLES = read_tables()
QUICK = {
    *((client, "plain") for client in ("claude-code", "codex", "gemini-cli", "mini-swe-agent", "pi")),
    *(("claude-code", name) for name in ("sub-agent", "overflow", "unavailable", "length", "empty")),
    *(("codex", name) for name in ("sub-agent", "overflow", "own count", "cut")),
    ("gemini-cli", "unknown"),
    ("pi", "arguments"),
}
"""Those of every run with the agents themselves; the rest are replayed (`test_agent_recordings`), and are soak here."""
BY_TIME = {("claude-code", "cut"), ("claude-code", "error")}
"""Whether the client asks anew before it has run what it heard of a broken answer is a matter of milliseconds."""


def marked(client, name):
    return pytest.param(client, name, marks=() if (client, name) in QUICK else pytest.mark.soak)


@pytest.fixture
def _sandboxes():
    usable("bubblewrap")


@pytest.mark.usefixtures("_sandboxes")
@pytest.mark.parametrize(("client", "name"), [marked(*each) for each in (EVERY if RECORD else TABLES)])
async def test_the_segments_are_those_of_the_specification(tmp_path, monkeypatch, client, name):
    installed(client)
    outcome, heard, prompts = await play(tmp_path, monkeypatch, client, name)
    trajectory = outcome.trajectory
    assert trajectory is not None, outcome.error
    for turn in trajectory.turns:
        ids = trajectory.segments[turn.segment].token_ids[: turn.completion_start].tolist()
        assert tuple(ids) in prompts
    assert trajectory.undelivered_tokens == 0
    if RECORD:
        Path(RECORD).mkdir(exist_ok=True)
        Path(RECORD, f"{client}+{name}.json").write_text(json.dumps(heard))
        Path(RECORD, f"{client}+{name}.txt").write_text("\n".join(table(trajectory)))
    elif (client, name) not in BY_TIME:
        assert without_numbers(table(trajectory)) == without_numbers(TABLES[client, name]), outcome.evaluation_log
