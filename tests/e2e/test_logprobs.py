"""Trajectories of a real vLLM, token by token: the mask, the ids, and the log-probabilities against transformers.

Those of our own loop, and those of the gateway, whose clients speak four dialects.

bfloat16 has 8 significant bits: a logit between 16 and 32, as this model's are, is a multiple of 1/8. So two programs
that are both right differ in each log-probability, and each of them from float32: not at all where the policy was sure,
and by 0.06 on average where it was not. The mean over a run, 0.02 to 0.07, tells how sure the policy was, not how exact
the engine is. So the engine is held against float32, and what it may differ by is measured in the same run: by what
bfloat16 does to transformers.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import trio

from perf.tokens import Sampled, drift_of
from prorl_launch.paths import engine_python, model_dir
from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.types.models import ChatMessage, JobSpec, SamplingParams, Segment, TaskInstance
from support.completions import asked, begun
from support.gateway_client import PATHS, TOOLS, served

LOGGER = logging.getLogger(__name__)
"""How far it is: `--log-cli-level=INFO` shows it."""
SCRIPT = Path(__file__).with_name("teacher_forcing.py")
AT_ONCE = 32
TURNS = 3
SAID_EVERY = 10
TURN_TOKENS, GATEWAY_TOKENS = 24, 12
CALL_S = 600.0
RUN_S = 3000.0
MEAN_ABS = 0.05
AS_EXACT = 1.25
"""The engine may be so much further from float32 than transformers in bfloat16 is."""
USUAL_ERRORS, LEAST_ERROR = 6.0, 1e-5
"""What bfloat16 may do to a token's log-odds, in its usual errors, and on top to its log-probability, in nats."""
QUESTIONS = (
    "A baker makes {0} loaves and sells {1} of them. How many are left? Explain.",
    "Write Python that sums the numbers from {0} to {1}.",
    "Tell a short story about {0} foxes and {1} lighthouses.",
    "List {0} things one needs for a journey of {1} days, with reasons.",
)
RESULTS = (
    "Traceback (most recent call last):\n  File '<stdin>', line {0}\nNameError: name 'x{1}' is not defined",
    "{0}\n{1}\n",
    "total {0}\n-rw-r--r-- 1 root root {1} notes.txt\n",
)


class Recorded(NamedTuple):
    """A trajectory as the trainer gets it, and beside it what went to the engine and came from it."""

    segment: Segment
    turns: list[Sampled]
    logprobs: list[float]


async def sample(url, count):
    """Dialogues of `TURNS` turns, `AT_ONCE` at a time."""
    chat = await trio.to_thread.run_sync(ChatFormat.load, model_dir())
    backends = Backends(made_by(VllmClient))
    info = await backends.add(url)
    assert info.logprob_kind == "raw"
    recorded, room = [], trio.CapacityLimiter(AT_ONCE)

    async def one(number):
        async with room, backends.lease(str(number)) as lease:
            question = QUESTIONS[number % len(QUESTIONS)].format(number + 2, 7 * number % 97)
            conversation = Conversation(chat, [ChatMessage(role="user", content=question)])
            turns, logprobs = [], []
            for turn in range(TURNS):
                prompt_ids = conversation.prompt_token_ids()
                if turns:
                    turns[-1] = Sampled(turns[-1].prompt_ids, turns[-1].completion_ids, prompt_ids)
                sampling = SamplingParams(temperature=1.0, stop_token_ids=chat.stop_token_ids)
                how = {"sampling": sampling, "request_id": f"{number}-{turn}", "timeout_s": CALL_S}
                completion = await lease.complete(begun(asked(prompt_ids, TURN_TOKENS, **how)))
                turns.append(Sampled(prompt_ids, list(completion.token_ids), []))
                logprobs += completion.logprobs
                conversation.add_completion(completion.token_ids, completion.logprobs, engine=completion.engine)
                result = RESULTS[(number + turn) % len(RESULTS)].format(number, turn)
                conversation.add_messages([ChatMessage(role="tool", content=result, name="bash")])
        (segment,) = conversation.segments()
        last = turns[-1]
        turns[-1] = Sampled(last.prompt_ids, last.completion_ids, segment.token_ids.tolist())
        recorded.append(Recorded(segment, turns, logprobs))
        if len(recorded) % SAID_EVERY == 0:
            LOGGER.info("%d of %d trajectories", len(recorded), count)

    try:
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(one, number)
    finally:
        await backends.aclose()
    return chat, recorded


def check_tokens(recorded):
    """The mask is 1 on what the engine returned and nowhere else; ids and log-probabilities are the engine's own."""
    for segment, turns, logprobs in recorded:
        mask = np.zeros(len(segment), dtype=np.uint8)
        for turn in turns:
            start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)
            assert segment.token_ids[:end].tolist() == [*turn.prompt_ids, *turn.completion_ids]
            mask[start:end] = 1
        assert np.array_equal(segment.loss_mask, mask)
        assert np.array_equal(segment.logprobs[mask == 1], np.array(logprobs, dtype=np.float32))
        assert not segment.logprobs[mask == 0].any()


