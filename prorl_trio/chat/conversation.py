"""A dialogue as token ids: the prompt, sampled completions, and replies, turn by turn.

A conversation consists of token ids; text is rendered once and never encoded again. The next prompt is always the
previous prompt, plus the sampled ids bit for bit, plus the template's own text for the messages between.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
import numpy as np

from prorl_trio.chat.template import assistant_message, call_id, parameter_schemas, spoken_message
from prorl_trio.chat.token_memory import RolloutTokens
from prorl_trio.types.errors import BackendError, ContextLengthExceeded, HandlerError, TokenDrift
from prorl_trio.types.models import ChatMessage, PolicySpan, Segment, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from prorl_trio.chat.families.syntax import SpokenTurn
    from prorl_trio.chat.format import ChatFormat, OnBreak
    from prorl_trio.chat.token_memory import SegmentTokens
    from prorl_trio.types.models import Message, SegmentReason, ToolSchema


MAX_CLOSINGS_READ = 32
_CLOSING_TOKENS = 64
"""Tokens that are enough to contain the closing of a call, byte by byte."""
_TAIL_TOKENS = 8
"""Tokens of a prompt's end that are enough to detect opened reasoning, even if `<think>` is several tokens."""

MAX_LOGPROB: Final = 0.01
"""The logprob of a certain token is 0, and rounding may yield more."""


class ServedModel(Protocol):
    """The facts of a model against which its ids are checked; see `ChatFormat`."""

    @property
    def model_dir(self) -> Path:
        """Its folder, for messages."""

    @property
    def ids_below(self) -> int:
        """Exclusive upper bound of the ids that it can sample."""


def sampled_arrays(
    token_ids: Sequence[int], logprobs: Sequence[float], model: ServedModel
) -> tuple[array[int], array[float]]:
    """Return int32 ids and float32 logprobs of tokens sampled by `model`; arrays are returned unchanged.

    Raises:
        BackendError: an engine may not return these values, or an id does not belong to the model; not retryable.
    """
    if len(token_ids) != len(logprobs):
        raise BackendError(
            f"the backend returned {len(token_ids)} token ids and {len(logprobs)} logprobs; they must be as many",
            retryable=False,
        )
    try:
        ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "i" else array("i", token_ids)
        values = logprobs if isinstance(logprobs, array) and logprobs.typecode == "f" else array("f", logprobs)
    except (TypeError, OverflowError) as exc:
        raise BackendError(f"the backend returned a token id or logprob that is none: {exc}", retryable=False) from exc
    possible = np.asarray(values) <= MAX_LOGPROB  # false for NaN
    if not possible.all():
        worst = values[int(np.argmin(possible))]
        raise BackendError(
            f"the backend returned the logprob {worst}, which is that of no probability", retryable=False
        )
    if (np.asarray(ids).view(np.uint32) < model.ids_below).all():  # false for a negative id
        return ids, values
    if min(ids) < 0:
        raise BackendError(f"the backend returned the token id {min(ids)}", retryable=False)
    raise BackendError(
        f"the backend returned the token id {max(ids)}, and the model has ids below {model.ids_below} only: it serves "
        f"another model than the one in {model.model_dir}, which [model] path names",
        retryable=False,
    )


class ParsedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one completion.

    Attributes:
        content: the text outside reasoning, tool calls and special tokens.
        reasoning: the text inside `<think>`.
        tool_calls: in order; an unreadable call has an `error`.
        ended: an end-of-turn token was sampled last; otherwise the completion was cut short.
        text: the whole decoded text, with special tokens.
    """

    content: str
    reasoning: str
    tool_calls: list[ToolCall]
    ended: bool
    text: str


class CompletionRange(NamedTuple):
    """Tokens `start` (inclusive) to `end` (exclusive) of segment `segment` are one completion."""

    start: int
    end: int
    segment: int


class _Point(NamedTuple):
    """The state of a dialogue after a completion: the number of its messages, or the remembered messages."""

    history: int | list[Message]
    answer: Message
    calls: int


def common_prefix(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Return the length of the common prefix of two sequences of tokens."""
    shared = min(len(one), len(other))
    differing = np.flatnonzero(one[:shared] != other[:shared])
    return int(differing[0]) if len(differing) else shared


