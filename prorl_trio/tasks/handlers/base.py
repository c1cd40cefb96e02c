"""AgentHandler: what a kind of task is, how an agent works on it, how the outcome is scored."""

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
"""The fate of the agent's sandbox between RUN and EVAL: ended at once, or kept for the evaluator. An evaluator that
wants one in which the agent has left nothing opens it itself, by `RolloutContext.open_sandbox`."""


def worded(context: RolloutContext, text: str, ours: str, for_programs: str) -> str:
    """Return what a payload has the policy told; in place of our own words those for a program that works on the task.

    It has tools of its own, and knows nothing of `finish`. A task's own words are what they are.

    Args:
        context: of the rollout.
        text: of the payload.
        ours: its default, for our own agent.
        for_programs: its default for programs of others.
    """
    return for_programs if text == ours and context.spec.agent is not None else text


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A score.

    `reward` is finite. `details` is JSON-like and reaches the trainer in `Outcome.details`. The pipeline
    checks what `eval` returned, and fails a job with another reward by its evaluator (`evaluator_malformed`).
    Text that the evaluator printed belongs into `RolloutContext.log_evaluation`.
    """

    reward: float
    details: dict[str, Any]


class AgentHandler(abc.ABC):
    """A kind of task.

    One instance serves every job of a node: keep a job's state in its context, not in `self`.

    A job passes `init`, `run` and `eval` in this order, each under its own budget and in its own worker pool. Errors
    fly; the pipeline turns them into the job's outcome. Raise a `RolloutError` to name the cause yourself; any other
    exception counts as this handler's fault (cause `handler`).
    """

    name: ClassVar[str]
    """The name by which `TaskInstance.handler` asks for it."""
    after_run: ClassVar[AfterRun] = "release"
    gold_check: ClassVar[str] = ""
    """The scorer `module:function` that reads a task's gold answer with the grader's own reader; empty for none.

    It is called with `{"payload": {...}}` in a scoring process (see `prorl_trio.agent.scoring`), after `validate`, when
    a task set is loaded and when a job is submitted. It grades the gold answer against itself, and returns
    `{"error": "", "path": ""}` if the task can be graded. Otherwise `error` is one sentence that names the problem and
    the remedy, and `path` is the field (`$.instance.payload.answer`). If it raises, the task is refused as well.
    """

    async def prepare(self, resources: Resources) -> None:  # noqa: B027 - a hook, not an obligation
        """Prepare the handler. Called once when the node starts, before jobs are taken. Default: nothing."""

    @abc.abstractmethod
    def validate(self, payload: Mapping[str, Any]) -> None:
        """Check an instance's payload at submission.

        Raises:
            MalformedJob: with the path of the offending field (`$.instance.payload.question`). Any other exception
                rejects the job, too, with the path `$.instance.payload`.
        """

    @abc.abstractmethod
    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec | None:
        """The sandbox this job needs, opened before `init`; None for a job without tools."""

    async def init(self, context: RolloutContext) -> None:  # noqa: B027 - a hook, not an obligation
        """Make the agent's sandbox ready: upload files, start shells. Charged to the INIT budget. Default: nothing."""

    @abc.abstractmethod
    async def run(self, context: RolloutContext) -> None:
        """Let the agent work, usually by `prorl_trio.agent.loop.run_agent`, recording into `context`.

        Its `before_turn` shortens a dialogue that has grown long, takes old reasoning out, or tries a step again; a
        tool that is made with the `context` may ask other agents by `run_sub_agent`. All of it is in the one
        trajectory: the `parent` and the `reason` of its segments say how it came about.
        """

    @abc.abstractmethod
    async def eval(self, context: RolloutContext) -> Evaluation:
        """Score what `run` left in the context.

        What the agent did not do, or spoilt, is a low score and no error: catch FileNotFoundError of a file that it
        should have left. Time in the agent's sandbox is charged to the agent, and so is that of programs in one from
        `context.open_sandbox`; what else its code takes is best spent in `context.waiting(..., "agent_budget")`. Run
        the handler's own preparations in `context.waiting(..., "evaluator")`.

        Raises:
            EvaluationError: there is no score. Never return 0 in its place.
        """

    def gradable(self, context: RolloutContext) -> dict[str, Any]:
        """Return the details of an outcome whose evaluation failed: what `restore` needs of them. Must not block.

        Default: nothing.
        """
        del context
        return {}

    def restore(self, context: RolloutContext, recorded: Recorded) -> None:
        """Put into `context` what `eval` needs of a recorded rollout, as `run` would have left it. Must not block.

        `context.turns` and `context.stop_reason` are restored already; there is no sandbox but what `eval` opens. In
        `recorded.details` is what `eval` put into `Evaluation.details`, or, if it failed, what `gradable` returned.
        Default: it cannot be done.

        Raises:
            NotRestorable: something is missing; the message says what.
        """
        del context, recorded
        raise NotRestorable(f"handler {self.name} does not say how a recorded rollout is graded again")

    def on_error(self, context: RolloutContext, stage: Stage, error: RolloutError) -> RolloutError:
        """Look at the error that ends this job in `stage`; return it, or another that names the cause better."""
        del context, stage
        return error

    def final_result(self, context: RolloutContext, outcome: Outcome) -> Outcome:
        """Last look at the job's outcome, also on failure, but not at an attempt that is made again. Must not block.

        Return it, or a copy with more `details`: what is returned is delivered, and nothing in it is checked again. If
        this raises, the job fails with the cause `handler`. Default: the outcome as it is.
        """
        del context
        return outcome
