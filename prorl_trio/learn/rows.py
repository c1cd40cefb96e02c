"""Rollouts as packed tensors for a forward pass: the shared prompt of rollouts is computed once.

The rollouts of a group begin with the same prompt. A pack is one sequence: a prompt, the rest of each row that begins
with it, and then the next prompt. The rests are branches that see the prompt and themselves but not each other.
Positions in a branch continue from the prompt's. Nothing is padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from prorl_trio.types.models import Outcome


class Row(NamedTuple):
    """A segment of one rollout of a batch, with T tokens. The mask is 1 where the policy sampled the token."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.uint8]
    rollout: int


class Pack(NamedTuple):
    """T tokens in one sequence; the policy sampled S of the tokens.

    Attributes:
        token_ids, positions: int64 [1, T]; each token, and its position in its own row.
        attention: bool [1, 1, T, T]; whether the token of a line sees the token of a column.
        before: int64 [S]; index of each sampled token's predecessor, whose output predicts the token.
        targets, sampled, rollout: the sampled tokens, their log-probabilities in the engine, and their rollouts [S].
    """

    token_ids: Tensor
    positions: Tensor
    attention: Tensor
    before: Tensor
    targets: Tensor
    sampled: Tensor
    rollout: Tensor


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return every segment of `outcomes` that contains sampled tokens, without a copy. Rollouts are numbered from 0.

    A rollout that failed before its first token has a reward and no row: it counts in the baseline of its group.
    """
    rows: list[Row] = []
    for number, outcome in enumerate(outcomes):
        recorded = outcome.trajectory.segments if outcome.trajectory is not None else []
        segments = [segment for segment in recorded if segment.free_mask.any()]
        rows += [Row(segment.token_ids, segment.logprobs, segment.free_mask, number) for segment in segments]
    return rows


def pack_rows(rows: Sequence[Row], max_tokens: int, device: str | torch.device = "cpu") -> Iterator[Pack]:
    """Yield packs of at most `max_tokens` tokens with all `rows`, in order. A longer row gets its own pack.

    Neighbours share the tokens before the first sampled one if they are equal.
    """
    trees: list[list[Row]] = []
    size = 0
    for row in rows:
        prompt = _prompt(row)
        shared = bool(trees) and np.array_equal(_prompt(trees[-1][0]), prompt)
        if trees and size + len(row.token_ids) - shared * len(prompt) > max_tokens:
            yield _pack(trees, device)
            trees, size, shared = [], 0, False
        size += len(row.token_ids) - shared * len(prompt)
        if shared:
            trees[-1].append(row)
        else:
            trees.append([row])
    if trees:
        yield _pack(trees, device)


def _prompt(row: Row) -> npt.NDArray[np.int32]:
    return row.token_ids[: int(row.loss_mask.argmax())]


def _pack(trees: Sequence[Sequence[Row]], device: str | torch.device) -> Pack:
    """Lay trees of rows with the same prompt side by side."""
    pieces: list[tuple[npt.NDArray[np.int32], int, int, int]] = []  # tokens, first position, tree, branch (0: prompt)
    before, sampled_rows, start = [], [], 0
    for tree, rows in enumerate(trees):
        prompt = _prompt(rows[0])
        shared, last_of_prompt = len(prompt), start + len(prompt) - 1
        pieces.append((prompt, 0, tree, 0))
        start += shared
        for branch, row in enumerate(rows, start=1):
            pieces.append((row.token_ids[shared:], shared, tree, branch))
            where = np.flatnonzero(row.loss_mask)
            before.append(np.where(where == shared, last_of_prompt, start + where - shared - 1))
            sampled_rows.append((row.token_ids[where], row.logprobs[where], np.full(len(where), row.rollout)))
            start += len(row.token_ids) - shared

    def tensor(parts: Sequence[npt.NDArray[np.generic]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, dtype)

    tree_of = tensor([np.full(len(tokens), tree) for tokens, _, tree, _ in pieces])
    branch_of = tensor([np.full(len(tokens), branch) for tokens, _, _, branch in pieces])
    sees = (branch_of == 0) | (branch_of[:, None] == branch_of)
    return Pack(
        token_ids=tensor([tokens for tokens, *_ in pieces])[None],
        positions=tensor([np.arange(first, first + len(tokens)) for tokens, first, _, _ in pieces])[None],
        attention=(sees & (tree_of[:, None] == tree_of)).tril()[None, None],
        before=tensor(before),
        targets=tensor([ids for ids, _, _ in sampled_rows]),
        sampled=tensor([logprobs for _, logprobs, _ in sampled_rows], torch.float32),
        rollout=tensor([rollout for _, _, rollout in sampled_rows]),
    )
