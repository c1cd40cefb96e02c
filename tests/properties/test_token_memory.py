"""Rollouts that share a small arena, under any schedule: tokens stay what they are, nothing is left, nobody waits for
ever."""

from __future__ import annotations

import random

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_ipc.arena import open_arena
from prorl_ipc.session import OutcomeRefFrame, ServerFrame
from prorl_trio.agent.context import Resources
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.chat.token_memory import TokenMemory
from prorl_trio.config import AgentConfig, ArenaConfig, ModelConfig, NodeConfig, StagesConfig
from prorl_trio.pipeline.job import Job
from prorl_trio.pipeline.pipeline import open_pipeline
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sessions.encoding import SharedOutcomes
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import BackendError
from prorl_trio.types.models import Budgets, ChatMessage, JobSpec, Outcome, RetryPolicy, TaskInstance, Turn
from prorl_trio.types.outcome_refs import join_outcome

BLOCK_TOKENS = 64
BLOCKS = 32
ARENA_BYTES = BLOCKS * (BLOCK_TOKENS * 9 + 16) + 2 * 4096
ROOM_TIMEOUT_S = 5.0


# ---------------------------------------------------------------- the memory alone


async def one_rollout(rng, memory):
    """Reserves, records some segments, and looks whether they are what they should be."""
    tokens = await memory.reserve(rng.randint(1, BLOCKS * BLOCK_TOKENS * 5 // 4), timeout_s=ROOM_TIMEOUT_S)
    try:
        segments = []
        for _ in range(rng.randint(0, 3)):
            if segments:
                segments[-1][0].seal()
            segments.append((tokens.open_segment(), [], [], []))
            for _ in range(rng.randint(0, 5)):
                segment, ids, logprobs, mask = segments[-1]
                new = [rng.randrange(2**31) for _ in range(rng.randint(0, 6 * BLOCK_TOKENS))]
                sampled = rng.random() < 0.5
                segment.append(new, [-0.5] * len(new) if sampled else None)
                ids += new
                logprobs += [-0.5 if sampled else 0.0] * len(new)
                mask += [int(sampled)] * len(new)
                await trio.sleep(rng.random())
                for each, *expected in segments:
                    assert [array.tolist() for array in each.arrays()] == expected
        for segment, *expected in segments:
            segment.seal()
            segment.seal()
            assert [array.tolist() for array in segment.arrays()] == expected
    finally:
        tokens.release()
        tokens.release()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32))
def test_what_is_recorded_stays_and_what_is_released_is_free(seed):
    rng = random.Random(seed)

    async def run():
        with trio.fail_after(1_000), open_arena(ARENA_BYTES, block_tokens=BLOCK_TOKENS) as arena:
            memory = TokenMemory(arena)
            async with trio.open_nursery() as nursery:
                scopes = []
                for _ in range(12):
                    scope = trio.CancelScope()
                    scopes.append(scope)

                    async def cancellable(scope=scope):
                        with scope:
                            await one_rollout(rng, memory)

                    nursery.start_soon(cancellable)
                    await trio.sleep(rng.random())
                for scope in rng.sample(scopes, 4):
                    await trio.sleep(rng.random())
                    scope.cancel()
            statistics = memory.statistics()
            assert (statistics["blocks_used"], statistics["waiting"], statistics["buffers_open"]) == (0, 0, 0)

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_a_segment_that_outgrows_a_full_arena_goes_on_in_private_memory(autojump_clock):
    with open_arena(ARENA_BYTES, block_tokens=BLOCK_TOKENS) as arena:
        memory = TokenMemory(arena)
        small = await memory.reserve(BLOCK_TOKENS, timeout_s=1)
        everything = arena.open_nowait((arena.statistics().blocks_free) * BLOCK_TOKENS)
        segment = small.open_segment()
        segment.append(range(BLOCK_TOKENS))
        segment.append(range(1000), [-0.5] * 1000)
        assert segment.arrays().token_ids.tolist() == [*range(BLOCK_TOKENS), *range(1000)]
        assert segment.arrays().loss_mask.sum() == 1000
        assert memory.statistics()["spilled_total"] == 1
        assert arena.statistics().buffers_open == 1, "its place is free for others"
        small.release()
        everything.release()
        assert arena.statistics().blocks_used == 0


