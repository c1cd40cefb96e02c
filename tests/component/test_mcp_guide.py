"""docs/mcp.md, as it is printed there: its server, its node.toml and its jobs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from component.test_whose_doing import SURVIVED, Tools, open_bench, turns
from prorl_trio.agent.mcp import servers_of
from prorl_trio.config import load_config
from prorl_trio.testing.fake_sandbox import FakeProvider

PAGE = (Path(__file__).parents[2] / "docs" / "mcp.md").read_text()

pytestmark = pytest.mark.timeout(60)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


async def test_the_guide_works_as_it_is_printed(rig, tmp_path):
    server, jobs = blocks("python")
    first, second = blocks("toml")
    (tmp_path / "words.py").write_text(server)
    file = tmp_path / "node.toml"
    file.write_text(second)
    assert load_config(file).mcp.servers["github"].secrets == {"Authorization": "GITHUB_AUTHORIZATION"}
    file.write_text(first.replace("/srv", str(tmp_path)).replace('"python3"', f'"{sys.executable}"'))
    config = load_config(file)
    names = {}
    exec(jobs, names)
    assert list(servers_of(config, names["spec"])) == ["words", "files"]
    assert servers_of(config, names["none"]) == {}
    rig.config = msgspec.structs.replace(rig.config, mcp=config.mcp)
    says = turns({"name": "words__count_words", "arguments": {"text": "three small words"}})
    async with open_bench(rig, FakeProvider()) as play:
        outcome = await play("guide", says, Tools())
    assert (outcome.status, outcome.cause, outcome.reward) == SURVIVED, outcome.error
    assert outcome.trajectory.turns[0].observations == ["3"]
    offered = [each["function"]["name"] for each in outcome.trajectory.tools]
    assert offered[-1] == "words__count_words"
    assert "words__delete_everything" not in offered
