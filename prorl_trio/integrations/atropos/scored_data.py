"""A group of rollouts as `POST /scored_data` of atroposlib 0.4 takes it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from prorl_trio.client.sampling import Group
    from prorl_trio.types.models import Outcome, Segment

MASKED: Final = -100
"""`ScoredData.masks` of tokens that are not trained on; of the others it has the token ids."""
NOT_SAMPLED: Final = 1.0
"""`ScoredData.inference_logprobs` of tokens that the policy did not sample: no log-probability is above 0."""


class ScoredData(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of atroposlib's model of this name that a group of n rollouts fills; n rows of T_i tokens.

    Attributes:
        tokens: ids.
        masks: the id of each token that is trained on, `MASKED` for the others.
        scores: the reward of each row's rollout. The trainer makes advantages of them.
        inference_logprobs: natural logarithms, exactly as the engine gave them; `NOT_SAMPLED` elsewhere.
        generation_params: `temperature`, by which a trainer divides its logits to compare log-probabilities.
        overrides: of each row: `job_id`, and the `policy_versions` that sampled it.
        group_overrides: `group_id`, and `part`: the number of these rows among those of the group.
        env_id: as the server registered the environment.
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

    The server packs batches out of groups of equal size, and a trainer compares the scores within one. So each part has
    n rows and all n scores; where a rollout has no further segment, its row is the first one again, all masked: it
    weighs nothing. The row of one that was spoilt before its first token is the first of another rollout, all masked.

    Raises:
        ConfigError: the log-probabilities are not of the distribution that was sampled from (raw ones, with a
            temperature other than 1, `top_p` or `top_k`), or rows were sampled with different temperatures.
        ValueError: a rollout has no reward, or none of the group has tokens. A group of the sampler never is such.
        StaleReference: the outcomes' arrays were memory of the node's, which took it back.
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
    masks: list[int] = np.where((segment.loss_mask == 1) & trained, segment.token_ids, MASKED).tolist()
    return masks


def _logprobs(segment: Segment, *, trained: bool) -> list[float]:
    logprobs: list[float] = np.where(
        (segment.loss_mask == 1) & trained, segment.logprobs, np.float32(NOT_SAMPLED)
    ).tolist()
    return logprobs


def _temperature(group_id: str, segments: list[Segment]) -> float:
    """Return the one temperature of all spans, whose log-probabilities are those of the distribution sampled from."""
    spans = [span for segment in segments for span in segment.spans]
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
