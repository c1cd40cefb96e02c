"""An Atropos environment that sends groups of rollouts to the API server."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.http.client import HttpClient
from prorl_trio.http.connection import ConnectFailed, HttpError, HttpLimits
from prorl_trio.types.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.sampling import Group, GroupRules, Groups
    from prorl_trio.types.models import Outcome, Segment


REQUEST_TIMEOUT_S: Final = 60.0
"""Time limit in seconds for one request. The server answers nothing else while it serves a large batch."""
POLL_S: Final = 0.5
"""Polling interval in seconds. The server sends no notifications."""
MAX_TRIES: Final = 6
MIN_BACKOFF_S: Final = 0.5
CLOSE_TIMEOUT_S: Final = 5.0
_STATUS_OK: Final = 200
_FIRST_SERVER_ERROR: Final = 500
_JSON: Final = (("Content-Type", "application/json"),)

T = TypeVar("T")

MASKED: Final = -100
"""`ScoredData.masks` of tokens that are not trained on. All other tokens have their token id."""
NOT_SAMPLED: Final = 1.0
"""`ScoredData.inference_logprobs` of tokens that the policy did not sample. No real log-probability is above 0."""


class ScoredData(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of atroposlib's model of this name that a group of n rollouts fills: n rows of T_i tokens.

    Attributes:
        tokens: token ids.
        masks: the id of each token that is trained on, `MASKED` for all others.
        scores: the reward of each row's rollout. The trainer computes advantages from these scores.
        inference_logprobs: natural logarithms, exactly as the engine returned them; `NOT_SAMPLED` elsewhere.
        generation_params: `temperature`, by which a trainer divides its logits to compare log-probabilities.
        overrides: for each row: `job_id`, and the `policy_versions` that sampled it.
        group_overrides: `group_id`, and `part`: the number of this part within the group.
        env_id: the environment's id at the server.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]]
    generation_params: dict[str, Any]
    overrides: list[dict[str, Any]]
    group_overrides: dict[str, Any]
    env_id: int


def scored_data(group: Group, env_id: int) -> list[ScoredData]:
    """Return the rows of a group: one part of n rows, or as many parts as its longest trajectory has segments.

    The server packs batches out of groups of equal size, and a trainer compares the scores within one group. So each
    part has n rows and all n scores. Where a rollout lacks a further segment, its first row is repeated, fully masked,
    for a weight of 0. A rollout that was spoilt before its first token repeats another rollout's first row,
    fully masked.

    Raises:
        ConfigError: the log-probabilities do not belong to the distribution that was sampled (raw log-probabilities
            with a temperature other than 1, `top_p` or `top_k`), or rows were sampled with different temperatures.
        ValueError: a rollout lacks a reward, or the whole group lacks tokens. The sampler never returns such a group.
        StaleReference: the outcomes' arrays were memory of the node, which has reused it.
    """
    segments = [_segments(outcome) for outcome in group.outcomes]
    some = [segment for rollout in segments for segment in rollout]
    if not some:
        raise ValueError(f"no rollout of group {group.group_id} has a token to train on")
    temperature = _temperature(group.group_id, some)
    parts = []
    for part in range(max(map(len, segments))):
        here = [(rollout[part], True) if part < len(rollout) else ([*rollout, *some][0], False) for rollout in segments]
        parts.append(
            ScoredData(
                tokens=[segment.token_ids.tolist() for segment, _ in here],
                masks=[_masks(segment, trained=trained) for segment, trained in here],
                scores=group.rewards.tolist(),
                inference_logprobs=[_logprobs(segment, trained=trained) for segment, trained in here],
                generation_params={"temperature": temperature},
                overrides=[
                    {
                        "job_id": outcome.job_id,
                        "policy_versions": list(dict.fromkeys(span.policy_version for span in segment.spans)),
                    }
                    for outcome, (segment, _) in zip(group.outcomes, here, strict=True)
                ],
                group_overrides={"group_id": group.group_id, "part": part},
                env_id=env_id,
            )
        )
    for outcome in group.outcomes:
        outcome.check()
    return parts


def _segments(outcome: Outcome) -> list[Segment]:
    if outcome.reward is None:
        raise ValueError(f"rollout {outcome.job_id} ({outcome.status}) has no reward")
    return outcome.trajectory.segments if outcome.trajectory is not None else []


def _masks(segment: Segment, *, trained: bool) -> list[int]:
    masks: list[int] = np.where((segment.free_mask == 1) & trained, segment.token_ids, MASKED).tolist()
    return masks


def _logprobs(segment: Segment, *, trained: bool) -> list[float]:
    logprobs: list[float] = np.where(
        (segment.free_mask == 1) & trained, segment.logprobs, np.float32(NOT_SAMPLED)
    ).tolist()
    return logprobs


def _temperature(group_id: str, segments: list[Segment]) -> float:
    """Return the one temperature of all spans.

    Their log-probabilities must belong to the distribution that was sampled.
    """
    spans = [span for segment in segments for span in segment.spans if span.constraint is None]
    for span in spans:
        changed = span.temperature != 1.0 or span.top_p != 1.0 or span.top_k > 0
        if changed and span.logprob_kind != "processed":
            raise ConfigError(
                f"group {group_id}: sampled with temperature {span.temperature:g}, top_p {span.top_p:g}, top_k "
                f"{span.top_k}, but {span.engine} gives {span.logprob_kind} log-probabilities: a trainer would take "
                "them for those of the sampled distribution. Sample with temperature 1 and nothing cut off, or start "
                "vLLM with --logprobs-mode processed_logprobs"
            )
    temperatures = {span.temperature for span in spans} or {1.0}
    if len(temperatures) > 1:
        raise ConfigError(f"group {group_id}: sampled with several temperatures: {sorted(temperatures)}; use one")
    return temperatures.pop()


class _Registered(msgspec.Struct):
    """The answer of `POST /register-env`. `status` becomes `success` once the trainer has requested a batch."""

    status: str
    env_id: int = -1
    wandb_name: str = ""
    starting_step: int = 0
    num_steps: int = -1


class _Info(msgspec.Struct):
    """The answer of `GET /info`."""

    batch_size: int
    max_token_len: int


class _Status(msgspec.Struct):
    """The answer of `GET /status-env`. Queues are counted in groups of this environment's size."""

    current_step: int
    queue_size: int
    self_queue_size: int = 0


