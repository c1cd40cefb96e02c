"""Messages to token ids and back for one model, token-exact over many turns.

`ChatFormat` combines a model's chat template (see `template`) and its tokenizer, which is used such that no message can
forge a control token (see `codec`). `conversation.Conversation` is one dialogue.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from prorl_trio.chat.codec import MARK, TokenCodec
from prorl_trio.chat.families.family import Family, choose_family
from prorl_trio.chat.families.syntax import HERMES, SpokenTurn
from prorl_trio.chat.history import RECALLS, STAND_IN, Recall, remembered
from prorl_trio.chat.model_folder import read_model_folder
from prorl_trio.chat.template import (
    REASONING_FORMS,
    SENTINEL,
    Capabilities,
    ChatTemplate,
    ReasoningForm,
    assistant_message,
    call_id,
    parameter_schemas,
    spoken_message,
)
from prorl_trio.chat.tool_calls import parse_turn
from prorl_trio.types.errors import ConfigError, HandlerError
from prorl_trio.types.model_facts import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from prorl_trio.chat.families.syntax import CallSyntax
    from prorl_trio.types.models import Message, ToolCall, ToolSchema


MAX_PADDING_ROWS = 2048
"""Rows of an embedding beyond its tokenizer. Published models have up to 1,069 (`vocab_size` in config.json of
openai/gpt-oss-20b is 201,088, and its tokenizer has 200,019 ids)."""

OnBreak = Literal["keep", "segment", "fail"]
"""The treatment of a template that would render an earlier turn differently from the sampled text. Qwen3, for example,
drops old reasoning at a new user message, so that the next prompt would not begin with the tokens so far. `keep`
appends to the sampled tokens; `segment` begins a segment with the template's own rendering; `fail` raises TokenDrift.
"""


def probe(template: ChatTemplate) -> None:
    """Set `template.capabilities`.

    Raises:
        ConfigError: the template fails on a plain dialogue, or loses messages.
    """
    try:
        # Capabilities that rendering itself depends on come first.
        template.capabilities = Capabilities(lists_content=not _renders_content(template))
        if template.capabilities.lists_content and not _renders_content(template):
            template.capabilities = Capabilities()
        _note(template, renders_system=_renders_system(template))
        _note(template, renders_tools=_renders_tools(template))
        for json_arguments in (False, True):
            _note(template, json_arguments=json_arguments)
            if _renders_calls(template):
                _note(template, renders_calls=True)
                break
        else:
            _note(template, json_arguments=False)
        _note(template, renders_tool_role=_renders_role(template))
        _note(template, needs_calls=_needs_calls(template))
        opening = _check_messages_survive(template)
        _check_texts_stand(template)
        opened = opening[opening.rfind("<think>") :] if opening.rstrip().endswith("<think>") else ""
        _note(template, opens_thinking=bool(opened))
        if not template.capabilities.needs_calls:
            form = _reasoning_form(template, opened)
            template.capabilities = msgspec.structs.replace(template.capabilities, reasoning_form=form)
            _note(template, calls_in_parts=_calls_in_parts(template, opened))
        _note(template, rewrites_history=_rewrites_history(template, opened))
        template.capabilities = msgspec.structs.replace(template.capabilities, recall=_shortest_recall(template))
    except HandlerError as exc:
        raise ConfigError(f"{template.origin}: the chat template failed its self-test: {exc}") from exc


def _note(template: ChatTemplate, **found: bool) -> None:
    template.capabilities = msgspec.structs.replace(template.capabilities, **found)


def _renders_content(template: ChatTemplate) -> bool:
    try:
        return SENTINEL in template.render([_USER, {"role": "assistant", "content": SENTINEL}], (), False)
    except HandlerError:
        return False


def _renders_system(template: ChatTemplate) -> bool:
    try:
        template.render([_SYSTEM, _USER], (), True)
    except HandlerError:
        return False
    return True


def _renders_tools(template: ChatTemplate) -> bool:
    try:
        return "probe_tool" in template.render([_USER], _TOOLS, True)
    except HandlerError:
        return False


def _renders_calls(template: ChatTemplate) -> bool:
    said = assistant_message(template.sentinel_calls([_CALL]))
    try:
        text = template.render([_USER, said, _TOOL], (), True)
    except HandlerError:
        return False
    return text.count(SENTINEL) == 1 and "probe_tool" in text.split(SENTINEL)[0]


def _renders_role(template: ChatTemplate) -> bool:
    for said in (_ASSISTANT, assistant_message([template.as_wanted(_CALL)])):
        try:
            as_tool = template.render([_USER, said, _TOOL], (), True)
        except HandlerError:
            continue
        if _TOOL["content"] in as_tool:
            break
    else:
        return False
    try:
        as_stranger = template.render([_USER, said, {**_TOOL, "role": "zqx"}], (), True)
    except HandlerError:
        return True
    return as_stranger.replace("zqx", "tool") != as_tool


def _needs_calls(template: ChatTemplate) -> bool:
    """Return whether results are rendered differently after a call than after an assistant's text."""
    capabilities = template.capabilities
    if not (capabilities.renders_calls and capabilities.renders_tool_role):
        return False
    for new in _AFTER_TOOLS:
        calls = _calls_for(new)
        try:
            after_calls = template.delta_after_calls(new, STAND_IN, (), calls)
        except HandlerError:
            continue  # perhaps several calls at once fail
        try:
            after_text = template.delta_after_text(new, STAND_IN, ())
        except HandlerError:
            return True
        if after_text != after_calls:
            return True
    called = assistant_message([template.as_wanted(_CALL)])
    accepted = [_delta_or_none(template, [_LAST], [_USER, said, _TOOL], ()) for said in (_ASSISTANT, called)]
    return accepted[0] is None and accepted[1] is not None


