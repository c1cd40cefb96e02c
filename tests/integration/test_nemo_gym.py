"""Real servers of NeMo Gym collect rollouts through a node, and their own code checks the results."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.config import NemoGymConfig
from prorl_trio.testing.fake_engine import open_fake_engine
from prorl_trio.testing.fake_http import Answer, serve_http
from support.nemo_gym_rig import AGENT, SERVERS, gym_python, open_gym, shown
from support.whole_node import TOKEN, open_service

pytestmark = pytest.mark.timeout(300)

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
ANSWERS = {"pens": "72", "remainder": "9", "divisors": "24", "train": "75", "primes": "1"}
"""By a word of the question; the last one is wrong."""


def policy(prompt):
    """Solve what the rows ask for, so that each server has something to verify."""
    _, _, asked = prompt.partition("<|im_start|>user")
    results = asked.count("<tool_response>")
    if "synonym" in prompt:
        return CALL % ("extract_synonym_values", json.dumps({"synonym_values": [711, 407]})) if not results else "Done."
    if added := re.findall(r"(?:add) (\d+)", asked):
        adds = "\n".join(CALL % ("increment_counter", json.dumps({"count": int(each)})) for each in added)
        calls = ["<think>I add.</think>\n" + adds, CALL % ("get_counter_value", "{}")]
        return calls[results // 2] if results < 3 else "That is the count."
    if "weather" in prompt:
        return "It is cold." if results else CALL % ("get_weather", '{"city": "San Francisco"}')
    word = next(word for word in ANSWERS if word in asked)
    return f"<think>Easily.</think>\n\\boxed{{{ANSWERS[word]}}}"


def task_rows(python):
    """The first row of each of the wheel's servers, as a task of a node."""
    for name, server in SERVERS.items():
        path = next(python.parents[1].glob(f"lib/*/site-packages/resources_servers/{server}/data/example.jsonl"))
        row = json.loads(path.read_text().splitlines()[0])
        yield {**row, "prorl": {"instance_id": name, "handler": "nemo_gym", "payload": {"server": name, "row": row}}}


async def collect(rig, rows):
    """What the guide's `gym eval run` writes, by its files: rollouts, failures, metrics."""
    (rig.folder / AGENT / "data/example.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    await rig.run(rig.line(shown("sh")[1]))
    found = [rig.folder / "results" / f"example{suffix}.jsonl" for suffix in ("", "_failures")]
    rollouts, failures = ([json.loads(line) for line in path.read_text().splitlines()] for path in found)
    (metrics,) = json.loads((rig.folder / "results/example_aggregate_metrics.json").read_text())
    return rollouts, failures, metrics


async def _chat_only(call):
    """As NeMo RL's own server: chat completions and /tokenize, and nothing that takes token ids."""
    await trio.lowlevel.checkpoint()
    if call.path in {"/health", "/v1/models"}:
        return Answer(200, b'{"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": 4000}]}')
    return Answer(404, b'{"detail": "Not Found"}')


@asynccontextmanager
async def open_chat_only_server():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, partial(serve_http, handle=_chat_only), [listener])
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}/v1"
        nursery.cancel_scope.cancel()


async def leave(rig, engine, observer, row):
    """Ask for a rollout, and go while the policy works on it; return how the job ended."""
    engine.hold()
    body, seen = json.dumps(row).encode(), observer.observed()
    head = f"POST /run HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    stream = await trio.open_tcp_stream("127.0.0.1", rig.ports["agent"])
    await stream.send_all(head.encode() + body)
    while (await anext(seen)).status != "run":
        pass
    await stream.aclose()
    while (outcome := (await anext(seen)).outcome) is None:
        pass
    engine.release()
    return outcome.status


async def test_gym_collects_rollouts_through_a_node():
    python = gym_python()
    async with open_gym(python) as rig, trio.open_nursery() as nursery:
        rig.write_files(TOKEN)
        servers = NemoGymConfig(servers={name: rig.url(name) for name in SERVERS} | {"gone": "http://127.0.0.1:1"})
        async with (
            open_service(rig.folder, policy=policy, max_model_len=60_000, nemo_gym=servers) as (url, engine, _),
            open_fake_engine(config=engine.config) as another,
            open_chat_only_server() as chat_only,
        ):
            await nursery.start(rig.serve, url)
            examples = [
                json.loads(line) for line in (rig.folder / AGENT / "data/example.jsonl").read_text().splitlines()
            ]
            tasks = list(task_rows(python))
            lost = {**tasks[0], "prorl": {"handler": "nemo_gym", "payload": {"server": "gone", "row": tasks[0]}}}
            bare = {"responses_create_params": {"input": "What now?"}}
            unknown = {**bare, "prorl": {"handler": "no such", "payload": {}}}
            async with connect(url, TOKEN, observe_all=True) as observer:
                with trio.fail_after(60):
                    assert await leave(rig, engine, observer, examples[0]) == "cancelled"
            rollouts, failures, metrics = await collect(rig, [*examples, *tasks, lost, bare, unknown])
            models = {
                "vllm": [f"{another.url}/v1"],
                "nemo_rl": [f"{engine.url}/v1", chat_only],
                "openai": None,
                "tls": "https://api/v1",
            }
            arguments = ["results/example.jsonl", "endpoint.json", json.dumps(lost), json.dumps(models)]
            said = await rig.run(f"PRORL_TOKEN={TOKEN} python -m support.nemo_gym_checks {shlex.join(arguments)}")
            async with connect(url, TOKEN) as client:
                assert (await client.list_backends()).urls == [another.url]
        nursery.cancel_scope.cancel()
    found = json.loads(said.splitlines()[-1])
    by_task = {each["_ng_task_index"]: each for each in [*rollouts, *failures]}
    assert [by_task[index]["reward"] for index in range(11)] == [1, 1, 1, 1, 0, 1, 1, 1, None, None, None]
    turns = {each["_ng_task_index"]: count for each, (count, _) in zip(rollouts, found["checked"], strict=True)}
    assert [turns[index] for index in range(8)] == [1, 1, 1, 1, 1, 2, 3, 2]
    assert all(
        tokens == each["response"]["usage"]["output_tokens"]
        for each, (_, tokens) in zip(rollouts, found["checked"], strict=True)
    )
    assert [by_task[index]["_ng_failure_class"] for index in (8, 9, 10)] == ["node", "refused", "refused"]
    assert [by_task[index].get("_ng_failure_terminal") for index in (8, 9, 10)] == [None, True, True]
    assert metrics["agent_metrics"]["mean/reward"] == 7 / 8
    assert (metrics["agent_metrics"]["failures/node"], metrics["agent_metrics"]["failures/refused"]) == (1, 2)
    check_models(found["models"])
    check_faults(found["faults"])


def check_models(found):
    assert found["vllm"] == "registered"
    assert found["nemo_rl"].startswith("BackendError")
    assert found["openai"].startswith("ConfigError")
    assert found["tls"].startswith("ConfigError")


def check_faults(found):
    statuses = {
        "bare": 422, "lost": 503, "malformed": 422, "responses": 501, "nothing listens": 503, "wrong scheme": 503,
        "wrong token": 503, "only failures": 200,
    }  # fmt: skip
    assert {name: status for name, (status, _) in found.items()} == statuses
    assert found["lost"][1]["reward"] is None
    assert found["only failures"][1]["agent_metrics"] == {"failures/node": 1}
    assert "token" in found["wrong token"][1]["detail"]
    assert "127.0.0.1:1" in found["nothing listens"][1]["detail"]
