"""What reads the text of a policy takes time in proportion to its length, and no longer than a loop may stand still.

`READERS` is the one list of these readers: a new one belongs here. Each gets degenerate turns of 100,000 characters.
"""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest

from prorl_ipc.sandbox_calls import BashResult
from prorl_trio.agent.context import BoundedText
from prorl_trio.agent.written_calls import CodeBlocks, JsonCalls, WrittenStyle
from prorl_trio.chat.families.family import FAMILIES
from prorl_trio.chat.tool_calls import parse_turn
from prorl_trio.tasks.handlers.code import _CodeStyle
from prorl_trio.tasks.handlers.final_answer import extract_boxed, find_final_answer, last_number
from prorl_trio.tasks.handlers.math import _MathStyle
from prorl_trio.tasks.handlers.stem.handler import _StemStyle
from prorl_trio.tools import ToolSet
from prorl_trio.tools.arguments import read_arguments
from prorl_trio.tools.builtin import render_bash
from prorl_trio.tools.fitting import fit_texts
from support.shares import part_of

CHARACTERS = 100_000
LIMIT_S = 0.020
"""Of CPU, on a machine that does `reference()` in `REFERENCE_S`."""
REFERENCE_S = 0.0012
PART = 4
GROWTH = 9.0
"""A text that is `PART` times as long may take this much longer: 4 times in proportion to it, 16 with its square."""