def _check_messages_survive(template: ChatTemplate) -> str:
    """Check that a dialogue and a delta contain their messages; return the opening of an assistant turn, if any."""
    closed, opened = (template.prompt([_SYSTEM, _USER], (), open_turn=open_turn) for open_turn in (False, True))
    shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(closed, opened, strict=False)))
    opening = opened[shared:]  # Phi-3 ends a dialogue with a token that it does not open
    spoken = template.prompt([_SYSTEM, _USER, {"role": "assistant", "content": SENTINEL}], ())
    if opening == opened or not (opening or spoken.startswith(opened + SENTINEL)):
        raise HandlerError("it does not append a generation prompt when asked to")
    tool_delta, user_delta = (template.delta([new], [_SYSTEM, _USER], calls=[_CALL]) for new in (_TOOL, _MORE))
    for text, message in ((opened, _SYSTEM), (opened, _USER), (tool_delta, _TOOL), (user_delta, _MORE)):
        if text.count(message["content"]) != 1:
            raise HandlerError(f"it loses, changes or repeats the content of a {message['role']} message")
    if not user_delta.endswith(opening):
        raise HandlerError("its generation prompt differs between the first turn and a later one")
    return opening


def _check_texts_stand(template: ChatTemplate) -> None:
    """Check that untrusted text is rendered unchanged, or as JSON."""
    odd = [{**message, "content": _ODD} for message in (_SYSTEM, _USER, _MORE, _TOOL)]
    texts = (
        template.prompt([odd[0], _USER], ()),
        template.prompt([_SYSTEM, odd[1]], ()),
        template.delta([odd[2]], [_SYSTEM, _USER]),
        template.delta([odd[3]], [_SYSTEM, _USER], calls=[_CALL]),
    )
    for message, text in zip(odd, texts, strict=True):
        if _ODD not in text and json.dumps(_ODD, ensure_ascii=False)[1:-1] not in text:
            raise HandlerError(
                f"it writes what a {message['role']} message says otherwise than it is, so that a control token might "
                "come of it"
            )


def _reasoning_form(template: ChatTemplate, opened: str) -> ReasoningForm:
    """Return the first form in which reasoning is rendered as it was sampled; if none works, `said`."""
    said = ("" if opened else "<think>\n") + "probe-why\n</think>\n\nprobe-answer"
    thought = re.compile(("" if opened else r"\s*<think>") + r"\s*probe-why\s*</think>\s*probe-answer")
    for form in REASONING_FORMS:
        try:
            prompt = template.prompt([_USER], ())
            text = template.prompt([_USER, spoken_message(said, opened, form)], (), open_turn=False)
        except HandlerError:
            continue
        if text.startswith(prompt) and thought.match(text, len(prompt)):
            return form
    return "said"