async def test_room_that_does_not_come_is_private_in_the_end(autojump_clock):
    with open_arena(ARENA_BYTES, block_tokens=BLOCK_TOKENS) as arena:
        memory = TokenMemory(arena)
        everything = arena.open_nowait(arena.memory.total_blocks * BLOCK_TOKENS)
        before_s = trio.current_time()
        tokens = await memory.reserve(1, timeout_s=7)
        assert trio.current_time() - before_s == pytest.approx(7)
        tokens.open_segment().append([1])
        too_much = await memory.reserve(10**9, timeout_s=7)
        assert trio.current_time() - before_s == pytest.approx(7), "what can never be is not waited for"
        too_much.open_segment().append([1])
        assert memory.statistics()["private_total"] == 2
        everything.release()


async def test_sealed_trajectories_are_packed_so_that_long_reservations_fit(autojump_clock):
    """Many short outcomes that nobody takes: their room is what they need, not what was reserved."""
    with open_arena(ARENA_BYTES, block_tokens=BLOCK_TOKENS) as arena:
        memory = TokenMemory(arena)
        held = []
        for number in range(12):
            tokens = await memory.reserve(15 * BLOCK_TOKENS, timeout_s=1)
            segment = tokens.open_segment()
            segment.append([number] * BLOCK_TOKENS)
            segment.seal()
            held.append((tokens, segment))
        assert memory.statistics()["private_total"] == 0
        assert arena.statistics().blocks_used == 12
        assert [segment.arrays().token_ids[0] for _, segment in held] == list(range(12))
        for tokens, _ in held:
            tokens.release()


# ---------------------------------------------------------------- the whole pipeline


class Talks(AgentHandler):
    """Records a conversation of random turns, and ends in a random way."""

    name = "talks"

    def __init__(self, rng):
        self.rng = rng
        self.recorded = []

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return None

    async def run(self, context):
        rng, hello = self.rng, [ChatMessage(role="user", content="Hi")]
        conversation = Conversation(context.resources.chat_format, hello)
        context.begin_dialogue(conversation)
        for number in range(rng.randint(1, 4)):
            if number:
                conversation.add_messages([ChatMessage(role="user", content="More" * rng.randint(1, 40))])
            self.recorded = conversation.prompt_token_ids()
            sampled = [rng.randrange(250) for _ in range(rng.randint(1, 300))]
            conversation.add_completion(sampled, [-1.0] * len(sampled), policy_version="v", engine="e")
            self.recorded = [*self.recorded, *sampled]
            start, end, segment = conversation.completion_ranges[-1]
            context.record(
                Turn(
                    segment=segment,
                    completion_start=start,
                    completion_end=end,
                    text="",
                    finish_reason="stop",
                    tool_calls=[],
                    observations=[],
                    inference_s=0.0,
                    tools_s=0.0,
                )
            )
            await trio.sleep(rng.random())
            if rng.random() < 0.15:
                raise BackendError("gone", retryable=True)

    async def eval(self, context):
        await trio.sleep(self.rng.random())
        if self.rng.random() < 0.1:
            raise ValueError("no score")
        return Evaluation(reward=1.0, details={})


