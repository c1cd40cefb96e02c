"""Clients that edit their histories at random: the policy is told what they say, and each sampled token comes once.

Two oracles, neither of which asks the gateway. The engine has kept what it read and sampled, and gives each token a
log-probability of its own: so a delivered token says of which call it is, and all before it has to be what was read
there. And a prompt is read back into words and held against the request that it answers: whatever a client does with
what it was served, either the tokens of its turns are gone on from or a segment begins with the history as it was sent.
"""

from __future__ import annotations

import json
import random
import re
from contextlib import asynccontextmanager
from itertools import groupby
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.agent.gateway import open_gateway
from prorl_trio.agent.said import Question, Said
from prorl_trio.chat.format import ChatFormat
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.inference.engines.protocol import Completion
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance

SESSIONS, REQUESTS = 25, 40
SOAK_EDITS, SOAK_FILES = 100_000, 20
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
SERIALS = 1024
"""A token's log-probability is minus its number by this: exact in float32."""


class Call(NamedTuple):
    """What the engine read and sampled."""

    prompt_ids: np.ndarray
    ids: np.ndarray
    text: str


class Engine:
    """Samples turns with words of their own, after a while; keeps what it read and sampled, by its first token's
    number."""

    info = SimpleNamespace(max_model_len=1_000_000)

    def __init__(self, tiny, rng):
        self.tiny, self.rng = tiny, rng
        self.calls, self.by_answer, self.next_serial = {}, {}, 1

    async def complete(self, so_far, **_how):
        await trio.sleep(self.rng.random())
        number = len(self.calls)
        text = f"answer {number}"
        if self.rng.random() < 0.3:
            text = f"<think>\nthought {number}\n</think>\n\n{text}"
        if self.rng.random() < 0.4:
            text += "".join(
                f'\n<tool_call>{{"name": "look", "arguments": {{"at":  {number}, "a": [{each}]}}}}</tool_call>'
                for each in range(self.rng.randint(1, 3))
            )
        ids = self.tiny.turn(text)
        prompt = np.array(so_far.request.prompt_token_ids, dtype=np.int32)
        call = Call(prompt, np.array(ids, dtype=np.int32), text)
        self.calls[self.next_serial] = self.by_answer[number] = call
        logprobs = [-(self.next_serial + at) / SERIALS for at in range(len(ids))]
        self.next_serial += len(ids)
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop", policy_version="1", engine="fake 1")

    @asynccontextmanager
    async def lease(self, *_args):
        yield self

    def check_delivered(self, segments):
        """Each sampled token is trained on once, after exactly what the engine had read and sampled before it."""
        delivered = set()
        for segment in segments:
            sampled = segment.loss_mask == 1
            assert not segment.logprobs[~sampled].any()
            serials = np.rint(-segment.logprobs * SERIALS).astype(int)
            (firsts,) = np.nonzero(sampled & np.isin(serials, list(self.calls)))
            for start in firsts.tolist():
                serial = int(serials[start])
                call = self.calls[serial]
                end = start + len(call.ids)
                assert serial not in delivered, f"{call.text!r} is delivered twice"
                delivered.add(serial)
                assert np.array_equal(segment.token_ids[:start], call.prompt_ids), f"{call.text!r}: a false context"
                assert np.array_equal(segment.token_ids[start:end], call.ids)
                assert np.array_equal(serials[start:end], np.arange(serial, serial + len(call.ids)))
                assert sampled[start:end].all()
                sampled[start:end] = False
            assert not sampled.any(), "tokens are trained on that nobody has sampled"
        assert delivered == set(self.calls), "tokens were sampled and not delivered"


def words(text):
    """The words of a text that say which message it is."""
    return re.findall(r"(?:word|answer|thought) \d+|pruned|begin|be good", " ".join(text.split()))


def without_reasoning(text):
    return text.rpartition("</think>")[2]


def altered(message, **fields):
    return msgspec.structs.replace(message, **fields)


