"""The cost of a turn's tokens, however long the context is, and of text in between: re-tokenised ids that differ.

    python -m perf.peers setup renderers               # once: the peers' environment
    python -m perf.tokens [--quick] [--json FILE]

Dialogues of an agent have grown turn by turn to so many tokens; their next turns are timed, interleaved. A turn of
ours: prove that nothing has changed, record and parse the completion, render and encode the tool's result. Beside it,
in the same run: rendering and encoding the whole dialogue each turn, by our own code (`rerender`) and by
`transformers`, and extending it with `renderers`.

The model is Qwen3's published tokenizer and template where the tests have fetched it (or PRORL_MODEL_DIR names it), a
small one of the same family otherwise; other models of the cache folder are measured besides.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import trio
from rich.table import Table

from perf.chat_families import write_family_model
from perf.harness import PLOT_DPI, Case, Options, Report, Series, run_benchmark
from perf.machine import describe_machine
from perf.peers.environments import PeerUnavailable
from perf.tokens_dialogue import TOOLS, DialogueTurn, TurnTimes, draw_turns, sampled_ids, time_turns, whole_dialogue
from perf.tokens_drift import Drift, drift_of, sampled_at_random
from perf.tokens_peers import WAYS, measure_peers
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXTS = (1_000, 4_000, 16_000, 32_000, 64_000, 100_000)
ROUNDS = 6
"""Rounds of turns at each length of context, for each set of dialogues."""
QUICK_DIALOGUES, DIALOGUES = 8, 30
QUICK_PEER_ROUNDS, PEER_ROUNDS = 3, 10
DRIFT_DIALOGUES = 20
FAMILY: Final = "qwen3"
FLATNESS = 1.5
US = 1e6
Times = dict[int, list[TurnTimes]]
NOTES = [
    "turn: a completion proven, recorded and parsed (record), and a tool's result rendered, encoded and recorded, what "
    "was there proven again (extend). prompt: its ids as a list, which the engine's request is made of; a request has "
    "the whole prompt in it, so that this grows with the context for everybody. Times are CPU time, peers' too.",
    "Peers hand over the whole prompt, too, so they are held against `whole`: turn and prompt. "
    "They run in their own process, without the pipe to it being charged. `renderers` parses and extends, as ours "
    "does, without a proof; `transformers` renders and encodes all messages, as `rerender` does with our code.",
    "drift: turns whose sampled ids change once they have been text, of short completions by the fake engine, which "
    "samples any token alike.",
]


class TokensReport(Report, frozen=True, kw_only=True):
    """The plot has a line for each way, against the length of the context."""

    def write_plot(self, path: Path) -> bool:
        """False, and no file, where matplotlib is missing."""
        if importlib.util.find_spec("matplotlib") is None:
            return False
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
        pyplot.switch_backend("agg")
        figure, axes = pyplot.subplots(figsize=(8, 5))
        for way in dict.fromkeys(series.case.name.split(".")[0] for series in self.series):
            points = [series for series in self.series if series.case.name.startswith(f"{way}.")]
            contexts = [_tokens_of(series) for series in points]
            p50, p95 = ([series.percentile(percent) for series in points] for percent in (50, 95))
            style = "--" if points[0].case.peer else "-"
            (line,) = axes.plot(contexts, p50, style, marker="o", markersize=3, label=way)
            axes.fill_between(contexts, p50, p95, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("us a turn (p50, shaded to p95; dashed: peers)")
        axes.set_title(self.title)
        axes.legend()
        figure.text(0.01, 0, describe_machine(), fontsize=5, va="bottom", color="grey")
        figure.tight_layout()
        figure.savefig(path, dpi=PLOT_DPI)
        pyplot.close(figure)
        return True


async def tokens(options: Options) -> Report:
    """Measure ours, re-rendering and the peers; then count drift."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-tokens-")))
        return await _measure(options, folder)


