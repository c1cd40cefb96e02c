"""The form of a turn (JSON, calls of tools) is asked of the engine, in four dialects, and recorded with its tokens."""

from __future__ import annotations

import json
from functools import partial

import pytest

from prorl_trio.chat.guided import MAX_BLANKS, excess
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.trainer_engine import TrainerEngineClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.testing.fake_engine import FakeEngineConfig
from prorl_trio.testing.fake_trainer_engine import open_fake_trainer_engine
from support.gateway_client import PARAMETERS, PATHS, TOOLS, serving

pytestmark = pytest.mark.timeout(30)


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = [
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/v1/chat/completions", {"response_format": {"type": "json_object"}}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/v1beta/models/m:generateContent", {"generationConfig": {"responseMimeType": "application/json"}}),
    (
        "/v1beta/models/m:generateContent",
        {"generationConfig": {"responseSchema": json.loads(json.dumps(SCHEMA).replace('"object"', '"OBJECT"'))}},
    ),
]
CALLS = [
    ("/v1/chat/completions", {"tool_choice": "required"}),
    ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    ("/v1/responses", {"tool_choice": {"type": "function", "name": "look"}}),
    (
        "/v1/responses",
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}},
    ),
    ("/v1/messages", {"tool_choice": {"type": "any"}}),
    ("/v1/messages", {"tool_choice": {"type": "tool", "name": "look"}}),
    ("/v1beta/models/m:generateContent", {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}),
    (
        "/v1beta/models/m:generateContent",
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}}},
    ),
]


CALL = dict(zip(PATHS, ('"tool_calls"', '"function_call"', '"tool_use"', '"functionCall"'), strict=True))
"""What a call is named in the answer."""


def formats(rig):
    """What the engine was asked to keep its completions to."""
    asked = [request.structured_outputs for request in rig.engine.requests]
    return [json.loads(each.structural_tag)["format"] for each in asked if each is not None]


@pytest.mark.parametrize(("path", "fields"), JSON)
async def test_json_is_asked_of_the_engine(rig, path, fields):
    async with rig.open(), serving(rig, '{"a": 1}', "Free.") as (gateway, tally, client):
        answer = await client.post(path, json={**PATHS[path], **fields})
        assert answer.status_code == 200, answer.text
        assert json.dumps('{"a": 1}') in answer.text
        free = await client.post(path, json=PATHS[path])
        assert "Free." in free.text, "the same history without a form is another question"
        (form,) = formats(rig)
        assert form["type"] == "json_schema"
        assert form["json_schema"]["type"] == "object"
        assert form["max_whitespace_cnt"] == MAX_BLANKS
        trajectory = gateway.context.trajectory()
        assert not {"response_format", "text", "generationConfig"} & tally.ignored.keys()
    spans = [span for segment in trajectory.segments for span in segment.spans]
    assert [span.constraint for span in spans] == ["json", None]
    constrained, unconstrained = trajectory.segments
    assert constrained.loss_mask.sum() == len('{"a": 1}') + 1
    assert not constrained.free_mask.any(), "built-in trainers leave it out"
    assert (unconstrained.free_mask == unconstrained.loss_mask).all()


