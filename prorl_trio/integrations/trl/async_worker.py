"""TRL's `AsyncGRPOTrainer` with rollouts by a node."""

from __future__ import annotations

import queue
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from prorl_trio.integrations.trl.logprobs import check_arguments, check_sampling, job_templates
from prorl_trio.integrations.trl.model_check import check_tokenizer, model_facts
from prorl_trio.integrations.trl.rows import advantages_of, placeholder, rows_of
from prorl_trio.integrations.trl.weights import newest_version
from prorl_trio.sampling import BlockingGroups, GroupRules, JobTemplate, reached_one
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prorl_trio.client import BlockingClient
    from prorl_trio.integrations.trl.rows import Row
    from prorl_trio.sampling import BatchStatistics, Group
    from prorl_trio.types.models import Outcome, TaskInstance


FETCH_S: Final = 5.0
"""Longest wait for a group in one call of `rollout_buffer.get`, where TRL names none."""


# The arithmetic by which `AsyncGRPOTrainer` never has a reason to throw a row away.
#
# TRL takes R rows from the rollout buffer between two policy updates, whatever groups they are of, and some ahead of
# time. A row may lie T updates behind when it is taken (`max_staleness`). A group of n rollouts gives n * M rows at
# most, where rollouts have up to M segments. So updates do not come after a fixed number of groups, and the sampler
# is given another clock: it is told of a "version" whenever B = R / n groups and all their rows were taken, and is
# bound to S of those. A group that is begun in one of them is among the next (S + 1) * B that are taken, and until
# its last row is, at most (S + 1) * B * n * M are. In that time there are at most (S + 1) * B * n * M / R updates,
# rounded up: at most T for
#
#     S = T * R / (B * n * M) - 1, rounded down.


def rows_per_update(args: Any) -> int:
    """Return R, the rows between two policy updates.

    Args:
        args: an `AsyncGRPOConfig`.

    Raises:
        ConfigError: the arguments leave it open.
    """
    if args.token_budget is None or args.token_budget > 0:
        raise ConfigError(
            f"token_budget is {args.token_budget}: steps would take any number of rows, so that no admission can keep "
            "max_staleness. Set token_budget=0, and per_device_train_batch_size and gradient_accumulation_steps "
            "to the rows of a step"
        )
    micro_batch = args.per_device_train_batch_size * args.world_size
    return int(micro_batch * args.gradient_accumulation_steps * args.weight_sync_steps)


