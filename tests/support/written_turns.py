"""Turns as each family writes its calls, made from what is to be said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from prorl_trio.chat.families.family import FAMILIES

Call = tuple[str, dict[str, Any]]
Written = Callable[[list[Call]], str]

SYNTAX = {family.name: family.syntax for family in FAMILIES}
PARAMETERS = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "o": {"type": "object"},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "get_it")]
SAID: list[list[Call]] = [
    [("f", {"s": "x"})],
    [("f", {"n": 3}), ("get_it", {"s": "y"})],
    [("f", {})],
    [("f", {"s": "3"})],
    [("f", {"s": 'a "q" \\n <b> & é\n  second, {"k": [1]} line', "n": -1})],
    [("f", {"s": "", "b": True, "x": 2.5})],
    [("get_it", {"l": [1, "two", None], "o": {"k": {"deep": [False]}}})],
    [("f", {"s": "def f(x):\n    return x\n"})],
    [("f", {"s": "x"}), ("f", {"s": "x"})],
]


def plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def in_json(call: tuple[Any, ...], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def each(before: str, form: Callable[..., str], after: str = "", between: str = "") -> Written:
    return lambda calls: before + between.join(form(number, *call) for number, call in enumerate(calls)) + after


def arguments(form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda values: "".join(form.format(key=key, value=plain(value)) for key, value in values.items())


def dumped(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)


XML = arguments("<parameter={key}>\n{value}\n</parameter>\n")
INVOKED = arguments('<parameter name="{key}">{value}</parameter>\n')
GLM = arguments("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
STEP = arguments('<steptml:parameter name="{key}">{value}</steptml:parameter>')
TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


def k3(values: Mapping[str, Any]) -> str:
    form = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
    return "".join(form.format(key, TYPES[type(value)], plain(value)) for key, value in values.items())


def dsml(values: Mapping[str, Any]) -> str:
    form = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
    return "".join(form.format(k, str(isinstance(v, str)).lower(), plain(v)) for k, v in values.items())


FORMS: dict[str, tuple[str, Written]] = {
    "hermes": ("chatml", each("Ok.\n", lambda _n, *call: f"<tool_call>\n{in_json(call)}\n</tool_call>", between="\n")),
    "qwen3_coder": (
        "qwen3-coder",
        each("Ok.\n", lambda _n, name, values: f"<tool_call>\n<function={name}>\n{XML(values)}</function>\n</tool_call>", between="\n"),  # noqa: E501
    ),
    "glm45": ("glm", each("Ok.", lambda _n, name, values: f"\n<tool_call>{name}\n{GLM(values)}</tool_call>")),
    "deepseek_v3": (
        "deepseek",
        each(
            "Ok.<｜tool▁calls▁begin｜>",
            lambda _n, name, values: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(values)}\n```<｜tool▁call▁end｜>",  # noqa: E501
            "<｜tool▁calls▁end｜>",
            "\n",
        ),
    ),
    "deepseek_v31": (
        "deepseek",
        each(
            "Ok.<｜tool▁calls▁begin｜>",
            lambda _n, name, values: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(values)}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v32": (
        "deepseek",
        each(
            "Ok.\n\n<｜DSML｜function_calls>\n",
            lambda _n, name, values: f'<｜DSML｜invoke name="{name}">\n{dsml(values)}</｜DSML｜invoke>\n',
            "</｜DSML｜function_calls>",
        ),
    ),
    "kimi_k2": (
        "kimi-k2",
        each(
            "Ok.<|tool_calls_section_begin|>",
            lambda n, name, values: f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{dumped(values)}<|tool_call_end|>",  # noqa: E501
            "<|tool_calls_section_end|>",
        ),
    ),
    "kimi_k3": (
        "kimi-k3",
        each(
            "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|><|open|>tools<|sep|>",
            lambda n, name, values: f'<|open|>call tool="{name}" index="{n + 1}"<|sep|>{k3(values)}<|close|>call<|sep|>',  # noqa: E501
            "<|close|>tools<|sep|><|close|>message<|sep|>",
        ),
    ),
    "minimax_m2": (
        "minimax",
        each(
            "Ok.\n<minimax:tool_call>\n",
            lambda _n, name, values: f'<invoke name="{name}">\n{INVOKED(values)}</invoke>\n',
            "</minimax:tool_call>",
        ),
    ),
    "step3": (
        "step3",
        each(
            "Ok.<｜tool_calls_begin｜>",
            lambda _n, name, values: f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{STEP(values)}</steptml:invoke><｜tool_call_end｜>',  # noqa: E501
            "<｜tool_calls_end｜>",
        ),
    ),
    "seed_oss": (
        "seed",
        each(
            "Ok.\n",
            lambda _n, name, values: f"<seed:tool_call>\n<function={name}>\n{XML(values)}</function>\n</seed:tool_call>",  # noqa: E501
            between="\n",
        ),
    ),
    "granite4": ("granite", each("Ok.", lambda _n, *call: f"<tool_call>\n{in_json(call)}\n</tool_call>", between="\n")),
    "hunyuan_a13b": ("hunyuan", each("Ok.<tool_calls>[", lambda _n, *call: in_json(call), "]</tool_calls>", ", ")),
    "ling3": ("ling", each("Ok.", lambda _n, name, values: f"<tool_call>{name}\n{GLM(values)}</tool_call>", between="\n")),  # noqa: E501
    "mistral": ("mistral", each("Ok.", lambda _n, name, values: f"[TOOL_CALLS]{name}[ARGS]{dumped(values)}")),
    "llama3_json": ("llama", each("", lambda _n, *call: in_json(call, "parameters"), between="; ")),
    "llama4_pythonic": (
        "llama",
        each("[", lambda _n, name, values: f"{name}({', '.join(f'{k}={v!r}' for k, v in values.items())})", "]", ", "),
    ),
}  # fmt: skip
"""By the name of vLLM's parser: the family, and how it writes calls."""
