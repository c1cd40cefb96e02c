"""The tokens that a trainer gets of programs' sessions, by our gateway and by other rules, and the correct ones.

A session is recorded once with our gateway, with the client's messages and the sampled tokens. The other systems render
each history anew, so their engine's context of a turn is the history as the template renders it. Their rules are models
written from their papers and issues, not their code:

* Polar (NVIDIA-NeMo/ProRL-Agent-Server#39, #52) joins calls afterwards. If a call's messages continue another call's,
  its tokens follow that call's, with the messages in between;
* slime (THUDM/slime#2288, #2360) renders a session's last history, and trains on each turn that it finds there, up to
  the first missing one;
* rLLM's gateway (rllm-model-gateway 0.1) keeps each call, and joins calls whose prompt begins with the whole previous
  call;
* Uni-Agent (Uni-Agent#90) sends stored tokens, drops the tokens after a place that a client returns to, and delivers
  the longest dialogue.
"""

from __future__ import annotations

import json
import random
import re
from array import array
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.agent.gateway import open_gateway
from prorl_trio.agent.said import Question, Said
from prorl_trio.chat.conversation import Conversation
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.inference.engines.protocol import Completion
from prorl_trio.types.models import ChatMessage, JobSpec, SamplingParams, TaskInstance, ToolCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from prorl_trio.chat.format import ChatFormat

Tokens = tuple[int, ...]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


class Call(NamedTuple):
    """A sampled turn: the client's messages, the prompt that our engine read, and the sampled tokens."""

    messages: tuple[Said, ...]
    read: Tokens
    sampled: Tokens


class Trained(NamedTuple):
    """Tokens that a trainer trains on, after a context."""

    context: Tokens
    tokens: Tokens


class Score(NamedTuple):
    """Numbers of tokens: sampled, trained after a wrong context, lost, and trained twice.

    A wrong context contains tokens that the engine had not read.
    """

    sampled: int
    false_context: int
    lost: int
    doubled: int
    rows: int


class ScriptedEngine:
    """A backend in this process that is also its lease. Each turn has a number, and some turns call a tool."""

    info = SimpleNamespace(max_model_len=1_000_000, guides=False)

    def __init__(self, encode: Callable[[str], list[int]], rng: random.Random | None = None) -> None:
        self.encode, self.rng, self.turns = encode, rng, 0
        self.read: list[tuple[Tokens, Tokens]] = []

    async def complete(self, so_far: Any, **_how: Any) -> Completion:
        await trio.lowlevel.checkpoint()
        self.turns += 1
        text = f"answer {self.turns}" if self.rng else "I have looked at it, and shall look at more of it."
        if self.rng and self.rng.random() < 0.2:
            text = f"<think>\nthought {self.turns}\n</think>\n\n{text}"
        if self.rng and self.rng.random() < 0.5:
            text += f'\n<tool_call>{{"arguments": {{"b":{self.turns}, "a":  1}}, "name": "look"}}</tool_call>'
        ids = self.encode(text)
        if self.rng:
            self.read.append((tuple(so_far.request.prompt_token_ids), tuple(ids)))
        logprobs = array("f", [-0.5]) * len(ids)
        return Completion(
            token_ids=array("i", ids), logprobs=logprobs, finish_reason="stop", policy_version="1", engine="-"
        )

    @asynccontextmanager
    async def lease(self, *_args: object) -> AsyncIterator[ScriptedEngine]:
        yield self


def new_context(chat: ChatFormat, engine: Any, job_id: str = "j") -> RolloutContext:
    """Return a rollout whose turns `engine` samples."""
    config = NodeConfig(model=ModelConfig(path=str(chat.model_dir)))
    instance = TaskInstance(instance_id="i", handler="math", payload={})
    spec = JobSpec(job_id=job_id, instance=instance, sampling=SamplingParams(max_output_tokens=500), max_turns=100_000)
    resources = Resources(config=config, chat_format=chat, backends=engine, scorers=None)  # type: ignore[arg-type]
    return RolloutContext(spec=spec, resources=resources)


