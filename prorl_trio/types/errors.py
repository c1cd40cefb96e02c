"""The exception tree. Exceptions propagate until `pipeline` turns them into data, in one place.

A message states the failure, the id, the limit, the actual value, and the remedy.
"""

from __future__ import annotations

import errno
import re
from typing import ClassVar, Final, Literal, NamedTuple

FailureCause = Literal[
    "sandbox",  # the sandbox failed to start or was lost
    "inference",  # the LLM backend
    "agent_fault",  # the policy violated the task or broke its sandbox
    "agent_budget",  # the policy exhausted its budget
    "evaluator",  # the scorer
    "handler",  # the handler's own code
    "cancelled",  # a cancel
    "node",  # any other cause
]
"""Why a job was not successful. Closed: a trainer may switch over it. Only `agent_*` are caused by the policy."""

ErrorCode = Literal[
    "sandbox_start",  # a sandbox failed to start
    "sandbox_lost",  # a running sandbox died, or its channel broke
    "sandbox_failed",  # a live sandbox could not execute a call
    "backend_unreachable",  # an LLM backend was unreachable or failed temporarily
    "backend_refused",  # an LLM backend violated its contract or refused the call permanently
    "context_overflow",  # the first prompt fills the context
    "token_drift",  # a prompt does not begin with the recorded tokens
    "stale",  # `max_staleness` was exceeded; the reward is 0 if the policy's tools caused it
    "agent_program",  # the agent program did not start, or ended before its first request
    "agent_fault",  # the policy violated the rules of the task
    "search_unavailable",  # the node's search backend does not answer
    "mcp_server",  # an MCP server did not start, or died without the policy's doing
    "handler_raised",  # the handler raised an exception, or its outcome was too large
    "not_restorable",  # a recorded rollout lacks data that its handler grades
    "evaluator_crashed",  # the scorer raised, or its process died
    "evaluator_timeout",  # the scorer exceeded its time-out or the EVAL budget
    "evaluator_malformed",  # the scorer returned a wrong type, NaN or nothing
    "budget_init",  # `init_s` was exhausted
    "budget_run",  # `run_s` was exhausted
    "budget_total",  # `total_s` was exhausted
    "cancelled",  # on request
    "early_stop",  # the job's group was complete or reached its deadline
    "shutdown",  # the node ended before the job did
    "node",  # any other failure
]
"""The exact failure, finer than the cause. Closed."""

_WHERE: Final = re.compile(r" - at (?:`key` in )?`(\$[^`]*)`$")
_UNKNOWN: Final = re.compile(r"unknown field `(.+)`$")


class FieldError(NamedTuple):
    """A value that does not have the expected shape.

    Attributes:
        problem: description of the error, without the place.
        path: the place: `$` for the whole, `$.tags.a` for a field in it.
        unknown: name of a field that does not exist there; empty for other errors.
    """

    problem: str
    path: str = "$"
    unknown: str = ""


def field_error(error: Exception) -> FieldError:
    """Return the problem and the place that msgspec reports. `error` is a `DecodeError`, or comes from the decoder."""
    message = str(error) or "nested too deeply"
    where = _WHERE.search(message)
    problem = message if where is None else message[: where.start()]
    unknown = _UNKNOWN.search(problem)
    return FieldError(problem, "$" if where is None else where[1], "" if unknown is None else unknown[1])


def malformed_job(error: Exception, *, prefix: str = "$") -> MalformedJob:
    """Return the error for a job that could not be decoded. Its path begins with `prefix` instead of `$`."""
    problem, path, _ = field_error(error)
    path = prefix + path[1:]
    return MalformedJob(problem if path == "$" else f"{problem} - at `{path}`", path)


