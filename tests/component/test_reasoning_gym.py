"""Families of reasoning-gym as endless sets, verified by its own code: where the package is installed.

Three packages that it needs have no wheels, and one is in C, so set-up does not install it.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from prorl_trio.agent.scoring import open_scorer_pool
from prorl_trio.tasks.handlers.stem.generated import REFUSED
from prorl_trio.tasks.handlers.stem.payload import read_payload
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.types.errors import ConfigError, EvaluationError, HostileAnswer
from support.skips import because

pytestmark = [
    pytest.mark.skipif(
        find_spec("reasoning_gym") is None,
        reason=because("reasoning-gym is not installed", ".venv/bin/python -m pip install reasoning-gym==0.1.25"),
    ),
    pytest.mark.timeout(240),
    # of what it imports
    pytest.mark.filterwarnings("ignore"),
]

SCORER = "prorl_trio.tasks.handlers.stem.verifier:score"
FAMILIES = ["chain_sum", "countdown", "n_queens", "simple_integration", "spiral_matrix"]


def test_a_set_goes_on_where_the_one_before_ended():
    first, second = load_task_set("reasoning-gym:chain_sum:5"), load_task_set("reasoning-gym:chain_sum:5:5")
    assert [instance.instance_id for instance in first + second] == [f"chain_sum-{seed}" for seed in range(10)]
    assert first + second == load_task_set("reasoning-gym:chain_sum:10:0")
    assert len({instance.payload["question"] for instance in first + second}) == 10
    assert len(load_task_set("reasoning-gym:chain_sum")) == 100
    assert {instance.family for instance in first} == {"chain_sum"}


def test_families_that_are_unknown_or_refused_say_why():
    with pytest.raises(ConfigError, match=r"no family 'sums'; it has: .*chain_sum"):
        load_task_set("reasoning-gym:sums")
    for family, why in REFUSED.items():
        with pytest.raises(ConfigError, match=why):
            load_task_set(f"reasoning-gym:{family}")


@pytest.fixture
async def verify():
    async with open_scorer_pool(1) as scorers:

        async def ask(instance, answer, **changes):
            payload = read_payload(instance.payload)
            grader = payload.grader
            task = {
                "family": grader.family,
                "seed": grader.seed,
                "version": grader.version,
                "question": payload.question,
                **changes,
            }
            harmless = {**task, "answer": None}
            found = await scorers.score(SCORER, {**task, "answer": answer}, timeout_s=120, harmless=harmless)
            return found["score"]

        yield ask


async def test_right_answers_are_worth_all_and_code_is_not_run(verify, tmp_path):
    witness = tmp_path / "witness"
    code = f"__import__('pathlib').Path({str(witness)!r}).touch()"
    for family in FAMILIES:
        (instance,) = load_task_set(f"reasoning-gym:{family}:1:3")
        assert await verify(instance, None) == 1.0
        for answer in (code, f"[{code}]", f"({code}, 1)[1]", "nonsense", "Integral(x, x)", "x" * 19_000):
            assert await verify(instance, answer) < 0.5, (family, answer[:40])
    assert not witness.exists()


async def test_what_is_no_number_is_no_answer(verify):
    (instance,) = load_task_set("reasoning-gym:complex_arithmetic:1:3")
    for answer in ("nan", "nan+nanj", "NaN", "inf", "-infinity"):
        assert await verify(instance, answer) == 0.0


async def test_a_verifier_that_fails_at_an_answer_fails_at_that_alone(verify):
    (instance,) = load_task_set("reasoning-gym:prime_factorization:1:3")
    with pytest.raises(HostileAnswer, match="invalid literal"):
        await verify(instance, "no number")


async def test_a_task_that_is_another_than_its_seed_makes_has_no_verdict(verify):
    (instance,) = load_task_set("reasoning-gym:chain_sum:1:3")
    with pytest.raises(EvaluationError, match="makes another question"):
        await verify(instance, "1", question="What is 1 + 1?")
    with pytest.raises(EvaluationError, match=r"reasoning-gym 0\.0\.1 made this task"):
        await verify(instance, "1", version="0.0.1")