@pytest.mark.parametrize(("path", "fields"), CALLS)
async def test_calls_are_asked_of_the_engine(rig, path, fields):
    said = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    async with rig.open(), serving(rig, said) as (gateway, _tally, client):
        answer = await client.post(path, json={**PATHS[path], "tools": TOOLS[path], **fields})
        assert answer.status_code == 200, answer.text
        assert '"look"' in answer.text
        (form,) = formats(rig)
        (tag,) = form["tags"]
        assert (tag["begin"], tag["end"]) == ('<tool_call>\n{"name": "look", "arguments": ', "}\n</tool_call>")
        assert tag["content"]["json_schema"] == PARAMETERS
        assert form["stop_after_first"] is ("look" in json.dumps(fields) and "llowed" not in json.dumps(fields))
        ((span,),) = [segment.spans for segment in gateway.context.trajectory().segments]
    assert span.constraint == "calls"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"tool_choice": "none"}),
        ("/v1/responses", {"tool_choice": "none"}),
        ("/v1/messages", {"tool_choice": {"type": "none"}}),
        ("/v1beta/models/m:generateContent", {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}}),
    ],
)
async def test_where_no_call_is_wanted_what_would_be_one_is_text(rig, path, fields):
    said = 'Hm.\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    async with rig.open(), serving(rig, said, said) as (_gateway, _tally, client):
        body = {**PATHS[path], "tools": TOOLS[path]}
        answer = await client.post(path, json={**body, **fields})
        assert "<tool_call>" in answer.text
        assert CALL[path] not in answer.text
        free = await client.post(path, json=body)
        assert ("<tool_call>" in free.text, CALL[path] in free.text) == (False, True), "this is another question"


NO_CALLS = dict(
    zip(
        PATHS,
        [
            {"tool_choice": "none"},
            {"tool_choice": "none"},
            {"tool_choice": {"type": "none"}},
            {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
        ],
        strict=True,
    )
)


@pytest.mark.parametrize(("path", "fields"), JSON)
async def test_where_no_call_is_wanted_json_alone_may_come(rig, path, fields):
    async with rig.open(), serving(rig, "{}") as (_gateway, _tally, client):
        answer = await client.post(path, json={**PATHS[path], "tools": TOOLS[path], **fields, **NO_CALLS[path]})
        assert answer.status_code == 200, answer.text
        (form,) = formats(rig)
    assert form["type"] == "json_schema"


async def test_where_tools_are_offered_json_or_a_call_may_come(rig):
    path = "/v1/chat/completions"
    async with rig.open(), serving(rig, "{}") as (_gateway, _tally, client):
        body = {**PATHS[path], "tools": TOOLS[path], "response_format": {"type": "json_object"}}
        assert (await client.post(path, json=body)).status_code == 200
        (form,) = formats(rig)
    assert [each["type"] for each in form["elements"]] == ["json_schema", "tags_with_separator"]


@pytest.mark.parametrize(
    ("path", "fields", "field", "remedy"),
    [
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice", "there is none"),
        ("/v1/messages", {"tool_choice": {"type": "tool", "name": "no"}}, "tool_choice", "not offered: no"),
        ("/v1/responses", {"tool_choice": {"type": "mcp"}}, "tool_choice", "use 'auto'"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}, "text.format", "needs a schema"),
        (
            "/v1beta/models/m:generateContent",
            {"generationConfig": {"responseMimeType": "text/x.enum"}},
            "generationConfig.responseMimeType",
            "application/json",
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"title": "x" * 70_000}}}},
            "output_config.format",
            "characters",
        ),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(120)}}},
            "response_format",
            "nested more than 100 deep",
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"pattern": "[a-z]?" * 400}}}},
            "text.format",
            "a pattern of 2400 characters",
        ),
        (
            "/v1/messages",
            {
                "tools": [{"name": "look", "input_schema": {"properties": {"at": nested(120)}}}],
                "tool_choice": {"type": "any"},
            },
            "tool_choice",
            "nested",
        ),
    ],
)
async def test_a_form_that_cannot_be_is_refused_by_name(rig, path, fields, field, remedy):
    async with rig.open(), serving(rig, "Free.") as (_gateway, _tally, client):
        told = await client.post(path, json={**PATHS[path], **fields})
        assert (told.status_code, field in told.text, remedy in told.text) == (400, True, True), told.text
        assert (await client.post(path, json=PATHS[path])).status_code == 200


def strings(count, **fields):
    return {"type": "array", "prefixItems": [{"type": "string", **fields} for _ in range(count)]}


