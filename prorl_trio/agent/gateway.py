"""The gateway of a rollout: the policy answers a program's requests to a model, in token-exact dialogues.

A program sends its whole history as text with each request. The gateway finds the policy's turns in it, and sends their
stored tokens to the engine, bit for bit, followed by the new messages. A history that continues no stored turn begins a
segment, which records the reason. Each sampled token is delivered once.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.agent.budget import AgentBudget
from prorl_trio.agent.context import Origin
from prorl_trio.agent.said import (
    KEY_DIGITS,
    Answer,
    Said,
    alike,
    context_digest,
    cut,
    digest,
    normal,
    rest_of,
    served_calls,
)
from prorl_trio.agent.turns import MIN_TURN_TOKENS, Turns, lease_backend
from prorl_trio.chat.conversation import Conversation, common_prefix
from prorl_trio.chat.families.syntax import HERMES
from prorl_trio.chat.guided import calls_format, excess, json_format, structural_tag
from prorl_trio.inference.engines.protocol import Guide, RequestRefused
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import (
    ContextLengthExceeded,
    HandlerError,
    ProrlError,
    StaleTrajectory,
    TokenDrift,
    TooManyDialogues,
)
from prorl_trio.types.models import ASIDE, ChatMessage, ToolCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from prorl_trio.agent.budget import ToolTime
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.agent.said import Question, SaidCall, Wants
    from prorl_trio.chat.conversation import ParsedTurn
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.types.models import Echo, SegmentReason, StopReason, ToolSchema

logger = logging.getLogger(__name__)

CALLS_FOR_A_TURN: Final = 4
"""Requests per turn of `max_turns`, sampled or not, because a program with a wrong limit would never stop."""
SPARE_CALLS: Final = 40
THREAD_CHARS: Final = 20_000
"""A new dialogue with this many characters is rendered and encoded in a thread."""
MESSAGE_CHARS: Final = 50
TOOL_CHARS: Final = 500
"""Number of text characters that take as long to render as the frame of one message or tool."""
NO_TOOLS: Final = digest([])


class RolloutOver(ProrlError):
    """The program gets no more turns, because its rollout has ended or it sent too many requests."""


class BadQuestion(ProrlError):
    """A request that can never be answered.

    The message names the error, and `field` the field, if it is a single one.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(slots=True, eq=False)