async def _measure(options: Options, folder: Path) -> Report:
    chat, others = await trio.to_thread.run_sync(_load_models, folder / "model", options.quick)
    rounds = QUICK_PEER_ROUNDS if options.quick else PEER_ROUNDS
    dialogues = QUICK_DIALOGUES if options.quick else DIALOGUES
    turns = await trio.to_thread.run_sync(_turns_to, chat, CONTEXTS)
    times = await trio.to_thread.run_sync(_time_ours, chat, dialogues)
    series = _series_of(times)
    series += await trio.to_thread.run_sync(_rerender, chat, turns, rounds)
    notes = [f"model: {chat.model_dir.name}, {chat.vocab_size} tokens", *NOTES]
    try:
        peers = folder / "peers"
        peers.mkdir()
        samples, differing = await measure_peers(chat, turns, rounds=rounds, folder=peers)
        notes = [*differing, *notes]
        series += [_series(way, context, samples[way, context], peer=True) for way in WAYS for context in CONTEXTS]
    except PeerUnavailable as exc:
        notes = [f"left out: {exc}", *notes]
    flatness = await trio.to_thread.run_sync(_flatness_of, others, dialogues // 3)
    drift = await trio.to_thread.run_sync(_drift, chat)
    return _report(series, flatness, drift, notes)


def _report(series: list[Series], flatness: dict[str, float], drift: Drift, notes: list[str]) -> Report:
    p50 = {each.case.name: each.percentile(50) for each in series}
    low, high = _name(CONTEXTS[0]), _name(CONTEXTS[-1])
    others = [way for way in ("rerender", *WAYS) if f"{way}.{high}" in p50]
    metrics = {
        f"render.us_per_turn_{low}": p50[f"turn.{low}"],
        f"render.us_per_turn_{high}": p50[f"turn.{high}"],
        "render.flatness": p50[f"turn.{high}"] / p50[f"turn.{low}"],
        **{f"render.{way}_over_whole_{high}": p50[f"{way}.{high}"] / p50[f"whole.{high}"] for way in others},
        "drift.ours": drift.ours_rate,
        "drift.retokenised_rate": drift.retokenised_rate,
    }
    details = {f"render.flatness.{name}": value for name, value in flatness.items()}
    details["render.flatness_with_prompt"] = p50[f"whole.{high}"] / p50[f"whole.{low}"]
    return TokensReport(
        title="tokens: a turn against the context's length",
        series=series,
        more_metrics={name: round(value, 3) for name, value in metrics.items()},
        detail_metrics={name: round(value, 3) for name, value in details.items()},
        at_most={"render.flatness": FLATNESS, "drift.ours": 0.0},
        more_tables=[_context_table(p50), *([_family_table(flatness)] if flatness else [])],
        notes=notes,
    )


# ---------------------------------------------------------------- measuring


def _load_models(small: Path, quick: bool) -> tuple[ChatFormat, list[ChatFormat]]:
    """The one that everything is measured with, and, not in quick runs, the others. What is refused is left out."""
    chosen: ChatFormat | None = None
    others = []
    for folder in _model_dirs():
        if chosen is not None and quick:
            break
        if chosen is None and quick and not folder.name.startswith(FAMILY):
            continue
        with suppress(ConfigError):
            chat = ChatFormat.load(folder)
            if chosen is None and chat.family.name == FAMILY:
                chosen = chat
            else:
                others.append(chat)
    return chosen or ChatFormat.load(write_family_model(small, FAMILY)), [] if quick else others


def _model_dirs() -> list[Path]:
    """Return the folders that PRORL_MODEL_DIR names, or else those in the cache folder; Qwen3's first."""
    if configured := os.environ.get("PRORL_MODEL_DIR"):
        return [Path(part) for part in configured.split(":")]
    cached = (
        folder.parent for kind in ("tokenizers", "models") for folder in (cache_dir() / kind).glob("*/tokenizer.json")
    )
    return sorted(cached, key=lambda folder: (not folder.name.startswith(FAMILY), folder.name))


def _time_ours(chat: ChatFormat, dialogues: int) -> Times:
    """Over dialogues of all seeds but the first, which warms up."""
    time_turns(chat, 0, CONTEXTS[:1], ROUNDS)
    times: Times = {context: [] for context in CONTEXTS}
    for seed in range(1, dialogues + 1):
        for context, turns in time_turns(chat, seed, CONTEXTS, ROUNDS).items():
            times[context] += turns
    return times


def _flatness(times: Times) -> float:
    first, last = (
        float(np.median([turn.record_s + turn.extend_s for turn in times[context]]))
        for context in (CONTEXTS[0], CONTEXTS[-1])
    )
    return last / first


def _flatness_of(chats: Sequence[ChatFormat], dialogues: int) -> dict[str, float]:
    return {chat.model_dir.name: _flatness(_time_ours(chat, dialogues)) for chat in chats}


def _drift(chat: ChatFormat) -> Drift:
    return drift_of(chat, (turn for seed in range(DRIFT_DIALOGUES) for turn in sampled_at_random(chat, seed)))


def _turns_to(chat: ChatFormat, contexts: Sequence[int]) -> dict[int, list[DialogueTurn]]:
    """The turns of one dialogue that make each context."""
    turns: list[DialogueTurn] = []
    reached: dict[int, list[DialogueTurn]] = {}
    drawn = draw_turns(0)
    context = len(Conversation(chat, whole_dialogue([]), TOOLS))
    for wanted in contexts:
        while context < wanted:
            turns.append(next(drawn))
            context += len(sampled_ids(chat, turns[-1].said)) + len(chat.codec.encode(turns[-1].result))
        reached[wanted] = list(turns)
    return reached


def _rerender(chat: ChatFormat, turns: dict[int, list[DialogueTurn]], rounds: int) -> list[Series]:
    """Our own code, as if it did as others do."""
    series = []
    for context, said in turns.items():
        messages = whole_dialogue(said)
        samples = []
        for _ in range(rounds + 1):
            started = time.thread_time()
            Conversation(chat, messages, TOOLS).prompt_token_ids()
            samples.append(time.thread_time() - started)
        series.append(_series("rerender", context, samples[1:]))
    return series


# ---------------------------------------------------------------- figures


def _series_of(times: Times) -> list[Series]:
    parts = {
        "turn": ("record_s", "extend_s"),
        "record": ("record_s",),
        "extend": ("extend_s",),
        "prompt": ("prompt_s",),
        "whole": ("prompt_s", "record_s", "extend_s"),
    }
    return [
        _series(name, context, [sum(getattr(turn, part) for part in added) for turn in times[context]])
        for name, added in parts.items()
        for context in CONTEXTS
    ]


def _series(way: str, context: int, samples_s: Sequence[float], *, peer: bool = False) -> Series:
    case = Case(name=f"{way}.{_name(context)}", unit="us", peer=peer)
    return Series(case=case, samples=[sample_s * US for sample_s in samples_s])


def _name(context: int) -> str:
    return f"{context // 1000}k"


def _tokens_of(series: Series) -> int:
    return int(series.case.name.rpartition(".")[2].removesuffix("k")) * 1000


def _context_table(p50: dict[str, float]) -> Table:
    """A row for each context."""
    ways = list(dict.fromkeys(name.split(".")[0] for name in p50))
    table = Table("context", title="us a turn, p50")
    for way in ways:
        table.add_column(way, justify="right")
    for context in CONTEXTS:
        table.add_row(f"{context:,}", *(f"{p50[f'{way}.{_name(context)}']:,.0f}" for way in ways))
    return table


def _family_table(flatness: dict[str, float]) -> Table:
    table = Table("model", title="the same with other models")
    table.add_column(f"{_name(CONTEXTS[-1])} over {_name(CONTEXTS[0])}", justify="right")
    for name, value in flatness.items():
        table.add_row(name, f"{value:.2f}")
    return table


if __name__ == "__main__":
    sys.exit(run_benchmark(tokens))
