"""Recorded rollouts as one HTML file that needs neither a server nor a network."""

from __future__ import annotations

import base64
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_trio.edges.viewer.pages import one_file
from prorl_trio.runs.book import shown_path
from prorl_trio.runs.rollout_view import RolloutView
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy as np
    import numpy.typing as npt

    from prorl_trio.runs.book import Run, RunBook
    from prorl_trio.runs.index import Row


def export_html(book: RunBook, jobs: Collection[str] = ()) -> bytes:
    """Return the page with the rollouts `jobs`, or with all rollouts of every run. It takes about 11 bytes per token.

    Raises:
        ConfigError: a rollout is in no run.
    """
    missing = set(jobs)
    runs, vocabulary = list[dict[str, Any]](), dict[int, str]()
    for run in book.runs():
        rows = [] if (index := run.index()) is None else [row for row in index.rows if not jobs or row.job_id in jobs]
        if rows or not jobs:
            missing -= {row.job_id for row in rows}
            rollouts = [_rollout(book, run, row, vocabulary) for row in rows]
            runs.append({"about": run.about(), "rows": rows, "rollouts": rollouts})
    if missing:
        raise ConfigError(f"no run of {book.root} has a rollout {min(missing)!r}")
    return one_file(
        msgspec.json.encode({"root": shown_path(book.root), "runs": runs, "vocabulary": vocabulary}, enc_hook=str)
    )


def _rollout(book: RunBook, run: Run, row: Row, vocabulary: dict[int, str]) -> dict[str, Any]:
    """Return a rollout with all its texts and tokens, and add the tokens' texts to `vocabulary`."""
    shown = book.rollout(run.run_id, row.job_id)
    view = RolloutView(shown.outcome, shown.vocabulary, head_chars=None)
    trajectory = view.outcome.trajectory
    segments = [] if trajectory is None else trajectory.segments
    return {**view.about, "tokens": [_tokens(view, index, vocabulary) for index in range(len(segments))]}


def _tokens(view: RolloutView, index: int, vocabulary: dict[int, str]) -> dict[str, Any]:
    """Return a segment's ids, the log-probabilities of its sampled tokens, runs of kinds, and texts.

    A token's text follows from its id, except for characters that span several tokens. They are in `texts`, by place.
    """
    assert view.outcome.trajectory is not None
    segment = view.outcome.trajectory.segments[index]
    own: dict[int, str] = {}
    texts, letters = view.decoded(index)
    for place, (token_id, text) in enumerate(zip(segment.token_ids.tolist(), texts or (), strict=texts is not None)):
        if vocabulary.setdefault(token_id, text) != text:
            own[place] = text
    kinds = [[kind, len(list(run))] for kind, run in groupby(letters.decode())]
    return {
        "ids": _base64(segment.token_ids),
        "logprobs": _base64(segment.logprobs[segment.loss_mask == 1]),
        "kinds": kinds,
        "texts": own,
    }


def _base64(array: npt.NDArray[np.generic]) -> str:
    return base64.b64encode(array.tobytes()).decode()