async def record(chat: ChatFormat, seed: int, requests: int) -> tuple[list[Call], list[Trained]]:
    """Run a session with a client that edits its histories. Return its calls, and the tokens that we deliver."""
    rng = random.Random(seed)
    engine = ScriptedEngine(lambda text: [*chat.codec.encode(text), chat.end_of_turn_id], rng)
    context = new_context(chat, engine)
    calls: list[Call] = []
    async with open_gateway(context) as gateway:
        histories: list[list[Said]] = [[Said("system", "Be good."), Said("user", "Begin.")]]
        for number in range(requests):
            history = _edited(rng, list(rng.choice(histories[-2:])), number)
            answer = await gateway.ask(Question(messages=history, tools=[TOOL]))
            if len(engine.read) > len(calls):
                calls.append(Call(tuple(history), *engine.read[-1]))
            said = Said("assistant", answer.text, answer.reasoning, answer.calls, key=answer.key)
            results = [Said("tool", f"result {number}", call_id=call.id, name=call.name) for call in answer.calls]
            histories.append([*history, said, *(results or [Said("user", f"more {number}")])])
    trajectory = context.trajectory()
    assert trajectory is not None
    rows = []
    for segment in trajectory.segments:
        ids = segment.token_ids.tolist()
        bounds = re.finditer(b"\x01+", segment.loss_mask.tobytes())
        # Two turns are never adjacent, because the template closes one and opens the next between them.
        rows += [Trained(tuple(ids[: at.start()]), tuple(ids[at.start() : at.end()])) for at in bounds]
    return calls, rows


def _edited(rng: random.Random, history: list[Said], number: int) -> list[Said]:
    """Return a history as a client may send it: mostly unchanged, with keys dropped or changed."""
    said = [at for at, message in enumerate(history) if message.role == "assistant"]
    if said and rng.random() < 0.5:
        history = [msgspec.structs.replace(message, key="") for message in history]
    at = rng.choice(said) if said else 0
    match rng.randrange(12):
        case 0 | 1 if said:  # arguments in another notation
            calls = [
                msgspec.structs.replace(call, arguments=json.dumps(call.parsed, sort_keys=True))
                for call in history[at].calls
            ]
            history[at] = msgspec.structs.replace(history[at], calls=calls)
        case 2 if said:
            history[at] = msgspec.structs.replace(history[at], reasoning="")
        case 3 if said:
            history[at] = Said("assistant", f"rewritten {number}")
        case 4 if said:
            history = [*history[:at], Said("user", f"back {number}")]
        case 5:
            history = [Said("system", "Help."), Said("user", f"task {number}")]
    return history


# ---------------------------------------------------------------- rules


def rendered(chat: ChatFormat, messages: Sequence[Said]) -> Tokens:
    """Return the template's prompt for a history."""
    return tuple(Conversation(chat, list(map(_as_message, messages)), [TOOL]).prompt_token_ids())


def _as_message(said: Said) -> ChatMessage:
    calls = [ToolCall(name=call.name, arguments=call.parsed or {}, raw="") for call in said.calls]
    text = f"<think>\n{said.reasoning}\n</think>\n\n{said.text}" if said.reasoning else said.text
    return ChatMessage(role=said.role, content=text, tool_calls=calls)


def _says(messages: Iterable[Said]) -> list[tuple[str, ...]]:
    """Return the content of messages, independent of the notation of arguments."""
    return [(each.role, each.text, *(str(call.says()) for call in each.calls)) for each in messages]


def _chains(calls: Sequence[Call]) -> list[list[int]]:
    """Return the calls of each dialogue. A call continues the last call whose messages and answer it begins with."""
    chains: list[list[int]] = []
    for number, call in enumerate(calls):
        for chain in reversed(chains):
            before = calls[chain[-1]].messages
            if len(call.messages) > len(before) + 1 and _says(call.messages[: len(before)]) == _says(before):
                chain.append(number)
                break
        else:
            chains.append([number])
    return chains