def unsendable(value: object, path: str = "$") -> FieldError | None:
    """Return the first part of a value that cannot be sent; None without one.

    JSON allows integers of any size and lone surrogates; msgpack allows neither.
    """
    pending: list[tuple[object, str]] = [(value, path)]
    while pending:
        part, where = pending.pop()
        if isinstance(part, int) and not -(2**63) <= part < 2**64:
            return FieldError(
                f"the integer {_shortened(part)} needs more than 64 bits and cannot be sent to a node; let the task "
                "use its text instead, or leave the row out",
                where,
            )
        if isinstance(part, str) and any("\ud800" <= letter <= "\udfff" for letter in part):
            return FieldError("the text has half of a character (a lone surrogate), which cannot be sent", where)
        if isinstance(part, dict):
            pending += [(each, f"{where}.{key}") for key, each in reversed(part.items())]
            pending += [(key, where) for key in part]
        elif isinstance(part, list | tuple | set | frozenset):
            parts = list(part)
            pending += [(each, f"{where}[{place}]") for place, each in reversed(list(enumerate(parts)))]
        elif not isinstance(part, str | int | float | bytes | None):
            return FieldError(f"a value of the type {type(part).__name__} cannot be sent", where)
    return None


def _shortened(number: int) -> str:
    digits = 1 + int(abs(number).bit_length() * 0.30103)
    return str(number) if digits <= 30 else f"of about {digits} digits"


class ProrlError(Exception):
    """Root of the errors this project raises on purpose."""


class ConfigError(ProrlError):
    """A configuration cannot be used. The message names the file and the field's path."""


# ---------------------------------------------------------------- the caller's or the service's fault


class ServiceError(ProrlError):
    """A request to the service was not carried out. `code` travels on the wire."""

    code: ClassVar[str] = "service"


class AdmissionRejected(ServiceError):
    """A limit is reached; nothing was stored. Retry after `retry_after_s` seconds."""

    code = "admission"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(ServiceError):
    """The node finishes its jobs and accepts no new ones."""

    code = "draining"


class UnknownJob(ServiceError):
    """The job is not known on this node."""

    code = "unknown_job"


class NoAgentWanted(ServiceError):
    """The job does not wait for an external agent, or not yet."""

    code = "no_agent_wanted"


class UnknownHandler(ServiceError):
    """No handler of that name is registered. The message lists the registered handlers."""

    code = "unknown_handler"


class DuplicateJob(ServiceError):
    """The id belongs to a job with another spec."""

    code = "duplicate_job"


class AlreadyDelivered(ServiceError):
    """The job ended, and this session recently acknowledged its outcome. It is not run again."""

    code = "already_delivered"


class MalformedJob(ServiceError):
    """A job's spec does not have the documented shape. `path` is the offending field (`$.instance.question`)."""

    code = "malformed"

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class Unauthorized(ServiceError):
    """The token is missing or wrong."""

    code = "token"


class ProtocolError(ServiceError):
    """The peer speaks another protocol, or another version of this one."""

    code = "protocol"


class Undelivered(ServiceError):
    """The outcome belongs to another session, whose trainer has not received it, so it must not be dropped."""

    code = "undelivered"


class BackendsBusy(ServiceError):
    """Another pause or resume of the backends is running."""

    code = "backends_busy"


class PauseTimeout(ServiceError):
    """The backends could not be paused in time. The pause is undone; the message lists the work that still runs."""

    code = "pause_timeout"


class UpdateRefused(ServiceError):
    """A step of a policy update is not possible now.

    Examples are weights without a pause, and a version for weights that an engine failed to load.
    """

    code = "update_refused"


# ---------------------------------------------------------------- recorded on the job, with its cause


class RolloutError(ProrlError):
    """An error that ended a job. `cause` is the cause for the trainer, `error_code` the exact failure."""

    cause: FailureCause = "node"
    error_code: ErrorCode = "node"


class BackendError(RolloutError):
    """An LLM backend failed or broke its contract. `retryable`: the same call may succeed later or elsewhere."""

    cause = "inference"

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.error_code = "backend_unreachable" if retryable else "backend_refused"