NAMED = {f"p{number}": {"type": "string"} for number in range(300)}
HEAVY = [
    {"patternProperties": {"[a-z]?" * 400: {}}},
    strings(1, pattern="[a-z]{1,999}" * 160),
    strings(1, pattern="^(([a-z]{1,200}b){1,200}c){1,200}$"),
    strings(200, format="email"),
    strings(50, format="hostname"),
    {"type": "object", "properties": NAMED, "minProperties": 150},
    {"type": "array", "prefixItems": [{"type": "array", "maxItems": 1000 + each} for each in range(400)]},
]
"""Each takes xgrammar 0.2 between one second and minutes."""
LIGHT = [
    strings(40, pattern="^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}$"),
    strings(1, pattern=r"^[a-z]{1,99999}\({2}$"),
    strings(20, format="date-time"),
    {"type": "object", "properties": NAMED},
    {"type": "object", "properties": {"pattern": {"description": "x" * 9000}, "maxItems": {"type": "integer"}}},
]


@pytest.mark.parametrize("schema", HEAVY)
def test_a_schema_that_is_too_much_work_is_refused_with_the_limit(schema):
    assert "at most 2000" in excess([schema])


@pytest.mark.parametrize("schema", LIGHT)
def test_a_schema_that_programs_use_is_not(schema):
    assert not excess([schema])


async def test_only_what_is_compiled_counts(rig):
    """The descriptions of functions do not, nor functions that may not be called."""
    path, said = "/v1/chat/completions", '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    other = {"name": "other", "description": "x" * 70_000, "parameters": {"title": "x" * 70_000}}
    tools = [*TOOLS[path], {"type": "function", "function": other}]
    choice = {"type": "function", "function": {"name": "look"}}
    async with rig.open(max_model_len=200_000), serving(rig, said) as (_gateway, _tally, client):
        answer = await client.post(path, json={**PATHS[path], "tools": tools, "tool_choice": choice})
        assert answer.status_code == 200, answer.text
        assert len(formats(rig)[0]["tags"]) == 1


async def test_a_form_that_the_engine_refuses_is_a_bad_request_and_the_rollout_goes_on(rig, monkeypatch):
    path, fields = JSON[0]
    async with rig.open(), serving(rig, "Free.") as (gateway, _tally, client):
        refusal = partial(rig.engine._refusal)
        refused = rig.engine._refusal.__globals__["error_answer"](400, "the grammar is bad")
        monkeypatch.setattr(
            rig.engine, "_refusal", lambda request: refused if request.structured_outputs else refusal(request)
        )
        told = await client.post(path, json={**PATHS[path], **fields})
        assert (told.status_code, told.json()["error"]["param"]) == (400, "response_format")
        assert "the grammar is bad" in told.text
        assert (await client.post(path, json=PATHS[path])).status_code == 200
        assert gateway.failure is None


async def test_an_engine_without_forms_is_named_with_the_remedy(rig):
    path, fields = JSON[0]
    config = FakeEngineConfig(vocab_size=259, end_of_turn_id=rig.tiny.end_of_turn_id, max_model_len=4000)
    async with rig.open(), open_fake_trainer_engine(config=config) as engine:
        rig.resources.backends = Backends(made_by(lambda url: TrainerEngineClient(url, context_tokens=4000)))
        await rig.resources.backends.add(engine.url)
        async with serving(rig) as (_gateway, _tally, client):
            told = await client.post(path, json={**PATHS[path], **fields})
            assert told.status_code == 400
            assert "vLLM or SGLang" in told.text
        await rig.resources.backends.aclose()


async def test_a_family_without_a_grammar_is_named_with_the_remedy(rig, monkeypatch):
    async with rig.open(), serving(rig) as (gateway, _tally, client):
        monkeypatch.setattr(type(gateway.context.resources.chat_format), "call_syntaxes", ())
        path, fields = CALLS[0]
        told = await client.post(path, json={**PATHS[path], "tools": TOOLS[path], **fields})
        assert told.status_code == 400
        assert "'auto'" in told.text
