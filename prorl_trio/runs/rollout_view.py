"""One rollout as the viewer shows it: messages, segments, timing, and windows of tokens.

Everything is plain JSON. Long texts are truncated, and fetched in parts by their name.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from tokenizers import Tokenizer

from prorl_trio.chat.model_folder import MAX_FILE_BYTES
from prorl_trio.file_systems import read_regular
from prorl_trio.types.errors import UnknownJob
from prorl_trio.types.models import ASIDE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from prorl_trio.types.models import ChatMessage, Outcome, ToolCall, Trajectory, Turn

HEAD_CHARS: Final = 4000
MAX_WINDOW: Final = 4096
"""Maximum number of tokens in one answer."""
MAX_MERGED: Final = 4
"""Maximum number of bytes of a UTF-8 character, and so of tokens per character."""
BROKEN: Final = "\ufffd"

SAMPLED, TEMPLATE, TOOL, MESSAGE, GIVEN, SHARED = b"stomg="
"""Kinds of tokens. A given token's part in the prompt is unknown."""


class Vocabulary:
    """The separate texts of a tokenizer's ids. Raises OSError or ValueError if the model lacks a usable tokenizer."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = Tokenizer.from_buffer(read_regular(model / "tokenizer.json", MAX_FILE_BYTES))
        self._texts: dict[int, str] = {}

    def texts(self, ids: npt.NDArray[np.int32]) -> list[str]:
        """Return the text of each token.

        If a character spans several tokens, the first has the text and the others are empty.
        """
        new = [each for each in np.unique(ids).tolist() if each not in self._texts]
        for token_id, text in zip(new, self._tokenizer.decode_batch([[each] for each in new], False), strict=True):
            raw = self._tokenizer.id_to_token(token_id) or ""
            self._texts[token_id] = raw.replace("\u2581", " ") if "\u2581" in raw else text
        values = ids.tolist()
        texts = [self._texts[each] for each in values]
        for place, text in enumerate(texts):
            if BROKEN in text:
                self._merge(values, texts, place)
        return texts

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a run of tokens, control tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _merge(self, ids: list[int], texts: list[str], place: int) -> None:
        for end in range(place + 2, min(place + MAX_MERGED, len(ids)) + 1):
            whole = self._tokenizer.decode(ids[place:end], skip_special_tokens=False)
            if BROKEN not in whole:
                texts[place:end] = [whole, *[""] * (end - place - 1)]
                return


class RolloutView:
    """An outcome prepared for viewing. Its texts and kinds of tokens are computed once, on demand.

    Args:
        outcome: the outcome to show.
        vocabulary: the vocabulary of the model that sampled it; None: unknown, and tokens lack texts.
        head_chars: longer texts are truncated to this length at first; None: all texts are sent whole.
    """

    def __init__(self, outcome: Outcome, vocabulary: Vocabulary | None, head_chars: int | None = HEAD_CHARS) -> None:
        self.outcome = outcome
        self.vocabulary = vocabulary
        self._head_chars = head_chars
        self._cut: dict[str, str] = {}
        self._decoded: dict[int, tuple[list[str] | None, bytes]] = {}

    @cached_property
    def _trajectory(self) -> Trajectory:
        if self.outcome.trajectory is None:
            raise UnknownJob(f"no trajectory was recorded of job {self.outcome.job_id!r}")
        return self.outcome.trajectory

    @cached_property
    def about(self) -> dict[str, Any]:
        """Return everything except the tokens."""
        outcome, trajectory = self.outcome, self.outcome.trajectory
        return {
            **_plain(outcome, "job_id", "instance_id", "group_id", "status", "reward", "cause", "error", "error_code"),
            **_plain(outcome, "attempt", "attempts", "tags", "timing"),
            "regraded": outcome.regraded is True,
            "details": self._head(_pretty(outcome.details), "details"),
            "evaluation_log": self._head(outcome.evaluation_log, "log"),
            "decoded": self.vocabulary is not None,
            "trajectory": None if trajectory is None else self._about_trajectory(trajectory),
        }

    def _about_trajectory(self, trajectory: Trajectory) -> dict[str, Any]:
        return {
            **_plain(trajectory, "prefix_breaks", "drift_tokens", "undelivered_tokens", "echoes"),
            "tools": self._head(_pretty(trajectory.tools), "tools") if trajectory.tools else "",
            "segments": _segments(trajectory),
            "turns": [self._turn(number, turn) for number, turn in enumerate(trajectory.turns)],
        }

    def _turn(self, number: int, turn: Turn) -> dict[str, Any]:
        segment, part = self._trajectory.segments[turn.segment], f"turn.{number}"
        logprobs = segment.logprobs[turn.completion_start : turn.completion_end]
        return {
            **_plain(turn, "segment", "finish_reason", "inference_s", "tools_s", "dropped_tokens", "tool_results"),
            "start": turn.completion_start,
            "end": turn.completion_end,
            "received": [self._begins[number], turn.completion_start],
            "text": self._head(turn.text, f"{part}.text"),
            "calls": [self._call(call, f"{part}.call.{n}") for n, call in enumerate(turn.tool_calls)],
            "observations": [self._head(text, f"{part}.observation.{n}") for n, text in enumerate(turn.observations)],
            "messages": [self._message(each, f"{part}.message.{n}") for n, each in enumerate(turn.messages)],
            "logprob_mean": float(logprobs.mean()) if len(logprobs) else None,
            "logprob_min": float(logprobs.min()) if len(logprobs) else None,
        }

    def _message(self, message: ChatMessage, part: str) -> dict[str, Any]:
        calls = [f"{call.name}({_arguments(call)})" for call in message.tool_calls]
        content = self._head(message.content, part)
        return {"role": message.role, "name": message.name, "content": content, "calls": calls}

    def _call(self, call: ToolCall, part: str) -> dict[str, Any]:
        return {"name": call.name, "arguments": self._head(_arguments(call), part), "error": call.error, "id": call.id}

    def _head(self, text: str, part: str) -> str | dict[str, Any]:
        """Return a short text whole. For a long text, return its beginning, length and name."""
        if self._head_chars is None or len(text) <= self._head_chars:
            return text
        self._cut[part] = text
        return {"text": text[: self._head_chars], "chars": len(text), "part": part}

    @cached_property
    def _begins(self) -> list[int]:
        """Return for each turn the position of the first token that the engine received after the previous turn."""
        ends = {index: segment.shared for index, segment in enumerate(self._trajectory.segments)}
        begins: list[int] = []
        for turn in self._trajectory.turns:
            begins.append(ends[turn.segment])
            ends[turn.segment] = turn.completion_end
        return begins

    def text(self, part: str, offset: int, limit: int) -> dict[str, Any]:
        """Return characters of a text that `about` truncated, or (`received.TURN`) of a turn's received tokens."""
        name, _, number = part.partition(".")
        if name == "received" and number in map(str, range(len(self._trajectory.turns))):
            turn = self._trajectory.turns[int(number)]
            ids = self._trajectory.segments[turn.segment].token_ids[self._begins[int(number)] : turn.completion_start]
            text = f"{ids.tolist()}" if self.vocabulary is None else self.vocabulary.decode(ids.tolist())
        elif self.about and part in self._cut:
            text = self._cut[part]
        else:
            raise UnknownJob(f"job {self.outcome.job_id!r} has no text {part!r}")
        return {"text": text[offset : offset + limit], "chars": len(text)}

    def tokens(self, index: int, start: int, count: int) -> dict[str, Any]:
        """Return a window of a segment's tokens: ids, texts, log-probabilities, and a letter for each one's kind."""
        if not 0 <= index < len(self._trajectory.segments):
            raise UnknownJob(f"job {self.outcome.job_id!r} has no segment {index}")
        segment = self._trajectory.segments[index]
        window = slice(start, start + min(count, MAX_WINDOW))
        texts, kinds = self.decoded(index)
        return {
            "start": start,
            "ids": segment.token_ids[window].tolist(),
            "texts": None if texts is None else texts[window],
            "logprobs": np.round(segment.logprobs[window].astype(float), 4).tolist(),
            "kinds": kinds[window].decode(),
        }

    def decoded(self, index: int) -> tuple[list[str] | None, bytes]:
        """Return the texts of a segment's tokens, None without a vocabulary, and the letter of each token's kind."""
        if index not in self._decoded:
            segment = self._trajectory.segments[index]
            texts = None if self.vocabulary is None else self.vocabulary.texts(segment.token_ids)
            kinds = np.full(len(segment), GIVEN, dtype="u1")
            if texts is not None:
                self._mark_all(index, kinds, texts)
            kinds[: segment.shared] = SHARED
            kinds[segment.loss_mask == 1] = SAMPLED
            self._decoded[index] = texts, kinds.tobytes()
        return self._decoded[index]

    def _mark_all(self, index: int, kinds: npt.NDArray[np.uint8], texts: list[str]) -> None:
        at, said = self._trajectory.segments[index].shared, list[tuple[int, str]]()
        for turn in self._trajectory.turns:
            if turn.segment == index:
                said += [(MESSAGE, message.content) for message in turn.messages]
                _mark(kinds[at : turn.completion_start], texts[at : turn.completion_start], said)
                at, said = turn.completion_end, [(TOOL, text) for text in turn.observations]
        if said:
            _mark(kinds[at:], texts[at:], said)