class Client:
    """A program: its dialogues, each a list of messages, and what it was served."""

    def __init__(self, gateway, engine, rng):
        self.gateway, self.engine, self.rng = gateway, engine, rng
        self.histories = [[Said("system", "be good"), Said("user", "begin")]]
        self.words = self.edits = 0
        self.served = {}

    def word(self):
        self.words += 1
        return f"word {self.words}"

    # ------------------------------------------------------------ edits

    def one(self, history, edit, role="assistant"):
        """Return the history with one message of that role replaced by the messages that `edit` makes of it."""
        at = [index for index, each in enumerate(history) if each.role == role]
        if not at:
            return history
        index = self.rng.choice(at)
        return [*history[:index], *edit(history[index]), *history[index + 1 :]]

    def respell_text(self, history):
        return self.one(history, lambda each: [altered(each, text=f" {each.text.replace(' ', '  ')}\n")])

    def respell_calls(self, history):
        def spelled(call):
            if not call.arguments.startswith("{"):  # of a tool that was not offered: its raw text
                return call
            return altered(call, arguments=json.dumps(json.loads(call.arguments), sort_keys=True, indent=1))

        return self.one(history, lambda each: [altered(each, calls=list(map(spelled, each.calls)))])

    def drop_key(self, history):
        return [altered(each, key="") for each in history] if self.rng.random() < 0.5 else self.one(
            history, lambda each: [altered(each, key="")]
        )  # fmt: skip

    def drop_reasoning(self, history):
        return [altered(each, reasoning="") for each in history]

    def reword(self, history):
        return self.one(history, lambda each: [altered(each, text=self.word(), reasoning="")])

    def replace_turn(self, history):
        return self.one(history, lambda _each: [Said("assistant", self.word())])

    def cut_text(self, history):
        return self.one(history, lambda each: [altered(each, text=each.text[:-1], key="")])

    def drop_calls(self, history):
        return self.one(history, lambda each: [altered(each, calls=[], key="")])

    def split_turn(self, history):
        """As clients of Responses do."""
        return self.one(
            history,
            lambda each: [
                Said("assistant", reasoning=each.reasoning, key=each.key),
                Said("assistant", each.text, key=each.key),
                *(Said("assistant", calls=[call], key=each.key) for call in each.calls),
            ],
        )

    def rename_calls(self, history):
        """As clients do that give ids of their own."""
        names = {}

        def name(call_id):
            return names.setdefault(call_id, f"own{len(names)}")

        return [
            altered(
                each,
                calls=[altered(call, id=name(call.id)) for call in each.calls],
                call_id=name(each.call_id) if each.call_id else "",
            )
            for each in history
        ]

    def swap_results(self, history):
        """Two results answer each other's calls."""
        at = [index for index in range(1, len(history)) if history[index - 1].role == history[index].role == "tool"]
        if not at:
            return history
        index, changed = self.rng.choice(at), list(history)
        one, other = history[index - 1], history[index]
        changed[index - 1 : index + 1] = altered(one, call_id=other.call_id), altered(other, call_id=one.call_id)
        return changed

    def drop_message(self, history):
        at = self.rng.randrange(len(history))
        return [*history[:at], *history[at + 1 :]]

    def swap_messages(self, history):
        at = self.rng.randrange(len(history))
        return [*history[:at], *reversed(history[at : at + 2]), *history[at + 2 :]]

    def repeat_messages(self, history):
        at, count = self.rng.randrange(len(history)), self.rng.randint(1, 3)
        return [*history[: at + count], *history[at : at + count], *history[at + count :]]

    def interleave(self, history):
        other = self.rng.choice(self.histories)
        at, start = self.rng.randrange(len(history) + 1), self.rng.randrange(len(other))
        return [*history[:at], *other[start : start + self.rng.randint(1, 4)], *history[at:]]

    def prune(self, history):
        role = self.rng.choice(("user", "tool"))
        return self.one(history, lambda each: [altered(each, text="pruned")], role)

    def go_back(self, history):
        return history[: self.rng.randrange(1, len(history) + 1)]

    def go_back_and_on(self, history):
        return [*self.go_back(history), Said("user", self.word())]

    def compact(self, history):
        last = max((at for at, each in enumerate(history) if each.role == "assistant"), default=len(history))
        return [history[0], Said("user", self.word()), *history[last:]]

    def begin_anew(self, _history):
        return [Said("system", self.word()), Said("user", self.word())]

    EDITS = (
        respell_text, respell_calls, drop_key, drop_reasoning, reword, replace_turn, cut_text, drop_calls, split_turn,
        rename_calls, swap_results, drop_message, swap_messages, repeat_messages, interleave, prune, go_back,
        go_back_and_on, compact, begin_anew,
    )  # fmt: skip

    def edited(self, history):
        for edit in self.rng.sample(self.EDITS, self.rng.choice((0, 0, 1, 1, 2, 3))):
            changed = edit(self, history)
            self.edits += changed != history
            history = changed or [Said("user", self.word())]
        history = list(history)
        while history and history[-1].role == "assistant":
            history.pop()
        return history or [Said("user", self.word())]

    # ------------------------------------------------------------ requests

    async def ask(self, history, patience_s=10.0):
        """Ask, with the history as it is; check the prompt, and append the answer to a copy."""
        tools = TOOLS if self.rng.random() < 0.95 else []
        with trio.move_on_after(patience_s):
            answer = await self.gateway.ask(Question(messages=history, tools=tools))
            said = Said("assistant", answer.text, answer.reasoning, answer.calls, key=answer.key)
            call = self.engine.by_answer[int(re.search(r"answer (\d+)", answer.text)[1])]
            self.served[answer.key] = call.text
            self.check(history, self.engine.tiny.decode(call.prompt_ids.tolist()))
            results = [Said("tool", self.word(), call_id=call.id, name=call.name) for call in said.calls]
            self.rng.shuffle(results)
            self.histories.append([*history, said, *(results or [Said("user", self.word())])])

    async def step(self):
        history = self.edited(self.rng.choice(self.histories[-4:]))
        how = self.rng.randrange(10)
        self.edits += how < 4
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.ask, history, 0.2 if how == 0 else 10.0)
            if how == 1:  # twice at once
                nursery.start_soon(self.ask, history)
            elif how == 2:  # something else at once
                nursery.start_soon(self.ask, self.edited(self.rng.choice(self.histories[-4:])))
        if how in (0, 3):  # again, after it has left, or with the answer lost
            await self.ask(history)

    def check(self, history, prompt):
        """Every word of the history is in the prompt, in its order, and no other."""
        told, at, calls = words(prompt), 0, []
        turns = [(role, list(run)) for role, run in groupby(history, lambda each: each.role)]
        assert prompt.count("<|im_start|>assistant") == 1 + sum(role == "assistant" for role, _ in turns)
        for role, run in turns:
            match role:
                case "assistant":
                    calls = [call.id for each in run for call in each.calls]
                    options = list(self.spoken(run))
                case "tool":
                    own = [each for each in run if each.call_id in calls]
                    if len(own) == len(run):
                        own.sort(key=lambda each: calls.index(each.call_id))
                    length = sum(len(words(each.text)) for each in run)
                    options = [words(" ".join(each.text for each in own)) if len(own) == len(run) else
                               sorted(told[at : at + length])]  # fmt: skip
                    if len(own) < len(run):
                        assert options[0] == sorted(words(" ".join(each.text for each in run))), (told, history)
                        at += length
                        continue
                case _:
                    options = [words(" ".join(each.text for each in run))]
            fitting = [option for option in options if told[at : at + len(option)] == option]
            assert fitting, (told[at:], options, history)
            at += max(map(len, fitting))
        assert at == len(told), (told[at:], history)

    def spoken(self, run):
        """What an assistant's messages may be told as: as they are, or as the turn was sampled that they echo."""
        said = words(" ".join(each.text for each in run))
        yield words(" ".join([*(each.reasoning for each in run), *(each.text for each in run)]))
        keys = {each.key for each in run}
        if len(keys) == 1 and keys <= self.served.keys():
            yield words(self.served[keys.pop()])
        elif not any(each.reasoning for each in run):
            yield from (words(text) for text in self.served.values() if words(without_reasoning(text)) == said)