class _Latest(msgspec.Struct):
    """The part of the answer of `GET /latest_example` that names the latest group."""

    group_overrides: dict[str, Any] | None = None


class AtroposStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot.

    Attributes:
        groups: groups sent.
        rows: rows in these groups.
        unsure: parts that were in flight when a connection was lost, and of which the server's receipt is unknown. They
            were not sent again.
        waited_s: seconds during which the server's queue was full.
    """

    groups: int
    rows: int
    unsure: int
    waited_s: float


class AtroposEnvironment:
    """A registered environment. Made by `open_environment`.

    Attributes:
        env_id: the environment's id at the server.
        name: the environment's name at the server.
        batch_size: sequences in one step of the trainer; 0 or less: unknown.
        max_token_len: rows of this length or longer are refused; 0 or less: no limit.
        num_steps: the trainer's last step; 0 or less: unknown.
        step: the trainer's step in the latest answer.
    """

    def __init__(
        self, http: HttpClient, registered: _Registered, info: _Info, *, group_size: int, max_batches_ahead: int
    ) -> None:
        self.env_id = registered.env_id
        self.name = registered.wandb_name
        self.batch_size = info.batch_size
        self.max_token_len = info.max_token_len
        self.num_steps = registered.num_steps
        self.step = registered.starting_step
        self._http = http
        self._group_size = group_size
        self._max_queue = max_batches_ahead * max(1, info.batch_size // group_size)
        self._groups = self._rows = self._unsure = 0
        self._waited_s = 0.0

    def statistics(self) -> AtroposStatistics:
        """Return statistics of the groups sent so far."""
        return AtroposStatistics(
            groups=self._groups,
            rows=self._rows,
            unsure=self._unsure,
            waited_s=self._waited_s,
        )

    async def feed(self, groups: Groups, rules: GroupRules) -> None:
        """Send one group after the other until the trainer has made its last step, or until cancelled.

        The trainer's steps are the policy versions of `groups`, which was opened with `rules` and with
        `version=str(environment.step)`. `rules.groups_per_step` is this environment's number of groups in one batch of
        the trainer.

        Raises:
            ServiceError, ConfigError: as `Groups.take` and `send`.
        """
        version, taken = "", 0  # of the last batch; groups taken at that version

        async def advance() -> None:
            """Announce each step, but only after the groups of a step were taken, because the sampler counts in steps.

            The server makes as many batches at once as it can, so the trainer may be temporarily ahead.
            """
            told, announced = self.step, ""
            while not 0 < self.num_steps <= self.step:
                if told < self.step and taken >= rules.groups_per_step and announced in ("", version):
                    told += 1
                    announced = str(told)
                    await groups.advance(announced)
                await trio.sleep(POLL_S)
                await self._status()
            nursery.cancel_scope.cancel()

        async with open_single_nursery() as nursery:
            nursery.start_soon(advance)
            while True:
                batch = await groups.take(1)
                taken = len(batch.groups) + (taken if batch.version == version else 0)
                version = batch.version
                for group in batch.groups:
                    await self.send(group, again=batch.again)

    async def send(self, group: Group, *, again: bool = False) -> None:
        """Wait until the server has room, then send the group.

        The server has room while fewer groups than `max_batches_ahead` steps need are waiting. A received group is
        never sent twice: after a lost connection the server is asked whether it has the group. If the answer is
        inconclusive, the group counts as sent and as `unsure`. After a cancel during sending, the group may or may not
        have arrived.

        Args:
            group: a group of the registered size.
            again: the group may have been sent before, by a process that was killed. It is then skipped if it is the
                latest group that the server received, which is conclusive if no other environment has sent since.

        Raises:
            ServiceError: the server does not answer after `MAX_TRIES` tries, or refuses the group.
            ConfigError, ValueError: see `scored_data`. Also raised if the group's size is not the registered one, or if
                a row is too long for the trainer.
        """
        if len(group.outcomes) != self._group_size:
            raise ConfigError(f"group {group.group_id} has {len(group.outcomes)} rollouts, not {self._group_size}")
        parts = await trio.to_thread.run_sync(_encoded, group, self.env_id)
        longest = max(len(row) for part, _ in parts for row in part.tokens)
        if 0 < self.max_token_len <= longest:
            raise ConfigError(
                f"group {group.group_id} has a row of {longest} tokens, and the trainer takes fewer than "
                f"{self.max_token_len}: bound them by JobTemplate(max_trajectory_tokens={self.max_token_len - 1})"
            )
        latest = await self._get("/latest_example", _Latest) if again else _Latest()
        sent = [number for number, (part, _) in enumerate(parts) if part.group_overrides == latest.group_overrides]
        for part, body in parts[sent[0] + 1 if sent else 0 :]:
            await self._post(part, body, await self._wait_for_room())
            self._rows += len(part.tokens)
        self._groups += 1

    async def _wait_for_room(self) -> _Status:
        began_s = trio.current_time()
        while (status := await self._status()).queue_size >= self._max_queue:
            await trio.sleep(POLL_S)
            self._waited_s += trio.current_time() - began_s
            began_s = trio.current_time()
        return status

    async def _post(self, part: ScoredData, body: bytes, before: _Status) -> None:
        """Send one part once. `before` is the server's status before sending."""
        problem = ""
        for number in range(MAX_TRIES):
            if number:
                await trio.sleep(MIN_BACKOFF_S * 2**number)
            try:
                response = await self._http.request(
                    "POST", "/scored_data", body=body, headers=_JSON, timeout_s=REQUEST_TIMEOUT_S
                )
            except ConnectFailed as exc:
                problem = str(exc)
                continue
            except HttpError as exc:
                problem = str(exc)
            else:
                if response.status == _STATUS_OK:
                    return
                problem = f"status {response.status}: {response.body[:400].decode(errors='replace')}"
                if response.status < _FIRST_SERVER_ERROR:
                    break
            if await self._has(part, before):
                return
        raise ServiceError(f"Atropos did not take group {part.group_overrides['group_id']}: {problem}")

    async def _has(self, part: ScoredData, before: _Status) -> bool:
        """Return whether the server received a part whose connection was lost; True if this is unknown."""
        await trio.sleep(POLL_S)  # let the server finish its current work
        latest = await self._get("/latest_example", _Latest)
        if latest.group_overrides == part.group_overrides:
            return True
        now = await self._status()
        if now.self_queue_size > before.self_queue_size:
            return True  # only this environment adds to it
        if now.current_step == before.current_step:
            return False
        self._unsure += 1  # other groups followed a batch, which may have contained this one
        return True

    async def _status(self) -> _Status:
        body = msgspec.json.encode({"env_id": self.env_id})
        status = await self._get("/status-env", _Status, body)
        self.step = max(self.step, status.current_step)
        return status

    async def _get(self, path: str, kind: type[T], body: bytes = b"") -> T:
        return await _ask(self._http, "GET", path, kind, body)


