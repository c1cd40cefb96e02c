"""Conversion of a job's end into its outcome: the one place where a failure becomes data."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_ipc.errors import CallFailed
from prorl_ipc.nursery import leaves
from prorl_trio.plugins import described
from prorl_trio.sandbox.use import is_spoilt
from prorl_trio.tasks.handlers.base import Evaluation
from prorl_trio.types.errors import (
    AgentFault,
    BudgetExceeded,
    EvaluationError,
    HandlerError,
    InternalError,
    JobCancelled,
    NodeExhausted,
    RolloutError,
    SandboxLost,
    is_exhaustion,
)
from prorl_trio.types.models import AttemptRecord, Outcome

if TYPE_CHECKING:
    from prorl_trio.pipeline.job import Job
    from prorl_trio.types.models import Stage, TerminalStatus

logger = logging.getLogger(__name__)

MAX_BACKOFF_S: Final = 60.0


def completed(job: Job) -> Outcome:
    """Return the outcome of a job that completed, with its reward."""
    assert job.evaluation is not None
    draft = _draft(job, "completed", job.context.sealed_trajectory())
    return msgspec.structs.replace(draft, reward=float(job.evaluation.reward), details=job.evaluation.details)


def not_completed(job: Job, failure: BaseException | None, stage: Stage | None) -> Outcome:
    """Return the outcome of a job that was cancelled, or that `failure` ended in `stage`.

    Raises:
        InternalError: `failure` contains one. A bug is never turned into data.
    """
    while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]
    raise_bugs(failure)
    status: TerminalStatus
    error: RolloutError
    if job.cancel_reason is not None:
        status, error = "cancelled", JobCancelled(job.cancel_reason, error_code=job.cancel_code)
    elif isinstance(failure, BudgetExceeded):
        status, error = "timed_out", failure
    else:
        assert failure is not None
        assert stage is not None
        status, error = "failed", _classify(job, stage, failure)
    return msgspec.structs.replace(
        _draft(job, status, job.context.sealed_trajectory() if job.spec.keep_partial else None),
        cause=error.cause,
        error_code=error.error_code,
        error=str(error) or type(error).__name__,
        reward=_reward(job, error),
        details=_gradable(job) if stage == "eval" else {},
    )


def _gradable(job: Job) -> dict[str, Any]:
    """Return the handler's data for grading the rollout again."""
    try:
        return job.handler.gradable(job.context)
    except Exception:  # a plug-in's hook must not end the node
        logger.exception("gradable of handler %s", job.handler.name)
        return {}


def raise_bugs(failure: BaseException | None) -> None:
    """Raise the first `InternalError` in `failure`, which may be a group."""
    for leaf in () if failure is None else leaves(failure):
        if isinstance(leaf, InternalError):
            raise leaf


def blame(failure: BaseException, *, has_acted: bool) -> BaseException:
    """Return the error that ends the job: `failure`, or an `AgentFault` if the policy caused it.

    The policy causes nothing before it has acted. Afterwards it is responsible for a sandbox that was ended from
    inside, and for any failure of a sandbox that it has used (`prorl_trio.sandbox.use`). In an unused sandbox, the same
    error is blamed on the handler or the infrastructure.
    """
    lost = isinstance(failure, SandboxLost) and failure.from_inside
    if not has_acted or not (lost or is_spoilt(failure)):
        return failure
    fault = AgentFault(f"what the policy ran left its sandbox unusable: {failure}")
    fault.__cause__ = failure
    return fault


def _reward(job: Job, error: RolloutError) -> float | None:
    """Return the reward of a job that was not completed.

    It is None unless the policy ended the job, by a fault or by using up its budget.
    """
    if isinstance(error, AgentFault):
        return error.reward
    return 0.0 if error.cause == "agent_budget" and job.context.turns else None


def finalise(job: Job, draft: Outcome) -> Outcome:
    """Return the outcome after the handler's `final_result`. If that raises, the job fails because of its handler."""
    try:
        return job.handler.final_result(job.context, draft)
    except Exception as exc:  # a plug-in's hook must not end the node
        logger.exception("final_result of handler %s", job.handler.name)
        return msgspec.structs.replace(
            draft,
            status="failed",
            reward=None,
            cause="handler",
            error_code="handler_raised",
            error=f"final_result raised {type(exc).__name__}: {exc}",
        )


