"""Finding out what a chat template can do, by rendering small dialogues with it."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.chat.codec import MARK
from prorl_trio.chat.history import RECALLS, STAND_IN, Recall, remembered
from prorl_trio.chat.template import (
    REASONING_FORMS,
    SENTINEL,
    Capabilities,
    ChatTemplate,
    ReasoningForm,
    assistant_message,
    call_id,
    spoken_message,
)
from prorl_trio.types.errors import ConfigError, HandlerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.chat.messages import Message, ToolSchema


def probe(template: ChatTemplate) -> None:
    """Set `template.capabilities`.

    Raises:
        ConfigError: the template fails on a plain dialogue, or loses messages.
    """
    try:
        # Those that rendering itself depends on come first.
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
    """Return whether results are written differently after a call than after an assistant's text."""
    capabilities = template.capabilities
    if not (capabilities.renders_calls and capabilities.renders_tool_role):
        return False
    for new in _AFTER_TOOLS:
        calls = _calls_for(new)
        try:
            after_calls = template.delta_after_calls(new, STAND_IN, (), calls)
        except HandlerError:
            continue  # several calls at once, perhaps
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
    """Check that a dialogue and a delta contain what was put in; return what opens an assistant turn, if anything."""
    closed, opened = (template.prompt([_SYSTEM, _USER], (), open_turn=open_turn) for open_turn in (False, True))
    shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(closed, opened, strict=False)))
    opening = opened[shared:]  # Phi-3 ends a dialogue that it does not open
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
    """Check that what comes from outside is written as it is, or as JSON."""
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
    """Return the first form in which reasoning is written as it was said; if there is none, as it was said."""
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
    """Return whether the template writes a turn with a call otherwise where all of it is given as content."""
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

    False where the template refuses it.
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
    """Return the shortest that leaves every delta as it is."""
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
    """Dialogues up to where the assistant speaks, each call in them in the form that the template needs."""
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
_MORE: Message = {"role": "user", "content": "probe-more"}  # another one: some templates look for equal messages
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