@asynccontextmanager
async def open_environment(
    url: str,
    *,
    name: str,
    group_size: int,
    max_token_length: int,
    weight: float = 1.0,
    min_batch_allocation: float | None = None,
    max_batches_ahead: int = 3,
    patience_s: float = 600.0,
) -> AsyncIterator[AtroposEnvironment]:
    """Register an environment at Atropos' API server (`run-api`), and unregister it when the block ends.

    Args:
        url: origin of the server, `http://127.0.0.1:8000`.
        name: the environment's name.
        group_size: rollouts of each group; `GroupRules.size`.
        max_token_length: longest expected row, in tokens. The server weighs environments with it.
        weight: the share of this environment among others.
        min_batch_allocation: the minimum share of each batch.
        max_batches_ahead: maximum number of steps' worth of groups in the server's queue.
        patience_s: maximum seconds to wait for the server, and for its trainer to request a first batch. Until
            then the server registers no environment.

    Raises:
        ServiceError: the address does not answer like such a server, or the trainer did not start in time.
        ConfigError: the trainer's batches cannot be made of groups of this size.
    """
    # Connections are not reused: a request on a connection that the server has closed would be sent twice.
    http = HttpClient(url, limits=HttpLimits(keep_alive_s=0.0))
    try:
        body = msgspec.json.encode(
            {
                "max_token_length": max_token_length,
                "desired_name": name,
                "weight": weight,
                "group_size": group_size,
                "min_batch_allocation": min_batch_allocation,
            }
        )
        registered = await _register(http, body, patience_s)
        try:
            info = await _ask(http, "GET", "/info", _Info)
            if info.batch_size > 0 and info.batch_size % group_size:
                raise ConfigError(
                    f"batches of {info.batch_size} sequences, as the trainer at {url} takes them, cannot be made of "
                    f"groups of {group_size}: choose a size that divides it"
                )
            yield AtroposEnvironment(http, registered, info, group_size=group_size, max_batches_ahead=max_batches_ahead)
        finally:
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await _disconnect(http, registered.env_id)
    finally:
        http.close()