def polar(chat: ChatFormat, calls: Sequence[Call]) -> list[Trained]:
    """Return rows of calls that were joined afterwards."""
    rows = []
    for chain in _chains(calls):
        so_far: Tokens = ()
        for place, number in enumerate(chain):
            call = calls[number]
            if not place:
                so_far = rendered(chat, call.messages)
            else:
                answered = rendered(chat, call.messages[: len(calls[chain[place - 1]].messages) + 1])
                end = len(answered) - answered[::-1].index(chat.end_of_turn_id)  # of the answer as sent back
                so_far += rendered(chat, call.messages)[end:]
            rows.append(Trained(so_far, call.sampled))
            so_far += call.sampled
    return rows


def slime(chat: ChatFormat, calls: Sequence[Call]) -> list[Trained]:
    """Return rows of the last history of each dialogue, with samples after the first difference masked."""
    rows = []
    for chain in _chains(calls):
        last = calls[chain[-1]]
        whole = rendered(chat, last.messages) + last.sampled
        for number in chain:
            prompt = rendered(chat, calls[number].messages)
            if whole[: len(prompt) + len(calls[number].sampled)] != prompt + calls[number].sampled:
                break
            rows.append(Trained(prompt, calls[number].sampled))
    return rows


def rllm(chat: ChatFormat, calls: Sequence[Call]) -> list[Trained]:
    """Return a row for each call, after its own prompt."""
    return [Trained(rendered(chat, call.messages), call.sampled) for call in calls]


def uni_agent(_chat: ChatFormat, calls: Sequence[Call]) -> list[Trained]:
    """Return the rows of the longest dialogue, after the tokens that were sent."""
    longest = max(_chains(calls), key=len, default=[])
    return [Trained(calls[number].read, calls[number].sampled) for number in longest]


RULES: dict[str, tuple[Callable[[ChatFormat, Sequence[Call]], list[Trained]], bool]] = {
    "polar": (polar, False),
    "slime": (slime, False),
    "rllm": (rllm, False),
    "uni_agent": (uni_agent, True),
}
"""The rules by name, and whether their engine receives stored tokens."""


def score(calls: Sequence[Call], contexts: Sequence[Tokens], trained: Iterable[Trained]) -> Score:
    """Compare the tokens trained on with the tokens sampled after `contexts`. Each turn has distinct tokens."""
    read = {call.sampled: context for call, context in zip(calls, contexts, strict=True)}
    seen: set[Tokens] = set()
    false_context = doubled = rows = 0
    for context, tokens in trained:
        rows += 1
        false_context += len(tokens) if read.get(tokens) != context else 0
        doubled += len(tokens) if tokens in seen else 0
        seen.add(tokens)
    lost = sum(len(call.sampled) for call in calls if call.sampled not in seen)
    return Score(sum(len(call.sampled) for call in calls), false_context, lost, doubled, rows)


async def scores(chat: ChatFormat, sessions: int, requests: int) -> dict[str, Score]:
    """Return the scores of our gateway and of each rule, over random sessions."""
    found = {name: Score(0, 0, 0, 0, 0) for name in ("ours", *RULES)}

    def add(name: str, more: Score) -> None:
        found[name] = Score(*map(sum, zip(found[name], more, strict=True)))

    for seed in range(sessions):
        calls, delivered = await record(chat, seed, requests)
        add("ours", score(calls, [call.read for call in calls], delivered))
        anew = [rendered(chat, call.messages) for call in calls]
        for name, (rule, sends_tokens) in RULES.items():
            read = [call.read for call in calls] if sends_tokens else anew
            add(name, score(calls, read, rule(chat, calls)))
    return found