MATHEMATICS = _MathStyle(plain_answer=True)
TOOLS = {"f": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": ["integer", "null"]}}}}


def style(reader):
    """An agent's style, given a turn as its content."""

    def read(text):
        parsed = SimpleNamespace(content=text, text=text, reasoning="", tool_calls=[], ended=True)
        reader.implied_calls(parsed)
        reader.final_answer(parsed)

    return read


def bounded(text):
    kept = BoundedText(1000)
    for start in range(0, len(text), 100):
        kept.append(text[start : start + 100])
    return str(kept)


class Bytes:
    """A codec with a token for each byte."""

    def mark(self, text):
        return text

    def encode(self, text):
        return list(text.encode(errors="replace"))

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def fitted(text):
    return fit_texts(Bytes(), [text], [Bytes().encode(text)], 1000)


def arguments(text):
    """A call with this text for an argument of each type, and in a list."""
    for kind in ("integer", "number", "boolean", "array", "object", "string"):
        read_arguments({"x": text}, {"properties": {"x": {"type": kind}}})
    read_arguments({"x": [text]}, {"properties": {"x": {"type": "array", "items": {"type": "integer"}}}})


READERS = {
    **{f"family {each.name}": lambda text, each=each: parse_turn(text, TOOLS, syntax=each.syntax) for each in FAMILIES},
    **{
        f"family {each.name}, in reasoning": lambda text, each=each: parse_turn(
            text, TOOLS, syntax=each.syntax, opened_thinking=True
        )
        for each in FAMILIES
        if each.name in ("qwen3", "deepseek", "kimi-k3", "seed", "llama")
    },
    "JSON calls": JsonCalls(SimpleNamespace(parameters=TOOLS)).read,
    "code blocks": CodeBlocks({"python": ("f", "s")}).read,
    "boxed answer": extract_boxed,
    "final answer": find_final_answer,
    "last number": last_number,
    "style of mathematics": style(MATHEMATICS),
    "style of stem": style(_StemStyle(keeps_unit=False)),
    "style of stem, a quantity": style(_StemStyle(keeps_unit=True)),
    "style of mathematics, JSON": style(WrittenStyle(JsonCalls(SimpleNamespace(parameters=TOOLS)), MATHEMATICS)),
    "style of mathematics, code": style(WrittenStyle(CodeBlocks({"python": ("f", "s")}), MATHEMATICS)),
    "style of code": style(_CodeStyle()),
    "arguments of a call": arguments,
    "observation": lambda text: ToolSet([], max_observation_chars=1000)._shorten(text),
    "result of bash": lambda text: render_bash(BashResult(output=text, exit_code=0, cwd="/", duration_s=0.0), 1.0),
    "bounded text": bounded,
    "fitted observation": fitted,
}

TOKENS = (
    *"{}[]()<>'\"\\`|$#,;:=-*_~.1aé", "\n", " ", "\t", "\ud800", "\\u", "\\\"", "1,", "[1,", "{}", "[]", "\n{}", "\n{", "\n[", "\n[{",  # noqa: E501
    "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<tool_call>{", "<tools>", "<tools>{\"",  # noqa: E501
    "<function=", "<function=f>", "<function=f>{", "</function>", "<parameter=s>", "</parameter>", "</parameter> ",
    "<tool_call>f<arg_key>", "<arg_key>s</arg_key><arg_value>", "</arg_value>", "<tool_calls>", "<tool_calls>[",
    "[TOOL_CALLS]", "[TOOL_CALLS]f", "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",  # noqa: E501
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜DSML｜", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="s">',  # noqa: E501
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>",
    "<|open|>call ", '<|open|>call tool="f"<|sep|>', '<|open|>argument key="s"<|sep|>', "<|close|>argument<|sep|>",
    "<minimax:tool_call>", '<invoke name="f">', '<parameter name="s">', "</invoke>", "<seed:think>", "<seed:tool_call>",
    "<｜tool_call_begin｜>", '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">', '<steptml:parameter name="s">',  # noqa: E501
    "<|python_tag|>", "[f(", "f(", "[f(s='", "<|tool_call>", "<|tool_call>call:f{", "<|tool_call>call:f{s:", '<|"|>',
    "<|channel>thought", "<|channel|>", "<|channel|>analysis", "<|channel|>commentary to=functions.f{", "<|message|>",
    "<|end|>", "<|end|> ", "<|call|>", "<|return|>", "<|start|>", "<|start|>assistant", "<|constrain|>", " to=",
    '{"name":', '{"name": "f", ', '{"name": "f", "arguments": {', '{"name": "f", "arguments": {"s": "', '\n{"name": 1}',
    '\n{"name": "f", "parameters": {}}', '"arguments":', "{'name':",
    "```", "``` ", "\n```\n", "```json\n", "```python\n", "\n```json\n{", "\n```\n{}\n```", "~~~\n",
    "\\boxed{", "\\boxed{{", "\\boxed", "\\boxed ", "\\boxed{}", "\\fbox{", "\\text{", "\\frac{", "**", "__", "answer is ",  # noqa: E501
    "Answer:", "#### ", "1e9", "x=", "A ", "(A) ", "Option B ", "<answer>", "</answer>", "\\[", "\\(", "$$",
)  # fmt: skip
OPENINGS = (
    "", '{"name": "f", "arguments": {"s": "', '{"name": "f", "parameters": {}}', "[f(s=[", "<tool_call>", "<think>",
    "<tool_call><function=f><parameter=s>", "<tool_call>f<arg_key>s</arg_key><arg_value>", "```json\n", "\\boxed{",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="s">', "<|python_tag|>",
    "<|channel|>analysis<|message|>", '<|tool_call>call:f{s:<|"|>', "[TOOL_CALLS]f{", "<|tool_call_begin|>f:0",
    '<|open|>call tool="f"<|sep|><|open|>argument key="s"<|sep|>', '<invoke name="f"><parameter name="s">',
    "<tool_calls>[",
)  # fmt: skip


def cpu_s(read, text):
    started_s = time.thread_time()
    read(text)
    return time.thread_time() - started_s


def reference():
    """Work like that of the readers, to find out how fast this machine is now."""
    return [match.end() for match in re.finditer("b", "abc" * 10_000)] + list(range(20_000))


AFTER_AN_OPENING = ("a", '"', "{", "\n", " ", "1,", "<tool_call>", "</parameter>", "```\n", "\\")


@pytest.mark.alone
@pytest.mark.parametrize("name", READERS)
def test_degenerate_turns_do_not_stop_the_loop(name):
    for token in TOKENS:
        check(name, "", token)
    for opening in OPENINGS:
        for token in AFTER_AN_OPENING:
            check(name, opening, token)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_every_token_after_every_opening(name):
    for number, opening in enumerate(OPENINGS):
        for token in part_of(TOKENS, 4, number % 4):
            check(name, opening, token)


def check(name, opening, token):
    read = READERS[name]

    def turn(characters):
        return opening + token * (characters // len(token))

    # A reader that fails is tried on little first: its first turn in full might take minutes.
    took_s = cpu_s(read, turn(CHARACTERS // 20))
    assert took_s < 10 * LIMIT_S, f"{name}: {took_s:.3f} s for a twentieth of {opening!r} + {token!r} again and again"
    took_s = cpu_s(read, turn(CHARACTERS))
    if took_s <= LIMIT_S:
        return
    # By turns: a machine that is faster at one moment than at another is so for all three.
    rounds = [
        (cpu_s(read, turn(CHARACTERS)), cpu_s(read, turn(CHARACTERS // PART)), cpu_s(lambda _text: reference(), ""))
        for _ in range(5)
    ]
    took_s, part_s, reference_s = map(min, zip(*rounds, strict=True))
    slowness = max(1.0, reference_s / REFERENCE_S)
    what = f"{name}: {took_s:.3f} s for {opening!r} + {token!r} again and again, {part_s:.3f} s for a quarter of it"
    assert took_s <= LIMIT_S * slowness, what
    assert took_s <= GROWTH * part_s or took_s <= LIMIT_S / 2, what
