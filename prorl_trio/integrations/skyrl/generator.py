"""A SkyRL generator that runs its rollouts on a node. Needs SkyRL, in its step-wise mode."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

try:
    from skyrl.train.generators.base import GeneratorInterface
except ImportError as exc:
    raise ImportError("this needs SkyRL: pip install 'skyrl[skyrl-train]>=0.3', with Python 3.12") from exc

from prorl_trio.integrations.node_address import NodeAddress
from prorl_trio.integrations.rollouts import rollouts_on
from prorl_trio.integrations.skyrl.jobs import row_of, sampling_and_limit, spec_of, task_of_prompt
from prorl_trio.integrations.skyrl.output import output_of
from prorl_trio.integrations.verl.jobs import JobTemplate, Sampling, loaded
from prorl_trio.integrations.verl.rows import RowLimits
from prorl_trio.types.errors import ConfigError, ProrlError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skyrl.train.generators.base import GeneratorInput, GeneratorOutput

    from prorl_trio.types.models import JobSpec, Outcome


class NoRewards(ProrlError):
    """No rollout of an evaluation has a reward, through no fault of the policy: there is nothing to report."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        first = outcomes[0]
        super().__init__(
            f"none of {len(outcomes)} rollouts of an evaluation has a reward; the first, {first.job_id!r}: "
            f"{first.status}, {first.cause}, {first.error_code}: {first.error}"
        )


class NodeGenerator(GeneratorInterface):  # type: ignore[misc] # SkyRL has no types
    """SkyRL's `GeneratorInterface` over a node or a fleet.

    Each segment of a rollout is a row, see `output_of`. A rollout that the infrastructure fails is repeated up to
    twice, and then left out of its group.

    Args:
        cfg: SkyRL's whole configuration.
        tokenizer: the policy's; its pad token fills rows without tokens.
        node: fields of `NodeAddress`, such as `{"endpoint_file": "/shared/endpoint.json"}`.
        job: fields that all jobs have, see `JobTemplate`.
        task: `package.module:function`, which returns the `TaskInstance` of a data row; None: `task_of_prompt`.

    Raises:
        ConfigError: the configuration cannot be used.
    """

    def __init__(
        self,
        cfg: Any,
        tokenizer: Any,
        *,
        node: Mapping[str, Any],
        job: Mapping[str, Any] | None = None,
        task: str | None = None,
    ) -> None:
        if not cfg.generator.step_wise_trajectories:
            raise ConfigError(
                "generator.step_wise_trajectories=false: rollouts on a node have several segments; set it to true, "
                "with trainer.algorithm.advantage_estimator=grpo, rloo or maxrl"
            )
        turn = int(cfg.generator.sampling_params.max_generate_length)
        whole = int(cfg.trainer.algorithm.max_seq_len or cfg.generator.max_input_length + turn)
        fields = dict(job or {})
        run = f"{cfg.trainer.project_name}/{cfg.trainer.run_name}"
        fields["tags"] = {"skyrl": run, **fields.get("tags", {})}
        self._template = JobTemplate(
            fields, RowLimits(whole - turn, turn), task_of_prompt if task is None else loaded(task)
        )
        pad = tokenizer.pad_token_id
        self._pad_token_id = 0 if pad is None else int(pad)
        self._rollouts = rollouts_on(NodeAddress.read(node))

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Run a rollout for each prompt, and return their rows in the order of the prompts.

        A cancel cancels all jobs. If a rollout raises, the others are cancelled.

        Raises:
            ConfigError: SkyRL cannot train on the tokens, because of their sampling; or a prompt is no task.
            NoRewards: no rollout of an evaluation has a reward.
            JobRefused: the node does not accept a job.
            ServiceError: the node is gone.
        """
        trajectory_ids, metadata = input_batch["trajectory_ids"], input_batch["batch_metadata"]
        if trajectory_ids is None:
            raise ConfigError("SkyRL passed no trajectory_ids, which name the groups of a batch")
        trains = metadata is None or metadata.training_phase == "train"
        params = input_batch["sampling_params"] or {}
        sampling, _ = sampling_and_limit(params)
        if trains and sampling.truncated:
            raise ConfigError(
                f"generator.sampling_params top_p={sampling.top_p}, top_k={sampling.top_k}: log-probabilities of a "
                "distribution that is cut off do not compare with the trainer's; set top_p=1 and top_k=-1"
            )
        extras = input_batch["env_extras"] or [None] * len(trajectory_ids)
        columns = zip(input_batch["prompts"], input_batch["env_classes"], extras, strict=True)
        specs: list[JobSpec] = [
            spec_of(self._template, row_of(*column), trajectory_id, params, trains=trains)
            for column, trajectory_id in zip(columns, trajectory_ids, strict=True)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._rollouts.run(spec)) for spec in specs]
        outcomes = [each.result() for each in tasks]
        if trains:
            for outcome in outcomes:
                check_logprobs(outcome, sampling)
        elif all(outcome.reward is None for outcome in outcomes):
            raise NoRewards(outcomes)
        output = output_of(trajectory_ids, outcomes, pad_token_id=self._pad_token_id, trains=trains)
        return cast("GeneratorOutput", output)


def check_logprobs(outcome: Outcome, sampling: Sampling) -> None:
    """Check that SkyRL may compare the outcome's log-probabilities with its own, at the sampling temperature.

    Raises:
        ConfigError: the engine reports those of another distribution.
    """
    segments = [] if outcome.trajectory is None else outcome.trajectory.segments
    for span in (span for segment in segments for span in segment.spans if span.constraint is None):
        if not sampling.tells(span):
            raise ConfigError(
                f"job {outcome.job_id!r}: {span.engine} reports {span.logprob_kind} log-probabilities of tokens "
                f"sampled at temperature {span.temperature}, and SkyRL compares them with its own, at "
                f"{sampling.temperature}: start vLLM with --logprobs-mode processed_logprobs, or set "
                "generator.sampling_params.temperature=1"
            )