def _mark(kinds: npt.NDArray[np.uint8], texts: list[str], said: list[tuple[int, str]]) -> None:
    """Mark the tokens between two completions by their message. All other tokens are the template's.

    Templates may trim a text. If a text cannot be found, the parts of all these tokens are unknown.
    """
    whole = "".join(texts)
    ends = np.cumsum([len(text) for text in texts])
    found, at = [], 0
    for kind, text in said:
        text = text.strip()
        place = whole.find(text, at)
        if place < 0:
            return
        at = place + len(text)
        found.append((kind, place, at))
    kinds[:] = TEMPLATE
    for kind, start, end in found:
        first, last = np.searchsorted(ends, [start, end - 1], side="right")
        kinds[first : last + (end > start)] = kind


def _plain(struct: msgspec.Struct, *names: str) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in names}


def _segments(trajectory: Trajectory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, segment in enumerate(trajectory.segments):
        above = found[segment.parent]["lane"] if segment.parent is not None and 0 <= segment.parent < index else 0
        found.append(
            {
                **_plain(segment, "parent", "reason", "shared", "agent", "agent_type", "spans"),
                "tokens": len(segment),
                "sampled": int(np.count_nonzero(segment.loss_mask)),
                "lane": above + (segment.reason in ASIDE),
            }
        )
    return found


def _arguments(call: ToolCall) -> str:
    """Return the arguments of a call as JSON, or the text of a malformed call."""
    return call.raw if call.error else _pretty(call.arguments)


def _pretty(value: object) -> str:
    try:
        return msgspec.json.format(msgspec.json.encode(keyed(value), enc_hook=str), indent=2).decode()
    except RecursionError:
        return "(nested too deeply to be shown)"


def keyed(value: Any) -> Any:
    """Return `value` with texts as keys, because a handler's `details` may be valid msgpack but invalid JSON."""
    if isinstance(value, dict):
        return {str(key): keyed(item) for key, item in value.items()}
    return [keyed(item) for item in value] if isinstance(value, list | tuple) else value
