"""A verl agent loop that runs its rollouts on a node. Needs verl.

verl makes an agent loop for each rollout, from the file named by `agent_loop_config_path`, and calls `run`. Both verl
trainers use it: V1 (`trainer.use_v1`), which accepts a list of rows or an exception, and V0, which accepts one row.

The alternative, `agent_loop_manager_class`, would have to write rows into verl's internal queues, which change with
each release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
except ImportError as exc:
    raise ImportError("this needs verl: pip install 'prorl-trio[verl]'") from exc

from prorl_trio.integrations.node_address import NodeAddress
from prorl_trio.integrations.rollouts import rollouts_on
from prorl_trio.integrations.verl.jobs import JobTemplate, Sampling, loaded, sampling_of, task_of_row
from prorl_trio.integrations.verl.rows import Row, RowLimits, masked_row, rows_of, turns_of
from prorl_trio.sampling.opening import reached_one
from prorl_trio.types.errors import ConfigError, ProrlError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.types.models import Outcome


class RolloutFailed(ProrlError):
    """A rollout lacks a reward, through no fault of the policy.

    verl's V1 marks its prompt as failed, and samples another one if `sync_refill_failed_groups` is set accordingly.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(
            f"rollout {outcome.job_id!r} has no reward: {outcome.status}, {outcome.cause}, {outcome.error_code}, "
            f"attempt {outcome.attempt}: {outcome.error}"
        )
        self.outcome = outcome


