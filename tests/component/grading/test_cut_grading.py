"""Grading that is cut at each of its steps: by the loss of a sandbox, or by a kill of what runs in it.

A right answer gets its reward or none, never 0; a wrong one 0 or none.
"""

from __future__ import annotations

import base64
from itertools import count

import msgspec
import pytest
import trio

from prorl_ipc.sandbox_calls import Exec
from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.sandbox.client import DaemonSandbox
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.handlers.code import CodeHandler
from prorl_trio.tasks.handlers.shell.handler import ShellHandler
from prorl_trio.tasks.handlers.swe import SweHandler
from prorl_trio.types.errors import EvaluationError, SandboxLost, SandboxUnavailable
from prorl_trio.types.models import JobSpec
from support.known_verdicts import SOLUTIONS, known_task, swe_patch
from support.own_cache import use_own_cache

CONFIG = NodeConfig(model=ModelConfig(path="none"), sandbox=SandboxConfig(packages=("pytest",)))
RESOURCES = Resources(config=CONFIG, chat_format=None, backends=None, scorers=None)
HANDLERS = {handler.name: handler for handler in (CodeHandler(), SweHandler(), ShellHandler())}
NO_VERDICT = (EvaluationError, SandboxLost, SandboxUnavailable)
LOST = (SandboxLost, SandboxUnavailable)
"""Errors that are retried by default: the machine's doing, and not that of the evaluator."""
EVERY_STEP = ["output", "function", "assert", "unittest", "swe", "shared", "separate"]


async def not_from_inside():
    """Say of a sandbox that nothing in it has ended it."""
    return False


class Cuts:
    """Cuts one step of a grading: `at` counts the calls to its sandboxes, or, with `kill`, the programs run there."""

    def __init__(self, monkeypatch):
        self.calls, self.programs = count(1), count(1)
        self.at, self.kill, self.on = 0, False, False
        whole = DaemonSandbox.call

        async def call(sandbox, request, reply_type, timeout_s, on_output=None):
            if self.on and self.is_due(request):
                if not self.kill:
                    sandbox._ended_from_inside = not_from_inside
                    sandbox._rpc._end("lost by the test")
                    return await whole(sandbox, request, reply_type, timeout_s, on_output)
                request = msgspec.structs.replace(request, argv=["sh", "-c", "kill -9 $$"])
            return await whole(sandbox, request, reply_type, timeout_s, on_output)

        monkeypatch.setattr(DaemonSandbox, "call", call)

    def is_due(self, request):
        number = next(self.calls)
        if not self.kill:
            return number == self.at
        return isinstance(request, Exec) and next(self.programs) == self.at

    def begin(self, at, kill):
        self.calls, self.programs, self.at, self.kill = count(1), count(1), at, kill


@pytest.fixture
async def grade(monkeypatch, tmp_path):
    """Grade the answer to a task of some kind, cut at a step. Returns the evaluation, or the error of none."""
    tmp_path.chmod(0o755)
    cuts = Cuts(monkeypatch)
    use_own_cache(tmp_path, monkeypatch)
    await HANDLERS["shell"].prepare(RESOURCES)
    async with open_sandbox_host(await choose_provider(CONFIG.sandbox)) as host:

        async def run(kind, answer="gold", *, at=0, kill=False):
            instance = known_task("i", kind, answer, tmp_path / "layer").instance
            handler = HANDLERS[instance.handler]
            context = RolloutContext(spec=JobSpec(job_id="j", instance=instance), resources=RESOURCES, sandboxes=host)
            cuts.begin(at, kill)
            with trio.fail_after(120):
                if kind in ("shared", "separate"):
                    async with context.open_sandbox(handler.sandbox_spec(context)) as context.sandbox:
                        await handler.init(context)
                        line = "8" if answer == "gold" else "7"
                        await context.sandbox.bash(f"echo {line} > /home/agent/doubled.txt", timeout_s=30)
                        return await evaluate(handler, context)
                patch = base64.b64encode(swe_patch(answer)).decode()
                context.answer = patch if kind == "swe" else SOLUTIONS[answer]
                return await evaluate(handler, context)

        async def evaluate(handler, context):
            cuts.on = True
            try:
                return await handler.eval(context)
            except NO_VERDICT as exc:
                return exc
            finally:
                cuts.on = False

        run.cuts = cuts
        yield run


async def steps_of(grade, kind, *, kill):
    """Return how many steps the whole grading has."""
    assert (await grade(kind, kill=kill)).reward == 1.0
    return next(grade.cuts.programs if kill else grade.cuts.calls) - 1


some_or_all = pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.soak)])
"""Of the steps: each sixth and the last, or every one."""


def chosen(steps, stride):
    return sorted({*range(1, steps + 1, stride), steps})


@pytest.mark.slow
@some_or_all
@pytest.mark.parametrize("kind", EVERY_STEP)
async def test_a_lost_sandbox_is_no_verdict_at_any_step(grade, kind, stride):
    for at in chosen(await steps_of(grade, kind, kill=False), stride):
        cut = await grade(kind, at=at)
        assert isinstance(cut, LOST) or cut.reward == 1.0, (at, cut)


@pytest.mark.parametrize("kind", ["output", "separate"])
async def test_a_sandbox_that_is_lost_at_the_first_step_is_no_failure_of_the_evaluator(grade, kind):
    cut = await grade(kind, at=1)
    assert isinstance(cut, LOST) or cut.reward == 1.0, cut


@pytest.mark.slow
@some_or_all
@pytest.mark.parametrize("kind", EVERY_STEP)
async def test_a_killed_program_is_run_again_at_any_step(grade, kind, stride):
    for at in chosen(await steps_of(grade, kind, kill=True), stride):
        cut = await grade(kind, at=at, kill=True)
        assert isinstance(cut, NO_VERDICT) or cut.reward == 1.0, (at, cut)
    wrong = await grade(kind, "wrong", at=at, kill=True)
    assert isinstance(wrong, NO_VERDICT) or wrong.reward == 0.0, (at, wrong)


@pytest.mark.parametrize("kind", ["function", "separate"])
async def test_the_last_program_that_is_killed_is_run_again(grade, kind):
    steps = await steps_of(grade, kind, kill=True)
    assert (await grade(kind, at=steps, kill=True)).reward == 1.0