def _calls_in_parts(template: ChatTemplate, opened: str) -> bool:
    """Return whether the template renders a turn with a call differently if the whole turn is given as content."""
    capabilities = template.capabilities
    if capabilities.needs_calls or not capabilities.renders_calls:
        return False
    try:
        prompt = template.prompt([_USER], ())
        text = template.prompt([_USER, assistant_message([template.as_wanted(_CALL)], "", "probe-why"), _TOOL], ())
        said = template.said_in(text, prompt)
        if said is None:
            return False
        return template.prompt([_USER, spoken_message(said, opened, capabilities.reasoning_form), _TOOL], ()) != text
    except HandlerError:
        return False


def _rewrites_history(template: ChatTemplate, opened: str) -> bool:
    said = [*_SAID]
    thought = "probe why\n</think>\n\nprobe answer"
    said.append(thought if opened else "<think>\n" + thought)
    return any(
        _differs(template, history, text, opened, new, tools)
        for history in _histories(template, _HISTORIES)
        for text in said
        for new in _NEW_MESSAGES
        for tools in ((), _TOOLS)
        if not (text is said[-1] and new[0]["role"] == "tool")
    )


def _differs(
    template: ChatTemplate,
    history: Sequence[Message],
    said: str,
    opened: str,
    new: Sequence[Message],
    tools: Sequence[ToolSchema],
) -> bool:
    """Return whether the whole dialogue is rendered differently than turn by turn.

    It is False if the template refuses the dialogue.
    """
    answer = spoken_message(said, opened, template.capabilities.reasoning_form)
    if template.capabilities.needs_calls and new[0]["role"] == "tool":
        answer = assistant_message([template.as_wanted(call) for call in _calls_for(new)], said)
    try:
        if "tool_calls" in answer:
            before = template.prompt([*history, answer], tools, open_turn=False)
            return not template.prompt([*history, answer, *new], tools).startswith(before.rstrip())
        grown = template.prompt(history, tools) + said + template.delta(new, history, tools)
        return template.prompt([*history, answer, *new], tools) != grown
    except HandlerError:
        return False


def _shortest_recall(template: ChatTemplate) -> Recall:
    """Return the shortest recall that leaves every delta unchanged."""
    probes = [
        (new, history, tools, _delta_or_none(template, new, history, tools))
        for new in _NEW_MESSAGES
        for history in _histories(template, _HISTORIES + _LONG_HISTORIES)
        for tools in ((), _TOOLS)
    ]
    enough = (
        recall
        for recall in RECALLS
        if all(
            delta == _delta_or_none(template, new, remembered(history, recall.history), tools if recall.tools else ())
            for new, history, tools, delta in probes
        )
    )
    return next(enough, Recall())


def _delta_or_none(
    template: ChatTemplate, new: Sequence[Message], history: Sequence[Message], tools: Sequence[ToolSchema]
) -> str | None:
    try:
        return template.delta(new, history, tools, _calls_for(new))
    except HandlerError:
        return None


def _histories(template: ChatTemplate, histories: Sequence[tuple[Message, ...]]) -> list[list[Message]]:
    """Return dialogues up to the assistant's turn, with each call in the form that the template needs."""
    if not template.capabilities.needs_calls:
        return [list(history) for history in histories]
    return [
        [
            assistant_message([template.as_wanted(_CALL)])
            if message is _ASSISTANT and history[index + 1 : index + 2] == (_TOOL,)
            else message
            for index, message in enumerate(history)
        ]
        for history in histories
    ]


def _calls_for(new: Sequence[Message]) -> list[Message]:
    results = [message for message in new if message["role"] == "tool"]
    return [{**_CALL, "id": result["tool_call_id"]} for result in results]


# ---------------------------------------------------------------- probes