class UnknownBackend(BackendError):
    """No backend with that URL is in the pool."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class AgentProgramFailed(RolloutError):
    """The agent program did not run, or ended before its first request to the policy."""

    cause = "sandbox"
    error_code = "agent_program"
    retryable = True


class ContextLengthExceeded(RolloutError):
    """The prompt leaves no room for a single new token."""

    cause = "agent_budget"
    error_code = "context_overflow"

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"prompt of {prompt_tokens} tokens leaves no room in a context of {max_model_len}; "
            "shorten the task, or allow a longer context: agent.max_trajectory_tokens of the node, and that which the "
            "model is served with"
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class TokenDrift(RolloutError):
    """A new prompt does not begin with the tokens already recorded. Never repaired silently."""

    cause = "node"
    error_code = "token_drift"


class StaleTrajectory(RolloutError):
    """The weights were updated more often since the trajectory's first token than its `max_staleness` allows.

    `is_agents`: the limit is exceeded only because of updates during the policy's own tool calls. Then the policy is
    responsible. Otherwise a policy could sleep to have its rollout dropped.
    """

    cause: FailureCause = "inference"
    error_code = "stale"

    def __init__(self, oldest: str, newest: str, updates: int, max_staleness: int, *, is_agents: bool = False) -> None:
        remedy = "allow more, update less often, or have it run again (retry.max_attempts)"
        if is_agents:
            self.cause = "agent_budget"
            remedy = "its own tools took that time. Leave its tokens out of the loss, and its reward in the group"
        super().__init__(
            f"{updates} policy updates lie between its first tokens (version {oldest}) and the next ones (version "
            f"{newest}); max_staleness is {max_staleness}: {remedy}"
        )
        self.oldest = oldest
        self.newest = newest
        self.updates = updates
        self.max_staleness = max_staleness


class AgentFault(RolloutError):
    """The policy violated its task, and there is nothing to evaluate. Unlike `HandlerError`, the policy caused it.

    `reward` is the reward for the trainer: a fault is not worth more than a wrong answer. A handler may set None, for
    no reward, with good reason.
    """

    cause = "agent_fault"
    error_code = "agent_fault"

    def __init__(self, message: str, *, reward: float | None = 0.0) -> None:
        super().__init__(message)
        self.reward = reward


class HostileAnswer(AgentFault):
    """The scorer crashed, hung or failed on the policy's answer, but scores others: see `scoring.ScorerPool.score`."""


_BUSY: Final = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETXTBSY}
)
"""Error numbers of temporary shortages."""


_EXHAUSTED: Final = _BUSY | {errno.EDQUOT, errno.EIO, errno.ENOBUFS, errno.ENOSPC, errno.EROFS}
"""Error numbers by which the system reports a shortage or a defect of the machine."""


class NodeExhausted(RolloutError):
    """The machine refused a resource that a rollout needs: a descriptor, space, memory, a thread."""

    cause = "node"
    error_code = "node"


def is_exhaustion(error: BaseException) -> bool:
    """Return whether the system raised `error` because the machine lacks a resource or is defective."""
    if isinstance(error, OSError):
        return error.errno in _EXHAUSTED
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)  # Python has no other sign


