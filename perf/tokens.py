"""The token cost of a turn at any context length, and the drift of text in between: re-tokenised ids that differ.

    python -m perf.peers setup renderers               # once: the peers' environment
    python -m perf.tokens [--quick] [--json FILE]

Agent dialogues have grown turn by turn to a given number of tokens. Their next turns are timed, interleaved. Our turn
proves that nothing has changed, records and parses the completion, and renders and encodes the tool's result. The same
run measures rendering and encoding the whole dialogue each turn, by our own code (`rerender`) and by `transformers`,
and extending it with `renderers`.

The model is Qwen3's published tokenizer and template, if the tests have downloaded it (or PRORL_MODEL_DIR names it).
Otherwise it is a small one of the same family. Other models of the cache folder are measured as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import trio

from perf.chat_families import write_family_model
from perf.harness import Case, Line, Lines, Options, Report, Rows, Series, caption_of, rotated, run_benchmark
from perf.peers.environments import PEERS, PeerUnavailable
from perf.peers.process import open_peer
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.testing.fake_sampling import default_script
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CONTEXTS = (1_000, 4_000, 16_000, 32_000, 64_000, 100_000)
ROUNDS = 6
"""Rounds of turns at each context length, for each set of dialogues."""
QUICK_DIALOGUES, DIALOGUES = 8, 30
QUICK_PEER_ROUNDS, PEER_ROUNDS = 3, 10
DRIFT_DIALOGUES, DRIFT_TURNS = 20, 6
"""Number of dialogues with the fake engine, and of turns in each."""
FAMILY: Final = "qwen3"
WAYS = ("renderers", "transformers")
FLATNESS = 1.5
US = 1e6

# ---------------------------------------------------------------- dialogues

SAID_WORDS, RESULT_WORDS = 30, 150
TURN_TOKENS = 300
"""Approximate tokens of a turn's words. Three quarters are a tool's result."""
WORDS = (
    "the of parser error file return value line test index module class def import self None True raise assert list "
    "dict path open read write 0x7f3a 42 1307 src/lexer.py tests/test_lexer.py :: -> == += [] () {} # TODO "
    "Traceback FAILED passed expected got Größe 数 naïve unbelievable_long_identifier_name"
)
OPENING = (
    ChatMessage(role="system", content="You are a careful software engineer."),
    ChatMessage(role="user", content="A test of this project fails since yesterday. Find out why, and repair it."),
)
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    },
)


class DialogueTurn(NamedTuple):
    """A text of the policy with a tool call, and the tool's result."""

    said: str
    result: str


class TurnTimes(NamedTuple):
    """The CPU times of our turn in this thread, after a context of `context_tokens` tokens.

    CPU time covers all of the turn's work, and other programs do not affect it.

    `prompt_s`: the prompt's ids proven and converted to a list, for the engine. `record_s`: the completion proven,
    recorded and parsed. `extend_s`: the tool's result rendered, encoded and recorded, with the earlier tokens proven
    again.
    """

    context_tokens: int
    prompt_s: float
    record_s: float
    extend_s: float


Times = dict[int, list[TurnTimes]]


