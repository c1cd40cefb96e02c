"""TRL's `GRPOTrainer` with rollouts on a node."""

from __future__ import annotations

import logging
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_ipc.session import Rejected
from prorl_trio.integrations.trl.logprobs import check_arguments, check_sampling, job_templates
from prorl_trio.integrations.trl.model_check import check_config, check_embedding, check_tokenizer, model_facts
from prorl_trio.integrations.trl.rows import completion_of
from prorl_trio.integrations.trl.weights import WeightTransfer
from prorl_trio.sampling import JobTemplate
from prorl_trio.types.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from prorl_trio.client import BlockingClient
    from prorl_trio.types.model_facts import ModelFacts
    from prorl_trio.types.models import JobSpec, Outcome, TaskInstance


class TaskLookup:
    """The task instances of a dataset, by prompt.

        tasks = TaskLookup(dataset, lambda row: TaskInstance(instance_id=row["id"], handler="math", payload=...))
        GRPOTrainer(..., train_dataset=dataset, rollout_func=RolloutFunction(client, tasks, ...))

    Args:
        rows: the dataset's rows, each with a column `prompt`: text or messages. Rows with the same prompt must give the
            same instance apart from its id, because only the prompt identifies them. The first row's id is used.
        instance_of: returns the instance of a row.

    Raises:
        ConfigError: a row lacks a prompt, or two rows have the same prompt but different instances.
    """

    def __init__(
        self, rows: Iterable[Mapping[str, Any]], instance_of: Callable[[Mapping[str, Any]], TaskInstance]
    ) -> None:
        self._instances: dict[bytes, TaskInstance] = {}
        for number, row in enumerate(rows):
            if row.get("prompt") is None:
                raise ConfigError(f"row {number} of the dataset has no `prompt`")
            instance = instance_of(row)
            known = self._instances.setdefault(_key(row["prompt"]), instance)
            if msgspec.structs.replace(instance, instance_id=known.instance_id) != known:  # otherwise one row is a copy
                raise ConfigError(
                    f"rows of the dataset with the instances {known.instance_id!r} and {instance.instance_id!r} have "
                    f"the same prompt, and TRL hands on nothing else: {row['prompt']!r:.200}"
                )

    def __len__(self) -> int:
        return len(self._instances)

    def __call__(self, prompt: Any) -> TaskInstance:
        """Return the instance of a prompt, as text or messages. Raises ConfigError if it is not in the dataset."""
        try:
            return self._instances[_key(prompt)]
        except KeyError:
            raise ConfigError(f"no row of the dataset has this prompt: {prompt!r:.200}") from None


def _key(prompt: Any) -> bytes:
    return msgspec.json.encode(prompt, order="deterministic")


logger = logging.getLogger(__name__)

STALL_S: Final = 3600.0

MAX_TRIES: Final = 8


class RolloutsRejected(RuntimeError):
    """The node does not accept such jobs."""


def run_rollouts(
    client: BlockingClient,
    instances: Sequence[TaskInstance],
    template: Callable[[TaskInstance], JobTemplate],
    *,
    evaluation: bool,
    stall_s: float,
    max_tries: int = MAX_TRIES,
) -> list[Outcome]:
    """Return an outcome for each instance, in order.

    A rollout without a reward (the infrastructure failed) is sampled again, up to `max_tries` times. After that its
    outcome is returned without a reward. Consecutive rollouts of the same instance form a group. A node that was killed
    resumes the rollouts after its restart.

    Raises:
        RolloutsRejected: the node rejects a job.
        TimeoutError: no rollout has ended for `stall_s` seconds; running rollouts are cancelled.
        ServiceError: the session is over.
    """
    run = uuid.uuid4().hex[:12]
    specs: dict[str, JobSpec] = {}
    places: dict[str, int] = {}
    group = -1
    for place, instance in enumerate(instances):
        group += place == 0 or instance != instances[place - 1]
        spec = template(instance).spec(f"{run}-{place}-0", f"{run}-{group}", instance)
        specs[spec.job_id] = msgspec.structs.replace(spec, priority="eval") if evaluation else spec
        places[spec.job_id] = place
    outcomes: list[Outcome | None] = [None] * len(instances)
    try:
        _submit(client, list(specs.values()))
        while places:
            outcome = _next(client, stall_s, places.keys())
            if outcome.job_id not in places:  # from an earlier call that was interrupted
                continue
            place = places.pop(outcome.job_id)
            tries = int(outcome.job_id.rpartition("-")[2]) + 1
            if outcome.reward is None and tries < max_tries:
                again = msgspec.structs.replace(specs[outcome.job_id], job_id=f"{run}-{place}-{tries}")
                specs[again.job_id] = again
                places[again.job_id] = place
                _submit(client, [again])
            else:
                outcomes[place] = outcome.detached()
    except BaseException:
        _give_up(client, list(places))
        raise
    return [outcome for outcome in outcomes if outcome is not None]


