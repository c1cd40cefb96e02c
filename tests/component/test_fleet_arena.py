"""The head of a fleet and a trainer on its machine: outcomes of the nodes go by reference into the head's memory."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np
import trio

from prorl_ipc.arena import open_arena
from prorl_ipc.session import Accepted
from prorl_ipc.wire import UNDECODABLE
from prorl_trio.client import connect
from prorl_trio.sessions.encoding import SharedOutcomes, fit_outcome
from prorl_trio.types.models import EncodedOutcome, JobSpec, Segment, TaskInstance, Trajectory
from support.fake_fleet import open_fake_fleet
from support.fake_node import make_outcome
from support.fleet_head import head_process

JOBS = 6
TOKENS = 30_000


def job(number):
    return JobSpec(job_id=f"j{number}", instance=TaskInstance(instance_id="i", handler="fake", payload={}))


def whole(spec):
    """Two segments, the first one with a prompt that nothing is trained on."""
    outcome = make_outcome(spec, tokens=TOKENS)
    (segment,) = outcome.trajectory.segments
    mask = segment.loss_mask.copy()
    mask[: TOKENS // 3] = 0
    first = Segment.from_arrays(segment.token_ids, segment.logprobs, mask, segment.spans)
    return msgspec.structs.replace(outcome, trajectory=Trajectory([first, segment], [], stop_reason="finished"))


def same(outcome):
    expected = whole(job(outcome.job_id[1:]))
    pairs = zip(outcome.trajectory.segments, expected.trajectory.segments, strict=True)
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for one, other in pairs
        for name in ("token_ids", "logprobs", "loss_mask")
    )


async def arena_of(client):
    return (await client.status())["arena"]


async def submit_all(client, first=0):
    while "a" not in (await client.status())["members"]:
        await trio.sleep(0.01)
    answers = await client.submit([job(number) for number in range(first, first + JOBS)])
    assert all(isinstance(answer, Accepted) for answer in answers), answers


async def wait_mapped(client):
    while not ((await arena_of(client))["readers"] and len(client._state.arenas)):
        await trio.sleep(0.01)
    await client.status()  # after which the head knows which reader this session is


@asynccontextmanager
async def open_fleet(tmp_path):
    """Yield the folder of a fleet of one node, whose head is a process of its own."""
    folder = tmp_path / "fleet"
    with trio.fail_after(60):
        async with (
            open_fake_fleet(folder, "a", on_submit=whole),
            head_process(folder, tmp_path / "l", tmp_path / "log"),
        ):
            yield folder


async def lose_a_client(folder):
    """Take two outcomes, of which only the first is acknowledged."""
    async with connect(fleet=folder, session_id="s", shared_memory=True) as client:
        await wait_mapped(client)
        await submit_all(client)
        results = client.results()
        assert same(await anext(results))
        assert same(await anext(results))
        raise ZeroDivisionError


async def test_outcomes_go_by_reference_to_a_trainer_beside_the_head_and_nothing_stays(tmp_path):
    async with open_fleet(tmp_path) as folder:
        with suppress(ZeroDivisionError):
            await lose_a_client(folder)
        async with connect(fleet=folder, session_id="s", shared_memory=True) as client:
            await wait_mapped(client)
            taken = {outcome.job_id async for outcome in client.results(JOBS - 1) if same(outcome)}
            assert len(taken) == JOBS - 1, "also what a trainer was sent that is gone"
            before = (await arena_of(client))["shared"]
            assert before["sent_total"] >= 2
            await submit_all(client, JOBS)
            assert [same(outcome) async for outcome in client.results(JOBS)] == [True] * JOBS
            after = (await arena_of(client))["shared"]
            assert after["sent_total"] == before["sent_total"] + JOBS
            while (await arena_of(client))["blocks_used"]:
                await trio.sleep(0.01)


async def test_a_trainer_that_maps_nothing_is_sent_the_same_as_frames(tmp_path):
    async with open_fleet(tmp_path) as folder, connect(fleet=folder) as client:
        await submit_all(client)
        assert [same(outcome) async for outcome in client.results(JOBS)] == [True] * JOBS
        arena = await arena_of(client)
        assert (arena["high_water_blocks"], arena["shared"]["sent_total"]) == (0, 0)


def test_what_does_not_fit_or_cannot_be_read_is_left_to_the_frames_and_leaks_nothing():
    def encoded(number, tokens):
        outcome = make_outcome(job(number), tokens=tokens)
        return EncodedOutcome.of(outcome, msgspec.msgpack.encode(outcome))

    with open_arena(2_000_000, block_tokens=4096) as arena:
        shared = SharedOutcomes(arena, arena.size_bytes)
        shared.add_copy("s", encoded(1, 10_000_000))
        broken = encoded(2, 100)
        shared.add_copy("s", EncodedOutcome("j2", "completed", None, 1, broken.data[:-30]))
        assert (len(shared), arena.statistics().blocks_used) == (0, 0)
        assert shared.statistics()["no_room_total"] == 1
        # One that nobody was sent makes room for the next; one that a present reader has does not.
        reader = arena.add_reader()
        shared.add_copy("s", encoded(3, 130_000))
        shared.add_copy("s", encoded(4, 130_000))
        assert (shared.has("s", "j3"), shared.has("s", "j4")) == (False, True)
        assert shared.frame("s", "j4", 1, reader)
        shared.add_copy("s", encoded(5, 130_000))
        assert (shared.has("s", "j4"), shared.has("s", "j5")) == (True, False)
        shared.remove("s", "j4")
        assert arena.statistics().blocks_used == 0


def nested(depth):
    """An outcome whose details nest so deeply, as bytes: not every depth that can be read can be written."""
    outcome = make_outcome(job(1), tokens=5)
    data = msgspec.msgpack.encode(msgspec.structs.replace(outcome, details={"deep": 77}))
    return EncodedOutcome(
        "j1", "completed", None, 1, data.replace(b"\xa4deep\x4d", b"\xa4deep" + depth * b"\x91" + b"\x01")
    )


def is_read(depth):
    try:
        nested(depth).decode()
    except UNDECODABLE:
        return False
    return True


def test_an_outcome_that_nests_as_deeply_as_can_be_read_harms_nothing():
    limit = bisect_left(range(100_000), True, key=lambda depth: not is_read(depth))
    with open_arena(2_000_000, block_tokens=4096) as arena:
        shared = SharedOutcomes(arena, arena.size_bytes)
        for depth in range(limit - 20, limit + 2):
            shared.add_copy("s", nested(depth))
            shared.remove("s", "j1")
        assert (len(shared), arena.statistics().blocks_used) == (0, 0)


def test_an_outcome_that_is_too_large_and_cannot_be_read_is_a_failure_that_says_so():
    data = msgspec.msgpack.encode(make_outcome(job(1), tokens=10_000))
    foreign = EncodedOutcome("j1", "completed", None, 3, data.replace(b"finished", b"bewitched"[:8]))
    outcome = fit_outcome(foreign, 10_000).decode()
    assert (outcome.job_id, outcome.status, outcome.attempt) == ("j1", "failed", 3)
    assert "too large, and cannot be read" in outcome.error