class SandboxUnavailable(RolloutError):
    """A sandbox, or another process that a rollout needs, could not be started. Nothing of it is left.

    `retryable`: the machine may only have been too busy. `of_machine`: the system refused a resource that every start
    needs (a descriptor, space, a process), so no job is at fault.
    """

    cause = "sandbox"
    error_code = "sandbox_start"

    def __init__(self, message: str, *, retryable: bool = False, of_machine: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.of_machine = of_machine

    @classmethod
    def refused(cls, what: str, error: OSError) -> SandboxUnavailable:
        """Return the failure of a start that the system refused; retryable if the shortage is temporary."""
        where = f" ({error.filename})" if error.filename is not None else ""
        return cls(f"{what}: {error.strerror or error}{where}", retryable=error.errno in _BUSY, of_machine=True)

    @classmethod
    def of(cls, what: str, error: Exception) -> SandboxUnavailable:
        """Return `error`, of any type, as the failure of a start."""
        if isinstance(error, SandboxUnavailable):
            return error
        if isinstance(error, OSError):
            return cls.refused(what, error)
        return cls(f"{what}: {error!r}", retryable=True)


class SandboxLost(RolloutError):
    """A running sandbox died or its control channel broke. The action in flight may or may not have run.

    `from_inside`: as far as is known, a process inside ended it; see `sandbox.process_tree.ProcessTree`. If the policy
    has acted by then, the policy is responsible (`outcomes.blame`). `before_the_call`: it was gone before the call was
    sent.
    """

    cause = "sandbox"
    error_code = "sandbox_lost"

    def __init__(self, message: str, *, from_inside: bool = False, before_the_call: bool = False) -> None:
        super().__init__(message)
        self.from_inside = from_inside
        self.before_the_call = before_the_call


class SandboxCallFailed(RolloutError):
    """A live sandbox could not execute a call.

    Its shell does not start any more, it lacks a thread or a descriptor, or its daemon failed. The next call may
    succeed.
    """

    cause = "sandbox"
    error_code = "sandbox_failed"


class SearchUnavailable(RolloutError):
    """The node's search backend does not answer, which is not the policy's fault.

    A query that fails alone is reported to the policy.
    """

    cause = "node"
    error_code = "search_unavailable"


class McpServerLost(RolloutError):
    """An MCP server did not start, or has ended, which is not the policy's fault."""

    error_code = "mcp_server"

    def __init__(self, message: str, cause: Literal["sandbox", "node"]) -> None:
        super().__init__(message)
        self.cause = cause


class HandlerError(RolloutError):
    """The agent handler's own code failed."""

    cause = "handler"
    error_code = "handler_raised"


class NotRestorable(RolloutError):
    """A recorded rollout cannot be regraded: it lacks data that its handler grades, or its handler cannot regrade."""

    cause = "handler"
    error_code = "not_restorable"


class TooManyDialogues(HandlerError):
    """A rollout called other agents more often than allowed. If a tool of the policy did, the policy gets the error."""


class EvaluationError(RolloutError):
    """The evaluator crashed, timed out or returned no score, according to `error_code`. The reward is None, not 0."""

    cause = "evaluator"

    def __init__(
        self,
        message: str,
        *,
        error_code: Literal["evaluator_crashed", "evaluator_timeout", "evaluator_malformed"] = "evaluator_crashed",
    ) -> None:
        super().__init__(message)
        self.error_code = error_code


class BudgetExceeded(RolloutError):
    """A stage, or the whole job, exhausted its budget. Time in queues is not charged.

    `cause`: the largest consumer of the time.
    """

    def __init__(
        self, stage: Literal["init", "run", "eval", "total"], budget_s: float, used_s: float, cause: FailureCause
    ) -> None:
        what = "the job" if stage == "total" else f"stage {stage}"
        super().__init__(f"{what} used {used_s:.2f} s of its budget of {budget_s:g} s, most of it in: {cause}")
        self.stage: Literal["init", "run", "eval", "total"] = stage
        self.budget_s = budget_s
        self.used_s = used_s
        self.cause = cause
        self.error_code = _BUDGET_CODE[stage]


_BUDGET_CODE: Final[dict[str, ErrorCode]] = {
    "init": "budget_init",
    "run": "budget_run",
    "eval": "evaluator_timeout",
    "total": "budget_total",
}


class JobCancelled(RolloutError):
    """The job was cancelled on request, or for the reason in `error_code`."""

    cause = "cancelled"

    def __init__(self, message: str, *, error_code: ErrorCode = "cancelled") -> None:
        super().__init__(message)
        self.error_code = error_code


class InternalError(ProrlError):
    """A bug of this project. It ends the process."""