class Trainer:
    """Keeps what is delivered by reference or as bytes, looks at it later, then acknowledges it."""

    session_id = "s"

    def __init__(self, rng, arena, shared):
        self.rng, self.arena, self.shared = rng, arena, shared
        self.reader = arena.add_reader()
        self.handlers, self.held, self.ended = {}, {}, set()

    def deliver(self, outcome):
        assert outcome.job_id not in self.ended
        self.ended.add(outcome.job_id)
        encoded = msgspec.msgpack.encode(outcome)
        self.shared.add("s", outcome)
        self.held[outcome.job_id] = self.shared.frame("s", outcome.job_id, 1, self.reader) or encoded

    def report(self, job_id, status, detail):
        pass

    def acknowledge(self, job_id):
        held = self.held.pop(job_id)
        try:
            outcome = msgspec.msgpack.decode(held, type=Outcome)
        except msgspec.ValidationError:
            frame = msgspec.msgpack.decode(held, type=ServerFrame)
            assert isinstance(frame, OutcomeRefFrame)
            outcome = join_outcome(frame, self.arena.memory)
            outcome.check()
        if outcome.trajectory is not None:
            recorded = self.handlers[job_id].recorded
            (segment,) = outcome.trajectory.segments
            assert segment.token_ids.tolist()[: len(recorded)] == recorded
        self.shared.remove("s", job_id)


def make_job(rng, number, handler, resources, trainer):
    spec = JobSpec(
        job_id=f"j{number}",
        instance=TaskInstance(instance_id="i", handler="talks", payload={}),
        budgets=Budgets(run_s=rng.choice([None, 1.0])),
        retry=RetryPolicy(max_attempts=rng.randint(1, 3), causes=("inference", "evaluator"), backoff_s=0.01),
        keep_partial=rng.random() < 0.5,
    )
    trainer.handlers[spec.job_id] = handler
    return Job(spec, handler, resources, trainer)


async def storm(seed, chat_format):
    rng = random.Random(seed)
    config = NodeConfig(
        model=ModelConfig(path="unused"),
        stages=StagesConfig(init_workers=2, run_workers=6, eval_workers=2, ready_queue=2, eval_queue=2),
        agent=AgentConfig(max_trajectory_tokens=rng.choice([200, 600, 1200])),
        arena=ArenaConfig(room_timeout_s=ROOM_TIMEOUT_S),
    )
    with open_arena(ARENA_BYTES, block_tokens=BLOCK_TOKENS) as arena:
        shared = SharedOutcomes(arena, arena.size_bytes // 2)
        memory = TokenMemory(arena, shared.make_room)
        trainer = Trainer(rng, arena, shared)
        resources = Resources(config=config, chat_format=chat_format, backends=None, scorers=None, tokens=memory)
        async with (
            open_sandbox_host(FakeProvider()) as host,
            trio.open_nursery() as service,
            open_pipeline(resources, host, service) as pipeline,
        ):
            jobs = []
            for number in range(24):
                jobs.append(make_job(rng, number, Talks(rng), resources, trainer))
                pipeline.submit(jobs[-1])
                if rng.random() < 0.3:
                    await trio.sleep(rng.random())
                if rng.random() < 0.2:
                    pipeline.cancel_soon(rng.choice(jobs), "enough")
                if trainer.held and rng.random() < 0.3:
                    trainer.acknowledge(rng.choice(list(trainer.held)))
            if rng.random() < 0.5:
                await pipeline.wait_idle()
        assert len(trainer.ended) == 24
        for job_id in list(trainer.held):
            trainer.acknowledge(job_id)
        statistics = memory.statistics()
        assert (statistics["blocks_used"], statistics["buffers_open"], statistics["waiting"]) == (0, 0, 0)
        assert (len(shared), shared.statistics()["bytes"]) == (0, 0)
        return shared.statistics()["sent_total"], statistics["spilled_total"], statistics["private_total"]


def test_whatever_happens_to_jobs_the_arena_is_empty_when_all_is_acknowledged(tmp_path):
    make_tiny_model(tmp_path)
    chat_format = ChatFormat.load(tmp_path)

    async def run(seed):
        with trio.fail_after(10_000):
            return await storm(seed, chat_format)

    clocks = [trio.testing.MockClock(autojump_threshold=0) for _ in range(20)]
    counts = [trio.run(run, seed, clock=clock) for seed, clock in enumerate(clocks)]
    sent, spilled, private = map(sum, zip(*counts, strict=True))
    assert min(sent, spilled, private) > 0, "the storms went everywhere"
