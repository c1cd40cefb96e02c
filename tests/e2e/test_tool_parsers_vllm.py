"""vLLM's own tool parsers find the same calls in the turns of each family as ours; each difference has its reason."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from prorl_launch.paths import engine_python
from prorl_trio.chat.families.family import FAMILIES
from prorl_trio.chat.tool_calls import parse_turn
from support.skips import because
from support.written_turns import FORMS, PARAMETERS, SAID, SYNTAX, TOOLS

pytestmark = pytest.mark.slow

DIFFERENCES = {
    ("step3", 4): "vLLM's Step3 parser takes a value that contains '<' for none, and leaves the argument out",
    ("step3", 6): "vLLM's Step3 parser converts numbers and truth values only; lists and objects stay text",
    ("step3", 7): "vLLM's Step3 parser strips white space around a text",
}
"""By parser and number in `SAID`: why vLLM's finds other calls. Ours finds what was said."""
MARKERS = [
    *{mark for family in FAMILIES for mark in (*family.markup, *family.ends)},
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<seed:think>", "</seed:think>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *(
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        "<｜tool_call_begin｜>",
    ),
    *("<｜tool_call_end｜>", "<｜tool_sep｜>"),
]
"""What is one token in the vocabulary of a model that writes it."""


def test_vllms_parsers_find_the_same_calls():
    if not engine_python().exists():
        pytest.skip(because("there is no engine", "make engine"))
    rows = [(name, number, form(said)) for name, (_, form) in FORMS.items() for number, said in enumerate(SAID)]
    asked = [[sorted({*MARKERS}), TOOLS], *([name, text] for name, _, text in rows)]
    done = subprocess.run(
        [engine_python(), Path(__file__).with_name("vllm_tool_parsers.py")],
        input="\n".join(map(json.dumps, asked)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    replies = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[[", "[]", '"'))]
    assert len(replies) == len(rows)
    differing, wrong = {}, []
    for (name, number, text), theirs in zip(rows, replies, strict=True):
        said = [[*call] for call in SAID[number]]
        calls = parse_turn(text, {"f": PARAMETERS, "get_it": PARAMETERS}, syntax=SYNTAX[FORMS[name][0]]).tool_calls
        if [[call.name, call.arguments] for call in calls if not call.error] != said or any(c.error for c in calls):
            wrong.append((name, text, calls))
        if theirs != said:
            differing[name, number] = (text, theirs)
    assert wrong == []
    assert {key: differing[key] for key in differing.keys() - DIFFERENCES} == {}
    assert differing.keys() == DIFFERENCES.keys()
