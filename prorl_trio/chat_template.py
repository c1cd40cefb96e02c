"""A model's own Jinja chat template: rendering with it, and finding out what it can do.

`ChatTemplate.delta` is how a conversation grows without touching what is already there: render a dialogue whose
assistant says a sentinel, and take the text after it. That text is what the template puts between one assistant turn
and the next, whatever the template looks like.
"""

from __future__ import annotations

import json
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prorl_trio.chat_codec import MARK
from prorl_trio.errors import ConfigError, HandlerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jinja2.parser import Parser

__all__ = ["Capabilities", "ChatTemplate", "Message", "ToolSchema"]

Message = dict[str, str]
"""`role`, `content` and perhaps `name`, as templates want it. Content from outside has been marked."""

ToolSchema = dict[str, Any]
"""A function's JSON schema in OpenAI's format."""

_SENTINEL = f"S{MARK}S"
"""Cannot occur in marked text: there a MARK is doubled, or follows the first character of an added token."""

_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a template does, found by rendering probes with it when it is loaded.

    Attributes:
        renders_tools: it writes tool schemas itself; else they are appended to the system message by us.
        renders_tool_role: it treats `tool` differently from a made-up role; else tool results become user messages
            with each result inside `<tool_response>`.
        opens_thinking: its generation prompt ends inside `<think>`.
        rewrites_history: it renders an earlier assistant turn otherwise than it was sampled (drops its reasoning, or
            differs in some other way on the dialogues of the self-test).
        short_history: what follows an assistant turn does not depend on what preceded it, so that a delta is rendered
            with a stand-in history of one message, in time independent of the dialogue's length.
    """

    renders_tools: bool = False
    renders_tool_role: bool = False
    opens_thinking: bool = False
    rewrites_history: bool = False
    short_history: bool = False


class ChatTemplate:
    """A compiled template with its capabilities. Immutable; may be used from several threads."""

    capabilities: Capabilities

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: Path,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile and probe `source`.

        Args:
            source: of the template, in Jinja.
            special_tokens: `bos_token` and so on: variables of the template.
            origin: the file it is from, for messages.
            options: further variables (`enable_thinking`, say), the same in every rendering.

        Raises:
            ConfigError: it is not Jinja, fails on a plain dialogue, or loses messages.
        """
        self._variables = {**(options or {}), **special_tokens}
        try:
            self._compiled = _environment().from_string(source)
        except jinja2.TemplateError as exc:
            raise ConfigError(f"{origin}: the chat template is not valid Jinja: {exc}") from exc
        self.capabilities = Capabilities()
        try:
            self.capabilities = self._probe()
        except HandlerError as exc:
            raise ConfigError(f"{origin}: the chat template failed its self-test: {exc}") from exc

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, open_turn: bool = True) -> str:
        """Return the whole dialogue as text; with `open_turn`, ready for the assistant to speak.

        Raises:
            HandlerError: the template refuses these messages, and says why.
        """
        adapted = list(messages) if self.capabilities.renders_tool_role else _tool_results_as_user(messages)
        if tools and not self.capabilities.renders_tools:
            adapted = _tools_in_system(adapted, tools)
        return self._render(adapted, tools, open_turn)

    def delta(self, new: Sequence[Message], history: Sequence[Message] = (), tools: Sequence[ToolSchema] = ()) -> str:
        """Return the text between the end of an assistant's content and its next turn, `new` being in between.

        `history` is what preceded that assistant turn; it and `tools` are used, and needed, only where
        `capabilities.short_history` is false.

        Raises:
            HandlerError: the template refuses these messages, loses one, or does not render the assistant's turn.
        """
        if self.capabilities.short_history:
            history, tools = _STAND_IN, ()
        rendered = self.prompt([*history, {"role": "assistant", "content": _SENTINEL}, *new], tools)
        _before, *after = rendered.split(_SENTINEL)
        if len(after) != 1:
            raise HandlerError(f"the chat template renders an assistant's content {len(after)} times instead of once")
        if any(message["role"] == "system" and message["content"].strip() not in after[0] for message in new):
            raise HandlerError("the chat template has no place for a system message after an assistant's turn")
        return after[0]

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], open_turn: bool) -> str:
        try:
            return self._compiled.render(
                messages=messages, tools=list(tools) or None, add_generation_prompt=open_turn, **self._variables
            )
        except _TEMPLATE_FAULTS as exc:
            raise HandlerError(f"the model's chat template refuses these messages: {exc}") from exc

    # ------------------------------------------------------------ probing

    def _probe(self) -> Capabilities:
        """Find the capabilities, those that rendering itself depends on first. Raises HandlerError."""
        self.capabilities = Capabilities(renders_tools=self._renders_tools(), renders_tool_role=self._renders_role())
        opening = self._check_messages_survive()
        return msgspec.structs.replace(
            self.capabilities,
            opens_thinking=opening.rstrip().endswith("<think>"),
            rewrites_history=self._rewrites_history(opening),
            short_history=all(
                self._delta_or_none(new, _STAND_IN, ()) == self._delta_or_none(new, history, tools)
                for new in _NEW_MESSAGES
                for history in _HISTORIES
                for tools in ((), _TOOLS)
            ),
        )

    def _renders_tools(self) -> bool:
        try:
            return "probe_tool" in self._render([_USER], _TOOLS, True)
        except HandlerError:
            return False

    def _renders_role(self) -> bool:
        try:
            as_tool = self._render([_USER, _ASSISTANT, _TOOL], (), True)
        except HandlerError:
            return False
        try:
            as_stranger = self._render([_USER, _ASSISTANT, {**_TOOL, "role": "zqx"}], (), True)
        except HandlerError:
            return _TOOL["content"] in as_tool
        return _TOOL["content"] in as_tool and as_stranger.replace("zqx", "tool") != as_tool

    def _check_messages_survive(self) -> str:
        """Check that a dialogue and a delta contain what was put in; return the text that opens an assistant turn."""
        closed, opened = (self.prompt([_SYSTEM, _USER], (), open_turn=open_turn) for open_turn in (False, True))
        opening = opened.removeprefix(closed)
        if not opening or opening == opened:
            raise HandlerError("it does not append a generation prompt when asked to")
        tool_delta, user_delta = (self.delta([new], [_SYSTEM, _USER]) for new in (_TOOL, _USER))
        for text, message in ((opened, _SYSTEM), (opened, _USER), (tool_delta, _TOOL), (user_delta, _USER)):
            if text.count(message["content"]) != 1:
                raise HandlerError(f"it loses, changes or repeats the content of a {message['role']} message")
        if not user_delta.endswith(opening):
            raise HandlerError("its generation prompt differs between the first turn and a later one")
        return opening

    def _rewrites_history(self, opening: str) -> bool:
        if any(
            self._differs(history, said, new, tools)
            for history in _HISTORIES
            for said in _SAID
            for new in _NEW_MESSAGES
            for tools in ((), _TOOLS)
        ):
            return True
        said = "probe why\n</think>\n\nprobe answer"
        if not opening.rstrip().endswith("<think>"):
            said = "<think>\n" + said
        kept = self.prompt([_USER], ()) + said + self.delta([_USER], [_USER])
        return self.prompt([_USER, {"role": "assistant", "content": said}, _USER], ()) != kept

    def _differs(
        self, history: Sequence[Message], said: str, new: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> bool:
        """Whether the whole dialogue is rendered otherwise than turn by turn. False where it is refused."""
        try:
            grown = self.prompt(history, tools) + said + self.delta(new, history, tools)
            return self.prompt([*history, {"role": "assistant", "content": said}, *new], tools) != grown
        except HandlerError:
            return False

    def _delta_or_none(
        self, new: Sequence[Message], history: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> str | None:
        try:
            return self.delta(new, history, tools)
        except HandlerError:
            return None


# ---------------------------------------------------------------- for templates without tools


def _tools_in_system(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """Append the instructions for `tools` to the system message; without one they become it."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = (
        "# Tools\n\nYou may call functions to help with the task. Their signatures, as JSON schemas, are between "
        f"<tools> and </tools>:\n<tools>\n{schemas}\n</tools>\n\nTo call a function, write a JSON object with its name "
        'and arguments between <tool_call> and </tool_call>:\n<tool_call>\n{"name": <function-name>, "arguments": '
        "<arguments-as-json-object>}\n</tool_call>"
    )
    if messages and messages[0]["role"] == "system":
        system, *rest = messages
        return [{**system, "content": f"{system['content']}\n\n{instructions}"}, *rest]
    return [{"role": "system", "content": instructions}, *messages]


def _tool_results_as_user(messages: Sequence[Message]) -> list[Message]:
    """Turn each run of tool messages into one user message."""
    adapted: list[Message] = []
    for is_tool, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_tool:
            results = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in run)
            adapted.append({"role": "user", "content": "\n".join(results)})
        else:
            adapted += run
    return adapted


# ---------------------------------------------------------------- Jinja as chat templates expect it


class _GenerationTag(Extension):
    """`{% generation %}..{% endgeneration %}` marks what a model said; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


# ---------------------------------------------------------------- probes

_SYSTEM: Message = {"role": "system", "content": "probe-system"}
_USER: Message = {"role": "user", "content": "probe-user"}
_ASSISTANT: Message = {"role": "assistant", "content": "probe-assistant"}
_TOOL: Message = {"role": "tool", "content": "probe-result", "name": "probe_tool"}
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
_STAND_IN = (_USER,)
_HISTORIES = (
    (_USER,),
    (_SYSTEM, _USER),
    (_USER, _ASSISTANT, _TOOL),
    (_SYSTEM, _USER, _ASSISTANT, _USER),
    (_SYSTEM, _USER, _ASSISTANT, _TOOL, _TOOL, _ASSISTANT, _USER, _ASSISTANT, _TOOL),
)
_SAID = ("probe-said", "", f"{MARK}{MARK} 2 < 3\n\n```\né e\u0301 數 😀 <{MARK}|x|>\n```", "long " * 4000 + "end")
_NEW_MESSAGES = ((_USER,), (_TOOL,), (_TOOL, _TOOL), (_TOOL, _USER), (_TOOL, _SYSTEM, _USER))
