"""A job's end becomes its outcome: whose doing it was where several things happened, and whether it is run again."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from prorl_ipc.errors import CallFailed
from prorl_trio.pipeline.outcomes import MAX_BACKOFF_S, finalise, not_completed, retry_after
from prorl_trio.sandbox.use import spoilt
from prorl_trio.tasks.handlers.base import AgentHandler
from prorl_trio.types.errors import (
    AgentFault,
    BackendError,
    BudgetExceeded,
    InternalError,
    SandboxCallFailed,
    SandboxLost,
)
from prorl_trio.types.models import JobSpec, RetryPolicy, TaskInstance, Timing


class Handler(AgentHandler):
    name = "h"

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        raise NotImplementedError

    async def init(self, context):
        pass

    async def run(self, context):
        pass

    async def eval(self, context):
        pass


def job_after(turns, *, attempt=1, **spec):
    """A job whose policy has taken so many turns."""
    context = SimpleNamespace(turns=[None] * turns, evaluation_log="", sealed_trajectory=lambda: None)
    return SimpleNamespace(
        spec=JobSpec(job_id="j", instance=TaskInstance(instance_id="i", handler="h", payload={}), **spec),
        context=context,
        handler=Handler(),
        lifecycle=SimpleNamespace(timing=Timing),
        attempt=attempt,
        attempts=[],
        cancel_reason=None,
        cancel_code="cancelled",
    )


def full(cause=None):
    error = OSError(errno.ENOSPC, "No space left on device")
    error.__cause__ = cause
    return error


INSIDE = SandboxLost("it was killed", from_inside=True)
OUTSIDE = SandboxLost("it was killed")
SPOILT = spoilt(SandboxCallFailed("no thread"))
ENGINE = BackendError("it is gone", retryable=True)


@pytest.mark.parametrize(
    ("failure", "turns", "cause", "reward"),
    [
        (INSIDE, 1, "agent_fault", 0.0),
        (INSIDE, 0, "sandbox", None),
        (OUTSIDE, 1, "sandbox", None),
        (SPOILT, 1, "agent_fault", 0.0),
        (SPOILT, 0, "sandbox", None),
        (SandboxCallFailed("no thread"), 1, "sandbox", None),
        (AgentFault("forbidden"), 1, "agent_fault", 0.0),
        (AgentFault("forbidden", reward=None), 1, "agent_fault", None),
        # Of two at once, the one that is not the policy's: it may have brought about the other.
        (ExceptionGroup("", [SPOILT, OUTSIDE]), 1, "sandbox", None),
        (ExceptionGroup("", [ENGINE, INSIDE]), 1, "inference", None),
        (ExceptionGroup("", [INSIDE, ExceptionGroup("", [ENGINE])]), 1, "inference", None),
        (ExceptionGroup("", [SPOILT, INSIDE]), 1, "agent_fault", 0.0),
        (ExceptionGroup("", [INSIDE, ValueError("a bug of the handler")]), 1, "handler", None),
        (ValueError("a bug of the handler"), 1, "handler", None),
        (full(), 1, "node", None),
        (full(CallFailed("os_error", "in the sandbox")), 1, "handler", None),
        (ExceptionGroup("", [ValueError("x"), full()]), 1, "node", None),
        (BudgetExceeded("run", 1, 2, "agent_budget"), 1, "agent_budget", 0.0),
        (BudgetExceeded("run", 1, 2, "agent_budget"), 0, "agent_budget", None),
        (BudgetExceeded("total", 1, 2, "inference"), 1, "inference", None),
        (BudgetExceeded("eval", 1, 2, "evaluator"), 1, "evaluator", None),
    ],
)
def test_whose_doing_an_end_is(failure, turns, cause, reward):
    outcome = not_completed(job_after(turns), failure, "run")
    assert (outcome.cause, outcome.reward) == (cause, reward), outcome.error


def test_a_bug_of_the_nodes_own_is_no_data():
    bug = InternalError("impossible")
    for failure in (bug, ExceptionGroup("", [INSIDE, ExceptionGroup("", [bug])])):
        with pytest.raises(InternalError):
            not_completed(job_after(1), failure, "run")


def test_what_a_hook_that_raises_leaves_is_no_reward():
    job = job_after(1)
    job.handler.final_result = lambda _context, _draft: 1 / 0
    outcome = finalise(job, not_completed(job, INSIDE, "run"))
    assert (outcome.status, outcome.cause, outcome.error_code, outcome.reward) == (
        "failed",
        "handler",
        "handler_raised",
        None,
    )


GREEDY = RetryPolicy(max_attempts=20, backoff_s=1.0, causes=("sandbox", "handler", "inference"))


def retried_after_s(failure, *, attempt=1, cancelled=False, retry=GREEDY):
    job = job_after(1, attempt=attempt, retry=retry)
    if cancelled:
        job.cancel_reason = "enough"
    found = retry_after(job, not_completed(job, failure, "run"))
    return None if found is None else found[1]


def test_what_is_run_again():
    assert retried_after_s(OUTSIDE) == 1.0
    assert retried_after_s(BudgetExceeded("run", 1, 2, "inference")) == 1.0
    assert retried_after_s(BudgetExceeded("total", 1, 2, "inference")) is None, "nothing is left to run it in"
    assert retried_after_s(ENGINE, cancelled=True) is None
    assert retried_after_s(INSIDE) is None, "a retry would be a second chance"
    assert retried_after_s(OUTSIDE, attempt=20) is None


def test_the_wait_for_a_retry_doubles_up_to_a_limit():
    waits_s = [retried_after_s(OUTSIDE, attempt=attempt) for attempt in range(1, 20)]
    assert waits_s[:4] == [1.0, 2.0, 4.0, 8.0]
    assert waits_s[10:] == [MAX_BACKOFF_S] * 9
