"""What agents that people have do when things go otherwise, and that the trainer gets the segments of the specification."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prorl_trio.agents.preset import presets
from support.agent_recordings import read_tables, table, without_numbers
from support.agent_scenarios import SCENARIOS, SHELLS, play
from support.skips import because
from support.whole_node import usable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RECORD = os.environ.get("PRORL_RECORD_AGENTS")
TABLES = read_tables()
EVERY = [(client, name) for client in SHELLS for name in SCENARIOS]


@pytest.fixture
def _sandboxes():
    usable("bubblewrap")


@pytest.mark.usefixtures("_sandboxes")
@pytest.mark.parametrize(("client", "name"), EVERY if RECORD else TABLES, ids=str)
async def test_the_segments_are_those_of_the_specification(tmp_path, monkeypatch, client, name):
    if not presets()[client].is_installed:
        pytest.skip(because(f"the agent {client} is not installed", f"prorl-trio agents install {client}"))
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
    else:
        assert without_numbers(table(trajectory)) == without_numbers(TABLES[client, name]), outcome.evaluation_log
