"""What codex and its like do by the Responses API, case by case: the stream, the whole answer, and the way back."""

from __future__ import annotations

import json

import pytest

from support.gateway_client import serving

pytestmark = pytest.mark.timeout(30)

PATH = "/v1/responses"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
PATCH = {"type": "custom", "name": "patch", "description": "Free text.", "format": {"type": "text"}}
TEAM = {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "ask", "parameters": {}}]}
TOOLS = {"tools": [LOOK, PATCH, TEAM, {"type": "web_search"}]}
THOUGHT = "<think>\nHm.\n</think>\n\n"


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def text(value, kind="input_text"):
    return [{"type": kind, "text": value}]


def user(content):
    return {"type": "message", "role": "user", "content": content}


SAYS = {
    "text": "Yes.",
    "nothing": "",
    "reasoning and text": f"{THOUGHT}Yes.",
    "reasoning alone": THOUGHT,
    "a call": call("look", at="x"),
    "a call without arguments": call("look"),
    "text and a call": f"I look.\n{call('look', at='x')}",
    "reasoning and a call": f"{THOUGHT}{call('look', at='x')}",
    "parallel calls": f"{call('look', at='x')}\n{call('look', at='y')}",
    "a custom call": call("patch", input="*** Begin\n+1\n"),
    "a call in a namespace": call("team__ask", who="Ada"),
    "calls of several kinds": "\n".join(call(name, input="i") for name in ("patch", "team__ask")),
    "arguments that are no JSON": '<tool_call>\n{"name": "look", "arguments": {"at": \n</tool_call>',
    "an unknown tool": call("nothing_such"),
}
"""What the policy says, with `TOOLS` offered."""

ASKED = {
    "input that is a text": {"input": "Hi"},
    "input in parts": {"input": [user(text("Hi")), user(text("and?"))]},
    "a message without a type": {"input": [{"role": "user", "content": "Hi"}]},
    "instructions": {"instructions": "Be brief.", "input": "Hi"},
    "a developer's message after the user's": {"input": [user("Hi"), {"role": "developer", "content": "Be brief."}]},
    "a summary in place of what was before": {
        "input": [{"role": "developer", "content": "Be brief."}, user("Hi"), user(text("So far: nothing."))]
    },
    "fields of codex": {
        "input": "Hi",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "reasoning": {"summary": "auto"},
        "client_metadata": {"x-codex-turn-metadata": "{}"},
        "parallel_tool_calls": True,
    },
}
CASES = {f"says {name}": ({"input": "Hi", **TOOLS}, said) for name, said in SAYS.items()} | {
    f"is asked by {name}": (fields, "Yes.") for name, fields in ASKED.items()
}


def shape(value):
    """A value without what is another in each answer: ids, keys and times."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items() if key not in ("id", "call_id", "encrypted_content")}
    return [shape(each) for each in value] if isinstance(value, list) else value


def check_stream(content):
    """Return the output of a stream, whose events are in order and agree."""
    events = [json.loads(line[6:]) for line in content.decode().splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    output = events[-1]["response"]["output"]
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        added, done = own[0], own[-1]
        assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
        assert added["item"]["id"] == done["item"]["id"]
        assert done["item"] == item, "an item that is done is the one of the whole response"
        pieces = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        (ended,) = (
            event for event in own if event["type"].endswith(".done") and "delta" not in event and whole_of(event)
        )
        assert whole_of(ended) == [pieces]
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
    assert len({item["id"] for item in output}) == len(output)
    usage = events[-1]["response"]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    return output


def whole_of(event):
    """The text, or the arguments, that an event says to be whole; nothing for other events."""
    return [event[name] for name in ("text", "arguments", "input") if name in event]


@pytest.mark.parametrize("case", CASES)
async def test_the_stream_the_whole_answer_and_the_history_agree(rig, case):
    fields, said = CASES[case]
    async with rig.open(), serving(rig, said, said, "Done.", max_turns=9) as (gateway, _tally, client):
        streamed = check_stream((await client.post(PATH, json={**fields, "stream": True})).content)
        again = {**fields, "max_output_tokens": 199, "metadata": {"try": "2"}}
        answer = (await client.post(PATH, json={**again, "input": [*items_of(fields), user("Again.")]})).json()
        assert shape(answer["output"]) == shape(streamed)
        # What came is sent back, with the results of calls, and is the same dialogue.
        before = len(gateway.context.trajectory().segments)
        results = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": text("It is there.")}
            for item in streamed
            if "call_id" in item
        ]
        history = [*items_of(fields), *streamed, *(results or [user("And?")])]
        last = await client.post(PATH, json={**fields, "input": history})
        assert "Done." in last.text
        trajectory = gateway.context.trajectory()
        assert len(trajectory.segments) == before
        assert trajectory.echoes.get("exact") == 1


def items_of(fields):
    given = fields["input"]
    return [user(given)] if isinstance(given, str) else given


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "item_reference"),
        ({"input": [{"type": "compaction_trigger"}]}, "compaction_trigger"),
        ({"tools": [{"type": "local_shell"}]}, "local_shell"),
        ({"input": [user([{"type": "input_image", "image_url": "data:"}])]}, "input_image"),
    ],
)
async def test_what_needs_the_vendor_is_refused_by_name(rig, fields, named):
    async with rig.open(), serving(rig, "Yes.") as (_gateway, _tally, client):
        told = await client.post(PATH, json={"input": "Hi", **fields})
        assert (told.status_code, named in told.text) == (400, True), told.text
