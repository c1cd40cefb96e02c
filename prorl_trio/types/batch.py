"""Trajectories as padded arrays for trainers. No Python list of tokens is made on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from prorl_trio.types.models import Outcome, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from prorl_trio.types.models import Segment

NOT_SAMPLED = -1
"""`PaddedBatch.policy_version` of tokens that were not sampled: prompts, observations, padding."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """B rows, one for each segment, padded to T tokens.

    Attributes:
        token_ids: int32 or int64 [B, T]; `pad_token_id` on padding.
        logprobs: float32 [B, T]; the engine's natural logarithms of sampled tokens, 0.0 elsewhere.
        loss_mask: uint8 [B, T]; 1 exactly where the policy sampled the token.
        attention_mask: uint8 [B, T]; 1 on tokens, 0 on padding.
        policy_version: int32 [B, T]; index into `policy_versions`, `NOT_SAMPLED` where nothing was sampled.
        lengths: int32 [B]; number of tokens of each row.
        truncated: uint8 [B]; 1 where the end of the row was cut off, which may include the tokens that earned the
            reward.
        item: int32 [B]; index of the row's item.
        segment: int32 [B]; index of the segment in that item's trajectory.
        job_ids: B job ids; empty for a row of a bare `Trajectory`.
        policy_versions: each version once, in the order of first use.
    """

    token_ids: npt.NDArray[Any]
    logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.uint8]
    attention_mask: npt.NDArray[np.uint8]
    policy_version: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    truncated: npt.NDArray[np.uint8]
    item: npt.NDArray[np.int32]
    segment: npt.NDArray[np.int32]
    job_ids: list[str]
    policy_versions: list[str]

    def __len__(self) -> int:
        """Return the number of rows, B."""
        return len(self.lengths)

    @property
    def rollout_weights(self) -> npt.NDArray[np.float32]:
        """Return a weight per row for its sampled tokens, so that each rollout weighs 1 in total: float32 [B].

        The weight is 1 / the number of sampled tokens in all rows of the item, or 0 if there are none. Then the loss
        `(loss_mask * weights[:, None] * token_losses).sum() / rollouts` is a mean over rollouts, whatever their numbers
        of segments and tokens. Without weights, in the mean over tokens, a rollout weighs in proportion to its length.
        """
        sampled = self.loss_mask.sum(axis=1, dtype=np.int64)
        of_item = np.bincount(self.item, weights=sampled)[self.item] if len(self) else np.zeros(0)
        return np.divide(1.0, of_item, out=np.zeros(len(self)), where=of_item > 0).astype(np.float32)


def pad_batch(
    items: Sequence[Outcome | Trajectory],
    *,
    pad_token_id: int,
    max_len: int | None = None,
    side: Literal["left", "right"] = "right",
    truncate: bool = True,
    token_dtype: type[np.int32 | np.int64] = np.int32,
    out: PaddedBatch | None = None,
) -> PaddedBatch:
    """Return the segments of all items as rows. An outcome without a trajectory adds none.

    Args:
        items: in the order of the rows.
        pad_token_id: value of `token_ids` on padding.
        max_len: T; the longest row if None.
        side: side of the padding.
        truncate: cut rows that are longer than `max_len` at their end. The rest of the row and its masks are unchanged,
            and the row is marked in `truncated`. To train on whole rows only, use `batch.loss_mask * (1 -
            batch.truncated[:, None])`. False: such a row is an error.
        token_dtype: dtype of `token_ids`.
        out: an earlier batch whose arrays [B', T'] are reused, with B' >= B and T' >= T. The result's arrays are views
            [:B, :T], and the earlier batch is overwritten. Its dtype counts, not `token_dtype`.

    Raises:
        ValueError: a row is longer than `max_len` without `truncate`, or the batch does not fit into `out`.
        StaleReference: an outcome's arrays are the node's memory, which was reused before all were copied.
    """
    rows = _rows(items)
    lengths = np.fromiter((len(segment) for *_, segment in rows), np.int32, len(rows))
    longest = int(lengths.max(initial=0))
    width = longest if max_len is None else max_len
    if longest > width and not truncate:
        number, job_id, index, _ = rows[int(lengths.argmax())]
        where = f"segment {index} of item {number}" + (f" (job {job_id!r})" if job_id else "")
        raise ValueError(f"{where} has {longest} tokens, max_len is {width}; raise it, or truncate")
    batch = _allocate(len(rows), width, token_dtype) if out is None else _within(out, len(rows), width)
    batch.token_ids.fill(pad_token_id)
    batch.logprobs.fill(0.0)
    batch.loss_mask.fill(0)
    batch.attention_mask.fill(0)
    batch.policy_version.fill(NOT_SAMPLED)
    np.greater(lengths, width, out=batch.truncated, casting="unsafe")
    lengths = np.minimum(lengths, width, out=batch.lengths)
    versions: dict[str, int] = {}
    for row, (number, job_id, index, segment) in enumerate(rows):
        length = int(lengths[row])
        start = width - length if side == "left" else 0
        here = slice(start, start + length)
        batch.token_ids[row, here] = segment.token_ids[:length]
        batch.logprobs[row, here] = segment.logprobs[:length]
        batch.loss_mask[row, here] = segment.loss_mask[:length]
        batch.attention_mask[row, here] = 1
        for span in segment.spans:
            version = versions.setdefault(span.policy_version, len(versions))
            batch.policy_version[row, start + min(span.start, length) : start + min(span.end, length)] = version
        batch.item[row] = number
        batch.segment[row] = index
        batch.job_ids.append(job_id)
    batch.policy_versions.extend(versions)
    for *_, segment in rows:
        segment.check()
    return batch


def _rows(items: Sequence[Outcome | Trajectory]) -> list[tuple[int, str, int, Segment]]:
    """Return (item, job id, index of the segment, segment) for every row."""
    found = []
    for number, item in enumerate(items):
        job_id, trajectory = (item.job_id, item.trajectory) if isinstance(item, Outcome) else ("", item)
        if trajectory is not None:
            found += [(number, job_id, index, segment) for index, segment in enumerate(trajectory.segments)]
    return found


def _allocate(rows: int, width: int, token_dtype: type[np.int32 | np.int64]) -> PaddedBatch:
    return PaddedBatch(
        token_ids=np.empty((rows, width), token_dtype),
        logprobs=np.empty((rows, width), np.float32),
        loss_mask=np.empty((rows, width), np.uint8),
        attention_mask=np.empty((rows, width), np.uint8),
        policy_version=np.empty((rows, width), np.int32),
        lengths=np.empty(rows, np.int32),
        truncated=np.empty(rows, np.uint8),
        item=np.empty(rows, np.int32),
        segment=np.empty(rows, np.int32),
        job_ids=[],
        policy_versions=[],
    )


def _within(out: PaddedBatch, rows: int, width: int) -> PaddedBatch:
    if out.token_ids.shape[0] < rows or out.token_ids.shape[1] < width:
        raise ValueError(f"a batch of {rows} rows of {width} tokens does not fit into out: {out.token_ids.shape}")
    return PaddedBatch(
        token_ids=out.token_ids[:rows, :width],
        logprobs=out.logprobs[:rows, :width],
        loss_mask=out.loss_mask[:rows, :width],
        attention_mask=out.attention_mask[:rows, :width],
        policy_version=out.policy_version[:rows, :width],
        lengths=out.lengths[:rows],
        truncated=out.truncated[:rows],
        item=out.item[:rows],
        segment=out.segment[:rows],
        job_ids=[],
        policy_versions=[],
    )
