"""What holds for every family's call syntax and any text: never a crash, never slow, calls that can be sent."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_trio.chat.families.deepseek import DEEPSEEK
from prorl_trio.chat.families.gemma import GEMMA_4
from prorl_trio.chat.families.harmony import HARMONY
from prorl_trio.chat.families.llama import LLAMA
from prorl_trio.chat.families.mistral import MISTRAL
from prorl_trio.chat.families.syntax import HERMES
from prorl_trio.chat.families.xml import GLM_XML, QWEN_XML
from prorl_trio.chat.tool_calls import MAX_TOOL_CALLS_PER_TURN, parse_turn

SYNTAXES = {
    "hermes": HERMES,
    "qwen_xml": QWEN_XML,
    "glm": GLM_XML,
    "deepseek": DEEPSEEK,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "gemma": GEMMA_4,
    "harmony": HARMONY,
}
TOOLS = {"f": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": ["integer", "null"]}}}}

WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": @@}\n</tool_call>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
    "```json\n@@\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "mistral": "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]@@",
    "llama": '{"name": "f", "parameters": @@}',
    "harmony": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>@@<|call|>",
}
"""Families that write arguments as JSON, which can be anything."""

fragments = st.sampled_from(
    [
        *"{}[]()<>:,=\"'\\|/\n ", "f", "s", "n", "1", "-1e999", "True", "null", "é", "\ud800", "<tool_call>",
        "</tool_call>", "<function=f>", "</function>", "<parameter=s>", "</parameter>", "<arg_key>", "</arg_key>",
        "<arg_value>", "</arg_value>", "<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]",
        "[CALL_ID]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>", "\n```json\n", "```", '<｜DSML｜invoke name="f">',
        '<｜DSML｜parameter name="s" string="true">',
        "</｜DSML｜parameter>", "</｜DSML｜invoke>", "<｜DSML｜function_calls>", "<|python_tag|>", "[f(",
        "f(s=", '<|"|>',
        "<|tool_call>call:f{", "<tool_call|>", "<|channel>thought", "<channel|>", "<|channel|>analysis", "<|message|>",
        "<|channel|>commentary to=functions.f", "<|end|>", "<|call|>", "<|start|>assistant", '{"name": "f", ',
        '"arguments": {"s": "x"}}', '"parameters": {', ' "n": 3',
    ]
)  # fmt: skip
hostile = st.one_of(st.lists(fragments, max_size=20).map("".join), st.text(max_size=30))


@pytest.mark.parametrize("name", SYNTAXES)
def test_parsing_never_raises_and_its_calls_can_be_sent(name):
    @given(text=hostile, opened=st.booleans())
    @settings(max_examples=400, deadline=None)
    def check(text, opened):
        turn = parse_turn(text, TOOLS, syntax=SYNTAXES[name], opened_thinking=opened)
        for call in turn.tool_calls:
            assert call.error or call.name == "f"
            assert call.raw in text
            msgspec.msgpack.encode(call.arguments)

    check()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(["</tool_call>", "<|call|>", "```", "<｜tool▁call▁end｜>", "[TOOL_CALLS]", "<|python_tag|>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_any_arguments_come_through_a_json_syntax(name):
    @given(arguments=st.dictionaries(st.text("abc", max_size=4), json_values, max_size=3))
    @settings(max_examples=100, deadline=None)
    def check(arguments):
        text = WRITTEN[name].replace("@@", json.dumps(arguments, ensure_ascii=False))
        turn = parse_turn(text, TOOLS, syntax=SYNTAXES[name])
        (call,) = turn.tool_calls
        assert (turn.content, call.name, call.arguments, call.error) == ("", "f", arguments, "")

    check()


values = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda text: "|>" not in text)


@given(value=values)
@settings(max_examples=200, deadline=None)
def test_any_text_comes_through_a_syntax_without_quotes(value):
    written = {
        "qwen_xml": f"<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "deepseek": f'<｜DSML｜calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">{value}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜calls>",
        "gemma": f'<|tool_call>call:f{{s:<|"|>{value}<|"|>}}<tool_call|>',
        "llama": f"[f(s={value!r})]",
    }
    for name, text in written.items():
        (call,) = parse_turn(text, TOOLS, syntax=SYNTAXES[name]).tool_calls
        assert (call.name, call.arguments, call.error) == ("f", {"s": value}, "")


@pytest.mark.parametrize(
    ("written", "value"), [("3", 3), ("null", None), ("x", "x"), (" 4 ", 4), ("1.5", 1.5), ("9" * 30, "9" * 30)]
)
def test_values_without_quotes_have_the_type_of_the_schema(written, value):
    for name, text in {
        "qwen_xml": f"<function=f><parameter=n>{written}</parameter><parameter=s>{written}</parameter></function>",
        "glm": f"<tool_call>f<arg_key>n</arg_key><arg_value>{written}</arg_value>"
        f"<arg_key>s</arg_key><arg_value>{written}</arg_value></tool_call>",
    }.items():
        (call,) = parse_turn(text, TOOLS, syntax=SYNTAXES[name]).tool_calls
        assert call.arguments == {"n": value, "s": written}


@pytest.mark.parametrize("name", SYNTAXES)
def test_an_unknown_tool_is_an_error_that_lists_the_tools(name):
    texts = {
        **{key: text.replace("@@", "{}").replace('"f"', '"g"').replace(".f ", ".g ") for key, text in WRITTEN.items()},
        "qwen_xml": "<tool_call><function=g></function></tool_call>",
        "glm": "<tool_call>g</tool_call>",
        "gemma": "<|tool_call>call:g{}<tool_call|>",
        "deepseek": '<｜DSML｜invoke name="g"></｜DSML｜invoke>',
        "mistral": "[TOOL_CALLS]g[ARGS]{}",
        "llama": "[g()]",
    }
    (call,) = parse_turn(texts[name], TOOLS, syntax=SYNTAXES[name]).tool_calls
    assert call.name == "g"
    assert call.error.startswith("unknown tool 'g'; the tools are: f; expected ")


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>", "<function=f>", "<function=", "<parameter=s>", "</parameter> ", "<tool_call>f<arg_key>", " ",
        "<arg_key>s</arg_key><arg_value>", "[TOOL_CALLS]", "[TOOL_CALLS]f ", "<｜tool▁call▁begin｜>", "\n```json\n",
        "<｜tool▁calls▁begin｜>", '<｜DSML｜invoke name="f">', "<｜DSML｜", '{"name": "f", ', "[f(",
        "<|python_tag|>", "[f(s='",
        "<|tool_call>", "<|tool_call>call:f{s:", '<|"|>', "<|channel|>", "<|end|>", "<|end|> ", "<|start|>assistant",
        "<|message|>", "<think>", "</think>", "{", "[", "\\", "'", "a",
    ],
)  # fmt: skip
def test_hostile_text_takes_no_quadratic_time(name, unit):
    started_s = time.process_time()
    for opening in (
        "",
        '{"name"',
        "[f(s=",
        "<tool_call><function=f><parameter=s>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
    ):
        parse_turn(opening + unit * (100_000 // len(unit)), TOOLS, syntax=SYNTAXES[name])
    assert time.process_time() - started_s < 5


@pytest.mark.parametrize("name", SYNTAXES)
def test_the_number_of_calls_is_bounded(name):
    many = MAX_TOOL_CALLS_PER_TURN + 5
    text = {
        "qwen_xml": "<tool_call><function=f></function></tool_call>" * many,
        "glm": "<tool_call>f</tool_call>" * many,
        "gemma": "<|tool_call>call:f{}<tool_call|>" * many,
        "llama": "[" + ", ".join(["f()"] * many) + "]",
        "mistral": "[TOOL_CALLS][" + ", ".join(['{"name": "f", "arguments": {}}'] * many) + "]",
        "harmony": "<|start|>assistant".join([WRITTEN["harmony"].replace("@@", "{}")] * many),
    }.get(name, WRITTEN.get(name, "").replace("@@", "{}") * many)
    calls = parse_turn(text, TOOLS, syntax=SYNTAXES[name]).tool_calls
    assert len(calls) == MAX_TOOL_CALLS_PER_TURN + 1
    assert [bool(call.error) for call in calls] == [False] * MAX_TOOL_CALLS_PER_TURN + [True]


@pytest.mark.parametrize("name", SYNTAXES)
def test_an_argument_given_twice_is_an_error(name):
    texts = {
        **{key: text.replace("@@", '{"s": "a", "s": "b"}') for key, text in WRITTEN.items()},
        "qwen_xml": "<function=f><parameter=s>a</parameter><parameter=s>b</parameter></function>",
        "glm": "<tool_call>f" + "<arg_key>s</arg_key><arg_value>a</arg_value>" * 2 + "</tool_call>",
        "gemma": '<|tool_call>call:f{s:<|"|>a<|"|>,s:<|"|>b<|"|>}<tool_call|>',
    }
    for text in (texts[name], *(["[f(s='a', s='b')]"] if name == "llama" else [])):
        (call,) = parse_turn(text, TOOLS, syntax=SYNTAXES[name]).tool_calls
        assert "'s' is there twice; expected " in call.error
        assert (call.name, call.arguments) == ("f", {})


@pytest.mark.parametrize("tags", ["\n</function>\n</tool_call>", "\n</function>", "</tool_call>", "\n<tool_call>\n"])
def test_a_value_may_contain_what_ends_a_call(tags):
    value = f'print("{tags}")'
    for name, text in {
        "qwen_xml": f"<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    }.items():
        for following in ("", "\nDone.", f"\n{text}"):
            first = parse_turn(text + following, TOOLS, syntax=SYNTAXES[name]).tool_calls[0]
            assert (first.arguments, first.raw) == ({"s": value}, text)
