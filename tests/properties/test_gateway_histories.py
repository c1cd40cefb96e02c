"""Clients that edit their histories at random: the policy is told what they say, and each sampled token comes once.

A prompt is read back into messages and held against the request that it answers. Whatever a client does with what it
was served (spell it anew, drop keys or reasoning, cut, repeat, go back, ask twice at once, leave), either the tokens of
its turns are gone on from or a segment begins with the history as it was sent.
"""

from __future__ import annotations

import random
import re
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.agent.gateway import open_gateway
from prorl_trio.agent.said import Question, Said, SaidCall
from prorl_trio.chat.format import ChatFormat
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.inference.engines.protocol import Completion
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance

SESSIONS = 40
REQUESTS = 40
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]


class Engine:
    """Samples turns with words of their own, after a while; keeps the prompts."""

    info = SimpleNamespace(max_model_len=1_000_000)

    def __init__(self, tiny, rng):
        self.tiny, self.rng = tiny, rng
        self.sampled, self.texts = {}, []

    async def complete(self, so_far, **_how):
        request = so_far.request
        await trio.sleep(self.rng.random())
        number = len(self.texts)
        text = f"answer {number}"
        if self.rng.random() < 0.3:
            text = f"<think>\nthought {number}\n</think>\n\n{text}"
        if self.rng.random() < 0.4:
            text += "".join(
                f'\n<tool_call>{{"name": "look", "arguments": {{"at":  {number}, "a": [{each}]}}}}</tool_call>'
                for each in range(self.rng.randint(1, 3))
            )
        ids = self.tiny.turn(text)
        self.texts.append(text)
        self.sampled[text] = self.tiny.decode(list(request.prompt_token_ids))
        return Completion(
            token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="stop", policy_version="1", engine="fake 1"
        )

    @asynccontextmanager
    async def lease(self, *_args):
        yield self


def words(text):
    """The words of a text that say which message it is."""
    return re.findall(r"(?:word|answer|thought) \d+|pruned|begin|be good", text)