def check_evaluation(job: Job, evaluation: Any) -> Evaluation:
    """Return the result of the handler's `eval` if it is a valid score.

    Raises:
        EvaluationError: it is not valid (`evaluator_malformed`).
    """
    what = f"handler {job.handler.name} returned"
    reward: Any = getattr(evaluation, "reward", None)
    details: Any = getattr(evaluation, "details", None)
    if not isinstance(evaluation, Evaluation):
        wrong = f"{what} {type(evaluation).__name__}, which is no Evaluation"
    elif isinstance(reward, bool) or not isinstance(reward, int | float):
        wrong = f"{what} a reward of type {type(reward).__name__}; it must be a number"
    elif not math.isfinite(reward):
        wrong = f"{what} the reward {reward}; it must be finite"
    elif not isinstance(details, dict):
        wrong = f"{what} details of type {type(details).__name__}; they must be a dict"
    else:
        return evaluation
    raise EvaluationError(wrong, error_code="evaluator_malformed")


def retry_after(job: Job, draft: Outcome) -> tuple[AttemptRecord, float] | None:
    """Return the record of this attempt and the seconds until the retry; None if `draft` does not allow a retry."""
    policy = job.spec.retry
    if (
        draft.status not in ("failed", "timed_out")
        or draft.cause not in policy.causes
        or draft.error_code == "budget_total"
        or job.attempt >= policy.max_attempts
    ):
        return None
    assert draft.cause is not None
    assert draft.error_code is not None
    record = AttemptRecord(
        attempt=job.attempt,
        status=draft.status,
        cause=draft.cause,
        error_code=draft.error_code,
        error=draft.error,
        timing=draft.timing,
    )
    doublings = min(job.attempt - 1, 10)  # beyond that, the cap applies to every back-off
    return record, min(MAX_BACKOFF_S, policy.backoff_s * 2.0**doublings)


def _classify(job: Job, stage: Stage, failure: BaseException) -> RolloutError:
    """Determine the cause: the error's own, else the owner of the failing code. The handler has the last word."""
    causes = [blame(leaf, has_acted=bool(job.context.turns)) for leaf in leaves(failure)]
    if all(isinstance(cause, RolloutError) for cause in causes) or len(causes) == 1:
        # Of concurrent errors, prefer one that the policy did not cause: it may have caused the others.
        failure = next((cause for cause in causes if not isinstance(cause, AgentFault)), causes[0])
    if not isinstance(failure, RolloutError):
        logger.error("job %s, stage %s", job.spec.job_id, stage, exc_info=failure)
        kind: type[RolloutError] = EvaluationError if stage == "eval" else HandlerError
        if any(is_exhaustion(leaf) and not isinstance(leaf.__cause__, CallFailed) for leaf in leaves(failure)):
            kind = NodeExhausted
        failure = kind(f"in stage {stage}: {described(failure, type(job.handler).__module__)}")
    try:
        return job.handler.on_error(job.context, stage, failure)
    except Exception as exc:  # a plug-in's hook must not end the node
        logger.exception("on_error of handler %s", job.handler.name)
        raised = described(exc, type(job.handler).__module__)
        return HandlerError(f"on_error raised {raised}, after {failure}")


def _draft(job: Job, status: TerminalStatus, trajectory: Any) -> Outcome:
    spec = job.spec
    return Outcome(
        job_id=spec.job_id,
        instance_id=spec.instance.instance_id,
        group_id=spec.group_id,
        status=status,
        reward=None,
        cause=None,
        error="",
        trajectory=trajectory,
        details={},
        timing=job.lifecycle.timing(),
        tags=spec.tags,
        evaluation_log=str(job.context.evaluation_log),
        attempt=job.attempt,
        attempts=list(job.attempts),
        regraded=msgspec.UNSET if spec.recorded is None else True,
    )