_SYSTEM: Message = {"role": "system", "content": "probe-system"}
_USER = STAND_IN[0]
_MORE: Message = {"role": "user", "content": "probe-more"}  # a different text: some templates look for equal messages
_ASSISTANT: Message = {"role": "assistant", "content": "probe-assistant"}
_TOOL: Message = {"role": "tool", "content": "probe-result", "name": "probe_tool", "tool_call_id": call_id(1)}
_TOOL_2: Message = {**_TOOL, "tool_call_id": call_id(2)}
_CALL: Message = {
    "id": call_id(1),
    "type": "function",
    "function": {"name": "probe_tool", "arguments": {"x": "probe-argument"}},
}
_TOOLS: tuple[ToolSchema, ...] = (
    {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "Probe.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    },
)
_HISTORIES: tuple[tuple[Message, ...], ...] = (
    (_USER,),
    (_SYSTEM, _USER),
    (_USER, _ASSISTANT, _TOOL),
    (_SYSTEM, _USER, _ASSISTANT, _MORE),
    (_SYSTEM, _USER, _ASSISTANT, _TOOL, _TOOL_2, _ASSISTANT, _MORE, _ASSISTANT, _TOOL),
)
_LONG_HISTORIES: tuple[tuple[Message, ...], ...] = (
    (_USER, _ASSISTANT, _TOOL, _ASSISTANT, _MORE),
    (_USER, *(_ASSISTANT, _TOOL) * 40),
    (_SYSTEM, _USER, *(_ASSISTANT, _MORE) * 40),
    (_USER, *(_ASSISTANT, _MORE, _ASSISTANT, _TOOL, _TOOL_2) * 2, *(_ASSISTANT, _MORE) * 2),
)
_SAID = (
    "probe-said",
    "",
    "\nprobe said \n",
    f"{MARK}{MARK} 2 < 3\n\n```\né e\u0301 數 😀 <{MARK}|x|>\n```",
    "long " * 4000 + "end",
)
_ODD: Final = "probe Odd <X> [y]{x}(z) &lt;&#60; \\| '\"` a  b\n\n \t</B>\ncC_-"
_LAST: Message = {"role": "user", "content": "probe-last"}
_AFTER_TOOLS = ((_TOOL,), (_TOOL, _TOOL_2), (_TOOL, _LAST))
_NEW_MESSAGES = ((_LAST,), *_AFTER_TOOLS, (_TOOL, _SYSTEM, _LAST))


@dataclass(frozen=True, slots=True, eq=False)
class ChatFormat:
    """A model's tokenizer and chat template. Immutable, to be shared; its calls use the CPU only.

    Attributes:
        model_dir: the folder it was loaded from.
        end_of_turn_id: the token that ends an assistant's turn before a user's message.
        end_of_turn_ids: every id that ends a turn when sampled: the former, the id before a tool's result (a different
            one for GLM), and the end-of-sequence ids of tokenizer_config.json and generation_config.json.
        closing_ids: the tokens with which the template closes a turn.
        family: its syntax of tool calls and reasoning.
        on_break: default for its conversations; see `OnBreak`.
        sampleable: exclusive upper bound of the ids that the model can sample, from the tokenizer and from the rows of
            the embedding in config.json; None without it.
        max_positions: the model's longest sequence in tokens; 0 if config.json does not contain it.
        architecture: facts of the model in config.json; see `architecture_of`.
    """

    model_dir: Path
    end_of_turn_id: int
    end_of_turn_ids: frozenset[int]
    closing_ids: frozenset[int]
    family: Family
    on_break: OnBreak
    codec: TokenCodec = field(repr=False)
    template: ChatTemplate = field(repr=False)
    sampleable: int | None = None
    max_positions: int = 0
    architecture: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        family: str = "",
        template_options: Mapping[str, Any] | None = None,
        on_break: OnBreak = "keep",
    ) -> ChatFormat:
        """Read a model folder. Takes a second or more for a large vocabulary: call it in a thread.

        Args:
            model_dir: with the tokenizer and the chat template.
            family: the name of one of `FAMILIES`; without it, the family is detected by the template and the tokens.
            template_options: variables for the template, such as `enable_thinking`.
            on_break: see `OnBreak`.

        Raises:
            ConfigError: a file is missing or broken, the chat template or the family does not exist, or the template
                fails its self-test (loses messages, closes no assistant turn with a control token). The message has the
                cause.
        """
        folder = read_model_folder(model_dir)
        chosen = choose_family(family, folder.template)
        codec = TokenCodec(folder.tokenizer_json, folder.tokenizer_file, chosen.markup)
        template = ChatTemplate(
            folder.template, folder.special_tokens, folder.template_file, template_options, codec.control_pattern
        )
        probed = template.dated()
        probe(probed)
        template.capabilities = probed.capabilities
        closings = _closing_ids(template, codec)
        eos_id = codec.added_ids.get(folder.special_tokens.get("eos_token", ""), closings[0])
        ends = [codec.added_ids[end] for end in chosen.ends if end in codec.added_ids] or [*closings, eos_id]
        return cls(
            model_dir=model_dir,
            end_of_turn_id=ends[0],
            end_of_turn_ids=frozenset({*ends, *folder.eos_token_ids}),
            closing_ids=frozenset(closings),
            family=chosen,
            on_break=on_break,
            codec=codec,
            template=template,
            sampleable=max(folder.rows, codec.vocab_size) if folder.rows else None,
            max_positions=folder.max_positions,
            architecture=folder.architecture,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self.template.capabilities

    def dated(self) -> ChatFormat:
        """Return a copy whose current time is frozen. See `ChatTemplate.dated`."""
        return replace(self, template=self.template.dated())

    def recalling(self, recall: Recall) -> ChatFormat:
        """Return a copy that remembers the part of a dialogue given by `recall`."""
        return replace(self, template=self.template.recalling(recall))

    @property
    def stop_token_ids(self) -> list[int]:
        """Return `end_of_turn_ids`, sorted: the ids at which an engine must stop."""
        return sorted(self.end_of_turn_ids)

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the tokenizer's ids. The model's embedding may have more rows."""
        return self.codec.vocab_size

    @property
    def ids_below(self) -> int:
        """Exclusive upper bound of the ids that this model can sample: `sampleable`, if config.json has it.

        Otherwise it is the tokenizer's bound plus `MAX_PADDING_ROWS`. The policy may sample the id of a padding row, so
        such an id does not indicate another model.
        """
        return self.vocab_size + MAX_PADDING_ROWS if self.sampleable is None else self.sampleable

    def facts(self) -> dict[str, object]:
        facts = ModelFacts(
            vocabulary=self.codec.vocabulary,
            vocab_size=self.vocab_size,
            sampleable=self.sampleable,
            end_of_turn_ids=self.stop_token_ids,
            architecture=dict(self.architecture),
        )
        return msgspec.structs.asdict(facts)

    def closes_alike(self, sampled_id: int, closing_id: int) -> bool:
        """Return whether a turn that ends with `sampled_id` does not need the template's `closing_id`."""
        return sampled_id == closing_id or bool(self.family.ends and sampled_id in self.end_of_turn_ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`, for tools and people. `skip_special` drops tokens that structure the dialogue."""
        return self.codec.decode(ids, skip_special=skip_special)

    @property
    def call_syntaxes(self) -> tuple[CallSyntax, ...]:
        """Return the syntaxes in which the policy may write its calls."""
        own = self.family.syntax
        return (own,) if self.capabilities.renders_tools or own is HERMES else (HERMES, own)

    def read_turn(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """Return the text of one completion without structural tokens, and the calls in it.

        `raw` of each call is its exact text, including reasoning. `tools` are the tools that the policy was offered.
        """
        return self.decode(ids, skip_special=True), self.parse(ids, parameter_schemas(tools), False).tool_calls

    def parse(
        self, ids: Sequence[int], tools: Mapping[str, Any], opened_thinking: bool, following: str = ""
    ) -> SpokenTurn:
        """Return the parsed completion; `tools` maps the names a call may have to the schemas of their parameters.

        `following` is text that is read after the completion as if it had been sampled as well.

        If the template renders no tools, they are described to the policy as `<tool_call>` with JSON, and calls in the
        family's own syntax are read as well.
        """
        text = self.decode(ids, skip_special=True) + following
        turns = (parse_turn(text, tools, syntax=each, opened_thinking=opened_thinking) for each in self.call_syntaxes)
        first = next(turns)
        return first if first.tool_calls else next(turns, first)


def _closing_ids(template: ChatTemplate, codec: TokenCodec) -> list[int]:
    """Return the ids with which the template closes an assistant's turn before a user's and before a tool's message."""
    call: Message = {"id": call_id(1), "function": {"name": "probe"}}
    found = []
    for role in ("user", "tool"):
        said: Message = {"role": role, "content": "probe", "tool_call_id": call_id(1)}
        closing = codec.encode(template.delta([said], [{"role": "user", "content": "probe"}], calls=[call]))
        if not closing or closing[0] not in codec.added_ids.values():
            raise ConfigError(
                f"{template.origin}: no end-of-turn token: after an assistant's content the chat template writes "
                f"{codec.decode(closing[:4])!r}, which does not begin with one of the tokenizer's added tokens"
            )
        found.append(closing[0])
    return found