def _encoded(group: Group, env_id: int) -> list[tuple[ScoredData, bytes]]:
    """Return the parts of a group with their JSON. Blocks for some tenths of a second for long rollouts."""
    return [(part, msgspec.json.encode(part)) for part in scored_data(group, env_id)]


async def _register(http: HttpClient, body: bytes, patience_s: float) -> _Registered:
    """Retry until the trainer has started."""
    problem = "it was not asked"
    with trio.move_on_after(patience_s):
        while True:
            try:
                registered = await _ask(http, "POST", "/register-env", _Registered, body)
                if registered.status == "success":
                    return registered
                problem = registered.status
            except ServiceError as exc:
                problem = str(exc)
            await trio.sleep(POLL_S)
    raise ServiceError(f"no environment could be registered at {http.origin} within {patience_s:g} s: {problem}")


async def _disconnect(http: HttpClient, env_id: int) -> None:
    body = msgspec.json.encode({"env_id": env_id})
    with suppress(HttpError):  # the server is gone, and so is the registration
        await http.request("POST", "/disconnect-env", body=body, headers=_JSON, timeout_s=CLOSE_TIMEOUT_S)


async def _ask(http: HttpClient, method: str, path: str, kind: type[T], body: bytes = b"") -> T:
    """Send a request that may be repeated, and return its answer. Retry while the server cannot be reached."""
    problem = ""
    for number in range(MAX_TRIES):
        if number:
            await trio.sleep(MIN_BACKOFF_S * 2**number)
        try:
            response = await http.request(method, path, body=body, headers=_JSON, timeout_s=REQUEST_TIMEOUT_S)
        except HttpError as exc:
            problem = str(exc)
            continue
        if response.status == _STATUS_OK:
            try:
                return msgspec.json.decode(response.body, type=kind)
            except msgspec.MsgspecError as exc:
                raise ServiceError(f"{http.origin}{path} is not answered as by Atropos: {exc}") from exc
        problem = f"status {response.status}: {response.body[:400].decode(errors='replace')}"
        if response.status < _FIRST_SERVER_ERROR:
            break
    raise ServiceError(f"{http.origin}: {method} {path} failed: {problem}")
