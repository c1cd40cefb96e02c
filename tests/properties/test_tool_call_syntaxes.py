"""What holds for every family's call syntax and any text: never a crash, never slow, calls that can be sent."""

from __future__ import annotations

import json
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_trio.chat.families.deepseek import DEEPSEEK
from prorl_trio.chat.families.gemma import GEMMA_4
from prorl_trio.chat.families.harmony import HARMONY
from prorl_trio.chat.families.kimi import KIMI_K2, KIMI_K3
from prorl_trio.chat.families.llama import LLAMA
from prorl_trio.chat.families.mistral import MISTRAL
from prorl_trio.chat.families.syntax import HERMES
from prorl_trio.chat.families.xml import GLM_XML, HUNYUAN, MINIMAX, QWEN_XML, SEED_XML, STEP3
from prorl_trio.chat.tool_calls import MAX_TOOL_CALLS_PER_TURN, parse_turn
from support.written_turns import FORMS, PARAMETERS, SAID, SYNTAX

SYNTAXES = {
    "hermes": HERMES,
    "qwen_xml": QWEN_XML,
    "glm": GLM_XML,
    "deepseek": DEEPSEEK,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "gemma": GEMMA_4,
    "harmony": HARMONY,
    "kimi_k2": KIMI_K2,
    "kimi_k3": KIMI_K3,
    "minimax": MINIMAX,
    "seed": SEED_XML,
    "step3": STEP3,
    "hunyuan": HUNYUAN,
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
    "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>@@<|tool_call_end|>",
    "hunyuan": '<tool_calls>[{"name": "f", "arguments": @@}]</tool_calls>',
}
"""Families that write arguments as JSON, which can be anything."""


def in_elements(name, tool, *pairs):
    """A call of a family that writes each argument between tags of its own."""
    call, argument = {
        "qwen_xml": ("<tool_call>\n<function={}>\n{}</function>\n</tool_call>", "<parameter={}>\n{}\n</parameter>\n"),
        "seed": ("<seed:tool_call><function={}>{}</function></seed:tool_call>", "<parameter={}>\n{}\n</parameter>"),
        "glm": ("<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
        "deepseek": (
            '<｜DSML｜invoke name="{}">{}</｜DSML｜invoke>',
            '<｜DSML｜parameter name="{}">{}</｜DSML｜parameter>',
        ),
        "minimax": ('<invoke name="{}">\n{}</invoke>', '<parameter name="{}">{}</parameter>\n'),
        "step3": (
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">{}</steptml:invoke><｜tool_call_end｜>',  # noqa: E501
            '<steptml:parameter name="{}">{}</steptml:parameter>',
        ),
        "kimi_k3": (
            '<|open|>call tool="{}" index="1"<|sep|>{}<|close|>call<|sep|>',
            '<|open|>argument key="{}" type="string"<|sep|>{}<|close|>argument<|sep|>',
        ),
    }[name]
    return call.format(tool, "".join(argument.format(*pair) for pair in pairs))


IN_ELEMENTS = ("qwen_xml", "seed", "glm", "deepseek", "minimax", "step3", "kimi_k3")

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
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|open|>", "<|close|>", "<|sep|>", "call", "tools", 'call tool="f"', 'argument key="s"', "<tools>", "<tool_calls>",  # noqa: E501
        "<minimax:tool_call>", '<invoke name="f">', '<parameter name="s">', "</parameter>", "</invoke>", "<seed:think>",
        "<seed:tool_call>", "<｜tool_call_begin｜>function<｜tool_sep｜>", '<steptml:invoke name="f">', "</steptml:invoke>",  # noqa: E501
        '<steptml:parameter name="s">', "</steptml:parameter>", "<｜tool_call_end｜>", "</tool_calls>", "~~~",
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
        **{name: in_elements(name, "f", ("s", value)) for name in IN_ELEMENTS},
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
        **{key: text.replace("@@", "{}").replace('"f"', '"g"').replace(".f", ".g") for key, text in WRITTEN.items()},
        **{name: in_elements(name, "g") for name in IN_ELEMENTS},
        "gemma": "<|tool_call>call:g{}<tool_call|>",
        "mistral": "[TOOL_CALLS]g[ARGS]{}",
        "llama": "[g()]",
    }
    (call,) = parse_turn(texts[name], TOOLS, syntax=SYNTAXES[name]).tool_calls
    assert call.name == "g"
    assert call.error.startswith("unknown tool 'g'; the tools are: f; expected ")


@pytest.mark.parametrize("name", SYNTAXES)
def test_the_number_of_calls_is_bounded(name):
    many = MAX_TOOL_CALLS_PER_TURN + 5
    text = {
        **{name: in_elements(name, "f") * many for name in IN_ELEMENTS},
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
        **{name: in_elements(name, "f", ("s", "a"), ("s", "b")) for name in IN_ELEMENTS},
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


@pytest.mark.parametrize("parser", FORMS)
def test_a_turn_that_is_cut_off_makes_no_call_that_was_not_written(parser):
    family, form = FORMS[parser]
    offered = {"f": PARAMETERS, "get_it": PARAMETERS}
    for said in SAID[:6]:
        text = form(said)
        for stop in range(0, len(text), 3):
            calls = parse_turn(text[:stop], offered, syntax=SYNTAX[family]).tool_calls
            made = [(call.name, call.arguments) for call in calls if not call.error]
            assert made == said[: len(made)], text[:stop]


AROUND = (
    "<think>{}</think>", "<think>{}", "```json\n{}\n```", "~~~\n{}\n~~~", "<tool_call>{}</tool_call>", "{} and {}",
    "<tools>{}</tools>", "[THINK]{}[/THINK]", "<|channel|>analysis<|message|>{}<|end|>", "<|python_tag|>{}", "\n{}\n",
    "<|channel|>final<|message|>{}<|return|>", "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",  # noqa: E501
    "{}<|im_end|>{}", "<seed:think>{}</seed:think>", "{}</tool_call>", "<|channel>thought\n{}<channel|>",
)  # fmt: skip


class Mixture:
    """A turn of calls of all families, cut, broken and nested; each word in it is there once."""

    def __init__(self, random):
        self.random, self.words = random, []
        self.text = "".join(self._part() for _ in range(random.randint(1, 3)))

    def _part(self, depth=0):
        random = self.random
        kind = random.random()
        if kind < 0.4:
            written = random.choice(list(FORMS.values()))[1](
                [(random.choice(["f", "get_it", "g"]), {"s": self._word()})]
            )
            at = random.randrange(len(written))
            return random.choice([written, written, written[:at], f"{written[:at]}{{{written[at + 1 :]}"])
        if kind < 0.5 or depth > 3:
            return self._word()
        around = random.choice(AROUND)
        return around.format(*(self._part(depth + 1) for _ in range(around.count("{}"))))

    def _word(self):
        self.words.append(f"w{len(self.words)}q")
        return self.words[-1]


@pytest.mark.parametrize("family", SYNTAX)
def test_nothing_of_a_mixed_turn_is_lost(family):
    random = Random(family)
    for _ in range(200):
        mixture = Mixture(random)
        turn = parse_turn(mixture.text, {"f": PARAMETERS, "get_it": PARAMETERS}, syntax=SYNTAX[family])
        kept = "\n".join([turn.content, turn.reasoning, *(call.raw for call in turn.tool_calls)])
        lost = [word for word in mixture.words if word in mixture.text and word not in kept]
        assert lost == [], mixture.text
