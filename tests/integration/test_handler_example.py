"""The handler of the guide, as it is printed: with real programs, from the trainer and back."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.config import NodeConfig
from prorl_trio.node.serve import serve_node
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, TaskInstance

GUIDE = Path(__file__).parents[2] / "docs" / "handlers.md"
CALL = '<tool_call>\n{"name": "%s", "arguments": {"%s": "%s"}}\n</tool_call>'
MAKE = "echo 42 > %s; touch ~/planted; alias grep=true"

pytestmark = pytest.mark.timeout(120)


def handler():
    (code,) = re.findall(r"```python\n(# make_file_handler.py\n.*?)```", GUIDE.read_text(), re.DOTALL)
    names = {"__name__": "make_file_handler"}
    exec(code, names)
    return names["MakeFileHandler"]()


def fresh_with(path):
    return ["sh", "-c", f"! ls ~/planted && grep -q 42 {path}"]


def job(job_id, **payload):
    return JobSpec(job_id=job_id, instance=TaskInstance(instance_id=job_id, handler="make_file", payload=payload))


async def test_the_handler_of_the_example(tmp_path):
    tiny = make_tiny_model(tmp_path / "model")

    def script(prompt):
        path, since = re.findall(r"please make (/[\w/.-]+)(.*)", tiny.decode(prompt), re.DOTALL)[-1]
        done = "tool_response" in since
        ids = tiny.turn(CALL % ("finish", "answer", "done") if done else CALL % ("bash", "command", MAKE % path))
        return ids, [-0.5] * len(ids), "stop"

    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=8_000)
    with trio.fail_after(60):
        async with open_fake_engine(script=script, config=engine_config) as engine, trio.open_nursery() as nursery:
            tables = {
                "model": {"path": str(tmp_path / "model")},
                "listen": {"port": 0, "token": "t"},
                "backends": {"urls": [engine.url]},
                "sandbox": {"provider": "process"},
                "arena": {"enabled": False},
            }
            serve = partial(serve_node, msgspec.convert(tables, NodeConfig), HandlerRegistry([handler()]))
            host, port = await nursery.start(lambda *, task_status: serve(task_status=task_status))
            async with connect(f"ws://{host}:{port}", "t") as client:
                good, bad, other = (str(tmp_path / name) for name in ("good", "bad", "other"))
                jobs = [
                    job("good", request=f"please make {good}", result=good, check=fresh_with(good)),
                    job("bad", request=f"please make {bad}", result=bad, check=["sh", "-c", "echo no >&2; exit 3"]),
                    job("missing", request=f"please make {other}", result=f"{other}.x", check=["true"]),
                    job("wrong", request="please make it", result="/tmp/it"),
                ]
                answers = await client.submit(jobs)
                assert [type(answer).__name__ for answer in answers] == ["Accepted"] * 3 + ["Rejected"]
                assert "missing required field `check`" in answers[3].message
                outcomes = {outcome.job_id: outcome async for outcome in client.results(3)}
            os.kill(os.getpid(), signal.SIGTERM)
    assert (outcomes["good"].reward, outcomes["good"].trajectory.stop_reason) == (1.0, "finished")
    assert (outcomes["missing"].status, outcomes["missing"].reward) == ("completed", 0.0)
    assert outcomes["missing"].details == {"made": False}
    assert (outcomes["bad"].reward, outcomes["bad"].evaluation_log) == (0.0, "no\n")
    assert [len(turn.tool_calls) for turn in outcomes["good"].trajectory.turns] == [1, 1]
