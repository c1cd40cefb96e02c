"""AgentHandler: the definition of a kind of task, the agent's work on it, and its score."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from prorl_trio.types.errors import NotRestorable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.context import Resources, RolloutContext
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.types.errors import RolloutError
    from prorl_trio.types.models import Outcome, Recorded, Stage

AfterRun = Literal["release", "keep"]
"""The fate of the agent's sandbox between RUN and EVAL: released at once, or kept for the evaluator. An evaluator that
needs a clean sandbox opens one itself with `RolloutContext.open_sandbox`."""


def worded(context: RolloutContext, text: str, ours: str, for_programs: str) -> str:
    """Return a prompt text from the payload; replace our default if an external program works on the task.

    An external program has its own tools and does not know `finish`. A task's own text is never replaced.

    Args:
        context: of the rollout.
        text: the payload's text.
        ours: its default for our own agent.
        for_programs: its default for external programs.
    """
    return for_programs if text == ours and context.spec.agent is not None else text


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A score.

    `reward` is finite. `details` is JSON-like and reaches the trainer in `Outcome.details`. The pipeline checks the
    return value of `eval`, and fails a job with an invalid reward (`evaluator_malformed`). The evaluator's output
    belongs into `RolloutContext.log_evaluation`.
    """

    reward: float
    details: dict[str, Any]


class AgentHandler(abc.ABC):
    """A kind of task.

    One instance serves every job of a node, so store a job's state in its context, not in `self`.

    A job passes `init`, `run` and `eval` in this order, each under its own budget and in its own worker pool.
    Exceptions may propagate; the pipeline turns them into the job's outcome. Raise a `RolloutError` to specify the
    cause; any other exception is attributed to this handler (cause `handler`).
    """

    name: ClassVar[str]
    """The name by which `TaskInstance.handler` refers to it."""
    after_run: ClassVar[AfterRun] = "release"
    gold_check: ClassVar[str] = ""
    """The scorer `module:function` that parses a task's gold answer with the grader's own parser; empty for none.

    It is called with `{"payload": {...}}` in a scoring process (see `prorl_trio.agent.scoring`), after `validate`, when
    a task set is loaded and when a job is submitted. It grades the gold answer against itself, and returns `{"error":
    "", "path": ""}` if the task can be graded. Otherwise `error` is one sentence with the problem and the remedy, and
    `path` is the field (`$.instance.payload.answer`). If it raises, the task is also refused.
    """

    async def prepare(self, resources: Resources) -> None:  # noqa: B027 - a hook, not an obligation
        """Prepare the handler. Called once at the node's start, before jobs are accepted. Default: nothing."""

    @abc.abstractmethod
    def validate(self, payload: Mapping[str, Any]) -> None:
        """Check an instance's payload at submission.

        Raises:
            MalformedJob: with the path of the offending field (`$.instance.payload.question`). Any other exception also
                rejects the job, with the path `$.instance.payload`.
        """

    @abc.abstractmethod
    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec | None:
        """Return the sandbox for this job, opened before `init`; None for a job without tools."""

    async def init(self, context: RolloutContext) -> None:  # noqa: B027 - a hook, not an obligation
        """Prepare the agent's sandbox: upload files, start shells. Charged to the INIT budget. Default: nothing."""

    @abc.abstractmethod
    async def run(self, context: RolloutContext) -> None:
        """Let the agent work, usually with `prorl_trio.agent.loop.run_agent`, and record into `context`.

        Its `before_turn` may shorten a long dialogue, remove old reasoning, or retry a step. A tool created with the
        `context` may call other agents with `run_sub_agent`. Everything is recorded in a single trajectory; the
        `parent` and the `reason` of each segment explain its origin.
        """

    @abc.abstractmethod
    async def eval(self, context: RolloutContext) -> Evaluation:
        """Score the results of `run` in the context.

        Missing or broken work of the agent is a low score, not an error: catch FileNotFoundError for a file that it
        should have created. Time in the agent's sandbox is charged to the agent, as is the time of programs in a
        sandbox from `context.open_sandbox`. Wrap other waits for the agent's code in
        `context.waiting(..., "agent_budget")`, and the handler's own preparations in
        `context.waiting(..., "evaluator")`.

        Raises:
            EvaluationError: there is no score. Never return 0 instead.
        """

    def gradable(self, context: RolloutContext) -> dict[str, Any]:
        """Return details for the outcome of a failed evaluation, as input for `restore`. Must not block.

        Default: nothing.
        """
        del context
        return {}

    def restore(self, context: RolloutContext, recorded: Recorded) -> None:
        """Restore the state of a recorded rollout in `context` that `eval` needs, as `run` would have left it.

        Must not block.

        `context.turns` and `context.stop_reason` are already restored; the only sandboxes are those that `eval` opens.
        `recorded.details` contains `Evaluation.details`, or the result of `gradable` if `eval` failed. By default this
        is not supported.

        Raises:
            NotRestorable: data is missing; the message names it.
        """
        del context, recorded
        raise NotRestorable(f"handler {self.name} does not say how a recorded rollout is graded again")

    def on_error(self, context: RolloutContext, stage: Stage, error: RolloutError) -> RolloutError:
        """Inspect the error that ends this job in `stage`; return it, or an error with a more precise cause."""
        del context, stage
        return error

    def final_result(self, context: RolloutContext, outcome: Outcome) -> Outcome:
        """Inspect and return the job's final outcome, also on failure, but not before a retry. Must not block.

        Return it, or a copy with more `details`: the return value is delivered without further checks. If this raises,
        the job fails with the cause `handler`. Default: the unchanged outcome.
        """
        del context
        return outcome
