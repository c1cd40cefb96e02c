"""The proof that a model's prompts equal its template's own, token by token, for generated dialogues.

Each dialogue grows turn by turn as rollouts do, and must equal the ids that an oracle computes for the whole dialogue.
The oracle renders the unmodified texts and encodes them with the whole tokenizer, without our marking and splitting. If
untrusted text contains control tokens, so do the oracle's ids. Then the decoded text must equal the oracle's, and the
control tokens must equal the ones in a dialogue of the same shape with empty messages.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import unicodedata
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from prorl_trio.chat.conversation import Conversation, ParsedTurn
from prorl_trio.chat.format import ChatFormat
from prorl_trio.chat.history import RECALLS, Recall
from prorl_trio.chat.model_folder import read_model_folder
from prorl_trio.chat.template import assistant_message, call_id, spoken_message
from prorl_trio.types.errors import ConfigError, HandlerError, TokenDrift
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from prorl_trio.config import ModelConfig
    from prorl_trio.types.models import Message, ToolSchema


logger = logging.getLogger(__name__)

PROOF_DIALOGUES: Final = 24
PROOF_TIMEOUT_S: Final = 5.0
"""Time after which a proof at startup ends with the dialogues compared so far."""
MIN_PROOF_DIALOGUES: Final = 10
MIN_RENDERED_DIALOGUES: Final = 5
"""A proof needs at least this many dialogues that the template does not refuse."""
SHORT_FIRST: Final = 3
"""Dialogues before the long ones, which take half a minute with some templates, to report obvious errors early."""
FIRST_ROUNDS: Final = 4
"""Rounds after which a long dialogue is first compared. If the template has rewritten the dialogue by then, it may
rewrite it later as well."""

MAX_ROUNDS: Final = 4
MAX_PIECES: Final = 12
LONG_OUTPUT_CHARACTERS: Final = 20_000
LONG_OUTPUT_SHARE: Final = 0.01
"""Share of tool results that are long."""
WORD_SHARE: Final = 0.25
"""Share of the pieces of a text that are words of the template."""
MAX_WORD_CHARACTERS: Final = 60
LONG_ROUNDS, MAX_LONG_ROUNDS = 160, 1_000
MAX_LONG_CHARACTERS: Final = 200_000
LONG_TEXT_ROUND, LONG_ANSWER_ROUND = 8, 10
"""Rounds of a long dialogue with a long reply, and with a long assistant text."""

_PIECES: Final = (
    "the sum", " of 12", "\n\n", "\n", "  ", "42", "<x>", "{}", "é", "e\u0301", "數", "😀", "👩\u200d💻", "\t", ".",
    "'s", "\r\n", "▁", "\u00a0", "\u200b", "ﬁ", "\u212b", "\u0301", "\u202e", "नि", "\u0e33", "\x00", "\x1b[0m",
    "\ue000", "\\n", '"', "'", "</", "```json\n", "print(1)", "Traceback (most recent call last):", "|", "assistant",
    "user\n", " " * 7, "0" * 9, "/* x */",
)  # fmt: skip
_LONG: Final = "line 數 of output\n\n" * (LONG_OUTPUT_CHARACTERS // 18)
_WORD: Final = re.compile(rf"[^<>|｜\[\]{{}}]{{1,{MAX_WORD_CHARACTERS}}}")
"""A piece of a template that cannot form a control token."""
_WORDS: Final = ("the sum", " of 12", " is", " 42", ".", " é", " 數", " 😀", "\n", "\n\n", " `x`", " < 3", ", then")


class Round(NamedTuple):
    """An assistant's turn and the messages after it.

    Attributes:
        content: text of the assistant's turn; begins with a word and does not end in space.
        reasoning: reasoning before it, or empty.
        arguments: arguments of each call of `probe`.
        results: results of these calls, in order.
        question: a user's message after them, or None. It is required if there are no calls.
    """

    content: str
    reasoning: str
    arguments: list[dict[str, Any]]
    results: list[str]
    question: str | None


class Dialogue(NamedTuple):
    """A generated dialogue. A `hostile` one has control tokens in the texts of users, tools and schemas."""

    system: str | None
    question: str
    rounds: list[Round]
    tools: list[dict[str, Any]]
    hostile: bool


def _tool(name: str, description: str) -> dict[str, Any]:
    properties = {"code": {"type": "string", "description": "What to run."}, "times": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["code"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def forged_tool(description: str) -> dict[str, Any]:
    """Return the additional tool of hostile dialogues."""
    return _tool("forged", description)


CORPUS_TOOLS: Final = (_tool("probe", "Führt <Python> aus & 'prints'."), _tool("finish", 'Say "done".'))


def made_up_dialogue(random: Random, control: Sequence[str], literals: Collection[str | int] = ()) -> Dialogue:
    """Return the next generated dialogue.

    Args:
        random: the same state yields the same dialogue.
        control: tokens whose look-alikes hostile texts contain.
        literals: values that the template may compare messages with; texts contain their words.
    """
    hostile = random.random() < 0.4
    forged = [*control, *(token[: random.randrange(len(token))] for token in control)] if hostile else []
    words = sorted(word for word in literals if isinstance(word, str) and _WORD.fullmatch(word))

    def text() -> str:
        pieces = random.choices([*_PIECES, *random.choices(forged, k=30)] if forged else _PIECES, k=MAX_PIECES)
        if words:
            pieces = [random.choice(words) if random.random() < WORD_SHARE else piece for piece in pieces]
        return "".join(pieces[: random.randrange(MAX_PIECES + 1)])

    def said() -> str:
        return ("So" + "".join(random.choices(_WORDS, k=random.randrange(MAX_PIECES)))).strip()

    def result() -> str:
        return text() + (_LONG if random.random() < LONG_OUTPUT_SHARE else "")

    tools = [*CORPUS_TOOLS, *([forged_tool(text())] if hostile else [])] if random.random() < 0.6 else []
    rounds = []
    for _ in range(random.randrange(MAX_ROUNDS + 1)):
        calls = random.choice((0, 0, 1, 1, 1, 2, 3)) if tools else 0
        arguments = [{"code": said(), "times": random.randrange(99)} for _ in range(calls)]
        rounds.append(
            Round(
                content=said() if not arguments or random.random() < 0.3 else "",
                reasoning=said() if random.random() < 0.4 else "",
                arguments=arguments,
                results=[result() for _ in arguments],
                question=text() if not arguments or random.random() < 0.1 else None,
            )
        )
    return Dialogue(text() if random.random() < 0.5 else None, text(), rounds, tools, hostile)


def long_dialogues(control: Sequence[str], literals: Collection[str | int]) -> list[Dialogue]:
    """Return dialogues with more messages and longer texts than a template is likely to count or measure.

    They exceed each whole number among its `literals`, up to `MAX_LONG_ROUNDS` and `MAX_LONG_CHARACTERS`. One dialogue
    has only results of calls, one only questions; a hostile one has look-alikes of `control` tokens in long texts.
    """
    numbers = [number for number in literals if isinstance(number, int)]
    rounds = max(LONG_ROUNDS, *(number + 1 for number in (0, *numbers) if number < MAX_LONG_ROUNDS))
    characters = max(LONG_OUTPUT_CHARACTERS, *(number + 1 for number in (0, *numbers) if number < MAX_LONG_CHARACTERS))
    line, forged = "the sum of 12 is 42\n", " ".join(control[:100]) + " "
    long, long_forged = (each * (characters // len(each) + 1) for each in (line, forged))

    def exchange(number: int, text: str, *, calls: bool) -> Round:
        said = "So " + (long if number == LONG_ANSWER_ROUND else f"{number}").strip()
        heard = text if number == LONG_TEXT_ROUND else f"{line}{number}"
        arguments = [{"code": f"{number}", "times": number}] if calls else []
        return Round("" if calls else said, "", arguments, [heard] if calls else [], None if calls else heard)

    def dialogue(text: str, last: int, *, calls: bool) -> Dialogue:
        exchanges = [exchange(number, text, calls=calls) for number in range(1, last + 1)]
        return Dialogue(None, line, exchanges, list(CORPUS_TOOLS) if calls else [], text is long_forged)

    return [
        *(dialogue(long, rounds, calls=calls) for calls in (False, True)),
        *(dialogue(long_forged, LONG_TEXT_ROUND, calls=calls) for calls in (False, True)),
    ]


class Unexplained(Exception):
    """A prompt differs from the oracle's for an unknown reason; the message has the position."""