def draw_turns(seed: int) -> Iterator[DialogueTurn]:
    """Yield an endless sequence of turns, the same for the same seed."""
    rnd, vocabulary = random.Random(seed), WORDS.split()
    while True:
        words = rnd.choices(vocabulary, k=SAID_WORDS)
        call = msgspec.json.encode({"name": "bash", "arguments": {"command": " ".join(words[:8])}}).decode()
        said = f"Let me see {' '.join(words[8:])}.\n\n<tool_call>\n{call}\n</tool_call>"
        lines = (" ".join(rnd.choices(vocabulary, k=10)) for _ in range(RESULT_WORDS // 10))
        yield DialogueTurn(said, "\n".join(lines))


def sampled_ids(chat: ChatFormat, said: str) -> list[int]:
    """Return the ids that a policy samples for this text, including the end of its turn."""
    return [*chat.codec.encode(chat.codec.mark(said, speech=True)), chat.end_of_turn_id]


def result_of(turn: DialogueTurn) -> ChatMessage:
    """Return the message of the tool's result."""
    return ChatMessage(role="tool", content=turn.result, name="bash")


def whole_dialogue(turns: Iterable[DialogueTurn]) -> list[ChatMessage]:
    """Return every message so far."""
    messages = [*OPENING]
    for turn in turns:
        messages += [ChatMessage(role="assistant", content=turn.said), result_of(turn)]
    return messages


class Dialogue:
    """A dialogue in our own code that grows turn by turn. Blocks."""

    def __init__(self, chat: ChatFormat, seed: int) -> None:
        self._chat = chat
        self._turns = draw_turns(seed)
        self._conversation = Conversation(chat, OPENING, TOOLS)

    def __len__(self) -> int:
        return len(self._conversation)

    def turn(self) -> TurnTimes:
        turn = next(self._turns)
        ids, result = sampled_ids(self._chat, turn.said), [result_of(turn)]
        logprobs, context = [-0.5] * len(ids), len(self)
        started = time.thread_time()
        self._conversation.prompt_token_ids()
        prompted = time.thread_time()
        self._conversation.add_completion(ids, logprobs, policy_version="1", engine="perf")
        recorded = time.thread_time()
        self._conversation.add_messages(result)
        extended = time.thread_time()
        return TurnTimes(context, prompted - started, recorded - prompted, extended - recorded)


def time_turns(chat: ChatFormat, seed: int, contexts: Sequence[int], rounds: int) -> Times:
    """Time turns at each context length, interleaved. Each round has one of each, starting with a different one.

    A slow spell of the machine therefore affects short and long contexts alike. Before that, untimed, a dialogue grows
    to slightly less than each length, so that the timed turns lie around it.
    """
    # Each has different text, because a tokenizer is faster with known text (Gemma's, by the line).
    dialogues = {context: Dialogue(chat, seed * len(contexts) + n) for n, context in enumerate(contexts)}
    for context, dialogue in dialogues.items():
        while len(dialogue) < context - rounds * TURN_TOKENS // 2:
            dialogue.turn()
    times: Times = {context: [] for context in contexts}
    for number in range(rounds):
        for context in rotated(contexts, number):
            times[context].append(dialogues[context].turn())
    return times


# ---------------------------------------------------------------- drift


class Sampled(msgspec.Struct, frozen=True):
    """A turn of a trajectory: the prompt for the policy, the sampled ids, and the prompt of the next turn.

    The next prompt is as recorded. It is missing for the last turn.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    next_prompt_ids: list[int]


class Drift(msgspec.Struct, frozen=True):
    """Counts of drift, over `turns` with a turn after them.

    Attributes:
        turns: number of turns examined.
        ours: turns whose sampled ids, or any earlier ids, differ in the recorded next prompt.
        retokenised: turns whose sampled ids differ after a conversion to text and back.
    """

    turns: int
    ours: int
    retokenised: int

    @property
    def ours_rate(self) -> float:
        return self.ours / max(1, self.turns)

    @property
    def retokenised_rate(self) -> float:
        return self.retokenised / max(1, self.turns)


def drift_of(chat: ChatFormat, turns: Iterable[Sampled]) -> Drift:
    """Count drift over recorded turns.

    A text is encoded in its place: after its prompt's end, before the end of the turn.
    """
    counted = ours = retokenised = 0
    for turn in turns:
        if not turn.next_prompt_ids:
            continue
        counted += 1
        so_far = turn.prompt_ids + turn.completion_ids
        ours += turn.next_prompt_ids[: len(so_far)] != so_far
        retokenised += _encoded_again(chat, turn) != turn.completion_ids
    return Drift(counted, ours, retokenised)


def sampled_at_random(chat: ChatFormat, seed: int) -> list[Sampled]:
    """Return a dialogue with the fake engine's policy, which samples all tokens of the vocabulary uniformly."""
    script = default_script(chat.vocab_size, chat.end_of_turn_id)
    dialogue = draw_turns(seed)
    conversation = Conversation(chat, [*OPENING, ChatMessage(role="user", content=next(dialogue).result)], TOOLS)
    prompt_ids = conversation.prompt_token_ids()
    turns = []
    for _ in range(DRIFT_TURNS):
        completion_ids, logprobs, _reason = script(prompt_ids)
        conversation.add_completion(completion_ids, logprobs)
        conversation.add_messages([result_of(next(dialogue))])
        next_ids = conversation.prompt_token_ids()
        turns.append(Sampled(prompt_ids, completion_ids, next_ids))
        prompt_ids = next_ids
    return turns


def _encoded_again(chat: ChatFormat, turn: Sampled) -> list[int]:
    """Return the completion's ids after a round trip through text, placed after the start of an assistant's turn."""
    added = set(chat.codec.added_ids.values())
    start = max(index for index, token_id in enumerate(turn.prompt_ids) if token_id in added)
    opening = turn.prompt_ids[start:]
    ids = chat.codec.encode(chat.decode([*opening, *turn.completion_ids]))
    return ids[len(opening) :] if ids[: len(opening)] == opening else ids


# ---------------------------------------------------------------- peers


async def measure_peers(
    chat: ChatFormat, dialogues: dict[int, list[DialogueTurn]], *, rounds: int, folder: Path
) -> tuple[list[Series], list[str]]:
    """Time each way `rounds` times with the last turn of each dialogue as the new one.

    Args:
        chat: of a model of the family Qwen3, in a folder that transformers can read.
        dialogues: turns by the context length that they produce.
        rounds: number at each length; the warm-up is not counted.
        folder: an empty folder, for the peers' files.

    Returns:
        CPU time by way and context, and a sentence for each prompt that differs from ours.

    Raises:
        PeerUnavailable: the peers are not installed, or failed.
    """
    series: list[Series] = []
    differing: list[str] = []
    env = {"PATH": os.defpath, "HOME": str(folder), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    async with open_peer(PEERS["renderers"], env=env, cwd=folder, log=folder / "log") as peer:
        for context, turns in dialogues.items():
            path = trio.Path(folder / f"{context}.json")
            await path.write_bytes(msgspec.json.encode(_state(chat, turns)))
            await peer.run(f"begin {path}")
            ids = await trio.to_thread.run_sync(lambda turns=turns: _prompt(chat, turns))  # type: ignore[misc]  # mypy infers no default
            expected = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
            for way in WAYS:
                times_s = [float((await peer.run(way)).output) for _ in range(rounds + 1)]
                series.append(_series(way, context, times_s[1:], peer=True))
                if (await peer.run("digest")).output != expected:
                    differing.append(f"{way}: its prompt of {context} tokens is not the one that the template makes")
    return series, differing


def _state(chat: ChatFormat, turns: list[DialogueTurn]) -> dict[str, object]:
    """Return the peers' input. They make a prompt with the last turn."""
    *before, last = turns
    messages = [{"role": each.role, "content": each.content, "name": each.name} for each in whole_dialogue(before)]
    return {
        "model_dir": str(chat.model_dir),
        "messages": [{key: value for key, value in each.items() if value is not None} for each in messages],
        "said": last.said,
        "completion_ids": sampled_ids(chat, last.said),
        "new_messages": [{"role": "tool", "content": last.result, "name": "bash"}],
        "tools": TOOLS,
    }


def _prompt(chat: ChatFormat, turns: list[DialogueTurn]) -> list[int]:
    return Conversation(chat, whole_dialogue(turns), TOOLS).prompt_token_ids()


# ---------------------------------------------------------------- measuring


async def tokens(options: Options) -> Report:
    """Measure ours, re-rendering and the peers; then count drift."""
    dialogues, rounds = (QUICK_DIALOGUES, QUICK_PEER_ROUNDS) if options.quick else (DIALOGUES, PEER_ROUNDS)
    with tempfile.TemporaryDirectory(prefix="prorl-tokens-") as name:
        peers = Path(name, "peers")
        await trio.Path(peers).mkdir()
        chat, others = await trio.to_thread.run_sync(load_models, Path(name, "tiny"), options.quick)
        turns = await trio.to_thread.run_sync(_turns_to, chat, CONTEXTS)
        times = await trio.to_thread.run_sync(_time_ours, chat, dialogues)
        series = [*_series_of(times), *await trio.to_thread.run_sync(_rerender, chat, turns, rounds)]
        notes = [f"model: {chat.model_dir.name}, {chat.vocab_size} tokens", *caption_of("tokens")]
        try:
            of_peers, differing = await measure_peers(chat, turns, rounds=rounds, folder=peers)
            series += of_peers
            notes = [*differing, *notes]
        except PeerUnavailable as exc:
            notes = [f"left out: {exc}", *notes]
        flatness = await trio.to_thread.run_sync(flatness_of, others, dialogues // 3)
        sampled = (turn for seed in range(DRIFT_DIALOGUES) for turn in sampled_at_random(chat, seed))
        return _report(series, flatness, await trio.to_thread.run_sync(drift_of, chat, sampled), notes)


def load_models(small: Path, quick: bool) -> tuple[ChatFormat, list[ChatFormat]]:
    """Return the main model and, except in quick runs, the others. Refused models are skipped.

    They are in the folders in PRORL_MODEL_DIR, or else in the cache folder. If Qwen3 is missing, a small model of that
    family is made in `small`.
    """
    if configured := os.environ.get("PRORL_MODEL_DIR"):
        folders = [Path(part) for part in configured.split(":")]
    else:
        folders = [
            each.parent for kind in ("tokenizers", "models") for each in cache_dir().glob(f"{kind}/*/tokenizer.json")
        ]
    found = []
    for folder in sorted(folders, key=lambda folder: (not folder.name.startswith(FAMILY), folder.name)):
        with suppress(ConfigError):
            found.append(ChatFormat.load(folder))
            if quick and found[-1].family.name == FAMILY:
                break
    chosen = next((chat for chat in found if chat.family.name == FAMILY), None)
    if chosen is None:
        chosen = ChatFormat.load(write_family_model(small, FAMILY))
    return chosen, [] if quick else [chat for chat in found if chat is not chosen]


def _time_ours(chat: ChatFormat, dialogues: int) -> Times:
    """Time the dialogues of all seeds except the first, which warms up."""
    time_turns(chat, 0, CONTEXTS[:1], ROUNDS)
    times: Times = {context: [] for context in CONTEXTS}
    for seed in range(1, dialogues + 1):
        for context, turns in time_turns(chat, seed, CONTEXTS, ROUNDS).items():
            times[context] += turns
    return times


def flatness_of(chats: Sequence[ChatFormat], dialogues: int) -> dict[str, float]:
    """Return the time of a turn at the longest context over the time at the shortest, by model name."""
    flatness = {}
    for chat in chats:
        times = _time_ours(chat, dialogues)
        first, last = (
            float(np.median([turn.record_s + turn.extend_s for turn in times[context]]))
            for context in (CONTEXTS[0], CONTEXTS[-1])
        )
        flatness[chat.model_dir.name] = last / first
    return flatness


def _turns_to(chat: ChatFormat, contexts: Sequence[int]) -> dict[int, list[DialogueTurn]]:
    """Return one dialogue's turns for each context."""
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
    """Time our own code with a complete re-rendering, as in other systems."""
    series = []
    for context, said in turns.items():
        samples = []
        for _ in range(rounds + 1):
            started = time.thread_time()
            _prompt(chat, said)
            samples.append(time.thread_time() - started)
        series.append(_series("rerender", context, samples[1:]))
    return series


# ---------------------------------------------------------------- figures

PARTS: Final = {
    "turn": ("record_s", "extend_s"),
    "record": ("record_s",),
    "extend": ("extend_s",),
    "prompt": ("prompt_s",),
    "whole": ("prompt_s", "record_s", "extend_s"),
}


def _report(series: list[Series], flatness: dict[str, float], drift: Drift, notes: list[str]) -> Report:
    p50 = {each.case.name: each.percentile(50) for each in series}
    ways = {name.split(".")[0]: each.case.peer for name, each in zip(p50, series, strict=True)}
    low, high = _name(CONTEXTS[0]), _name(CONTEXTS[-1])
    rows = [[f"{each:,}", *(f"{p50[f'{way}.{_name(each)}']:,.0f}" for way in ways)] for each in CONTEXTS]
    tables = [Rows(title="us a turn, p50", headings=["context", *ways], rows=rows)]
    if flatness:
        others = [[name, f"{value:.2f}"] for name, value in flatness.items()]
        tables.append(Rows(title="the same with other models", headings=["model", f"{high} over {low}"], rows=others))
    lines = [
        Line(
            label=way,
            points=[(float(context), p50[f"{way}.{_name(context)}"]) for context in CONTEXTS],
            role="peer" if peer else "ours",
        )
        for way, peer in ways.items()
    ]
    title, unit = "a turn against the context's length", "us a turn (p50; dashed: peers)"
    return Report(
        title=f"tokens: {title}",
        series=series,
        more_metrics={
            f"render.us_per_turn_{low}": p50[f"turn.{low}"],
            f"render.us_per_turn_{high}": p50[f"turn.{high}"],
            "render.flatness": p50[f"turn.{high}"] / p50[f"turn.{low}"],
            **{
                f"render.{way}_over_whole_{high}": p50[f"{way}.{high}"] / p50[f"whole.{high}"]
                for way in ways
                if way not in PARTS
            },
            "drift.ours": drift.ours_rate,
            "drift.retokenised_rate": drift.retokenised_rate,
        },
        detail_metrics={
            **{f"render.flatness.{name}": value for name, value in flatness.items()},
            "render.flatness_with_prompt": p50[f"whole.{high}"] / p50[f"whole.{low}"],
        },
        at_most={"render.flatness": FLATNESS, "drift.ours": 0.0},
        tables=tables,
        figures=[Lines(title=title, x_label="context, tokens", y_label=unit, lines=lines, logarithmic=True)],
        notes=notes,
    )


def _series_of(times: Times) -> list[Series]:
    return [
        _series(name, context, [sum(getattr(turn, part) for part in added) for turn in times[context]])
        for name, added in PARTS.items()
        for context in CONTEXTS
    ]


def _series(way: str, context: int, samples_s: Sequence[float], *, peer: bool = False) -> Series:
    case = Case(name=f"{way}.{_name(context)}", unit="us", peer=peer)
    return Series(case=case, samples=[sample_s * US for sample_s in samples_s])


def _name(context: int) -> str:
    return f"{context // 1000}k"


if __name__ == "__main__":
    sys.exit(run_benchmark(tokens))
