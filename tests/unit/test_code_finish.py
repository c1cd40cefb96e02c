"""The code that an agent gives to finish: read in a scoring process where it has fences, taken as it is elsewhere."""

from __future__ import annotations

import pytest
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.tasks.handlers.code import CodeHandler
from prorl_trio.tasks.handlers.code_answer import choose
from prorl_trio.types.errors import HostileAnswer
from prorl_trio.types.models import JobSpec, TaskInstance

TESTS = {"kind": "function", "function": "f", "cases": [{"args": [1], "result": 2}]}


class NoFile:
    async def read_file(self, path, *, max_bytes):
        await trio.lowlevel.checkpoint()
        raise FileNotFoundError(path)


class Scorers:
    async def score(self, function, payload, *, timeout_s, harmless):
        await trio.lowlevel.checkpoint()
        if "hostile" in payload["answer"]:
            raise HostileAnswer("it hangs")
        assert choose(harmless)["code"]
        return choose(payload)


@pytest.mark.parametrize(
    ("finished", "solution"),
    [
        ("def f(n): return 2", "def f(n): return 2"),
        ("So:\n```python\ndef f(n): return 2\n```\nUse it:\n```python\nf(1)\n```", "def f(n): return 2\n"),
        ("```bash\nls\n```", None),
        ("```python\nhostile\n```", None),
        ("```python\n" + "x" * 600_000, None),
        (" ", None),
        (None, None),
    ],
)
async def test_what_was_given_to_finish_is_the_solution(finished, solution):
    config = NodeConfig(model=ModelConfig(path="none"))
    instance = TaskInstance(instance_id="i", handler="code", payload={"prompt": "p", "tests": TESTS})
    context = RolloutContext(
        spec=JobSpec(job_id="j", instance=instance),
        resources=Resources(config=config, chat_format=None, backends=None, scorers=Scorers()),
        sandbox=NoFile(),
        answer=finished,
    )
    await CodeHandler().collect(context)
    assert context.answer == solution