@pytest.fixture(scope="module")
def resources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny = make_tiny_model(folder)
    config = NodeConfig(model=ModelConfig(path=str(folder)))
    return tiny, config, ChatFormat.load(folder)


async def session(resources, seed, requests):
    """One rollout; return the edits of its client."""
    tiny, config, chat = resources
    rng = random.Random(seed)
    engine = Engine(tiny, rng)
    context = RolloutContext(
        spec=JobSpec(
            job_id="j",
            instance=TaskInstance(instance_id="i", handler="math", payload={}),
            sampling=SamplingParams(max_output_tokens=500),
            max_turns=10 * requests,
        ),
        resources=Resources(config=config, chat_format=chat, backends=engine, scorers=None),
    )
    async with open_gateway(context) as gateway:
        client = Client(gateway, engine, rng)
        for _ in range(requests):
            await client.step()
        await trio.sleep(5)  # what clients left is sampled to its end
    trajectory = context.trajectory()
    engine.check_delivered(trajectory.segments)
    assert trajectory.undelivered_tokens == 0
    assert len(trajectory.turns) == len(engine.calls) > requests // 2
    for segment in (each for each in trajectory.segments if each.parent is not None):
        parent = trajectory.segments[segment.parent]
        assert np.array_equal(segment.token_ids[: segment.shared], parent.token_ids[: segment.shared])
        assert not segment.loss_mask[: segment.shared].any()
        assert segment.reason is not None
    return client.edits


@pytest.mark.parametrize("seed", range(SESSIONS))
async def test_the_policy_is_told_what_the_client_says_and_each_token_comes_once(resources, seed, autojump_clock):
    assert await session(resources, seed, REQUESTS) > REQUESTS // 2


@pytest.mark.soak
@pytest.mark.parametrize("part", range(SOAK_FILES))
async def test_100_000_edits(resources, part, autojump_clock):
    edits, seed = 0, 1_000_000 * (1 + part)
    while edits < SOAK_EDITS // SOAK_FILES:
        edits += await session(resources, seed, REQUESTS)
        seed += 1


@pytest.mark.parametrize("fault", ["lost", "doubled", "false context"])
async def test_the_oracle_finds_what_it_is_for(resources, fault, autojump_clock):
    engine = Engine(resources[0], random.Random(0))
    request = SimpleNamespace(prompt_token_ids=[5, 6, 7])
    done = await engine.complete(SimpleNamespace(request=request))
    ids, zeros = np.array([5, 6, 7, *done.token_ids], dtype=np.int32), np.zeros(3, dtype=np.float32)
    segment = SimpleNamespace(
        token_ids=ids,
        logprobs=np.concatenate([zeros, np.array(done.logprobs, dtype=np.float32)]),
        loss_mask=np.array([0] * 3 + [1] * len(done.token_ids), dtype=np.uint8),
    )
    engine.check_delivered([segment])
    if fault == "false context":
        ids[1] = 9
    with pytest.raises(AssertionError):
        engine.check_delivered({"lost": [], "doubled": [segment, segment]}.get(fault, [segment]))
