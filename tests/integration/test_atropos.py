"""Rollouts of a node reach a trainer by way of Atropos' own API server, each group once, bit for bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import trio

from prorl_trio.client.sampling import Group
from prorl_trio.integrations.atropos import open_environment
from prorl_trio.types.errors import ConfigError, ServiceError
from prorl_trio.types.models import Outcome, PolicySpan, Segment, TaskInstance, Timing, Trajectory
from support.atropos import AtroposTrainer, atropos_python, open_atropos
from support.faulty_proxy import FaultyProxy

SIZE = 4

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def python():
    return atropos_python()


@pytest.fixture
async def server(python, tmp_path):
    with trio.fail_after(100):
        async with open_atropos(python, tmp_path / "atropos.log") as url:
            yield url


@pytest.fixture
def trainer(server):
    trainer = AtroposTrainer(server)
    yield trainer
    trainer.close()


open_sized = partial(open_environment, name="sums", group_size=SIZE, max_token_length=4096)


def made_up_group(number, *, tokens=6):
    outcomes = []
    for member in range(SIZE):
        ids = [1000 * number + member, *range(1, tokens)]
        mask = np.array([0, *[1] * (tokens - 1)], "u1")
        spans = [PolicySpan(start=1, end=tokens, policy_version="0", engine="vllm")]
        segment = Segment.from_arrays(ids, -mask / np.float32(3), mask, spans)
        outcomes.append(
            Outcome(
                job_id=f"{number}-{member}",
                instance_id="q",
                group_id=f"g{number}",
                status="completed",
                reward=float(member % 2),
                cause=None,
                error="",
                details={},
                timing=Timing(),
                trajectory=Trajectory(segments=[segment], turns=[], stop_reason="finished"),
            )
        )
    instance = TaskInstance(instance_id="q", handler="math", payload={})
    correct = [outcome.reward == 1 for outcome in outcomes]
    return Group(
        number=number, group_id=f"g{number}", instance=instance, outcomes=outcomes, correct=correct,
        submitted_version="0", staleness=0,
    )  # fmt: skip


def group_ids(batch):
    return [group["group_overrides"]["group_id"] for group in batch]


async def test_a_full_queue_holds_back_until_the_trainer_takes_a_batch(server, trainer):
    await trainer.register(batch_size=2 * SIZE)
    async with open_sized(server, max_batches_ahead=1) as environment, trio.open_nursery() as nursery:
        assert (environment.batch_size, environment.num_steps, environment.step) == (2 * SIZE, 1000, 0)
        assert await environment.send(made_up_group(0))
        assert await environment.send(made_up_group(1))
        sent = trio.Event()

        async def send():
            await environment.send(made_up_group(2))
            sent.set()

        nursery.start_soon(send)
        with trio.move_on_after(1.5):
            await sent.wait()
        assert not sent.is_set()
        assert group_ids(await trainer.batch()) == ["g0", "g1"]
        await sent.wait()
        assert environment.statistics().waited_s > 1


@pytest.mark.parametrize("server_has_it", [True, False])
async def test_a_lost_connection_neither_doubles_nor_loses_a_group(server, trainer, server_has_it):
    await trainer.register(batch_size=2 * SIZE)
    async with trio.open_nursery() as nursery:
        proxy = FaultyProxy("127.0.0.1", int(server.rpartition(":")[2]))
        port = await nursery.start(proxy.serve)
        async with open_sized(f"http://127.0.0.1:{port}") as environment:
            await environment.send(made_up_group(0))
            ways = {True: "down", False: "up"}

            async def cut():
                """Wait for the second group on its way; then nothing more gets through, and all is cut."""
                while (await trainer.call("GET", "/status"))["queue_size"] < 1 + server_has_it:
                    await trio.sleep(0.02)
                await trio.sleep(0.5)
                proxy.cut_all()
                proxy.resume()

            status = environment._status

            async def status_then_stall():
                found = await status()
                environment._status = status
                proxy.stall(ways[server_has_it])
                nursery.start_soon(cut)
                return found

            environment._status = status_then_stall
            assert await environment.send(made_up_group(1))
            assert environment.statistics().unsure == 0
        assert group_ids(await trainer.batch()) == ["g0", "g1"]
        assert (await trainer.call("GET", "/status"))["queue_size"] == 0
        nursery.cancel_scope.cancel()


async def test_rows_that_the_trainer_does_not_take_are_not_sent(server, trainer):
    await trainer.register(batch_size=SIZE, max_token_len=10)
    async with open_sized(server) as environment:
        assert not await environment.send(made_up_group(0, tokens=10))
        assert await environment.send(made_up_group(1, tokens=9))
        assert environment.statistics().too_long == 1
    assert group_ids(await trainer.batch()) == ["g1"]


async def test_a_size_that_does_not_divide_the_batch_is_refused(server, trainer):
    await trainer.register(batch_size=2 * SIZE + 1)
    with pytest.raises(ConfigError, match="batches of 9 sequences"):
        async with open_sized(server):
            pass


async def test_without_a_trainer_nothing_is_registered(server):
    with pytest.raises(ServiceError, match="wait for trainer to start"):
        async with open_sized(server, patience_s=1.0):
            pass
