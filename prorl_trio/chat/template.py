"""A model's own Jinja chat template: whole dialogues, and the text between one assistant turn and the next.

`ChatTemplate.delta` extends a conversation without changing earlier text: it renders a dialogue whose assistant message
is a sentinel, and returns the text after the sentinel. This works for any template. `probe` detects the capabilities of
a template.
"""

from __future__ import annotations

import json
from copy import copy
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prorl_trio.chat.codec import MARK
from prorl_trio.chat.history import Recall, remembered
from prorl_trio.types.errors import ConfigError, HandlerError

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from jinja2.parser import Parser

    from prorl_trio.types.models import Message, ToolSchema


ReasoningForm = Literal["said", "opened", "field"]
"""Reasoning as it was sampled, in the content (`said`); also with the `<think>` from the end of the prompt (`opened`);
or in a separate field (`reasoning_content`, `reasoning` or `thinking`)."""
REASONING_FORMS: Final[tuple[ReasoningForm, ...]] = ("said", "opened", "field")

REASONING_FIELDS = ("thinking", "reasoning_content", "reasoning")
"""Names of templates for an assistant's reasoning; each gets the same text."""

SENTINEL = f"\u0298{MARK}\u0298"
"""A text that cannot occur in marked text: there a MARK is doubled, or follows a character of an added token."""

TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError
)  # fmt: skip
"""Exceptions of rendering that are caused by the template or the messages."""


class _GenerationTag(Extension):
    """`{% generation %}..{% endgeneration %}` marks a model's output; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return a new environment; templates compiled in it may be rendered in several threads.

    It offers no random functions, because the output of a template must be deterministic.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def template_literals(source: str) -> set[str | int]:
    """Return the strings and whole numbers in expressions of `source`: values that it may compare messages with."""
    constants = template_environment().parse(source).find_all(nodes.Const)
    return {each.value for each in constants if type(each.value) in (str, int)}


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


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Abilities of a template, detected by rendering probes when it is loaded.

    Attributes:
        lists_content: it expects the content of a message as a list of parts, such as one text part.
        renders_system: it accepts a system message; otherwise its text is prepended to the first user message.
        renders_tools: it renders tool schemas itself; otherwise they are appended to the system message.
        renders_tool_role: it treats `tool` differently from a made-up role; otherwise tool results become user messages
            with each result inside `<tool_response>`.
        renders_calls: it renders the `tool_calls` of an assistant message.
        json_arguments: it expects their arguments as a string with JSON, not as an object.
        needs_calls: its rendering of tool results depends on the calls that they answer (their names, ids or presence),
            so an assistant's turn is rendered from its parts, not from its text.
        opens_thinking: its generation prompt ends inside `<think>`.
        reasoning_form: the form of an assistant's reasoning that it renders as it was sampled.
        calls_in_parts: it renders a turn with calls as sampled only if the calls are separate from the text.
        rewrites_history: it renders an earlier assistant turn differently from the sampled text (drops its reasoning,
            or differs in some other way on the dialogues of the self-test).
        recall: the part of the dialogue before an assistant turn that the text after the turn depends on. Only this
            part is rendered for a delta, for most templates in time independent of the dialogue's length.
    """

    lists_content: bool = False
    renders_system: bool = True
    renders_tools: bool = False
    renders_tool_role: bool = False
    renders_calls: bool = False
    json_arguments: bool = False
    needs_calls: bool = False
    opens_thinking: bool = False
    reasoning_form: ReasoningForm = "said"
    calls_in_parts: bool = False
    rewrites_history: bool = False
    recall: Recall = Recall()


def call_id(number: int) -> str:
    """Return the id of a call that was sampled without one: nine digits, as required by Mistral's template."""
    return f"{number:09d}"


def parameter_schemas(tools: Iterable[ToolSchema]) -> dict[str, Any]:
    """Return the schema of each tool's parameters by the tool's name."""
    schemas = {}
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise HandlerError(f"tools[{index}] has no function.name; a tool is a JSON schema in OpenAI's format")
        schemas[name] = function.get("parameters")
    return schemas


