"""Rollouts of a node reach a trainer by way of Atropos' own API server, each group once, bit for bit."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.integrations.atropos import open_environment
from prorl_trio.sampling import Group, GroupRules, JobTemplate, open_groups
from prorl_trio.types.errors import ConfigError, ServiceError
from prorl_trio.types.models import Outcome, PolicySpan, SamplingParams, Segment, TaskInstance, Timing, Trajectory
from support.atropos import AtroposTrainer, atropos_python, open_atropos
from support.faulty_proxy import FaultyProxy
from support.quick_node import open_quick_node

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
        number=number,
        group_id=f"g{number}",
        instance=instance,
        outcomes=outcomes,
        correct=correct,
        submitted_version="0",
        staleness=0,
    )


def group_ids(batch):
    return [group["group_overrides"]["group_id"] for group in batch]


async def test_what_a_node_recorded_is_what_the_trainer_takes(server, trainer):
    dice = random.Random(0)
    tasks = [
        TaskInstance(
            instance_id=f"{a}", handler="math", payload={"question": f"What is {a} * 7?", "answer": f"{a * 7}"}
        )
        for a in range(2, 6)
    ]

    def policy(prompt):
        asked = int(prompt.split(" * 7")[0].rsplit(maxsplit=1)[-1])
        return rf"I think it is \boxed{{{asked * 7 + (dice.random() < 0.5)}}}."

    recorded, batches = {}, []
    await trainer.register(batch_size=2 * SIZE, num_steps=3)
    async with open_quick_node(policy) as node, trio.open_nursery() as nursery:

        async def watch(*, task_status):
            async with connect(node.url, node.token, observe_all=True) as observer:
                task_status.started()
                async for seen in observer.observed():
                    if seen.outcome is not None:
                        recorded[seen.job_id] = seen.outcome.detached()

        async def feed():
            rules = GroupRules(size=SIZE, groups_per_step=2, max_staleness=1)
            job = JobTemplate(sampling=SamplingParams(max_output_tokens=64), max_turns=2)
            async with (
                open_sized(server) as environment,
                connect(node.url, node.token) as client,
                open_groups(client, tasks, rules, job=job, version=str(environment.step)) as groups,
            ):
                await environment.feed(groups, rules)
                assert environment.step in (3, 4)  # the server makes the next batch, too, if it has the groups
                assert environment.statistics().unsure == 0

        await nursery.start(watch)
        async with trio.open_nursery() as feeding:
            feeding.start_soon(feed)
            batches += [await trainer.wait_batch() for _ in range(3)]
        nursery.cancel_scope.cancel()

    rows = 0
    for group in [group for batch in batches for group in batch]:
        assert len(set(group["scores"])) == 2, "only groups that teach something"
        for row, override in enumerate(group["overrides"]):
            outcome = recorded.pop(override["job_id"])  # each once
            (segment,) = outcome.trajectory.segments
            mask = segment.loss_mask == 1
            assert group["scores"][row] == outcome.reward
            assert np.array(group["tokens"][row], "<i4").tobytes() == segment.token_ids.tobytes()
            assert np.array_equal(group["masks"][row], np.where(mask, segment.token_ids, -100))
            logprobs = np.array(group["inference_logprobs"][row])
            assert logprobs[mask].astype("<f4").tobytes() == segment.logprobs[mask].tobytes()
            assert (logprobs[~mask] == 1.0).all()
            rows += 1
    assert rows == 3 * 2 * SIZE


async def test_a_full_queue_holds_back_until_the_trainer_takes_a_batch(server, trainer):
    await trainer.register(batch_size=2 * SIZE)
    async with open_sized(server, max_batches_ahead=1) as environment, trio.open_nursery() as nursery:
        assert (environment.batch_size, environment.num_steps, environment.step) == (2 * SIZE, 1000, 0)
        await environment.send(made_up_group(0))
        await environment.send(made_up_group(1))
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
            await environment.send(made_up_group(1))
            assert environment.statistics().unsure == 0
        assert group_ids(await trainer.batch()) == ["g0", "g1"]
        assert (await trainer.call("GET", "/status"))["queue_size"] == 0
        nursery.cancel_scope.cancel()


async def test_an_environment_that_was_killed_after_sending_does_not_send_again(server, trainer):
    await trainer.register(batch_size=2 * SIZE)
    async with open_sized(server) as killed:
        await killed.send(made_up_group(0))
    async with open_sized(server) as environment:
        assert environment.env_id == killed.env_id + 1
        await environment.send(made_up_group(0), again=True)
        await environment.send(made_up_group(1), again=True)
    assert group_ids(await trainer.batch()) == ["g0", "g1"]
    assert (await trainer.call("GET", "/status"))["queue_size"] == 0


async def test_rows_that_are_too_long_for_the_trainer_are_an_error(server, trainer):
    await trainer.register(batch_size=SIZE, max_token_len=10)
    async with open_sized(server) as environment:
        with pytest.raises(ConfigError, match=r"group g0 has a row of 10 tokens.*max_trajectory_tokens=9"):
            await environment.send(made_up_group(0, tokens=10))
        await environment.send(made_up_group(1, tokens=9))
        assert (environment.statistics().groups, environment.statistics().rows) == (1, SIZE)
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