class Client:
    """A program: its dialogues, each a list of messages, and what it was served."""

    def __init__(self, gateway, engine, rng):
        self.gateway, self.engine, self.rng = gateway, engine, rng
        self.histories = [[Said("system", "be good"), Said("user", "begin")]]
        self.words = 0
        self.served = {}

    def word(self):
        self.words += 1
        return f"word {self.words}"

    def altered(self, message):
        """An assistant's message as a client may send it back; None: exactly."""
        match self.rng.randrange(9):
            case 0:
                return Said("assistant", f" {message.text}\n", message.reasoning, message.calls, key=message.key)
            case 1:
                calls = [SaidCall(each.name, each.arguments.replace(" ", ""), "none") for each in message.calls]
                return Said("assistant", message.text, message.reasoning, calls)
            case 2:
                return Said("assistant", message.text, "", message.calls, key=message.key)
            case 3:
                return Said("assistant", message.text, "", [SaidCall(c.name, c.arguments, "x") for c in message.calls])
            case 4:
                return Said("assistant", self.word(), "", message.calls, key=message.key)
            case 5:
                return Said("assistant", self.word())
        return message

    async def ask(self, history):
        """Ask, with the history as it is; check the prompt, and append the answer to a copy."""
        with trio.move_on_after(self.rng.choice((10, 10, 10, 0.2))):
            answer = await self.gateway.ask(Question(messages=history, tools=TOOLS))
            said = Said("assistant", answer.text, answer.reasoning, answer.calls, key=answer.key)
            raw = self.engine.texts[int(re.search(r"answer (\d+)", answer.text)[1])]
            self.served[answer.key] = raw
            self.check(history, self.engine.sampled[raw])
            self.histories.append([*history, said, *self.follow_up(said)])

    def follow_up(self, said):
        results = [Said("tool", self.word(), call_id=call.id, name=call.name) for call in said.calls]
        self.rng.shuffle(results)
        return results or [Said("user", self.word())]

    def check(self, history, prompt):
        """Every word of the history is in the prompt, in its order, and no other."""
        told, at, results = words(prompt), 0, []
        assert prompt.count("<|im_start|>assistant") == 1 + sum(each.role == "assistant" for each in history)
        for message in [*history, None]:
            if message is not None and message.role == "tool":
                results += words(message.text)
                continue
            assert sorted(told[at : at + len(results)]) == sorted(results), (told, history)
            at, results = at + len(results), []
            if message is None:
                break
            options = [words(message.text)]
            if message.role == "assistant":  # as it was served, with or without the reasoning that was left out
                said = words(f"{message.reasoning} {message.text}")
                served = [self.served[message.key]] if message.key in self.served else self.served.values()
                options = [said, *(words(text) for text in served if message.key or message.text.strip() in text)]
            fitting = [option for option in options if told[at : at + len(option)] == option]
            assert fitting, (told[at:], options, history)
            at += max(map(len, fitting))
        assert at == len(told), (told[at:], history)

    async def step(self):
        history = list(self.rng.choice(self.histories[-4:]))
        match self.rng.randrange(12):
            case 0:  # goes back
                cut = self.rng.randrange(1, len(history) + 1)
                history = history[:cut]
                while history and history[-1].role == "assistant":
                    history.pop()
                history = history or [Said("user", self.word())]
                if self.rng.random() < 0.5:
                    history.append(Said("user", self.word()))
            case 1:  # a line of its own
                history = [Said("system", self.word()), Said("user", self.word())]
            case 2:  # shortens, and keeps the last turn
                last = max((at for at, each in enumerate(history) if each.role == "assistant"), default=None)
                if last is not None:
                    history = [history[0], Said("user", self.word()), *history[last:]]
            case 3 | 4:  # asks twice at once
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.ask, history)
                    nursery.start_soon(self.ask, history)
                return
            case 5 | 6:
                history = [self.altered(each) if each.role == "assistant" else each for each in history]
            case 7:  # an earlier message reads otherwise now
                at = self.rng.randrange(len(history))
                if history[at].role in ("user", "tool"):
                    history[at] = Said(history[at].role, "pruned", call_id=history[at].call_id)
        await self.ask(history)


@pytest.fixture(scope="module")
def resources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny = make_tiny_model(folder)
    config = NodeConfig(model=ModelConfig(path=str(folder)))
    return tiny, config, ChatFormat.load(folder)


async def session(resources, seed, requests):
    """One rollout; return how many turns were sampled."""
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
    delivered = []
    for turn in trajectory.turns:
        part = slice(turn.completion_start, turn.completion_end)
        segment = trajectory.segments[turn.segment]
        assert segment.loss_mask[part].all()
        delivered.append(tiny.decode(segment.token_ids[part].tolist()).removesuffix("<|im_end|>"))
        assert tiny.decode(segment.token_ids[: turn.completion_start].tolist()) == engine.sampled[delivered[-1]]
    assert sorted(delivered) == sorted(engine.sampled), "lost, or delivered twice"
    trained = sum(int(segment.loss_mask.sum()) for segment in trajectory.segments)
    assert trained == sum(turn.completion_end - turn.completion_start for turn in trajectory.turns)
    for segment in (each for each in trajectory.segments if each.parent is not None):
        parent = trajectory.segments[segment.parent]
        assert np.array_equal(segment.token_ids[: segment.shared], parent.token_ids[: segment.shared])
        assert segment.reason is not None
    return len(delivered)


@pytest.mark.parametrize("seed", range(SESSIONS))
async def test_the_policy_is_told_what_the_client_says_and_each_token_comes_once(resources, seed, autojump_clock):
    assert await session(resources, seed, REQUESTS) > REQUESTS // 2


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1000 + 100))
async def test_many_edits(resources, seed, autojump_clock):
    for more in range(20):
        await session(resources, 1000 * seed + more, 50)