def _submit(client: BlockingClient, specs: list[JobSpec]) -> None:
    for answer in client.submit(specs):
        if isinstance(answer, Rejected):
            raise RolloutsRejected(f"job {answer.job_id}: {answer.code}: {answer.message}")


def _next(client: BlockingClient, stall_s: float, ours: AbstractSet[str]) -> Outcome:
    try:
        return next(client.results(timeout_s=stall_s, follow=True))
    except TimeoutError:
        raise TimeoutError(
            f"no rollout has ended for {stall_s:g} s, {len(ours)} are missing: look at `prorl-trio status`, or bound "
            "what a rollout may take with JobTemplate(budgets=...)"
        ) from None


def _give_up(client: BlockingClient, job_ids: list[str]) -> None:
    with suppress(ServiceError):  # without a connection the jobs continue, and their outcomes stay with the session
        client.cancel(job_ids)


class RolloutFunction:
    """`GRPOTrainer(rollout_func=...)`: rollouts by a node, with the current policy.

        with BlockingClient(url, token) as client:
            rollouts = RolloutFunction(client, TaskLookup(dataset, instance_of))
            trainer = GRPOTrainer(..., train_dataset=dataset, rollout_func=rollouts, reward_funcs=node_reward)
            trainer.train()

    TRL passes each prompt `num_generations` times in a row, and gets the same number of rows back. When the training
    step has advanced, the weights are first sent to the node's engines. A failed rollout is sampled again. If that
    fails as well, its reward is None, which TRL leaves out of the baseline. The row of a rollout is its last segment
    with sampled tokens.

    With `use_vllm=True` TRL itself transfers the weights to its vLLM servers, which must be the node's engines, and
    uses the log-probabilities for its importance sampling correction. Otherwise TRL ignores the log-probabilities, and
    trains as if on-policy.

    Args:
        client: its own session, in each process of the trainer.
        instance_of: maps a prompt, as TRL passes it, to the task instance; see `TaskLookup`.
        job: the fields of each rollout's job, or a function of the instance. The trainer's `max_completion_length`
            bounds the tokens of a row after its prompt.
        details: names in `Outcome.details` that are passed to the reward functions, each as a list.
        max_tries: maximum number of rollouts for one row.
        stall_s: maximum seconds without a finished rollout.
        transfer: the transfer of weights to the engines; None: `WeightTransfer(client)`.
    """

    __name__ = "prorl_trio"

    def __init__(
        self,
        client: BlockingClient,
        instance_of: Callable[[Any], TaskInstance],
        *,
        job: JobTemplate | Callable[[TaskInstance], JobTemplate] = JobTemplate(),  # noqa: B008 - it is immutable
        details: Sequence[str] = (),
        max_tries: int = MAX_TRIES,
        stall_s: float = STALL_S,
        transfer: WeightTransfer | None = None,
    ) -> None:
        if isinstance(job, JobTemplate):
            check_sampling(job.sampling)
        self._client = client
        self._instance_of = instance_of
        self._job = job
        self._details = tuple(details)
        self._max_tries = max_tries
        self._stall_s = stall_s
        self._transfer = WeightTransfer(client) if transfer is None else transfer
        self._checked = False
        self._step: int | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return a row for each prompt.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs` (0.0 for tokens that were not sampled) and `env_mask` (1 for
            sampled
            tokens): lists of lists. For reward functions: `rollout_reward` (float or None), `rollout_status`, `job_id`,
            `stop_reason` (None without a trajectory), and the `details`.

        Raises:
            ConfigError: the tokenizer or the model is not the node's, or a node cannot serve the trainer's settings.
            WeightsRefused: the weights are not finite, or of another model.
            RolloutsRejected: see `run_rollouts`.
            TimeoutError: see `run_rollouts`.
            ServiceError: the session is over.
        """
        if not self._checked:
            _check_trainer(trainer, model_facts(self._client))
            self._transfer.init_weight_transfer()
            self._checked = True
        if trainer.state.global_step != self._step:
            self._update(trainer)
            self._step = trainer.state.global_step
        outcomes = run_rollouts(
            self._client,
            [self._instance_of(prompt) for prompt in prompts],
            job_templates(self._job, trainer.args),
            evaluation=not trainer.model.training,
            stall_s=self._stall_s,
            max_tries=self._max_tries,
        )
        return self._rows(outcomes, int(trainer.processing_class.eos_token_id))

    def _update(self, trainer: Any) -> None:
        """Send the trainer's weights to the engines. If TRL has done this, report the new version to the node."""
        if trainer.accelerator.is_main_process:
            self._transfer.pause()
            if not trainer.use_vllm:
                self._transfer.send_weights(_tensors(trainer))
            self._transfer.resume()
        trainer.accelerator.wait_for_everyone()

    def _rows(self, outcomes: list[Outcome], filler_id: int) -> dict[str, list[Any]]:
        rows = [completion_of(outcome, filler_id) for outcome in outcomes]
        if left_out := sum(row.left_out for row in rows):
            logger.warning(
                "%d sampled tokens in earlier segments are not trained on: GRPOTrainer has one row a rollout; "
                "AsyncGRPOTrainer has one a segment",
                left_out,
            )
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "logprobs": [row.logprobs for row in rows],
            "env_mask": [row.mask for row in rows],
            "rollout_reward": [outcome.reward for outcome in outcomes],
            "rollout_status": [outcome.status for outcome in outcomes],
            "job_id": [outcome.job_id for outcome in outcomes],
            "stop_reason": [outcome.trajectory.stop_reason if outcome.trajectory else None for outcome in outcomes],
            **{name: [outcome.details.get(name) for outcome in outcomes] for name in self._details},
        }


def node_reward(
    prompts: Sequence[Any], completions: Sequence[Any], rollout_reward: list[float | None], **_columns: Any
) -> list[float | None]:
    """Return the node's own rewards: `GRPOTrainer(reward_funcs=node_reward)`.

    None means that a rollout lacks a reward.
    """
    return rollout_reward


def _check_trainer(trainer: Any, facts: ModelFacts) -> None:
    args = trainer.args
    check_arguments(args)
    if trainer.tools:
        raise ConfigError(
            "GRPOTrainer(tools=...): TRL would call tools a second time; leave them to the node's handler"
        )
    if getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", None) and not trainer.use_vllm:
        raise ConfigError(
            "GRPOTrainer(peft_config=...) without use_vllm: adapters are not pushed; AsyncGRPOTrainer merges them first"
        )
    check_tokenizer(trainer.processing_class, facts)
    check_config(trainer.accelerator.unwrap_model(trainer.model).config, facts)
    check_embedding(int(trainer.model.get_input_embeddings().weight.shape[0]), facts)


def _tensors(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the model's parameters under the names of its own files."""
    for name, parameter in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        yield name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), parameter.detach()