def group_rules(args: Any, rows_per_rollout: int, options: Mapping[str, Any]) -> GroupRules:
    """Return the rules of sampling, in the sampler's own clock.

    Args:
        args: an `AsyncGRPOConfig`.
        rows_per_rollout: M, the most rows that a rollout gives.
        options: further fields of `GroupRules`.

    Raises:
        ConfigError: there are no such rules, or `options` has one that follows from `args`.
    """
    rows, size = rows_per_update(args), args.num_generations
    groups = max(1, rows // size)
    max_staleness = args.max_staleness * rows // (groups * size * rows_per_rollout) - 1
    if max_staleness < 0:
        least = -(-groups * size * rows_per_rollout // rows)
        raise ConfigError(
            f"max_staleness is {args.max_staleness}, and must be at least {least} with {rows} rows an update, groups "
            f"of {size} and up to {rows_per_rollout} rows a rollout: AsyncGRPOTrainer takes rows ahead of its updates"
        )
    derived = {"size": size, "groups_per_step": groups, "max_staleness": max_staleness}
    if clash := sorted(set(options) & set(derived)):
        raise ConfigError(f"{', '.join(clash)}: follows from AsyncGRPOConfig; set it there")
    try:
        return GroupRules(**derived, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{type(args).__name__}: {error}") from error


class RolloutBuffer:
    """`RolloutWorkerProtocol.rollout_buffer`, for one consumer.

    Args:
        fetch: blocks for at most so many seconds (None: for ever) and returns further rows; raises TimeoutError.
    """

    def __init__(self, fetch: Callable[[float | None], Iterable[Any]]) -> None:
        self._fetch = fetch
        self._rows: deque[Any] = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next row. Raises queue.Empty: there was none in time; and what `fetch` raises."""
        while not self._rows:
            try:
                self._rows.extend(self._fetch(timeout if block else 0.0))
            except TimeoutError:
                raise queue.Empty from None
        return self._rows.popleft()

    def put_nowait(self, row: Any) -> None:
        """Put a row after those that are here."""
        self._rows.append(row)

    def qsize(self) -> int:
        """Return the number of rows that are here already."""
        return len(self._rows)


class RolloutWorker:
    """`AsyncGRPOTrainer(rollout_worker=...)`: whole groups from a node (TRL's `RolloutWorkerProtocol`).

        with BlockingClient(url, token) as client:
            worker = RolloutWorker(client, tasks, args, tokenizer=tokenizer)
            trainer = AsyncGRPOTrainer(..., args=args, rollout_worker=worker, weight_transfer=WeightTransfer(client))
            trainer.train()

    Each segment of a rollout is a row: its tokens, mask and log-probabilities as the node recorded them, the advantage
    of its rollout within the whole group, and the version of its oldest token. Groups come from `client.sampling`: a
    rollout that failed is sampled again, groups without information are left out, and staleness is bounded when
    rollouts are begun, so that TRL discards none. Rewards are the node's: `reward_funcs` are not called.

    Made and used in the main process; other processes pass None.

    Args:
        client: a session of the worker's own: it takes all of the session's outcomes.
        tasks: see `open_groups`.
        args: the trainer's `AsyncGRPOConfig`. Group size, groups per update and staleness follow from it.
        tokenizer: the trainer's, of `transformers`.
        job: the fields of each rollout's job; or a function of the instance. `max_completion_length` of `args` bounds
            the tokens of a row after its prompt.
        correct: decides whether a rollout that has a reward is correct: groups of all or of none teach nothing.
        rows_per_rollout: the most segments that a rollout can have. The more, the later rollouts are begun, since a
            step may then be made of fewer groups.
        scale_advantages: divide advantages by the standard deviation of their group's rewards.
        seed: of the order of `tasks`; None: that of `args`.
        **rules: further fields of `GroupRules`: `dynamic`, `early_stop`, `patience_groups`, ...

    Attributes:
        rollout_buffer: what TRL takes `RolloutSample`s from.
        metrics_queue: what TRL takes metrics from, a dict for each group.

    Raises:
        LogprobsRefused: completions would not be sampled from the policy's own distribution.
        ConfigError: the tokenizer is not the node's, or `args` leave staleness open.
    """

    def __init__(
        self,
        client: BlockingClient,
        tasks: Sequence[TaskInstance] | Callable[[int], TaskInstance],
        args: Any,
        *,
        tokenizer: Any,
        job: JobTemplate | Callable[[TaskInstance], JobTemplate] = JobTemplate(),  # noqa: B008 - it is immutable
        correct: Callable[[Outcome], bool] = reached_one,
        rows_per_rollout: int = 1,
        scale_advantages: bool = True,
        seed: int | None = None,
        **rules: Any,
    ) -> None:
        self.rollout_buffer = RolloutBuffer(self._fetch)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        check_arguments(args)
        if isinstance(job, JobTemplate):
            check_sampling(job.sampling)
        check_tokenizer(tokenizer, model_facts(client))
        self._rules = group_rules(args, rows_per_rollout, rules)
        self._client = client
        self._tasks = tasks
        self._options = {
            "job": job_templates(job, args),
            "correct": correct,
            "seed": args.seed if seed is None else seed,
        }
        self._rows_per_rollout = rows_per_rollout
        self._scale = scale_advantages
        self._filler_id = int(tokenizer.eos_token_id)
        self._sample = _sample_class()
        self._groups: BlockingGroups | None = None
        self._version = 0
        self._first = 0
        self._block = 0
        self._taken = 0
        self._ended: tuple[float, float | None] = (time.monotonic(), 0)

    def start(self) -> None:
        """Begin sampling. Called after the first policy update."""
        self._first = newest_version(self._client) - self._version
        self._groups = BlockingGroups(self._client, self._tasks, self._rules, version="0", **self._options)
        self._block = self._taken = 0
        self._ended = (time.monotonic(), 0)

    def stop(self) -> None:
        """End sampling: what is at work is cancelled. Does nothing where nothing was begun."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    def update_model_version(self, model_version: int) -> None:
        """Note the version that is in use. Staleness is bounded by rows, not by updates: see `steps`."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Check that rollouts end.

        Raises:
            ServiceError: the session is over.
            TimeoutError: for so long none has ended; the message says how the node is.
        """
        if self._groups is None:
            return
        ended = self._groups.statistics()["ended"]
        since_s, before = self._ended
        if ended != before:
            self._ended = (time.monotonic(), ended)
        elif time.monotonic() - since_s > stale_after_s:
            backends = self._client.list_backends().pool["backends"]
            states = ", ".join(f"{each['url']} {each['state']} {each['error']}".strip() for each in backends)
            raise TimeoutError(
                f"no rollout has ended for {stale_after_s:g} s (heartbeat_stale_after_s); backends: {states or 'none'}."
                " Nothing is lost: rollouts go on at the node. Look at `prorl-trio status`, or bound what a rollout "
                "may take with JobTemplate(budgets=...)"
            )

    def _fetch(self, timeout_s: float | None) -> list[Any]:
        """Return the rows of the next group. Raises TimeoutError: there was none in time."""
        if self._groups is None:
            raise RuntimeError("the worker was not started, or has been stopped")
        if self._taken == self._rules.groups_per_step:
            self._block += 1
            self._groups.advance(str(self._block))
            self._taken = 0
        batch = self._groups.take(1, timeout_s=FETCH_S if timeout_s is None else timeout_s)
        self._taken += len(batch.groups)
        self.metrics_queue.put_nowait(_metrics(batch.statistics))
        return [sample for group in batch.groups for sample in self._samples(group)]

    def _samples(self, group: Group) -> list[Any]:
        rewards = group.rewards
        samples = []
        for outcome, advantage in zip(group.outcomes, advantages_of(rewards, scale=self._scale), strict=True):
            metrics = {"reward": outcome.reward, "reward_std": float(rewards.std()), "rewards/node": outcome.reward}
            samples += [
                self._sample(
                    prompt=[],
                    completion=[],
                    input_ids=row.token_ids,
                    completion_mask=row.mask,
                    old_log_probs=row.logprobs,
                    advantage=float(advantage) if row.versions else 0.0,
                    model_version=min(map(self._number, row.versions), default=self._version),
                    group_id=group.number,
                    metrics=dict(metrics),
                    enqueued_at=time.time(),
                )
                for row in self._rows(outcome)
            ]
        return samples

    def _rows(self, outcome: Outcome) -> list[Row]:
        rows = rows_of(outcome)
        if len(rows) > self._rows_per_rollout:
            raise ConfigError(
                f"job {outcome.job_id} has {len(rows)} segments, and rows_per_rollout is {self._rows_per_rollout}: "
                "staleness cannot be kept. Raise it (and max_staleness)"
            )
        return rows or [placeholder(self._filler_id)]

    def _number(self, name: str) -> int:
        if not name.isdecimal():
            raise ConfigError(
                f"a token was sampled by policy version {name!r}, which is no number: use this package's WeightTransfer"
            )
        return int(name) - self._first


def _metrics(statistics: BatchStatistics) -> dict[str, float]:
    """Return what TRL logs. It sums what is called `total`, and takes the highest of `max`."""
    figures = {
        "rollout/informative_share": statistics.informative_share,
        "rollout/uninformative_groups_total": float(statistics.solved_groups + statistics.unsolved_groups),
        "rollout/resampled_total": float(statistics.resampled),
        "rollout/cancelled_total": float(statistics.cancelled),
        "rollout/carried_groups": float(statistics.carried_groups),
        "rollout/running_groups": float(statistics.running_groups),
        "rollout/duration_ks": statistics.duration_ks,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _sample_class() -> Any:
    try:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
    except ImportError as error:
        raise ImportError(f"TRL 1.16 is needed: pip install 'prorl-trio[trl]' ({error})") from error
    return RolloutSample