class Conversation:
    """The token state of one trajectory. Not for concurrent use; needs no closing.

    Tokens are written once, as they arrive, into memory of this process, or into the memory given to `keep_in`.

    The calls alternate: `prompt_token_ids`, `add_completion`, `add_messages`, and again. A call out of turn raises
    RuntimeError. A call that raises has changed nothing.

    Attributes:
        prefix_breaks: segments begun because the template rewrote history (only with `on_break="segment"`).
        drift_tokens: recorded tokens that differ from the tokens sent and sampled. The first one fails the rollout.
        completion_ranges: the range of each completion, in the order they were added.
    """

    prefix_breaks: int
    drift_tokens: int
    completion_ranges: list[CompletionRange]

    def __init__(
        self,
        chat_format: ChatFormat,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        on_break: OnBreak | None = None,
        at_most: int | None = None,
    ) -> None:
        """Begin a conversation that is ready for the assistant's first turn.

        Args:
            chat_format: the model's format.
            messages: rendered by the template, including its default system message. Text that looks like a control
                token is encoded as text, except `<think>` and `<tool_call>` in an assistant message.
            tools: functions the policy may call, as JSON schemas in OpenAI's format.
            on_break: see `OnBreak`; None uses the format's.
            at_most: maximum number of tokens. A prompt that is surely longer is not encoded.

        Raises:
            HandlerError: the template refuses the messages, or a tool lacks a name.
            ContextLengthExceeded: they are far more than `at_most` tokens.
        """
        self._format = chat_format
        self._template = chat_format.template.dated()
        self._known_tools = parameter_schemas(tools)
        self._tools = chat_format.codec.mark_strings(list(tools))
        self._on_break = (on_break or chat_format.on_break) if chat_format.capabilities.rewrites_history else "keep"
        self._calls_so_far = self._closings_read = 0
        self._points: list[_Point] = []
        self._answer = assistant_message(())
        self._history, ids = self._render(messages, at_most)
        self._opening, self._opening_tokens = self._history, len(ids)
        self._tokens = RolloutTokens()
        self._current = _OpenSegment(self._tokens.open_segment())
        self._closed: list[_OpenSegment] = []
        self._awaits_completion = True
        self._has_sampled = self._sealed = False
        self.prefix_breaks = self.drift_tokens = 0
        self.completion_ranges = []
        self._current.tokens.append(ids)
        self._proven = bytearray(memoryview(ids))

    def __len__(self) -> int:
        """Return the number of tokens in the current segment, which is the length of the next prompt."""
        return len(self._current.tokens)

    @property
    def segment(self) -> int:
        """Return the index of the growing segment, which is the last one."""
        return len(self._closed)

    @property
    def awaits_completion(self) -> bool:
        return self._awaits_completion

    @property
    def closing_reasoning(self) -> str:
        """Return the tag that closes the reasoning opened by the next prompt; empty if it opens none."""
        return self._format.family.syntax.thoughts.get(self._opened().rstrip(), "")

    def token_ids_of(self, segment: int) -> npt.NDArray[np.int32]:
        """Return a view of the current tokens of a segment: int32."""
        return self._all[segment].token_ids

    def keep_in(self, tokens: RolloutTokens) -> None:
        """Record into `tokens` from now on, the prompt included. Before the first completion only."""
        if self._has_sampled:
            raise RuntimeError("keep_in comes before the first completion")
        moved = _OpenSegment(tokens.open_segment())
        moved.tokens.append(self._current.tokens.arrays().token_ids)
        self._tokens, self._current = tokens, moved

    def prompt_token_ids(self) -> list[int]:
        """Return the prompt for the engine: all tokens so far, ending with the generation prompt.

        Raises:
            TokenDrift: the recorded tokens differ from the last prompt, completion and delta.
        """
        return self.prompt_array().tolist()

    def prompt_array(self) -> array[int]:
        """Return `prompt_token_ids` as int32, in a copy of their memory: some 10 us for 100,000 tokens."""
        self._expect(awaits_completion=True)
        self._prove_prefix()
        copy = array("i")
        copy.frombytes(self._current.token_ids.view(np.uint8).data)
        return copy

    def add_completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        policy_version: str = "",
        engine: str = "",
        spans: Sequence[PolicySpan] = (),
    ) -> ParsedTurn:
        """Record the completion sampled after `prompt_token_ids()`, verbatim, and return its content.

        Args:
            token_ids: N sampled ids, with the end-of-turn token if it was sampled. May be empty.
            logprobs: N natural logarithms, one for each id.
            policy_version: version of the weights that sampled them.
            engine: the engine that sampled them.
            spans: replace these two if the completion has several spans: they cover the N ids, and start at 0.

        Raises:
            BackendError: the counts differ, the spans do not cover the ids, or an id or logprob is invalid; not
                retryable.
        """
        self._expect(awaits_completion=True)
        self._prove_prefix()
        ids, sampled_logprobs = sampled_arrays(token_ids, logprobs, self._format)
        spans = spans or [PolicySpan(start=0, end=len(ids), policy_version=policy_version, engine=engine)]
        if [0, *(span.end for span in spans)] != [*(span.start for span in spans), len(ids)]:
            raise BackendError(f"the spans of {len(ids)} tokens leave some out or overlap: {spans}", retryable=False)
        start, end = len(self), len(self) + len(ids)
        self._current.tokens.append(ids, sampled_logprobs)
        self._current.spans += [
            msgspec.structs.replace(span, start=start + span.start, end=start + span.end)
            for span in spans
            if span.start < span.end
        ]
        self.completion_ranges.append(CompletionRange(start, end, self.segment))
        self._proven += memoryview(ids).cast("B")
        self._awaits_completion, self._has_sampled = False, True
        self._closings_read = 0
        turn = self._parse(ids)
        if self._keeps_texts or self._format.capabilities.needs_calls:
            self._answer = self._as_message(turn)
        history = len(self._history) if self._keeps_texts else self._history
        self._points.append(_Point(history, self._answer, self._calls_so_far))
        return turn

    def count_beyond(self, messages: Sequence[ChatMessage], at_most: int) -> int:
        """Return a lower bound of the number of tokens of messages if it surely exceeds `at_most`, else 0.

        See `TokenCodec.count_beyond`. Assistant messages do not count, because templates omit some parts.
        """
        said = "".join(message.content for message in messages if message.role != "assistant")
        return self._format.codec.count_beyond(said, at_most)

    def add_messages(self, messages: Sequence[ChatMessage], *, at_most: int | None = None) -> int:
        """Append messages (tool results, a nudge), exactly as the template renders them, up to the next turn.

        Returns the resulting length. If it exceeds `at_most`, nothing is changed.

        If the completion was cut short, the missing end-of-turn token comes first. None of these tokens is trained on.
        All messages of a turn belong into one call, because templates merge tool results.

        Raises:
            ValueError: `messages` is empty, or contains one with role `assistant`.
            HandlerError: the template refuses the messages.
            TokenDrift: the template would rewrite history and `on_break` is `fail`, or the prefix proof failed.
        """
        self._expect(awaits_completion=False)
        if not messages or any(message.role == "assistant" for message in messages):
            raise ValueError("add_messages takes at least one message, none of them an assistant's")
        self._prove_prefix()
        calls_before = self._calls_so_far
        try:
            calls = self._answered_calls(messages)
            new = self._marked(messages, calls)
            dialogue = [*self._history, self._answered(calls), *new]
            rewritten = self._rewritten(dialogue, len(new)) if self._on_break != "keep" else None
            delta = self._delta(new, calls) if rewritten is None else array("i")
        except (HandlerError, TokenDrift):
            self._calls_so_far = calls_before
            raise
        length = len(self) + len(delta) if rewritten is None else len(rewritten)
        if at_most is not None and length > at_most:
            self._calls_so_far = calls_before
            return length
        if rewritten is not None:
            self._begin_segment(rewritten, "template_rewrite", dialogue)
            self.prefix_breaks += 1
        else:
            self._current.tokens.append(delta)
            self._proven += memoryview(delta).cast("B")
        self._history = self._kept(dialogue)
        self._awaits_completion = True
        return length

    def continue_from(
        self, messages: Sequence[ChatMessage], reason: SegmentReason, *, at_most: int | None = None
    ) -> None:
        """Continue with another dialogue instead of this one, such as a shortened one, in a new segment.

        Its parent is the current segment, which stays recorded. The assistant's turn is next.

        Raises:
            HandlerError: the template refuses the messages.
            ContextLengthExceeded: they are more than `at_most` tokens.
        """
        if self._sealed:
            raise RuntimeError("the conversation has been sealed")
        calls_before = self._calls_so_far
        try:
            history, prompt = self._render(messages, at_most)
            if at_most is not None and len(prompt) > at_most:
                raise ContextLengthExceeded(len(prompt), at_most)
        except (HandlerError, ContextLengthExceeded):
            self._calls_so_far = calls_before
            raise
        self._begin_segment(prompt, reason, history)
        self._points.clear()
        self._history = self._kept(history)
        self._awaits_completion = True

    def change_tools(self, tools: Sequence[ToolSchema], *, at_most: int) -> bool:
        """Offer other tools from the next turn on, in a new segment. Not for branches.

        The segment's opening prompt is rendered with the new tools; all tokens after it are kept as they are. Return
        False, and change nothing, if that is more than `at_most` tokens.

        Raises:
            HandlerError: the template refuses the tools, and nothing is changed.
        """
        self._expect(awaits_completion=True)
        known, marked = parameter_schemas(tools), self._format.codec.mark_strings(list(tools))
        opening = array("i", self._format.codec.encode(self._template.prompt(self._opening, marked)))
        prompt = opening + array("i", self._current.token_ids[self._opening_tokens :].tolist())
        if len(prompt) > at_most:
            return False
        self._known_tools, self._tools = known, marked
        self._begin_segment(prompt, "tools_changed", self._opening)
        self._opening_tokens = len(opening)
        self._points.clear()
        return True

    def branch(self, completion: int) -> Conversation:
        """Return another dialogue with the same history up to that completion, which awaits `add_messages`.

        Its tokens up to there are copies, which are not trained on in the branch. If a completion lies in an earlier
        segment, the tokens of that segment are copied.

        Raises:
            IndexError: the completion does not exist, or the dialogue was restarted since (`continue_from`).
        """
        point, place = self._points[completion], self.completion_ranges[completion]
        other: Conversation = object.__new__(Conversation)
        other.__dict__.update(self.__dict__)
        history = point.history
        other._history = self._history[:history] if isinstance(history, int) else history
        other._answer, other._calls_so_far, other._closings_read = point.answer, point.calls, 0
        other._points = [point]
        other._tokens = RolloutTokens()
        other._current = _OpenSegment(other._tokens.open_segment())
        ids = self._all[place.segment].token_ids[: place.end]
        other._current.tokens.append(ids)
        other._closed, other._awaits_completion, other._has_sampled, other._sealed = [], False, False, False
        other.prefix_breaks = other.drift_tokens = 0
        other.completion_ranges = [CompletionRange(place.start, place.end, 0)]
        other._proven = bytearray(ids.view(np.uint8).data)
        return other

    def ends_with_tool_call(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last sampled id completes a tool call that later tokens cannot change.

        It is cheap unless the last id completes the closing of a call. At most `MAX_CLOSINGS_READ` closings are
        examined in a turn, because a policy may repeat them. For families without a mark at a call's end it is always
        False.
        """
        closings = tuple(each.closing for each in self._format.call_syntaxes if each.closing)
        if not token_ids or not self._format.decode(token_ids[-1:]).rstrip().endswith(">"):
            return False
        if not self._format.decode(token_ids[-_CLOSING_TOKENS:]).rstrip().endswith(closings):
            return False
        if self._closings_read >= MAX_CLOSINGS_READ:
            return False
        self._closings_read += 1
        calls = self._speech(token_ids).tool_calls
        return (
            bool(calls)
            and not any(call.error for call in calls)
            and self._speech(token_ids, following="...").tool_calls == calls  # not a tag inside an argument
        )

    def segments(self) -> list[Segment]:
        """Return a copy of everything recorded, in the form for the trainer. Allowed at any time."""
        return [each.as_segment(Segment.from_arrays) for each in self._all]

    def seal(self) -> list[Segment]:
        """End the conversation: return everything recorded as views of its memory, without a copy.

        They are valid until that memory is released. Nothing can be added afterwards. Idempotent.
        """
        self._sealed = True
        for each in self._all:
            each.tokens.seal()
        return [each.as_segment(Segment.over_arrays) for each in self._all]

    # ------------------------------------------------------------ inside

    @property
    def _all(self) -> list[_OpenSegment]:
        return [*self._closed, self._current]

    @property
    def _keeps_texts(self) -> bool:
        """Return whether the texts of messages must be kept.

        They need not be if deltas do not depend on them and rewrites are not detected.
        """
        return self._on_break != "keep" or self._format.capabilities.recall.history == "whole"

    def _expect(self, *, awaits_completion: bool) -> None:
        if self._sealed:
            raise RuntimeError("the conversation has been sealed")
        if self._awaits_completion != awaits_completion:
            expected = "add_completion" if self._awaits_completion else "add_messages"
            raise RuntimeError(f"out of turn: the conversation expects {expected}")

    def _prove_prefix(self) -> None:
        """Compare the recorded tokens with a separate copy of the tokens sent and sampled."""
        now = self._current.token_ids
        # The one comparison that is a plain memcmp: some 5 us for 100,000 tokens, in every turn.
        if self._proven != now.view(np.uint8).data:
            then = np.frombuffer(self._proven, dtype=np.int32)
            shared = min(len(now), len(then))
            differing = np.flatnonzero(now[:shared] != then[:shared])
            position = int(differing[0]) if len(differing) else shared
            self.drift_tokens = len(differing) + abs(len(now) - len(then))
            raise TokenDrift(
                f"{len(now)} recorded tokens do not continue the {len(then)} sent and sampled: "
                f"they differ from position {position} on"
            )

    def _render(self, messages: Sequence[ChatMessage], at_most: int | None) -> tuple[list[Message], array[int]]:
        """Return messages in the template's form, and the tokens of their prompt.

        Raises:
            HandlerError: the template refuses them.
            ContextLengthExceeded: they are surely more than `at_most` tokens, and were not all encoded.
        """
        codec = self._format.codec
        if at_most is not None and (found := self.count_beyond(messages, at_most)):
            raise ContextLengthExceeded(found, at_most)
        history = self._marked(messages)
        prompt = self._template.prompt(history, self._tools)
        if at_most is not None and (found := codec.count_beyond(prompt, at_most)):
            raise ContextLengthExceeded(found, at_most)
        return history, array("i", codec.encode(prompt))

    def _delta(self, new: Sequence[Message], calls: Sequence[Message]) -> array[int]:
        """Return the tokens between the last completion and the next one. Errors as `add_messages`."""
        delta = array("i", self._format.codec.encode(self._template.delta(new, self._history, self._tools, calls)))
        if not delta or delta[0] not in self._format.closing_ids:
            raise TokenDrift(f"the template closes this assistant turn with {self._format.decode(delta[:4])!r}")
        start, end, _segment = self.completion_ranges[-1]
        closed = end > start and self._format.closes_alike(int(self._current.token_ids[-1]), delta[0])
        return delta[1:] if closed else delta

    def _rewritten(self, dialogue: Sequence[Message], new: int) -> array[int] | None:
        """Return the template's own rendering of `dialogue` if it rewrites earlier turns, else None.

        The last `new` messages of `dialogue` come after the turn that was sampled last.

        An assistant turn that is rendered from its parts may differ from the sampled text from its first rendering on.
        Only a later change of that rendering then counts as a rewrite.
        """
        codec, template = self._format.codec, self._template
        text = template.prompt(dialogue, self._tools)
        if self._format.capabilities.needs_calls:
            asked = template.prompt(dialogue[: -new - 1], self._tools)
            answered = template.prompt(dialogue[:-new], self._tools, open_turn=False)
            stands = text.startswith(asked) and text.startswith(answered)
        else:
            then = codec.decode(self._current.token_ids.tolist())
            stands = codec.unmarked(text).startswith(then)
            if not stands:  # perhaps the tokenizer only composes accents
                now = codec.decode(codec.encode(text))
                stands = codec.normalized(now).startswith(codec.normalized(then))
        if stands:
            return None
        if self._on_break == "fail":
            raise TokenDrift(
                "the chat template rewrites earlier turns at this message; open the conversation with "
                "on_break='keep' or 'segment' to go on"
            )
        return array("i", codec.encode(text))

    def _begin_segment(self, prompt: array[int], reason: SegmentReason, opening: list[Message]) -> None:
        """Begin a segment with a prompt whose first tokens, and normally all, are the rendered `opening`."""
        shared = common_prefix(self._current.token_ids, np.frombuffer(prompt, dtype=np.int32))
        self._current.tokens.seal()
        self._closed.append(self._current)
        self._current = _OpenSegment(self._tokens.open_segment(), len(self._closed) - 1, reason, shared)
        self._current.tokens.append(prompt)
        self._proven = bytearray(memoryview(prompt))
        self._opening, self._opening_tokens = opening, len(prompt)

    def _kept(self, dialogue: list[Message]) -> list[Message]:
        """Return the part of `dialogue` that must be remembered for the next delta."""
        return dialogue if self._keeps_texts else self._template.remembered(dialogue)

    def _marked(self, messages: Iterable[ChatMessage], answered: Sequence[Message] = ()) -> list[Message]:
        """Return `messages` in the template's form.

        Tool results answer the calls of the assistant message before them, or else `answered`, in order.
        """
        codec, capabilities = self._format.codec, self._format.capabilities
        open_ids = [call["id"] for call in answered]
        marked = []
        for message in messages:
            said: object = message.content
            if not isinstance(said, str):
                given = type(said).__name__
                raise HandlerError(f"a {message.role} message is {given}, not text; media have no place in a dialogue")
            speech = message.role == "assistant" and not capabilities.needs_calls
            rendered: Message = {"role": message.role, "content": codec.mark(said, speech=speech)}
            if message.name is not None:
                rendered["name"] = codec.mark(message.name)
            if message.role == "tool":
                answers = open_ids.pop(0) if open_ids else call_id(0)
                rendered["tool_call_id"] = codec.mark(message.tool_call_id) if message.tool_call_id else answers
            if message.tool_calls and capabilities.renders_calls:
                rendered["tool_calls"] = self._calls(message.tool_calls)
                open_ids = [call["id"] for call in rendered["tool_calls"]]
            elif message.tool_calls:
                rendered["content"] += "".join(codec.mark(_written(call), speech=True) for call in message.tool_calls)
            marked.append(rendered)
        return marked

    def _calls(self, calls: Iterable[ToolCall]) -> list[Message]:
        """Return `calls` in the template's form. A call sampled without an id gets the next number."""
        mark, written = self._format.codec.mark, []
        for call in calls:
            self._calls_so_far += 1
            arguments = self._format.codec.mark_strings(call.arguments)
            function = {"name": mark(call.name or "none"), "arguments": arguments}
            identity = mark(call.id) if call.id else call_id(self._calls_so_far)
            written.append(self._template.as_wanted({"id": identity, "type": "function", "function": function}))
        return written

    def _answered_calls(self, messages: Sequence[ChatMessage]) -> list[Message]:
        """Return one call for each tool result in `messages`: a call of the last turn, or a stand-in by name."""
        results = [message for message in messages if message.role == "tool"]
        made = self._answer.get("tool_calls", [])[: len(results)] if self._format.capabilities.needs_calls else []
        asked = [ToolCall(name=each.name or "", arguments={}, raw="") for each in results[len(made) :]]
        return [*made, *self._calls(asked)]

    def _answered(self, calls: Sequence[Message]) -> Message:
        """Return the last turn as the dialogue has it after results of `calls` were received.

        It contains these calls, even if it did not write them in the family's syntax. Templates do not support text in
        addition to a reasoned call.
        """
        if not self._format.capabilities.needs_calls:
            return self._answer
        said, reasoning = self._answer["content"], self._answer.get("reasoning_content", "")
        return assistant_message(calls, "" if calls and reasoning else said, reasoning)

    def _as_message(self, turn: ParsedTurn) -> Message:
        """Return a sampled turn as a message: its text, or its parts if the template needs them."""
        mark = self._format.codec.mark
        if not self._format.capabilities.needs_calls:
            return self._last_said(turn)
        return assistant_message(self._calls(turn.tool_calls), mark(turn.content), mark(turn.reasoning))

    def _last_said(self, turn: ParsedTurn) -> Message:
        """Return the last completion as a message: its text without its end-of-turn token, in parts if necessary."""
        start, end, _segment = self.completion_ranges[-1]
        ids = self._current.token_ids[start:end].tolist()
        if ids and ids[-1] in self._format.end_of_turn_ids:
            ids = ids[:-1]
        capabilities, text, calls = self._format.capabilities, self._format.decode(ids), []
        if capabilities.calls_in_parts and turn.tool_calls and not any(call.error for call in turn.tool_calls):
            before, first, _ = text.partition(turn.tool_calls[0].raw)
            if first:
                text, calls = before.rstrip("\n"), self._calls(turn.tool_calls)
        text = self._format.codec.mark(text, speech=True)
        return spoken_message(text, self._opened(), capabilities.reasoning_form, calls)

    def _speech(self, ids: Sequence[int], following: str = "") -> SpokenTurn:
        return self._format.parse(ids, self._known_tools, self._opens_thinking(), following)

    def _parse(self, ids: array[int]) -> ParsedTurn:
        content, reasoning, tool_calls = self._speech(ids)
        return ParsedTurn(
            content=content,
            reasoning=reasoning,
            tool_calls=tool_calls,
            ended=bool(ids) and ids[-1] in self._format.end_of_turn_ids,
            text=self._format.decode(ids),
        )

    def _opens_thinking(self) -> bool:
        """Return whether the prompt of the current or last sampled turn ends inside reasoning."""
        return bool(self._opened())

    def _opened(self) -> str:
        """Return the tag that opens reasoning at the end of that prompt, with its trailing space, or ""."""
        end = len(self) if self._awaits_completion else self.completion_ranges[-1].start
        tail = self._format.decode(self._current.token_ids[max(0, end - _TAIL_TOKENS) : end].tolist())
        thoughts = self._format.family.syntax.thoughts
        found = next((each for each in thoughts if tail.rstrip().endswith(each)), "")
        return tail[tail.rfind(found) :] if found else ""


@dataclass(slots=True)
class _OpenSegment:
    """A growing segment."""

    tokens: SegmentTokens
    parent: int | None = None
    reason: SegmentReason | None = None
    shared: int = 0
    spans: list[PolicySpan] = field(default_factory=list)

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return self.tokens.arrays().token_ids

    def as_segment(self, make: Callable[..., Segment]) -> Segment:
        """Return the result of `make`, a constructor of `Segment`."""
        return make(*self.tokens.arrays(), list(self.spans), parent=self.parent, reason=self.reason, shared=self.shared)


def _written(call: ToolCall) -> str:
    """Return a call as it was sampled, or in the form that a template without tools asks for."""
    said = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return call.raw or f"<tool_call>\n{said}\n</tool_call>"
