"""Every entrant of `perf.race` on one fake engine, whose policy solves the tasks by the tool: all do the same work."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import jinja2
import msgspec
import pytest
import trio

from perf.peers.environments import PEERS, PeerUnavailable, peer_python
from perf.race import (
    Scale,
    forget_prefixes,
    node_config,
    race_problems,
    ride_bare,
    ride_node,
    ride_peer,
    round_of,
    with_tool_results,
)
from prorl_launch.node import open_node_process
from prorl_trio.client import connect
from prorl_trio.sandbox.providers.bubblewrap import find_bubblewrap
from prorl_trio.testing.fake_engine import FakeEngine, FakeEngineConfig, open_look_alike
from prorl_trio.testing.fake_http import Answer, HttpCall
from prorl_trio.testing.tiny_model import CHATML_TEMPLATE, TinyTokenizer, make_tiny_model
from support.skips import because

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(find_bubblewrap() is None, reason=because("there is no bubblewrap", "apt install bubblewrap")),
]

SCALE = Scale(tasks=3, rollouts=2, slots=4, rounds=1)
PROBLEMS = race_problems(0, SCALE.tasks)
TURN = "<|im_start|>"


def said_to(prompt: str) -> str:
    """Return what the policy says next: a program, then what it printed as the answer; for the last problem none."""
    problem = next(problem for problem in PROBLEMS if problem.question in prompt)
    printed = re.search(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
    if printed is None:
        return f"```python\n{problem.program}\n```"
    return f"\\boxed{{{printed[1]}}}" if problem is not PROBLEMS[-1] else "I do not know."


class ChattingEngine(FakeEngine):
    """A fake engine that takes chats, too, as verifiers sends them."""

    tokens: TinyTokenizer
    prompts: set[str]
    chats: list[dict[str, object]]

    async def _answer(self, call: HttpCall) -> Answer:
        if call.path != "/v1/chat/completions":
            return await super()._answer(call)
        await trio.lowlevel.checkpoint()
        chat = msgspec.json.decode(call.body)
        self.chats.append(chat)
        template = jinja2.Template(with_tool_results(CHATML_TEMPLATE))
        prompt = template.render(messages=chat["messages"], add_generation_prompt=True)
        self.prompts.add(prompt)
        text = said_to(prompt)
        ids = self.tokens.turn(text)
        logprobs = [{"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * len(ids)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            "logprobs": {"content": logprobs},
            "token_ids": ids,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        body = {"id": "chat", "object": "chat.completion", "created": 0, "model": chat["model"], "usage": usage}
        return Answer(200, msgspec.json.encode({**body, "choices": [choice]}))


@asynccontextmanager
async def chatting_engine(model: Path) -> AsyncIterator[ChattingEngine]:
    tokens = make_tiny_model(model)
    (model / "chat_template.jinja").write_text(with_tool_results(CHATML_TEMPLATE))
    (model / "config.json").write_text('{"model_type": "llama"}')
    prompts: set[str] = set()

    def script(ids: list[int]):
        prompts.add(prompt := tokens.decode(ids))
        sampled = tokens.turn(said_to(prompt))
        return sampled, [-0.5] * len(sampled), "stop"

    config = FakeEngineConfig(model=str(model), vocab_size=300, end_of_turn_id=tokens.end_of_turn_id, development=True)
    async with open_look_alike(ChattingEngine, script, config, 0) as engine:
        engine.tokens, engine.prompts, engine.chats = tokens, prompts, []
        yield engine


def expected_prompts() -> set[str]:
    """The prompts of everybody's first and second turns."""
    prompts = set()
    for problem in PROBLEMS:
        first = f"{TURN}system\nUse Python.<|im_end|>\n{TURN}user\n{problem.question}<|im_end|>\n{TURN}assistant\n"
        program = f"```python\n{problem.program}\n```"
        result = f"{TURN}user\n<tool_response>\n{problem.answer}\n</tool_response><|im_end|>\n"
        prompts |= {first, f"{first}{program}<|im_end|>\n{result}{TURN}assistant\n"}
    return prompts


def check_work(record, engine: ChattingEngine) -> None:
    """Assert that the round was done as everybody does it."""
    assert len(record.rollouts) == SCALE.tasks * SCALE.rollouts
    assert sum(rollout.reward for rollout in record.rollouts) == (SCALE.tasks - 1) * SCALE.rollouts
    assert {(rollout.turns, rollout.tool_calls) for rollout in record.rollouts} == {(2, 1)}
    answers = [f"\\boxed{{{problem.answer}}}" for problem in PROBLEMS[:-1]] + ["I do not know."]
    programs = [f"```python\n{problem.program}\n```" for problem in PROBLEMS]
    sampled = sum(len(engine.tokens.turn(text)) for text in (*answers, *programs))
    assert sum(rollout.tokens for rollout in record.rollouts) == sampled * SCALE.rollouts
    assert all(0 <= rollout.start_s < rollout.end_s <= record.wall_s + 0.5 for rollout in record.rollouts)
    assert record.framework_cpu_s > 0
    assert engine.prompts == expected_prompts()


@pytest.mark.parametrize("name", ["trl", "verifiers"])
async def test_a_peer_does_the_same_work_as_the_node(name: str, tmp_path: Path):
    try:
        peer_python(PEERS[name])
    except PeerUnavailable as exc:
        pytest.skip(because(f"the peer {name} is not there: {exc}", f"python -m perf.peers setup {name}"))
    with trio.fail_after(180):
        async with chatting_engine(tmp_path / "model") as engine:
            race = round_of(engine.url, tmp_path / "model", SCALE, PROBLEMS, find_bubblewrap() or "")
            record = await ride_peer(name, race, tmp_path / "peer")
            check_work(record, engine)
            assert record.sandboxes_cpu_s > 0
            asked = engine.chats if name == "verifiers" else engine.requests
            assert len(asked) == 2 * race.total
            assert all(chat["temperature"] == race.temperature and "seed" not in chat for chat in engine.chats)


async def test_the_node_and_the_bare_loop(tmp_path: Path):
    with trio.fail_after(120):
        async with chatting_engine(tmp_path / "model") as engine:
            race = round_of(engine.url, tmp_path / "model", SCALE, PROBLEMS, find_bubblewrap() or "")
            async with (
                open_node_process(node_config(race), folder=tmp_path, log_file=tmp_path / "log") as node,
                connect(node.url, node.token) as client,
            ):
                record, outcomes = await ride_node(client, node, PROBLEMS, race)
            check_work(record, engine)
            await forget_prefixes(engine.url)
            bare = await ride_bare(race, outcomes, salt="again")
            assert sum(rollout.tokens for rollout in bare.rollouts) == sum(
                rollout.tokens for rollout in record.rollouts
            )


async def test_an_engine_that_keeps_its_prefixes_is_an_error():
    async with open_look_alike(FakeEngine, None, None, 0) as engine:
        with pytest.raises(RuntimeError, match="keeps its prefix cache: it answered 404"):
            await forget_prefixes(engine.url)
