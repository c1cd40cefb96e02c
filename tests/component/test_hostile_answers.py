"""Answers made to hang, crash or exhaust the mathematics scorer: they are worth 0, and the next one is scored."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio

from prorl_trio.agent.context import BoundedText, RolloutContext
from prorl_trio.agent.scoring import open_scorer_pool
from prorl_trio.config import AgentConfig, ModelConfig, NodeConfig, ScoringConfig
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.types.errors import EvaluationError
from prorl_trio.types.models import JobSpec, TaskInstance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ANSWERS = [
    "9^{9^{9^9}}",
    "9**9**9**9",
    "(10^9)!",
    "10^9!",
    "((10!)!)!",
    "(" * 900 + "42" + ")" * 900,
    "{" * 900 + "42" + "}" * 900,
    "\\frac{" * 300 + "1}{2}",
    "\\sqrt{" * 300 + "2" + "}" * 300,
    "-" * 1900 + "42",
    "9" * 1999,
    "1e999999999",
    "1" + "0" * 1500 + "!",
    "\\sum_{n=1}^{10^{12}} \\frac{1}{n}",
    "\\prod_{n=1}^{10^9} n",
    "\\int_0^1 e^{e^{e^{x^{x^x}}}} dx",
    "\\lim_{x \\to 0} \\frac{\\sin(x^{x^{x}})}{x}",
    "\\binom{10^9}{5*10^8}",
    "x^{1000} - (x-1)^{1000}",
    "(x+y+z+w)^{200}",
    "2^{2^{2^{2^{2^2}}}}",
    "\\gcd(10^{1000}, 9^{9^9})",
    "\\boxed{" * 200 + "42",
    "1+" * 900 + "1",
    "1," * 900 + "1",
    "a" * 2000,
    "\\text{" * 300,
    "$" * 2000,
    "*" * 2000,
    "\\begin{pmatrix}" + "1&" * 900 + "\\end{pmatrix}",
    "x_" * 900,
    "^" * 1000,
    "\x00\x01\udcff\ud800",
    "\u202e24",
]


def context(scorers, answer, gold="42"):
    instance = TaskInstance(instance_id="q", handler="math", payload={"question": "?", "answer": gold})
    config = NodeConfig(model=ModelConfig(path="/nowhere"), agent=AgentConfig(tool_timeout_s=60.0))
    resources = SimpleNamespace(scorers=scorers, config=config)
    return RolloutContext(
        spec=JobSpec(job_id="job", instance=instance),
        resources=resources,
        answer=answer,
        evaluation_log=BoundedText(9999),
    )


async def test_each_of_them_is_worth_nothing_and_the_right_answer_one():
    rewards = {}
    async with open_scorer_pool(2, ScoringConfig(cpu_s=2)) as pool, trio.open_nursery() as nursery:

        async def ask(answer):
            rewards[answer] = (await MathHandler().eval(context(pool, answer))).reward

        for answer in ANSWERS:
            nursery.start_soon(ask, answer)
        nursery.start_soon(ask, "42")
    assert len(rewards) == len(ANSWERS) + 1
    assert rewards.pop("42") == 1.0
    assert {answer for answer, reward in rewards.items() if reward} <= {text for text in ANSWERS if "42" in text}


async def test_a_gold_answer_that_cannot_be_read_is_the_tasks_fault():
    async with open_scorer_pool(1, ScoringConfig(cpu_s=2)) as pool:
        with pytest.raises(EvaluationError) as caught:
            await MathHandler().eval(context(pool, "42", gold="$"))
    assert caught.value.cause == "evaluator"


async def test_any_of_several_gold_answers_is_right():
    async with open_scorer_pool(1, ScoringConfig(cpu_s=20)) as pool:
        for answer, reward in (("18", 1.0), ("3", 1.0), ("18, 3", 0.0), ("7", 0.0)):
            evaluation = await MathHandler().eval(context(pool, answer, gold=["18", "3"]))
            assert evaluation.reward == reward, answer
