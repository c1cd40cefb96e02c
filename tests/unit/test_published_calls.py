"""Turns as each family is published to write them, and as models break them: a broken part costs nothing else."""

from __future__ import annotations

import pytest

from prorl_trio.chat.families.family import FAMILIES, choose_family
from prorl_trio.chat.tool_calls import parse_turn

SYNTAX = {family.name: family.syntax for family in FAMILIES}
TOOLS = {"f": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}
X, THREE = ("f", {"s": "x"}), ("f", {"n": 3})

K2 = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
K2_CALL = "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
K3 = '<|open|>call tool="f" index="1"<|sep|>{}<|close|>call<|sep|>'
K3_ARGUMENT = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
STEP3 = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">{}</steptml:invoke><｜tool_call_end｜>'

WELL_FORMED = [
    (
        "kimi-k2",
        "<think>hm</think>Ok." + K2.format(K2_CALL.format(0, '{"s": "x"}') + K2_CALL.format(1, '{"n": 3}')),
        ("Ok.", "hm", [X, THREE]),
    ),
    ("kimi-k2", K2.format("<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"), ("", "", [("f", {})])),  # noqa: E501
    (
        "kimi-k3",
        "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|>"
        "<|open|>tools<|sep|>"
        + K3.format(K3_ARGUMENT.format("s", "string", "a <b> & 3") + K3_ARGUMENT.format("n", "number", "3"))
        + "<|close|>tools<|sep|><|close|>message<|sep|>",
        ("Ok.", "hm", [("f", {"s": "a <b> & 3", "n": 3})]),
    ),
    ("kimi-k3", K3.format(K3_ARGUMENT.format("s", "string", "3")), ("", "", [("f", {"s": "3"})])),
    (
        "minimax",
        '<think>\nhm\n</think>\n\nOk.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x</parameter>\n</invoke>\n'  # noqa: E501
        "<invoke name='f'>\n<parameter name=n>3</parameter>\n</invoke>\n</minimax:tool_call>",
        ("Ok.", "hm", [X, THREE]),
    ),
    (
        "step3",
        "Ok.<｜tool_calls_begin｜>"
        + STEP3.format('<steptml:parameter name="s">x</steptml:parameter>')
        + STEP3.format('<steptml:parameter name="n">3</steptml:parameter>')
        + "<｜tool_calls_end｜>",
        ("Ok.", "", [X, THREE]),
    ),
    (
        "seed",
        "<seed:think>hm</seed:think>Ok.<seed:tool_call>\n<function=f>\n<parameter=s>x</parameter>\n</function>\n"
        "</seed:tool_call>",
        ("Ok.", "hm", [X]),
    ),
    ("granite", 'Ok.<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>', ("Ok.", "", [X])),
    ("granite", "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>", ("", "", [X])),
    (
        "hunyuan",
        '<think>hm</think>Ok.<tool_calls>[{"name": "f", "arguments": {"s": "x"}}, {"name": "f", "arguments": "{\\"n\\": 3}"}]'  # noqa: E501
        "</tool_calls>",
        ("Ok.", "hm", [X, THREE]),
    ),
    (
        "hunyuan",
        "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n</tool_calls>",
        ("", "", [X]),
    ),
    ("ling", '<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>', ("", "", [X])),
    ("ling", "<think>hm</think><tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", ("", "hm", [THREE])),  # noqa: E501
    ("glm", "<think>hm</think>Ok.<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value></tool_call>", ("Ok.", "hm", [X])),  # noqa: E501
    ("chatml", '<tools>\n{"name": "f", "arguments": {"s": "x"}}\n</tools>', ("", "", [X])),
    ("llama", '{"name": "f", "parameters": {"s": "x"}}\n\nThis is it.', ("This is it.", "", [X])),
    ("llama", 'I run:\n{"name": "f", "parameters": {"s": "x"}}; {"name": "f", "parameters": {"n": 3}}', ("I run:", "", [X, THREE])),  # noqa: E501
    ("llama", 'I run:\n```json\n{"name": "f", "parameters": {"s": "x"}}\n```', ("I run:", "", [X])),
    ("llama", '[{"name": "f", "parameters": {"s": "x"}}, {"name": "f", "arguments": {"n": 3}}]', ("", "", [X, THREE])),
    ("llama", '{"type": "function", "function": {"name": "f", "parameters": {"s": "x"}}}', ("", "", [X])),
    ("llama", 'Ok. <function=f>{"s": "x"}</function><|eom_id|>', ("Ok.", "", [X])),
    ("llama", '<think>\nhm\n</think>\n<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>', ("", "hm", [X])),  # noqa: E501
    ("llama", 'Ok.<|python_tag|>{"name": "f", "parameters": {"s": "x"}}<|eom_id|>', ("Ok.", "", [X])),
    ("gpt-oss", "<|channel|>??<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>", ("42", "", [])),
    (
        "gpt-oss",
        "<|channel|>commentary to=assistant<|channel|>commentary?<|end|><|start|>assistant<|channel|>commentary to=functions.f"  # noqa: E501
        ' <|constrain|>json<|message|>{"s":"x"}<|call|>',
        ("", "", [X]),
    ),
    ("gpt-oss", "<|channel|>analysis hm<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>", ("42", "hm", [])),  # noqa: E501
    ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>42<|return|>", ("42", "hm", [])),
    ("gpt-oss", "Hm. <|channel|>final<|message|>42<|return|>", ("Hm. 42", "", [])),
    ("gpt-oss", "Hm. <|channel|>analysis<|message|>hm<|end|>", ("Hm.", "hm", [])),
    ("gpt-oss", "<|start|>assistant<|start|>assistant<|channel|>final<|message|>42<|return|>", ("42", "", [])),
    ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>fin", ("", "hm", [])),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "expected"), WELL_FORMED)
def test_a_turn_as_published(family, text, expected):
    turn = parse_turn(text, TOOLS, syntax=SYNTAX[family])
    calls = [(call.name, call.arguments) for call in turn.tool_calls if not call.error]
    assert (turn.content, turn.reasoning, calls) == expected
    assert len(calls) == len(turn.tool_calls)


GOOD_X = {
    "kimi-k2": K2_CALL.format(1, '{"s": "x"}'),
    "kimi-k3": K3.format(K3_ARGUMENT.format("s", "string", "x")),
    "minimax": '<invoke name="f">\n<parameter name="s">x</parameter>\n</invoke>\n</minimax:tool_call>',
    "step3": STEP3.format('<steptml:parameter name="s">x</steptml:parameter>'),
    "seed": "<seed:tool_call><function=f><parameter=s>x</parameter></function></seed:tool_call>",
    "granite": '<tool_call>{"name": "f", "arguments": {"s": "x"}}</tool_call>',
    "hunyuan": '<tool_calls>[{"name": "f", "arguments": {"s": "x"}}]</tool_calls>',
    "ling": "<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value></tool_call>",
    "llama": '\n{"name": "f", "parameters": {"s": "x"}}',
    "gpt-oss": '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"s": "x"}<|call|>',
}
BROKEN = [
    ("kimi-k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "x<|tool_call_end|>', "f"),
    ("kimi-k2", "<|tool_call_begin|>{}<|tool_call_end|>", ""),
    ("kimi-k2", "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|>", "g"),
    ("kimi-k3", '<|open|>call tool="f"<|sep|><|open|>argument key="s"<|sep|>x<|close|>call<|sep|>', "f"),
    ("kimi-k3", '<|open|>call index="1"<|sep|><|close|>call<|sep|>', ""),
    ("minimax", '<minimax:tool_call><invoke name="g"></invoke>', "g"),
    ("minimax", '<minimax:tool_call><invoke name="f">x</minimax:tool_call>', "f"),
    ("step3", '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">x<｜tool_call_end｜>', "f"),
    ("step3", "<｜tool_call_begin｜>function<｜tool_call_end｜>", ""),
    ("seed", "<seed:tool_call>f()</seed:tool_call>", ""),
    ("granite", '<tool_call>{"name": "f", "arguments": {</tool_call>', "f"),
    ("hunyuan", '<tool_calls>[{"name": "f", "arguments": {"s": "x"}</tool_calls>', "f"),
    ("hunyuan", '<tool_calls>[{"name": "g", "arguments": {}}]</tool_calls>', "g"),
    ("ling", "<tool_call>f<arg_key>s</arg_key></tool_call>", "f"),
    ("llama", '{"name": "f", "parameters": {"s": x}}', "f"),
    ("llama", '{"name": "f", "parameters": {"s": 1', "f"),
    ("gpt-oss", '<|channel|>commentary to=functions.f <|constrain|>json{"s": "x"}<|call|>', "f"),
    ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>{<|call|>", "f"),
]


@pytest.mark.parametrize(("family", "broken", "name"), BROKEN)
def test_a_call_that_cannot_be_read_is_an_error_and_costs_no_other(family, broken, name):
    failed, good = parse_turn(broken + GOOD_X[family], TOOLS, syntax=SYNTAX[family]).tool_calls
    assert failed.error
    assert failed.name == name
    assert (good.name, good.arguments, good.error) == (*X, "")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("chatml", 'Given <tools>\n{"name": "f", "description": "d", "parameters": {"s": "x"}}\n</tools> I say no.'),
        ("chatml", 'The tools are <tools>{"type": "function", "function": {"name": "f"}}</tools>'),
        ("llama", '{"name": "Al", "age": 3}'),
        ("llama", 'Sets:\n[1, 2]\n["a"]\n{"k": 1}\n{"k": \n done'),
        ("gpt-oss", "Hello there"),
    ],
)
def test_what_is_no_call_stays_content(family, text):
    turn = parse_turn(text, TOOLS, syntax=SYNTAX[family])
    assert (turn.content, turn.tool_calls) == (text, [])


@pytest.mark.parametrize(
    ("sign", "family"),
    [
        ("<|tool_calls_section_begin|>", "kimi-k2"), ("<|open|>tools<|sep|>", "kimi-k3"), ("<minimax:tool_call>", "minimax"),  # noqa: E501
        ("<steptml:invoke name=", "step3"), ("<seed:bos>system", "seed"), ("<|start_of_role|>", "granite"),
        ("<tool_calls>", "hunyuan"), ("<role>HUMAN</role>", "ling"),
    ],
)  # fmt: skip
def test_the_family_is_told_from_the_template(sign, family):
    assert choose_family("", f"{{{{ bos_token }}}}{sign}").name == family