class Oracle(Protocol):
    """A reference that renders a dialogue and encodes its text, each in one piece."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], open_turn: bool) -> str:
        """Return the dialogue as text. Raises HandlerError if the template refuses it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text."""
        ...


class Proof(NamedTuple):
    """Counts of the compared dialogues.

    In `exact` dialogues each prompt extends the previous one. In `rewritten` ones the template itself changed earlier
    turns, and each segment is exact. The template does not render `refused` ones. `turns` counts the first two kinds.
    """

    exact: int
    rewritten: int
    refused: int
    turns: int


def load_chat_format(model: ModelConfig, *, proven: bool = True) -> ChatFormat:
    """Load the configured model's format, proven by default. Takes seconds: call it in a thread.

    The proof may show that the template's output depends on more of a dialogue than the probes found. Then that part is
    remembered as well, which makes each turn slower.

    Raises:
        ConfigError: the model folder cannot be used, or its prompts are not exact; the message has the cause.
    """
    options, on_break = model.template_options, model.on_break
    chat = ChatFormat.load(Path(model.path), family=model.family, template_options=options, on_break=on_break)
    if not proven:
        return chat
    digest = _digest(chat, options)
    if digest not in _PROVEN:
        _PROVEN[digest] = _proven_recall(chat)
    return chat.recalling(_PROVEN[digest])


_PROVEN: Final[dict[bytes, Recall]] = {}
"""Results by model, so that a model that is reloaded in this process is not proven again."""


def _proven_recall(chat: ChatFormat) -> Recall:
    """Return the shortest recall with a successful proof, beginning with the probed one. Raises ConfigError."""
    probed = chat.capabilities.recall
    longer = [recall for recall in RECALLS if recall.tools and RECALLS.index(recall) > RECALLS.index(probed)]
    failure: ConfigError | None = None
    for recall in (probed, *longer):
        try:
            prove_format(chat.recalling(recall))
        except ConfigError as exc:
            failure = failure or exc
        else:
            if recall.history in ("shape", "whole"):
                logger.warning(
                    "%s: what this chat template writes depends on all messages before it, so that turns take longer "
                    "the more there have been",
                    chat.template.origin,
                )
            return recall
    assert failure is not None
    raise failure


def _digest(chat: ChatFormat, options: Mapping[str, Any]) -> bytes:
    folder = read_model_folder(chat.model_dir)
    digest = hashlib.blake2b(folder.tokenizer_json)
    digest.update(repr((folder.template, folder.special_tokens, chat.family.name, sorted(options.items()))).encode())
    return digest.digest()


def prove_format(
    chat: ChatFormat, *, dialogues: int = PROOF_DIALOGUES, seed: int = 0, timeout_s: float = PROOF_TIMEOUT_S
) -> Proof:
    """Check that the prompts of `chat` equal its own template's, for random and long dialogues.

    Returns the counts of comparisons. Uses the CPU for a second or so; after `timeout_s` it ends early, but not before
    `MIN_PROOF_DIALOGUES` dialogues.

    Raises:
        ConfigError: a prompt differs, with the difference in the message; or the template refuses nearly all dialogues.
    """
    chat = chat.dated()
    oracle, random, deadline = _OwnTemplate(chat), Random(seed), time.monotonic() + timeout_s
    counted = {"exact": 0, "rewritten": 0, "refused": 0}
    turns, proving = 0, ""
    try:
        for number in range(dialogues):
            if number == min(SHORT_FIRST, dialogues - 1):
                proving = "a long one"
                for long in long_dialogues(chat.codec.look_alikes, chat.template.literals):
                    prove_long_dialogue(chat, oracle, long)
            if number >= MIN_PROOF_DIALOGUES and time.monotonic() > deadline:
                break
            proving = f"dialogue {number} of the proof"
            kind, rounds = prove_dialogue(chat, oracle, random)
            counted[kind] += 1
            turns += rounds
    except Unexplained as exc:
        raise ConfigError(
            f"{chat.template.origin}: prompts of the family {chat.family.name!r} are not exact for this template "
            f"({proving}): {exc}"
        ) from exc
    proof = Proof(**counted, turns=turns)
    if proof.exact + proof.rewritten < min(MIN_RENDERED_DIALOGUES, dialogues):
        raise ConfigError(
            f"{chat.template.origin}: nothing can be proven: the chat template refuses {proof.refused} of "
            f"{sum(counted.values())} dialogues of users, assistants and tools"
        )
    return proof


def prove_dialogue(
    chat: ChatFormat, oracle: Oracle, random: Random
) -> tuple[Literal["exact", "rewritten", "refused"], int]:
    """Prove one dialogue generated from `random`; return its result and its number of turns.

    Raises:
        Unexplained: a prompt differs from the oracle's.
    """
    dialogue = made_up_dialogue(random, chat.codec.look_alikes, chat.template.literals)
    try:
        return _Prover(chat, oracle, dialogue).prove(), len(dialogue.rounds)
    except HandlerError:
        return "refused", 0
    except TokenDrift as exc:
        raise Unexplained(str(exc)) from exc


def prove_long_dialogue(chat: ChatFormat, oracle: Oracle, dialogue: Dialogue) -> None:
    """Prove a dialogue that is rendered as a whole only twice: near its beginning, and at its end.

    Raises:
        Unexplained: a prompt differs from the oracle's, and the template had not rewritten the dialogue at the first
            check.
    """
    number = 0
    try:
        prover = _Prover(chat, oracle, dialogue, long=True)
        for number, each in enumerate(dialogue.rounds, 1):
            prover.grow(each)
            if number in (FIRST_ROUNDS, len(dialogue.rounds)):
                prover.check()
    except HandlerError:
        return
    except (TokenDrift, Unexplained) as exc:
        if not (chat.capabilities.rewrites_history and number == FIRST_ROUNDS):
            raise Unexplained(f"after {number} rounds, {exc}") from exc


class _Prover:
    """A dialogue that grows in two forms: as our conversation, and as the oracle's messages."""

    def __init__(self, chat: ChatFormat, oracle: Oracle, dialogue: Dialogue, *, long: bool = False) -> None:
        self._chat, self._oracle, self._dialogue = chat, oracle, dialogue
        opening = [ChatMessage(role="user", content=dialogue.question)]
        if dialogue.system is not None:
            opening.insert(0, ChatMessage(role="system", content=dialogue.system))
        self._messages: list[Message] = [{"role": each.role, "content": each.content} for each in opening]
        self._text = self._whole()
        self._conversation = Conversation(chat, opening, dialogue.tools, on_break="keep" if long else "segment")
        ways = (chat, chat.recalling(RECALLS[-1])) if chat.capabilities.rewrites_history and not long else ()
        self._append_only = [Conversation(way, opening, dialogue.tools, on_break="keep") for way in ways]
        self._calls = 0

    def prove(self) -> Literal["exact", "rewritten"]:
        for each in self._dialogue.rounds:
            self._turn(each)
        self._check_prompt()
        return "rewritten" if self._conversation.prefix_breaks else "exact"

    def grow(self, each: Round) -> None:
        """Add a turn without comparing it; the assistant's text is the one after a plain question."""
        alone: list[Message] = [{"role": "user", "content": "x"}]
        said, end, answer = self._spoken(each, alone, self._whole(alone))
        _ids, new, _turn = self._exchange(each, said, end, answer)
        self._add(new)

    def check(self) -> None:
        """Compare the dialogue with the oracle's. Raises Unexplained."""
        self._text = self._whole()
        self._check_prompt()

    def _check_prompt(self) -> None:
        ids = self._conversation.prompt_token_ids()
        if self._dialogue.hostile:
            self._check_forgeries(ids)
        elif ids != (expected := self._oracle.encode(self._text)):
            raise Unexplained(_difference(self._chat, ids, expected))

    def _exchange(
        self, each: Round, said: str, end: int | None, answer: Message
    ) -> tuple[list[int], list[ChatMessage], ParsedTurn]:
        """Add the assistant's turn; return its ids, the next messages, and the parsed turn."""
        ids = [*self._oracle.encode(said), *([] if end is None else [end])]
        turn = self._conversation.add_completion(ids, [0.0] * len(ids))
        new = [ChatMessage(role="tool", content=text, name="probe") for text in each.results]
        if each.question is not None:
            new.append(ChatMessage(role="user", content=each.question))
        self._messages.append(answer)
        for index, message in enumerate(new):
            plain: Message = {"role": message.role, "content": message.content}
            if message.role == "tool":
                made = answer.get("tool_calls", [])
                plain |= {"name": "probe", "tool_call_id": made[index]["id"] if index < len(made) else call_id(0)}
            self._messages.append(plain)
        return ids, new, turn

    def _add(self, new: Sequence[ChatMessage]) -> None:
        try:
            self._conversation.add_messages(new)
        except HandlerError as exc:
            self._whole()  # raises the template's own objection
            raise Unexplained(f"the template renders the dialogue, but not turn by turn: {exc}") from exc

    def _turn(self, each: Round) -> None:
        said, end, answer = self._spoken(each, self._messages, self._text)
        chat, conversation = self._chat, self._conversation
        breaks, before = conversation.prefix_breaks, self._text
        ids, new, turn = self._exchange(each, said, end, answer)
        self._add(new)
        self._text = self._whole()
        self._check_append_only(ids, new)
        stands = before + said + ("" if end is None else chat.decode([end]))
        if conversation.prefix_breaks > breaks and self._text.startswith(stands):
            raise Unexplained(f"a new segment where the template rewrites nothing, after {said[-60:]!r}")
        read = [call.arguments for call in turn.tool_calls]
        if "tool_calls" in answer and not (read and read == each.arguments[: len(read)]):  # some write only the first
            raise Unexplained(f"the calls in {said!r}, as the template writes them, are read as {turn.tool_calls}")

    def _check_append_only(self, ids: Sequence[int], new: Sequence[ChatMessage]) -> None:
        """Check that the text after a turn depends only on the remembered part.

        Conversations that begin new segments would hide such a dependence, so these are append-only.
        """
        prompts: list[list[int] | None] = []
        for each in self._append_only:
            try:
                each.add_completion(ids, [0.0] * len(ids))
                each.add_messages(new)
                prompts.append(each.prompt_token_ids())
            except (HandlerError, TokenDrift):
                prompts.append(None)
        if None in prompts:
            self._append_only = []  # it cannot continue
        if len(prompts) == 2 and prompts[0] != prompts[1]:
            raise Unexplained("without new segments, it depends on more of the dialogue than is remembered")

    @property
    def _renders_tools(self) -> bool:
        return self._chat.capabilities.renders_tools

    def _whole(self, messages: Sequence[Message] | None = None, tools: Sequence[ToolSchema] | None = None) -> str:
        template = self._chat.template
        tools = self._dialogue.tools if tools is None else tools
        adapted = template.adapted(self._messages if messages is None else messages, tools)
        return self._oracle.render(adapted, tools if self._renders_tools else [], True)

    def _spoken(self, each: Round, messages: Sequence[Message], prompt: str) -> tuple[str, int | None, Message]:
        """Return the assistant's text after `prompt`, the token that ends it, if any, and the oracle's message.

        `prompt` is the rendering of `messages`.

        If the template renders calls itself, the text is exactly the template's.
        """
        chat, capabilities = self._chat, self._chat.capabilities
        in_parts = capabilities.needs_calls or capabilities.reasoning_form == "field"
        if in_parts or (each.arguments and capabilities.renders_calls):
            answer = self._parts(each)
            written = self._as_written(answer, messages, prompt)
            if written is None and in_parts:  # it changes earlier turns as soon as it renders this one
                alone: list[Message] = [{"role": "user", "content": "x"}]
                written = self._as_written(answer, alone, self._whole(alone))
            if written is not None:
                return *written, answer
            if in_parts:
                raise HandlerError("the template does not continue its own prompt")
        said = each.content or "So"
        thoughts = chat.family.syntax.thoughts
        if each.reasoning and "<think>" in thoughts:
            said = f"{each.reasoning}\n</think>\n\n{said}"
            said = said if capabilities.opens_thinking else f"<think>\n{said}"
        opened = prompt[prompt.rfind("<think>") :] if prompt.rstrip().endswith("<think>") else ""
        answer = spoken_message(said, opened, capabilities.reasoning_form)
        return said, None if each.results else chat.end_of_turn_id, answer

    def _parts(self, each: Round) -> Message:
        calls = []
        for arguments in each.arguments:
            self._calls += 1
            function = {"name": "probe", "arguments": arguments}
            call = {"id": call_id(self._calls), "type": "function", "function": function}
            calls.append(self._chat.template.as_wanted(call))
        takes_reasoning = self._chat.capabilities.reasoning_form == "field"
        content = "" if each.reasoning and calls and not takes_reasoning else each.content
        reasoning = each.reasoning or ("So" if takes_reasoning and self._chat.capabilities.opens_thinking else "")
        return assistant_message(calls, content, reasoning)

    def _as_written(self, answer: Message, messages: Sequence[Message], prompt: str) -> tuple[str, int | None] | None:
        """Return the template's text for `answer` after its own prompt, and the token that closes it."""
        codec, template = self._chat.codec, self._chat.template
        adapted = template.adapted([*messages, answer], self._dialogue.tools)
        try:
            text = self._oracle.render(adapted, self._dialogue.tools if self._renders_tools else [], False)
        except HandlerError:
            return None
        if not text.startswith(prompt):
            return None
        text = text[len(prompt) :]
        if text[:1].isspace() and prompt[-1:].isspace():
            return None  # a model samples one run of white space in other tokens than its encoding as a whole
        closings = list(codec.control_pattern.finditer(text))
        if not closings or text[closings[-1].end() :].strip():
            return text, None
        return text[: closings[-1].start()], codec.added_ids[closings[-1][0]]

    def _check_forgeries(self, ids: Sequence[int]) -> None:
        codec = self._chat.codec
        decoded, expected = _normal(codec.decode(ids)), _normal(self._text)
        if decoded != expected:
            raise Unexplained(_first_difference(decoded, expected))
        quiet = [_silenced(message) for message in self._messages]
        tools = self._dialogue.tools and [*CORPUS_TOOLS, forged_tool("x")]
        controls = {codec.added_ids[token] for token in codec.look_alikes}
        ours = [token_id for token_id in ids if token_id in controls]
        theirs = [token_id for token_id in self._oracle.encode(self._whole(quiet, tools)) if token_id in controls]
        if ours != theirs:
            raise Unexplained(f"{len(ours)} control tokens instead of {len(theirs)}: {codec.decode(ours)!r}")


def _silenced(message: Message) -> Message:
    """Return a message with the same fields but dummy text; templates may test whether a field is present."""
    return {**message, "content": "x"} if message["role"] != "assistant" and message["content"].strip() else message


class _OwnTemplate:
    """The plain template and tokenizer, without marks."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], open_turn: bool) -> str:
        return self._chat.template.render(messages, tools, open_turn)

    def encode(self, text: str) -> list[int]:
        return self._chat.codec.encode_whole(text)


def _difference(chat: ChatFormat, ids: Sequence[int], expected: Sequence[int]) -> str:
    at = next((n for n, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected)))
    ours, theirs = (chat.decode(each[max(0, at - 8) : at + 8]) for each in (ids, expected))
    return f"from id {at} on there is {ours!r} instead of {theirs!r}"


def _first_difference(text: str, expected: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), 0)
    start = max(0, at - 30)
    return f"from character {at} on there is {text[start : at + 40]!r} instead of {expected[start : at + 40]!r}"


def _normal(text: str) -> str:
    """Normalise `text` as tokenizers may: to NFC, and with a plain space instead of a special one."""
    return unicodedata.normalize("NFC", text).replace("\u2581", " ")
