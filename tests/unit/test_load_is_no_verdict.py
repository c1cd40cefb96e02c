"""The load of a machine is no verdict: when a program is too slow, is tried again alone, or nobody knows."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import trio

from prorl_ipc.sandbox_calls import ExecResult
from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.tasks.grading.verifier import (
    ALONE_TIMEOUT_S,
    ProgramKilled,
    ProgramLate,
    Verifier,
    again_if_killed,
    backstop_s,
)
from prorl_trio.types.errors import EvaluationError, SandboxLost
from prorl_trio.types.models import JobSpec, TaskInstance

RESOURCES = Resources(config=NodeConfig(model=ModelConfig(path="none")), chat_format=None, backends=None, scorers=None)
LIMIT_S = 10.0


class OneResult:
    """A sandbox in which each program ends in the same way."""

    def __init__(self, **result):
        base = {"exit_code": 0, "stdout": b"", "stderr": b"", "duration_s": 1.0}
        self.result = ExecResult(**{**base, **result})
        self.asked = {}

    async def exec(self, argv, **asked):
        await trio.lowlevel.checkpoint()
        self.asked = asked
        return self.result


class Bench:
    @contextmanager
    def standing_in_line(self, what, charge, *, at_most_s):
        self.charge, self.at_most_s = charge, at_most_s
        yield


async def run(result, *, last_try):
    sandbox, bench = OneResult(**result), Bench()
    ended = await Verifier(bench, sandbox, last_try=last_try).run(["program"], timeout_s=LIMIT_S)
    assert sandbox.asked["own_limit_s"] == LIMIT_S
    assert sandbox.asked["lenient"] is not last_try
    assert sandbox.asked["timeout_s"] == backstop_s(LIMIT_S) < bench.at_most_s
    assert bench.charge == "agent_budget"
    return ended


TIMED_OUT = {"timed_out": True, "exit_code": None}


@pytest.mark.parametrize(
    ("result", "first", "alone"),
    [
        ({}, "exited", "exited"),
        ({"duration_s": 100.0, "own_s": 3.0, "cpu_s": 2.9}, "exited", "exited"),
        ({"own_s": 12.0, "cpu_s": 11.9}, "late", "late"),
        ({**TIMED_OUT, "own_s": 20.0, "cpu_s": 19.0, "duration_s": 60.0}, "timed_out", "timed_out"),
        ({**TIMED_OUT, "own_s": 10.1, "cpu_s": 0.1}, ProgramLate, "timed_out"),
        ({**TIMED_OUT, "own_s": 7.0, "cpu_s": 7.0, "duration_s": 200.0}, EvaluationError, EvaluationError),
        ({**TIMED_OUT, "own_s": 7.0, "cpu_s": 7.0, "breach": "wall"}, "timed_out", "timed_out"),
        ({"exit_code": 137}, ProgramKilled, "exited"),
        ({"exit_code": 137, "breach": "memory"}, "exited", "exited"),
    ],
)
async def test_how_a_program_ended_decides_who_made_it_slow(result, first, alone):
    for expected, last_try in ((first, False), (alone, True)):
        if isinstance(expected, str):
            ended = await run(result, last_try=last_try)
            assert ("late" if ended.is_late else ended.ended) == expected
        else:
            with pytest.raises(expected):
                await run(result, last_try=last_try)


class Refuses(OneResult):
    """A sandbox that raises what `errors` has next, or runs the program."""

    def __init__(self, *errors):
        super().__init__()
        self.errors = [*errors]

    async def exec(self, argv, **asked):
        error = self.errors.pop(0)
        if error is not None:
            raise error
        return await super().exec(argv, **asked)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "python3"), PermissionError(13, "python3"), OSError(5, "io")])
async def test_a_first_program_that_does_not_start_is_no_verdict_and_a_later_one_is_the_candidates(error):
    verifier = Verifier(Bench(), Refuses(error, None, error), last_try=True)
    with pytest.raises(EvaluationError, match="cannot run program"):
        await verifier.run(["program"], timeout_s=1.0)
    assert (await verifier.run(["program"], timeout_s=1.0)).ended == "exited"
    assert (await verifier.run(["program"], timeout_s=1.0)).ended == "refused"


async def test_a_program_that_is_killed_at_the_second_try_as_well_has_failed():
    bench, context = Bench(), a_context()

    async def grade(*, last_try):
        return await Verifier(bench, OneResult(exit_code=137), last_try=last_try).run(["program"], timeout_s=1.0)

    ended = await again_if_killed(context, grade)
    assert (ended.ended, ended.exit_code) == ("exited", 137)
    assert "once more" in str(context.evaluation_log)


async def test_what_is_right_and_late_is_tried_again_and_then_is_late():
    assert not Verifier(Bench(), OneResult(), last_try=False).check_late(False, "it")
    with pytest.raises(ProgramLate, match="right, and late"):
        Verifier(Bench(), OneResult(), last_try=False).check_late(True, "it")
    assert Verifier(Bench(), OneResult(), last_try=True).check_late(True, "it")


def a_context():
    instance = TaskInstance(instance_id="i", handler="code", payload={})
    return RolloutContext(spec=JobSpec(job_id="j", instance=instance), resources=RESOURCES)


async def test_second_tries_are_made_one_at_a_time_and_their_wait_is_charged_to_nobody(autojump_clock):
    at_once, most, done = 0, 0, []

    async def grade(name, *, last_try):
        nonlocal at_once, most
        if not last_try:
            raise ProgramLate("slow")
        at_once += 1
        most = max(most, at_once)
        await trio.sleep(10.0)
        at_once -= 1
        done.append(name)
        return name

    async def one(name):
        context = a_context()
        with trio.CancelScope(deadline=trio.current_time() + 15.0) as scope:
            context.begin_stage(scope, "evaluator")

            async def action(*, last_try):
                return await grade(name, last_try=last_try)

            assert await again_if_killed(context, action) == name
        assert not scope.cancelled_caught
        assert "once more, alone" in str(context.evaluation_log)

    async with trio.open_nursery() as nursery:
        for name in range(4):
            nursery.start_soon(one, name)
    assert (most, sorted(done)) == (1, [0, 1, 2, 3])


async def test_a_killed_program_waits_for_no_turn():
    tries = []

    async def action(*, last_try):
        await trio.lowlevel.checkpoint()
        tries.append(last_try)
        if not last_try:
            raise ProgramKilled("gone")
        return 1

    assert await again_if_killed(a_context(), action) == 1
    assert tries == [False, True]


async def test_who_gets_no_turn_in_time_has_a_verdict_all_the_same(autojump_clock):
    verdicts, began_s = [], trio.current_time()

    async def action(*, last_try):
        if not last_try:
            raise ProgramLate("idle")
        await trio.sleep(5 * ALONE_TIMEOUT_S)
        return 0

    async def one():
        verdicts.append(await again_if_killed(a_context(), action))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(one)
    assert verdicts == [0] * 5
    assert trio.current_time() - began_s < 7 * ALONE_TIMEOUT_S


@pytest.mark.parametrize("last_try", [False, True])
async def test_a_loss_is_the_candidates_only_if_it_came_from_inside(last_try):
    outside = Verifier(Bench(), Refuses(SandboxLost("it was killed")), last_try=last_try)
    with pytest.raises(SandboxLost):
        await outside.run(["program"], timeout_s=LIMIT_S)
    inside = Verifier(Bench(), Refuses(SandboxLost("it was killed", from_inside=True)), last_try=last_try)
    assert (await inside.run(["program"], timeout_s=LIMIT_S)).ended == "lost"
