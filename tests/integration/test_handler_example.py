"""The handler that CONTRIBUTING.md shows, as it is printed: with a real sandbox, from the trainer and back."""

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
from prorl_trio.handlers.registry import HandlerRegistry
from prorl_trio.models import JobSpec, TaskInstance
from prorl_trio.node import serve_node
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
CALL = '<tool_call>\n{"name": "%s", "arguments": {"%s": "%s"}}\n</tool_call>'

pytestmark = pytest.mark.timeout(120)


def handler():
    (code,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    names = {"__name__": "my_package"}
    exec(code, names)
    return names["ShellHandler"]()


def job(job_id, **payload):
    return JobSpec(job_id=job_id, instance=TaskInstance(instance_id=job_id, handler="shell", payload=payload))


async def test_the_handler_of_the_example(tmp_path):
    tiny = make_tiny_model(tmp_path / "model")

    def script(prompt):
        done = b"tool_response" in tiny.decode(prompt).encode().rpartition(b"make it")[2]
        ids = tiny.turn(CALL % ("finish", "answer", "done") if done else CALL % ("bash", "command", "echo 42 > it"))
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
                good = job("good", request="make it", check="grep -q 42 it")
                bad = job("bad", request="make it", check="echo no >&2; exit 3")
                wrong = job("wrong", request="make it")
                answers = await client.submit([good, bad, wrong])
                assert [type(answer).__name__ for answer in answers] == ["Accepted", "Accepted", "Rejected"]
                assert "missing required field `check`" in answers[2].message
                outcomes = {outcome.job_id: outcome async for outcome in client.results(2)}
            os.kill(os.getpid(), signal.SIGTERM)
    assert (outcomes["good"].reward, outcomes["good"].trajectory.stop_reason) == (1.0, "finished")
    assert (outcomes["bad"].reward, outcomes["bad"].details) == (0.0, {"stderr": "no\n"})
    assert [len(turn.tool_calls) for turn in outcomes["good"].trajectory.turns] == [1, 1]