class ChatTemplate:
    """A compiled template. Immutable once probed; may be used from several threads.

    Attributes:
        capabilities: empty until `chat.format.probe` has detected them.
        literals: the strings and whole numbers in its expressions.
    """

    capabilities: Capabilities
    literals: frozenset[str | int]

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: Path,
        options: Mapping[str, Any] | None,
        control: re.Pattern[str],
    ) -> None:
        """Compile `source`.

        Args:
            source: the template, in Jinja.
            special_tokens: `bos_token` and so on: variables of the template.
            origin: its file, for messages.
            options: further variables, such as `enable_thinking`, for every rendering.
            control: matches the tokens that structure a dialogue, which end an assistant's calls.

        Raises:
            ConfigError: it is not Jinja.
        """
        self._variables = {**(options or {}), **special_tokens}
        self._control = control
        self._tells_time = "strftime_now" in source
        self.origin = origin
        self.capabilities = Capabilities()
        try:
            self._compiled = template_environment().from_string(source)
            self.literals = frozenset(template_literals(source))
        except jinja2.TemplateError as exc:
            raise ConfigError(f"{origin}: the chat template is not valid Jinja: {exc}") from exc

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, open_turn: bool = True) -> str:
        """Return the whole dialogue as text; with `open_turn`, ready for the assistant's turn.

        Raises:
            HandlerError: the template refuses these messages; the message has the reason.
        """
        return self.render(self.adapted(messages, tools), tools, open_turn)

    def adapted(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
        """Return `messages` with unsupported parts, such as results or `tools`, written into their texts."""
        adapted = list(messages) if self.capabilities.renders_tool_role else _tool_results_as_user(messages)
        if tools and not self.capabilities.renders_tools:
            adapted = _tools_in_system(adapted, tools)
        return adapted if self.capabilities.renders_system else _system_as_user(adapted)

    def delta(
        self,
        new: Sequence[Message],
        history: Sequence[Message] = (),
        tools: Sequence[ToolSchema] = (),
        calls: Sequence[Message] = (),
    ) -> str:
        """Return the text between the end of an assistant's turn and its next turn, with the `new` messages between.

        Args:
            new: the messages after the turn. Tool results answer `calls` in their order.
            history: the messages before that assistant turn, or their `remembered` part. It and `tools` are used, and
                needed, only as `capabilities.recall` requires.
            tools: functions the policy may call.
            calls: the calls of that assistant turn, as `tool_calls`; used only if `capabilities.needs_calls`.

        Raises:
            HandlerError: the template refuses these messages, loses one, or does not render the assistant's turn.
        """
        history, tools = self.remembered(history), tools if self.capabilities.recall.tools else ()
        if self.capabilities.needs_calls and new and new[0]["role"] == "tool":
            return self.delta_after_calls(new, history, tools, calls)
        return self.delta_after_text(new, history, tools)

    def remembered(self, history: Sequence[Message]) -> list[Message]:
        """Return the part of `history` that `delta` needs, now and after it has grown."""
        return remembered(history, self.capabilities.recall.history)

    def dated(self) -> ChatTemplate:
        """Return a copy with frozen current time, because a date in a prompt must not change within a dialogue."""
        if not self._tells_time or "strftime_now" in self._variables:
            return self
        other = copy(self)
        other._variables = {**self._variables, "strftime_now": datetime.now().strftime}
        return other

    def recalling(self, recall: Recall) -> ChatTemplate:
        """Return a copy that renders deltas over the part given by `recall`."""
        other = copy(self)
        other.capabilities = msgspec.structs.replace(self.capabilities, recall=recall)
        return other

    def delta_after_text(self, new: Sequence[Message], history: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """See `delta`: after an assistant's turn that has only content."""
        return self._after_sentinel([*history, {"role": "assistant", "content": SENTINEL}, *new], new, tools)

    def delta_after_calls(
        self,
        new: Sequence[Message],
        history: Sequence[Message],
        tools: Sequence[ToolSchema],
        calls: Sequence[Message],
    ) -> str:
        """See `delta`: after an assistant's turn that ends with calls.

        Begins with the token that closes the turn, or else with the token that opens the next one.
        """
        spoken = assistant_message(self.sentinel_calls(calls))
        after = self._after_sentinel([*history, spoken, *new], new, tools)
        closing = self._control.search(after)
        if closing is None:
            raise HandlerError("the chat template writes no control token between a tool call and its result")
        return after[closing.start() :]

    def sentinel_calls(self, calls: Sequence[Message]) -> list[Message]:
        """Return the names and ids of `calls`, without their arguments, and with the sentinel in the first one.

        Templates that write one call at a time still write the first one.
        """
        ids = [(call["function"]["name"], call["id"]) for call in calls] or [("none", call_id(0))]
        bare = [_call(name, identity, {}) for name, identity in ids]
        bare[0] = _call(*ids[0], {"s": SENTINEL})
        return [self.as_wanted(call) for call in bare]

    def as_wanted(self, call: Message) -> Message:
        """Return `call` with its arguments in the form that this template expects."""
        if not self.capabilities.json_arguments:
            return call
        function = call["function"]
        written = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": written}}

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], open_turn: bool) -> str:
        """Return the rendering of exactly these messages. Raises HandlerError as `prompt` does."""
        if self.capabilities.lists_content:
            messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        try:
            return self._compiled.render(
                messages=messages, tools=list(tools) or None, add_generation_prompt=open_turn, **self._variables
            )
        except TEMPLATE_FAULTS as exc:
            raise HandlerError(f"the model's chat template refuses these messages: {exc}") from exc

    def said_in(self, text: str, prompt: str) -> str | None:
        """Return the part of `text` after `prompt`, up to the next token that structures the dialogue."""
        if not text.startswith(prompt):
            return None
        end = self._control.search(text, len(prompt))
        return text[len(prompt) : end.start() if end else len(text)]

    def _after_sentinel(self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        _before, *after = self.prompt(messages, tools).split(SENTINEL)
        if len(after) != 1:
            raise HandlerError(f"the chat template renders what an assistant says {len(after)} times instead of once")
        for index, message in enumerate(new, len(messages) - len(new)):
            said = message["content"].strip()
            if said in after[0] or json.dumps(said, ensure_ascii=False)[1:-1] in after[0]:
                continue
            changed = [*messages[:index], {**message, "content": "changed"}, *messages[index + 1 :]]
            if self.prompt(changed, tools).partition(SENTINEL)[2] == after[0]:
                raise HandlerError(
                    f"the chat template has no place for a {message['role']} message after an assistant's turn, or not "
                    "in this order"
                )
        return after[0]


def assistant_message(calls: Sequence[Message], content: str = "", reasoning: str = "") -> Message:
    """Return an assistant's turn in parts. Empty parts are omitted, because templates test for their presence."""
    parts: Message = {"role": "assistant", "content": content}
    if reasoning:
        parts |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return {**parts, "tool_calls": list(calls)} if calls else parts


def spoken_message(text: str, opened: str, form: ReasoningForm, calls: Sequence[Message] = ()) -> Message:
    """Return a turn's text, without its `calls`, as an assistant message for a template with this form of reasoning.

    `opened`: `<think>` and the text after it at the prompt's end, or empty. If reasoning does not end, the message
    contains nothing else.
    """
    if form == "opened":
        text = opened + text
    if form != "field":
        return assistant_message(calls, text)
    if not opened:
        before, thought, text = text.partition("<think>")
        if not thought or before.strip():
            return assistant_message(calls, before + thought + text)
    reasoning, _, content = text.partition("</think>")
    return assistant_message(calls, content, reasoning)


def _call(name: str, identity: str, arguments: Any) -> Message:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


# ---------------------------------------------------------------- for templates without tools, or system messages


def _tools_in_system(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """Append the instructions for `tools` to the system message, or create one from them."""
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


def _system_as_user(messages: Sequence[Message]) -> list[Message]:
    """Put the text of a system message before the first user message, as Gemma 3's template does."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        user, *rest = rest
        return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]
    return [{**system, "role": "user"}, *rest]


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
