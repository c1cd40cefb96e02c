"""The programs of docs/sampling.md, as they are printed there, over a node's edge."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import get_args

import pytest
import trio

from prorl_trio.sampling.batch import Fate, Why
from support.fake_node import FakeNode
from support.fake_service import TOKEN, open_service
from support.sampled import make_rollout

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class Node(FakeNode):
    """Takes jobs of any handler; the first half of each group is right."""

    def __init__(self):
        super().__init__(lambda spec: make_rollout(spec, float(int(spec.job_id.split("-")[-2]) < 2)))

    def check(self, spec, sink, ahead):
        pass


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
async def test_a_program_runs_and_ends_by_itself(number, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    node = Node()
    with trio.fail_after(30):
        await node.backends.add("http://engine:1")
        async with open_service(node) as service:
            monkeypatch.setenv("PRORL_URL", service.url)
            monkeypatch.setenv("PRORL_TOKEN", TOKEN)
            code = compile(PROGRAMS[number], "docs/sampling.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            for _ in range(2):  # it comes back to what it left
                names: dict[str, object] = {}
                if code.co_flags & inspect.CO_COROUTINE:
                    await eval(code, names)
                else:
                    await trio.to_thread.run_sync(exec, code, names)
        await node.backends.aclose()
    assert not node.live
    assert node.submitted


def test_every_fate_and_reason_is_in_the_table():
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|", PAGE[PAGE.index("## The manifest") :], re.MULTILINE)
    fates = {fate: set(re.findall(r"`(\w+)`", why)) for fate, why in rows if fate in get_args(Fate)}
    assert set(fates) == set(get_args(Fate))
    assert set().union(*fates.values()) == set(get_args(Why)) - {""}