async def score(recorded, folder):
    """Log-probabilities of all sampled tokens as recorded, as transformers has them in bfloat16 and in float32, and the
    spread between those; see `teacher_forcing`."""
    cases = [
        {"token_ids": each.segment.token_ids.tolist(), "loss_mask": each.segment.loss_mask.tolist()}
        for each in recorded
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    argv = [engine_python(), SCRIPT, model_dir(), folder / "cases.json", folder / "scores.json"]
    env = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    done = await trio.run_process(argv, env=env, capture_stdout=True, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    scores = json.loads((folder / "scores.json").read_text())
    recorded_logprobs = np.concatenate([np.array(each.logprobs) for each in recorded])
    names = "bfloat16", "float32", "spread"
    return recorded_logprobs, *(np.concatenate([each[name] for each in scores]) for name in names)


class Outlier(NamedTuple):
    """A token at which the engine is further from float32 than bfloat16 explains."""

    index: int
    engine: float
    bfloat16: float
    float32: float
    spread: float


class Agreement(NamedTuple):
    """Mean absolute differences of log-probabilities between the engine, transformers in bfloat16, and in float32."""

    engine_to_bfloat16: float
    engine_to_float32: float
    bfloat16_to_float32: float
    unexplained: list[Outlier]


def agreement(engine, bfloat16, float32, spread):
    """bfloat16 moves logits, and so the log-odds of a token, about as much whether it is likely or not: its
    log-probability hardly, where the policy was sure. How much, depends on the place: `spread` measures it there, but
    of one way to calculate, and the engine has another. So the run's mean goes in beside it.
    """
    usual = np.hypot(spread, math.sqrt(np.mean(spread**2)))
    with np.errstate(divide="ignore"):
        odds = float32 - np.log(-np.expm1(float32))
    lowest, highest = (-np.logaddexp(0.0, -(odds + by)) for by in (-USUAL_ERRORS * usual, USUAL_ERRORS * usual))
    (far,) = np.nonzero((engine < lowest - LEAST_ERROR) | (engine > highest + LEAST_ERROR))
    means = (np.abs(one - other).mean() for one, other in ((engine, bfloat16), (engine, float32), (bfloat16, float32)))
    outliers = [Outlier(i, *(float(each[i]) for each in (engine, bfloat16, float32, spread))) for i in far.tolist()]
    return Agreement(*map(float, means), outliers)


async def check(url, count, folder, record_property):
    """Sample, and hold everything against what it is to be. Returns the drift, with the control's, and the figures."""
    with trio.fail_after(RUN_S):
        chat, recorded = await sample(url, count)
        assert len(recorded) == count
        check_tokens(recorded)
        drift = drift_of(chat, [turn for each in recorded for turn in each.turns])
        found = agreement(*await score(recorded, folder))
    for name, value in {
        **found._asdict(),
        "drift.ours": drift.ours_rate,
        "drift.retokenised": drift.retokenised_rate,
    }.items():
        record_property(name, value)
    LOGGER.info("%s, %s", drift, found)
    assert drift.ours == 0
    assert found.engine_to_float32 < MEAN_ABS, found
    assert found.engine_to_float32 < AS_EXACT * found.bfloat16_to_float32, found
    assert not found.unexplained, found
    return drift, found


@pytest.mark.slow
async def test_ten_trajectories(vllm_url, tmp_path, record_property):
    await check(vllm_url, 10, tmp_path, record_property)


async def work(client, path):
    """Speak for a program: three turns, one more from the first on, in one of the dialects."""
    body = copy.deepcopy(PATHS[path])
    field = next(name for name in ("messages", "input", "contents") if name in body)
    if field == "input":
        body["input"] = [{"role": "user", "content": body["input"]}]
    limit = {"messages": "max_tokens", "input": "max_output_tokens"}.get(field)
    body |= {limit: GATEWAY_TOKENS} if limit else {"generationConfig": {"maxOutputTokens": GATEWAY_TOKENS}}
    body["tools"], history = TOOLS[path], body[field]

    async def ask(text):
        history.append({"role": "user", **({"parts": [{"text": text}]} if field == "contents" else {"content": text})})
        answer = await client.post(path, json={**body, field: history}, timeout=CALL_S)
        assert answer.status_code == 200, answer.text
        got = answer.json()
        match path.split("/")[2]:
            case "chat":
                history.append(got["choices"][0]["message"])
            case "responses":
                history.extend(got["output"])
            case "messages":
                history.append({"role": "assistant", "content": got["content"]})
            case _:
                history.append(got["candidates"][0]["content"])

    await ask(QUESTIONS[0].format(3, 7))
    after_first = list(history)
    for text in ("Are you sure?", "Say it in one word."):
        await ask(text)
    history[:] = after_first
    await ask("Write it as Python.")


async def constrained(client):
    """Have the engine keep turns to forms, and check that it does."""
    path = "/v1/chat/completions"
    body = {
        "messages": [{"role": "user", "content": "Where is the fox? Look."}],
        "tools": TOOLS[path],
        "max_tokens": 40,
    }
    call = await client.post(path, json={**body, "tool_choice": "required"}, timeout=CALL_S)
    (made,) = call.json()["choices"][0]["message"]["tool_calls"][:1]
    assert made["function"]["name"] == "look"
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    form = {"type": "json_schema", "json_schema": {"schema": {**schema, "additionalProperties": False}}}
    said = await client.post(
        path, json={"messages": body["messages"], "response_format": form, "max_tokens": 20}, timeout=CALL_S
    )
    assert set(json.loads(said.json()["choices"][0]["message"]["content"])) == {"sure"}
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing-that-there-is"}}}
    told = await client.post(path, json={"messages": body["messages"], "response_format": bad}, timeout=CALL_S)
    assert (told.status_code, told.json()["error"]["param"]) == (400, "response_format"), told.text


@pytest.mark.slow
async def test_segments_of_the_gateway(vllm_url, tmp_path, record_property):
    """Each delivered token has the log-probability of its context there; one that was kept to a form has no less."""
    chat = await trio.to_thread.run_sync(ChatFormat.load, model_dir())
    backends = Backends(made_by(VllmClient))
    await backends.add(vllm_url)
    config = NodeConfig(model=ModelConfig(path=str(model_dir())))
    resources = Resources(config=config, chat_format=chat, backends=backends, scorers=None)
    instance = TaskInstance(instance_id="q", handler="math", payload={})
    sampling = SamplingParams(max_output_tokens=100)
    segments = []

    async def one(path):
        spec = JobSpec(job_id=f"j{path}", instance=instance, sampling=sampling, max_turns=20)
        context = RolloutContext(spec=spec, resources=resources)
        async with served(context) as (_gateway, _tally, client):
            await (work(client, path) if path else constrained(client))
        trajectory = context.trajectory()
        assert trajectory.undelivered_tokens == 0
        segments.extend(trajectory.segments)
        if path:
            assert [segment.reason for segment in trajectory.segments] == [None, "branch"]
            assert set(trajectory.echoes) == {"exact", "branch"}, trajectory.echoes

    with trio.fail_after(RUN_S):
        async with trio.open_nursery() as nursery:
            for path in [*PATHS, ""]:
                nursery.start_soon(one, path)
        await backends.aclose()
        free = [(segment, segment.free_mask) for segment in segments if segment.free_mask.any()]
        kept = [(segment, segment.loss_mask) for segment in segments if not segment.free_mask.any()]
        assert len(kept) >= 2
        cases = [
            Recorded(SimpleNamespace(token_ids=each.token_ids, loss_mask=mask), [], each.logprobs[mask == 1].tolist())
            for each, mask in [*free, *kept]
            if mask.any()
        ]
        engine, bfloat16, float32, spread = await score(cases, tmp_path)
    tokens = sum(int(mask.sum()) for _, mask in free)
    found = agreement(*(each[:tokens] for each in (engine, bfloat16, float32, spread)))
    record_property("gateway", found._asdict())
    LOGGER.info("%d tokens of the gateway: %s", tokens, found)
    assert found.engine_to_float32 < MEAN_ABS, found
    assert not found.unexplained, found
    more = engine[tokens:] - float32[tokens:]
    assert more.min() > -0.5, "of fewer candidates each has a larger share"
    assert more.max() > 1.0, "its grammar has left one that the policy would hardly have sampled"
    assert float(np.exp(engine[tokens:]).max()) > 0.999, "where there was no choice, the log-probability is 0"


@pytest.mark.soak
async def test_two_hundred_trajectories(vllm_url, tmp_path, record_property):
    drift, found = await check(vllm_url, 200, tmp_path, record_property)
    assert found.engine_to_bfloat16 < MEAN_ABS, "of so many tokens, the sure and the unsure ones level out"
    assert drift.retokenised, "a client that encodes text again changes some of so many turns"


def test_what_bfloat16_does_not_explain_is_found():
    rng = np.random.default_rng(0)
    float32 = -rng.exponential(1.0, 4000)
    float32[:3] = -1e-3, -1e-7, 0.0
    noise = 0.07 * -np.expm1(float32)
    engine, bfloat16 = (np.minimum(0.0, float32 + noise * rng.standard_normal(4000)) for _ in range(2))
    spread = np.full(4000, 0.07)
    assert not agreement(engine, bfloat16, float32, spread).unexplained
    unsure = int(np.argmin(np.abs(float32 + 2)))
    engine[unsure] += 0.7
    engine[:3] -= 0.002, 2e-5, 2e-5
    found = agreement(engine, bfloat16, float32, spread).unexplained
    assert [each.index for each in found] == sorted([0, 1, 2, unsure])
    spread[unsure] = 0.3
    found = agreement(engine, bfloat16, float32, spread).unexplained
    assert [each.index for each in found] == [0, 1, 2], "where bfloat16 moves the logits more, it explains more"