class NodeAgentLoop(AgentLoopBase):  # type: ignore[misc] # verl has no types
    """A verl rollout that runs on a node.

    Args:
        node: see `NodeAddress`.
        job: fields that all jobs have, see `JobTemplate`.
        task: `package.module:function`, which returns the `TaskInstance` of a data row; None: `task_of_row`.
        correct: `package.module:function`, which returns whether an outcome with a reward is correct.
            `algorithm.filter_groups.metric=acc` filters by it. None: a reward of at least 1.0 is correct.
        **verl: arguments that verl passes.

    Raises:
        ConfigError: the configuration cannot be used.
    """

    def __init__(
        self,
        *,
        node: Mapping[str, Any],
        job: Mapping[str, Any] | None = None,
        task: str | None = None,
        correct: str | None = None,
        **verl: Any,
    ) -> None:
        super().__init__(**verl)
        rollout = self.rollout_config
        check_sampling(rollout)
        self._trained = _trained_sampling(rollout)
        self._limits = RowLimits(int(rollout.prompt_length), int(rollout.response_length))
        fields = {} if job is None else builtin(job)
        fields["tags"] = {"verl": run_name(self.config), **fields.get("tags", {})}
        self._template = JobTemplate(fields, self._limits, task_of_row if task is None else loaded(task))
        self._correct = reached_one if correct is None else loaded(correct)
        self._rollouts = rollouts_on(NodeAddress.read(builtin(node)))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one rollout of a data row, and return its rows. See `AgentLoopBase.run`.

        A cancel cancels the job.

        Raises:
            RolloutFailed: the rollout lacks a reward. Only V1 gets this error: V0 would lose the batch. With V0,
                the result is a fully masked row.
            ConfigError: verl cannot train on the tokens, because of their sampling or their versions.
            ServiceError: the node refused it, or is gone.
        """
        sampling = sampling_of(sampling_params)
        outcome = await self._rollouts.run(self._template.spec_of(row, sampling))
        is_v1 = "session_id" in row
        if outcome.reward is None and is_v1:
            raise RolloutFailed(outcome)
        rows = rows_of(outcome, self._limits) if outcome.reward is not None else []
        if sampling_params.get("logprobs") and sampling == self._trained:
            self._check_logprobs(outcome, rows)
        if not rows:
            pad = self.tokenizer.pad_token_id
            rows = [masked_row(outcome, 0 if pad is None else pad, self._limits)]
        with_logprobs = bool(sampling_params.get("logprobs"))
        before = _step_before(row)
        outputs = [self._output(outcome, each, len(rows), before, with_logprobs=with_logprobs) for each in rows]
        return outputs if is_v1 else outputs[-1]

    def _output(
        self, outcome: Outcome, row: Row, rows: int, before: int | None, *, with_logprobs: bool
    ) -> AgentLoopOutput:
        steps = [_step(version, outcome) for version in row.versions]
        turns = outcome.trajectory.turns if outcome.trajectory is not None else []
        return AgentLoopOutput(
            prompt_ids=row.prompt_ids.tolist(),
            response_ids=row.response_ids.tolist(),
            response_mask=row.response_mask.tolist(),
            response_logprobs=row.logprobs.tolist() if with_logprobs else None,
            reward_score=outcome.reward or 0.0,
            num_turns=turns_of(outcome.trajectory),
            metrics=AgentLoopMetrics(
                generate_sequences=sum(turn.inference_s for turn in turns),
                tool_calls=sum(turn.tools_s for turn in turns),
                compute_score=outcome.timing.eval_s,
            ),
            extra_fields={
                "reward_extra_info": {
                    "acc": float(outcome.reward is not None and self._correct(outcome)),
                    "has_reward": float(outcome.reward is not None),
                    "cut_tokens": float(row.cut),
                },
                "min_global_steps": min(steps, default=before),
                "max_global_steps": max(steps, default=before),
                "turn_scores": [],
                "tool_rewards": [],
                "job_id": outcome.job_id,
                "segment": row.segment,
                "segments": rows,
                "stop_reason": outcome.trajectory.stop_reason if outcome.trajectory is not None else outcome.status,
            },
        )

    def _check_logprobs(self, outcome: Outcome, rows: list[Row]) -> None:
        segments = [] if outcome.trajectory is None else outcome.trajectory.segments
        for row in rows:
            for span in segments[row.segment].spans:
                if span.constraint is None and not self._trained.tells(span):
                    raise ConfigError(
                        f"job {outcome.job_id!r}: {span.engine} tells {span.logprob_kind} log-probabilities of tokens "
                        f"sampled at temperature {span.temperature}, and verl compares them with its own, at "
                        f"{self._trained.temperature}: have the engine tell processed ones (vLLM: --logprobs-mode "
                        "processed_logprobs, verl's rollout.logprobs_mode), or set rollout.temperature=1, or "
                        "rollout.calculate_log_probs=False"
                    )


def check_sampling(rollout: Any) -> None:
    """Refuse a rollout configuration whose log-probabilities could not be trained on.

    Raises:
        ConfigError: `calculate_log_probs` is used with `top_p` or `top_k`. The engine then samples from a part of the
            distribution, while verl's trainer computes over the whole. Their ratio is then not a ratio of two policies.
    """
    if rollout.calculate_log_probs and _trained_sampling(rollout).truncated:
        raise ConfigError(
            f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k}: log-probabilities of a distribution that "
            "is cut off do not compare with the trainer's, over the whole vocabulary; set top_p=1 and top_k=-1, or "
            "rollout.calculate_log_probs=False"
        )


def run_name(config: Any) -> str:
    """Return the name of a training run: `trainer.project_name/trainer.experiment_name`."""
    return f"{config.trainer.project_name}/{config.trainer.experiment_name}"


def _trained_sampling(rollout: Any) -> Sampling:
    return sampling_of({"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k})


def builtin(fields: Any) -> dict[str, Any]:
    """Return a part of a configuration as plain dictionaries and lists."""
    found = OmegaConf.to_container(fields, resolve=True) if OmegaConf.is_config(fields) else dict(fields)
    assert isinstance(found, dict)
    return found


def _step(version: str, outcome: Outcome) -> int:
    """Return the training step of a policy version.

    Raises:
        ConfigError: the version is not a step of verl.
    """
    if not version.isdecimal():
        raise ConfigError(
            f"job {outcome.job_id!r}: its tokens are of the policy version {version!r}, which is no step of verl's: "
            "resume the node's backends with version=global_steps; see docs/train-with-verl.md"
        )
    return int(version)


def _step_before(row: Mapping[str, Any]) -> int | None:
    """Return the step whose weights a row's rollouts start with. A row without sampled tokens does not contain it.

    None means that verl does not provide it (V0).
    """
    return max(0, int(row["global_steps"]) - 1) if "global_steps" in row else None