class _Turn:
    """An assistant's turn in the tree of histories; the root comes before all turns.

    Attributes:
        said: the message as served, or as given by the client; None while it is sampled.
        key: the key planted in it; empty if it was not sampled here.
        line: its dialogue.
        index: index of its completion in the dialogue; -1 if it was not sampled there.
        answer: None while it is sampled, and for a client's turn.
        error: why it was not sampled.
        done: set when sampling has succeeded or failed.
        wants, at_most: the requested form and maximum tokens; None and 0 for a client's turn.
        resent: its answer was sent a second time.
        seen: a later request had it in its history.
        following: the turns after it, by the digest of the messages between.
    """

    said: Said | None = None
    key: str = ""
    line: _Line | None = None
    index: int = -1
    answer: Answer | None = None
    error: Exception | None = None
    done: trio.Event = field(default_factory=trio.Event)
    wants: Wants | None = None
    at_most: int = 0
    resent: bool = False
    seen: bool = False
    following: dict[bytes, list[_Turn]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Line:
    """A dialogue.

    Attributes:
        system: digest of the system messages at its beginning.
        opening: number and digest of all messages before the first turn.
        after: the dialogue whose work it continues under another history, or None.
        tip: its last turn.
        last: text of the last sampled turn, and the number of that turn in the rollout.
        sampled: number of sampled turns.
    """

    turns: Turns
    tools: bytes
    system: bytes
    opening: tuple[int, bytes]
    origin: Origin | None = None
    after: _Line | None = None
    tip: _Turn | None = None
    last: tuple[int, ParsedTurn] | None = None
    sampled: int = 0

    @property
    def first(self) -> _Line:
        """Return the dialogue in which the work of this dialogue began."""
        line = self
        while line.after is not None:
            line = line.after
        return line


class _Place(NamedTuple):
    """The place of a history in the tree.

    Attributes:
        turn: the deepest turn that it continues.
        depth: number of assistant messages up to that turn.
        rest: the messages after that turn. Any assistant message among them is unknown here.
        key: key in `turn.following` for the messages up to the next assistant message.
        echoes: how each turn on the path was echoed.
    """

    turn: _Turn
    depth: int
    rest: Sequence[Said]
    key: bytes
    echoes: Sequence[tuple[_Turn, Echo]]

    @property
    def continues(self) -> bool:
        """Return whether every assistant message in the history is a known turn."""
        return not any(message.role == "assistant" for message in self.rest)


class Gateway:
    """Answers a program's requests for one rollout. `open_gateway` creates it.

    Attributes:
        calls: number of requests so far.
        joined: number of requests answered by a turn that was requested before.
        failure: an infrastructure failure, after which all requests are refused.
        limit: the last limit that was reported to a client.
        program: the time of the requesting program, which is not charged while the policy answers.
    """

    def __init__(self, context: RolloutContext, lease: Lease, budget: AgentBudget, nursery: trio.Nursery) -> None:
        self.context = context
        self.budget = budget
        self.calls = self.joined = 0
        self.failure: Exception | None = None
        self.limit: StopReason | None = None
        self.program: ToolTime | None = None
        self._over = ""
        self._lease = lease
        self._nursery = nursery
        self._root = _Turn()
        self._lines: list[_Line] = []
        self._by_key: dict[str, _Turn] = {}
        self._turns_begun = 0
        self._keeps_reasoning = context.resources.chat_format.on_break == "keep"

    def __repr__(self) -> str:
        return f"<Gateway of {self.context.spec.job_id}: {self.calls} calls, {len(self._lines)} dialogues>"

    async def ask(self, question: Question) -> Answer:
        """Return the policy's turn after the messages of `question`.

        A cancelled turn is still sampled to its end, and a client that repeats the request receives it.

        Raises:
            BadQuestion: it can never be answered.
            ContextLengthExceeded: another turn does not fit.
            RolloutOver: the rollout has ended, or its calls are used up.
            ProrlError: infrastructure failed, which ends the rollout.
        """
        self._admit()
        with self._reading():
            messages = self._messages_of(question)
            if not messages or messages[-1].role == "assistant":
                return self._rest(messages, question)
            self._check_form(question)
            place = self._find(messages, question)
            turn = self._asked_before(place, question)
        if turn is None:
            turn = _Turn(wants=question.wants, at_most=self._at_most(question))
            if place.continues:
                place.turn.following.setdefault(place.key, []).append(turn)
            self._nursery.start_soon(self._answer, turn, place, question, messages)
        with self.program.given_away() if self.program is not None else nullcontext():
            await turn.done.wait()
        if turn.error is not None:
            raise turn.error
        assert turn.answer is not None
        return turn.answer

    async def count_tokens(self, question: Question) -> int:
        """Return the length of a question's prompt in tokens, or a lower bound if it is far too long.

        Raises BadQuestion.
        """
        try:
            with self._reading():
                return len(await self._new_conversation(self._messages_of(question), question.tools))
        except ContextLengthExceeded as exc:
            return exc.prompt_tokens

    def end(self, why: str) -> None:
        """Refuse all further questions, with `why` as the message to clients. Idempotent."""
        self._over = self._over or why

    @property
    def context_tokens(self) -> int:
        """Return the maximum number of tokens in a dialogue."""
        return self.context.resources.max_trajectory_tokens(self.context.spec, self._lease.info.max_model_len)

    def final_turn(self) -> ParsedTurn | None:
        """Return the policy's last message in the task's own dialogue; None before its first turn.

        This is the first dialogue with the most turns, counted with all dialogues that continue its work. If a client
        rewrites its history each time, each of these dialogues has one turn.
        """
        turns: Counter[int] = Counter()
        said: dict[int, tuple[int, ParsedTurn]] = {}
        for line in self._lines:
            if line.last is not None and line.first.origin is None:
                of = id(line.first)
                turns[of] += line.sampled
                said[of] = max(said.get(of, line.last), line.last, key=lambda each: each[0])
        return said[turns.most_common(1)[0][0]][1] if turns else None

    def _admit(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.calls += 1
        most = CALLS_FOR_A_TURN * self.context.spec.max_turns + SPARE_CALLS
        if self.calls > most:
            self.limit = "max_turns"
            self.end(f"the agent has made {most} calls, the most for {self.context.spec.max_turns} turns")
        if self._over:
            raise RolloutOver(self._over)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise BadQuestion instead of any error that a question causes in the block that reads it.

        A program's request is the policy's act, like the arguments of a tool, so it must not void the rollout.
        """
        try:
            yield
        except ProrlError:
            raise
        except Exception as exc:
            logger.warning("job %s: a request cannot be read", self.context.spec.job_id, exc_info=exc)
            raise BadQuestion(f"it cannot be read: {type(exc).__name__}: {exc}") from exc

    # ------------------------------------------------------------ histories

    def _messages_of(self, question: Question) -> list[Said]:
        """Return a question's messages in normal form. Raises ContextLengthExceeded if it has too many parts to read.

        Each message and each tool is at least one token. Even empty ones take time in the loop.
        """
        if (parts := len(question.messages) + len(question.tools)) > self.context_tokens:
            raise ContextLengthExceeded(parts, self.context_tokens)
        return normal(question.messages)

    def _find(self, messages: Sequence[Said], question: Question) -> _Place:
        """Follow a history from its beginning through known turns, to the deepest turn that it continues."""
        tools = digest(question.tools)
        starts = [0, *(at + 1 for at, message in enumerate(messages) if message.role == "assistant")]
        best: _Place | None = None
        paths: list[tuple[_Turn, tuple[tuple[_Turn, Echo], ...]]] = [(self._root, ())]
        while paths:
            turn, echoes = paths.pop()
            depth = len(echoes)
            rest = messages[starts[depth] :]
            said = next((at for at, message in enumerate(rest) if message.role == "assistant"), len(rest))
            key = context_digest(rest[:said]) + (tools if turn is self._root else b"")
            if best is None or depth > best.depth:
                best = _Place(turn, depth, rest, key, echoes)
            if said < len(rest):
                known = ((each, self._echo(rest[said], each)) for each in turn.following.get(key, ()))
                paths += [(each, (*echoes, (each, echo))) for each, echo in known if echo is not None]
        assert best is not None
        return best

    def _echo(self, message: Said, turn: _Turn) -> Echo | None:
        if turn.said is None:
            return None
        if turn.answer is None:  # the client's own words
            return alike(message, turn.said, drops_reasoning=False)
        echo = alike(message, turn.said, drops_reasoning=self._keeps_reasoning)
        if message.key:
            return (echo or "keyed") if message.key == turn.key else None
        return echo

    def _asked_before(self, place: _Place, question: Question) -> _Turn | None:
        """Return the turn of an earlier identical question, if it can answer this one as well.

        Such a turn is still being sampled, or no later history contains its answer; a finished turn is resent only
        once. A turn that exceeds the current limit, or was cut below it, does not qualify.
        """
        at_most = self._at_most(question)
        for turn in place.turn.following.get(place.key, ()) if place.continues else ():
            if turn.wants != question.wants:
                continue
            if turn.done.is_set() and (turn.answer is None or turn.seen or turn.resent):
                continue
            if (said := turn.answer) is not None:
                is_cut = said.finish_reason == "length" and turn.at_most < at_most
                if is_cut or said.completion_tokens > at_most:
                    continue
            turn.resent = turn.done.is_set()
            self.joined += 1
            return turn
        return None

    def _at_most(self, question: Question) -> int:
        most = self.context.spec.sampling.max_output_tokens
        return min(most, question.max_tokens or most)

    def _rest(self, messages: Sequence[Said], question: Question) -> Answer:
        """Return the missing part of a turn after an interrupted stream, from the end of the client's part.

        Raises:
            BadQuestion: the history is empty, or the last message does not begin like any turn of the policy.
        """
        if not messages:
            raise BadQuestion("there is no message: a turn comes after a user's, a system's or a tool's")
        place = self._find(messages[:-1], question)
        for turn in place.turn.following.get(place.key, ()) if place.continues else ():
            if turn.answer is not None and (rest := rest_of(turn.answer, messages[-1])) is not None:
                self.joined += 1
                return rest
        raise BadQuestion(
            "the last message is an assistant's: a turn cannot be begun for the policy; end with a user's or a tool's"
        )

    # ------------------------------------------------------------ dialogues

    async def _answer(self, turn: _Turn, place: _Place, question: Question, messages: Sequence[Said]) -> None:
        """Sample a turn of the policy, and notify all waiting requests. An infrastructure failure ends the rollout."""
        try:
            if self._turns_begun >= self.context.spec.max_turns:
                self.limit = "max_turns"
                self.end(f"the agent has taken its {self.context.spec.max_turns} turns")
                raise RolloutOver(self._over)
            with self._reading():
                turn.line = await self._line_for(turn, place, question, messages)
            for echoed, echo in place.echoes:
                if echoed.key and not echoed.seen:
                    self.context.echoes[echo] += 1
                echoed.seen = True
            await self._sample(turn, turn.line, question)
        except (BadQuestion, ContextLengthExceeded, RolloutOver) as exc:
            turn.error = exc
            if isinstance(exc, ContextLengthExceeded):
                self.limit = "context_budget"
        except TooManyDialogues as exc:
            self.end(str(exc))
            turn.error = RolloutOver(self._over)
        except Exception as exc:
            turn.error = self.failure = self.failure or exc
            self._nursery.cancel_scope.cancel("a turn failed")
        except BaseException:
            turn.error = RolloutOver(self._over or "the rollout has ended")
            raise
        finally:
            if turn.error is not None and turn in (siblings := place.turn.following.get(place.key, [])):
                siblings.remove(turn)
            turn.done.set()

    async def _line_for(self, turn: _Turn, place: _Place, question: Question, messages: Sequence[Said]) -> _Line:
        """Return the dialogue of a turn, with all messages before it. Errors as `ask`."""
        after = place.turn
        if place.continues and after.line is not None and after.index >= 0:
            line = after.line
            if line.tip is not after or line.turns.conversation.awaits_completion:
                line = self._branch(after, question)
            self._say(line, place.rest)
        else:
            line = await self._new_line(place, question, messages)
            if not place.continues:
                self._plant(line, messages, question, turn)
        return line

    def _plant(self, line: _Line, messages: Sequence[Said], question: Question, turn: _Turn) -> None:
        """Record an unknown history, so that later ones are found to continue `turn`, which comes after it."""
        at, between = self._root, list[Said]()

        def key() -> bytes:
            return context_digest(between) + (digest(question.tools) if at is self._root else b"")

        for message in messages:
            if message.role != "assistant":
                between.append(message)
                continue
            given = _Turn(message, message.key, line, seen=True)
            given.done.set()
            at.following.setdefault(key(), []).append(given)
            at, between = given, []
        at.following.setdefault(key(), []).append(turn)

    def _say(self, line: _Line, between: Sequence[Said]) -> None:
        """Add the messages after the last turn to the dialogue."""
        turns, messages = line.turns, self._as_messages(between)
        if found := turns.conversation.count_beyond(messages, turns.limit):
            raise ContextLengthExceeded(len(turns.conversation) + found, turns.limit)
        try:
            too_many = turns.say(messages)
        except (HandlerError, TokenDrift):  # GLM's template opens a system message with tokens that close no turn
            try:
                too_many = turns.say(list(_joined(map(_as_user, messages))))
            except HandlerError as exc:
                raise BadQuestion(f"the model's chat template does not take these messages: {exc}") from exc
        if too_many:
            raise ContextLengthExceeded(turns.limit - MIN_TURN_TOKENS + too_many, turns.limit)
        turns.said = messages
        if line.tip is None:  # a branch
            turns.begin(line.origin)
            self._lines.append(line)

    def _branch(self, after: _Turn, question: Question) -> _Line:
        """Return a dialogue that continues from an earlier turn of another dialogue; `_say` begins it."""
        assert after.line is not None
        of = after.line.turns
        conversation, place = of.conversation.branch(after.index), of.conversation.completion_ranges[after.index]
        origin = Origin(
            of.dialogue, place.segment, question.kind or "branch", place.end, question.agent, question.agent_type
        )
        self.context.echoes["branch"] += 1
        turns = Turns(self.context, self._lease, self.budget, conversation, keeps_cut=True)
        line = after.line
        parent = None if question.kind in ASIDE else line
        return _Line(turns, line.tools, line.system, line.opening, origin, parent)

    async def _new_line(self, place: _Place, question: Question, messages: Sequence[Said]) -> _Line:
        """Begin a dialogue with a history as the template renders it."""
        conversation = await self._new_conversation(messages, question.tools)
        turns = Turns(self.context, self._lease, self.budget, conversation, self._as_messages(messages), keeps_cut=True)
        if turns.room < MIN_TURN_TOKENS:
            raise ContextLengthExceeded(len(conversation), turns.limit)
        begun = next((at for at, each in enumerate(messages) if each.role != "system"), len(messages))
        opened = next((at for at, each in enumerate(messages) if each.role == "assistant"), len(messages))
        opening = opened, context_digest(messages[:opened])
        line = _Line(turns, digest(question.tools), context_digest(messages[:begun]), opening)
        # Some programs ask for a title before they begin the task: a request without tools, which has no successor.
        is_own = line.tools != NO_TOOLS and all(each.tools == NO_TOOLS for each in self._lines)
        if self._lines and not is_own:
            line.origin = self._origin(place, question, messages, line)
            self.context.echoes[line.origin.reason] += 1  # type: ignore[index]  # a program's are echoes
        else:
            self.context.tools = list(question.tools)
        turns.begin(line.origin)
        self._lines.append(line)
        return line

    def _origin(self, place: _Place, question: Question, messages: Sequence[Said], line: _Line) -> Origin:
        """Return the origin of a dialogue that continues no turn."""
        beside = next((each for each in place.turn.following.get(place.key, ()) if each.line), None)
        keyed = next((self._by_key[each.key] for each in reversed(messages) if each.key in self._by_key), None)
        near = place.turn if place.turn.line is not None else keyed or beside
        parent = self._lines[0] if near is None or near.line is None else near.line
        of = parent.turns.conversation
        segment = of.completion_ranges[near.index].segment if near is not None and near.index >= 0 else 0
        if question.kind is not None:
            reason = question.kind
        elif beside is not None:
            reason = "branch" if place.continues else "rewrite"
        else:
            reason = _reason(parent, near, place, messages, line, self._lines)
        line.after = None if reason in ASIDE else parent
        shared = common_prefix(of.token_ids_of(segment), line.turns.conversation.token_ids_of(0))
        return Origin(parent.turns.dialogue, segment, reason, shared, question.agent, question.agent_type)

    async def _new_conversation(self, messages: Sequence[Said], tools: Sequence[ToolSchema]) -> Conversation:
        chars = len(messages) * MESSAGE_CHARS + len(tools) * TOOL_CHARS + sum(map(_chars, messages))
        if chars < THREAD_CHARS:
            return self._render(messages, tools)
        return await run_sync(self._render, messages, tools)

    def _render(self, messages: Sequence[Said], tools: Sequence[ToolSchema]) -> Conversation:
        chat_format, rendered = self.context.resources.chat_format, self._as_messages(messages)
        at_most = self.context_tokens
        try:
            return Conversation(chat_format, rendered, tools, at_most=at_most)
        except HandlerError:  # many templates allow a system message only at the beginning
            first = 1 if rendered and rendered[0].role == "system" else 0
            as_user = [*rendered[:first], *_joined(map(_as_user, rendered[first:]))]
            try:
                return Conversation(chat_format, as_user, tools, at_most=at_most)
            except HandlerError as exc:
                raise BadQuestion(f"the model's chat template does not take these messages: {exc}") from exc

    def _as_messages(self, messages: Sequence[Said]) -> list[ChatMessage]:
        return list(_joined(map(self._as_message, messages)))

    def _as_message(self, message: Said) -> ChatMessage:
        match message.role:
            case "assistant":
                calls = list(map(_as_call, message.calls))
                return ChatMessage(role="assistant", content=self._spoken(message), tool_calls=calls)
            case "tool":
                return ChatMessage(role="tool", content=message.text, name=message.name or None)
            case role:
                return ChatMessage(role=role, content=message.text)

    def _spoken(self, message: Said) -> str:
        """Return the text of an assistant message with its reasoning, if the family has a form for reasoning."""
        if not message.reasoning or "<think>" not in self.context.resources.chat_format.family.syntax.thoughts:
            return message.text
        return f"<think>\n{message.reasoning}\n</think>\n\n{message.text}"

    # ------------------------------------------------------------ forms

    def _check_form(self, question: Question) -> None:
        """Raise BadQuestion if a turn cannot be constrained to the form of a question."""
        if (form := question.form) is None:
            return
        info, family = self._lease.info, self.context.resources.chat_format
        names = [tool["function"]["name"] for tool in question.tools]
        missing = [name for name in form.tools if name not in names]
        remedy = "leave it out, and ask for the form in words"
        if not info.guides:
            why = (
                f"the engine {info.engine} cannot keep a turn to a form; {remedy}, or serve the model by vLLM or SGLang"
            )
        elif found := excess([form.schema, *([each["name"], each.get("parameters")] for each in _to_call(question))]):
            why = f"its schemas are too much for an engine: {found}; make them simpler"
        elif form.calls and HERMES not in family.call_syntaxes:
            why = f"calls of the family {family.family.name!r} have no grammar here; {remedy}, with tool choice 'auto'"
        elif form.calls and (missing or not names):
            why = f"a tool is to be called that is not offered: {', '.join(missing) or 'there is none'}"
        else:
            return
        raise BadQuestion(f"{form.field}: {why}", form.field)

    def _guide(self, question: Question, conversation: Conversation) -> Guide | None:
        """Return the form of a question as a constraint for an engine."""
        if (form := question.form) is None:
            return None
        formats = [] if form.schema is None else [json_format(form.schema)]
        if form.calls:
            formats.append(calls_format(_to_call(question), one=form.one))
        return Guide(
            "calls" if form.schema is None else "json", structural_tag(formats, conversation.closing_reasoning)
        )

    # ------------------------------------------------------------ sampling

    async def _sample(self, turn: _Turn, line: _Line, question: Question) -> None:
        turns, line.tip = line.turns, turn
        number, self._turns_begun = self._turns_begun, self._turns_begun + 1
        prompt_tokens = len(turns.conversation)
        cached_tokens = turns.conversation.completion_ranges[-1].end if turns.conversation.completion_ranges else 0
        guide = self._guide(question, turns.conversation)
        try:
            sampled = await turns.sample(number, question.max_tokens, question.stops, guide)
        except RequestRefused as exc:
            if question.form is None:
                raise
            raise BadQuestion(
                f"{question.form.field}: the engine refuses this form: {exc}", question.form.field
            ) from exc
        turns.record(sampled)
        line.sampled, line.last = line.sampled + 1, (number, sampled.parsed)
        turn.index = len(turns.conversation.completion_ranges) - 1
        turn.key = secrets.token_hex(KEY_DIGITS // 2)
        self._by_key[turn.key] = turn
        parsed, completion = sampled.parsed, sampled.completion
        text, calls = served_calls(parsed, turn.key, no_calls=question.no_calls)
        text, stopped_at = cut(text, question.stops)
        turn.said = Said("assistant", text, parsed.reasoning, calls, key=turn.key)
        turns.check_staleness(completion.policy_version)
        tokens = len(completion.token_ids)
        turn.answer = Answer(
            key=turn.key,
            text=text,
            reasoning=parsed.reasoning,
            calls=calls,
            finish_reason=completion.finish_reason,
            stopped_at=stopped_at,
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens,
            cached_tokens=cached_tokens,
            reasoning_tokens=round(tokens * len(parsed.reasoning) / max(1, len(parsed.text))),
        )


def _reason(
    parent: _Line,
    near: _Turn | None,
    place: _Place,
    messages: Sequence[Said],
    line: _Line,
    lines: Sequence[_Line],
) -> SegmentReason:
    """Return the likely reason why a history continues no turn; `lines` are the dialogues so far."""
    if near is None:
        if line.tools == parent.tools and line.system == parent.system:
            return "branch" if _skips_turns(parent, lines, messages) else "compaction"
        return "side_call" if line.tools == NO_TOOLS else "sub_agent"
    if line.tools != parent.tools:
        return "side_call" if line.tools == NO_TOOLS else "tools_changed"
    said = sum(message.role == "assistant" for message in messages)
    return "compaction" if not place.depth and said <= near.index else "rewrite"


def _skips_turns(parent: _Line, lines: Sequence[_Line], messages: Sequence[Said]) -> bool:
    """Return whether a history continues the opening of a dialogue, without a summary instead of its turns.

    A summary is the policy's last message in a dialogue, or its answer to a request for compaction.
    """
    count, opening = parent.opening
    if len(messages) <= count or context_digest(messages[:count]) != opening:
        return False
    if any(each.origin and each.origin.reason == "compaction" and each.tip and not each.tip.seen for each in lines):
        return False
    summaries = [each.last[1].content.strip() for each in lines if each.last is not None]
    return not any(said in message.text for said in filter(None, summaries) for message in messages[count:])


def _chars(message: Said) -> int:
    return len(message.text) + len(message.reasoning) + sum(len(call.arguments) for call in message.calls)


def _to_call(question: Question) -> list[dict[str, Any]]:
    """Return the functions that a turn in the form of a question may call."""
    if question.form is None or not question.form.calls:
        return []
    functions, names = [tool["function"] for tool in question.tools], question.form.tools
    return [each for each in functions if not names or each["name"] in names]


def _as_call(call: SaidCall) -> ToolCall:
    return ToolCall(name=call.name, arguments=call.parsed or {}, raw="")


def _as_user(message: ChatMessage) -> ChatMessage:
    return ChatMessage(role="user", content=message.content) if message.role == "system" else message


def _joined(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield messages with adjacent `system` or `user` messages joined, as many templates reject two in a row."""
    last: ChatMessage | None = None
    for message in messages:
        if last is not None and last.role == message.role and message.role in ("system", "user"):
            last = ChatMessage(role=message.role, content=f"{last.content}\n\n{message.content}")
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


@asynccontextmanager
async def open_gateway(context: RolloutContext) -> AsyncIterator[Gateway]:
    """Answer a program's requests for a rollout during the block, with one backend that is leased for the whole block.

    The block is cancelled if infrastructure fails, or if the budget `agent_s` is used up; `context.stop_reason` is then
    `agent_budget`. A program's time is charged like a tool's: `with gateway.budget.tool("agent"):`.

    Raises:
        StaleTrajectory, BackendError, TokenDrift: as `run_agent`.
    """
    config = context.resources.config
    async with AsyncExitStack() as stack:
        lease = await lease_backend(context, stack)
        if (bound := config.agent.staleness_bound(context.spec)) is not None:
            lease.freshen(bound)
        budget = AgentBudget(context, config.budgets.of_agent(context.spec.budgets))
        with budget.scope:
            async with open_single_nursery() as nursery:
                gateway = Gateway(context, lease, budget, nursery)
                try:
                    yield gateway
                finally:
                    gateway.end("the rollout has ended")
                nursery.cancel_scope.cancel("the block is left")
        if budget.scope.cancelled_caught:
            context.stop_reason = "agent_budget"
        if (failure := gateway.failure) is not None:
            if not isinstance(failure, StaleTrajectory) or failure.cause != "agent_budget":
                raise failure
            context.stop_reason = "agent_budget"
