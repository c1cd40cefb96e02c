"""Trainers on the node's own host: sessions over a Unix socket, outcomes as references into the node's memory."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import numpy as np
import pytest
import trio

from prorl_ipc.session import Accepted
from prorl_trio.agent.loop import run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.client import BlockingClient, connect
from prorl_trio.config import (
    ArenaConfig,
    BackendConfig,
    ListenConfig,
    ModelConfig,
    NodeConfig,
    SandboxConfig,
    StagesConfig,
)
from prorl_trio.edges.websocket.local_sockets import claim_local_sockets
from prorl_trio.node.serve import serve_node
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.tools import ToolSet
from prorl_trio.types.batch import pad_batch
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import ChatMessage, JobSpec, RetryPolicy, SamplingParams, TaskInstance
from support.addresses import offset_in

TOKEN = "a-token-for-tests-0123456789"
TOKENS = 5_000
pytestmark = pytest.mark.timeout(90)


class Plain(AgentStyle):
    """An agent that says one thing."""

    def final_answer(self, parsed):
        return parsed.text[:10]


class Talk(AgentHandler):
    """Asks the model once, in no sandbox. Fails in its evaluation where the payload says so."""

    name = "talk"

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return None

    async def run(self, context):
        await run_agent(
            context, [ChatMessage(role="user", content="Talk!")], ToolSet([], max_observation_chars=1000), Plain()
        )

    async def eval(self, context):
        await trio.lowlevel.checkpoint()
        if context.spec.instance.payload.get("fails"):
            raise ValueError("as asked")
        return Evaluation(reward=1.0, details={})


def job(number, tokens=TOKENS, **payload):
    instance = TaskInstance(instance_id="q", handler="talk", payload=payload)
    retry = RetryPolicy(max_attempts=2, causes=("evaluator",), backoff_s=0.0)
    sampling = SamplingParams(max_output_tokens=tokens + 1)
    return JobSpec(job_id=f"j{number}", instance=instance, sampling=sampling, max_turns=1, retry=retry)


class Service:
    """The node, as its configuration and its endpoint file show it."""

    def __init__(self, folder, engine):
        self.engine = engine
        self.endpoints = json.loads((folder / "endpoint.json").read_bytes())
        self.unix_url = self.endpoints["unix_url"]
        self.sockets = folder / ".endpoint"

    async def arena(self):
        async with connect(self.unix_url, TOKEN) as client:
            return (await client.status())["arena"]

    async def wait_empty(self):
        """Returns when no block is used any more."""
        while (await self.arena())["blocks_used"]:
            await trio.sleep(0.02)


@asynccontextmanager
async def open_service(
    tmp_path, *, arena=None, max_model_len=8_000, tokens=TOKENS, first_id=97, workers=8, slice_tokens=256
):
    tiny = make_tiny_model(tmp_path / "model")

    def script(prompt):
        letters = range(first_id, first_id + 26)
        said = next(count for count, token in enumerate(reversed(prompt)) if token not in letters)
        ids = ([*letters] * (tokens // 26))[said:]
        return [*ids, tiny.end_of_turn_id], [-0.5] * (len(ids) + 1), "stop"

    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=max_model_len)
    ended = []
    async with open_fake_engine(script=script, config=engine_config) as engine, trio.open_nursery() as nursery:
        config = NodeConfig(
            model=ModelConfig(path=str(tmp_path / "model")),
            listen=ListenConfig(port=0, token=TOKEN, endpoint_file=str(tmp_path / "endpoint.json")),
            backends=BackendConfig(urls=[engine.url], slice_tokens=slice_tokens),
            sandbox=SandboxConfig(provider="process"),
            stages=StagesConfig(run_workers=workers, ready_queue=workers),
            arena=arena or ArenaConfig(size_bytes=64 * 1024 * 1024),
        )

        async def serve(*, task_status):  # noqa: ASYNC128 - serve_node calls it
            ended.append(await serve_node(config, HandlerRegistry([Talk()]), task_status=task_status))

        await nursery.start(serve)
        service = Service(tmp_path, engine)
        yield service
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [True]
    assert not service.sockets.exists(), "the sockets are gone, and their folder"


def is_whole(outcome):
    assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error
    (segment,) = outcome.trajectory.segments
    (turn,) = outcome.trajectory.turns
    sampled = segment.token_ids[turn.completion_start : turn.completion_end]
    assert len(sampled) == TOKENS // 26 * 26 + 1
    assert (sampled[:-1] == np.tile(np.arange(97, 97 + 26), TOKENS // 26)).all()
    assert segment.loss_mask.sum() == len(sampled)
    return True


async def test_outcomes_are_views_of_the_nodes_memory_and_it_is_empty_afterwards(tmp_path):
    async with open_service(tmp_path) as service:
        assert stat.S_IMODE(service.sockets.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in service.sockets.iterdir()} == {0o600}
        async with connect(service.unix_url, TOKEN, shared_memory=True) as client:
            await wait_mapped(client)
            assert all(isinstance(answer, Accepted) for answer in await client.submit([job(n) for n in range(20)]))
            (arena,) = client._state.arenas._arenas
            seen = 0
            async for outcome in client.results(20):
                assert is_whole(outcome)
                inside = offset_in(arena.memory, outcome.trajectory.segments[0].token_ids)
                assert 0 < inside < len(arena.memory.mapping), "no copy was made"
                batch = pad_batch([outcome], pad_token_id=0)
                assert (batch.token_ids[0] == outcome.trajectory.segments[0].token_ids).all()
                seen += 1
            statistics = (await client.status())["arena"]
        assert seen == statistics["shared"]["sent_total"] == 20
        assert (statistics["private_total"], statistics["spilled_total"], statistics["waiting"]) == (0, 0, 0)
        await service.wait_empty()


async def wait_mapped(client):
    """Returns when the node has noted the client as a reader."""
    while not (await client.status())["arena"]["readers"] or not len(client._state.arenas):
        await trio.sleep(0.01)
    await client.status()


async def test_a_trainer_elsewhere_and_one_that_does_not_map_get_frames(tmp_path):
    async with open_service(tmp_path) as service:
        for url in (service.endpoints["url"], service.unix_url):
            async with connect(url, TOKEN) as client:
                await client.submit([job(n) for n in range(3)])
                async for outcome in client.results(3):
                    assert is_whole(outcome)
        assert (await service.arena())["shared"]["sent_total"] == 0
        await service.wait_empty()


async def test_whatever_its_end_a_job_leaves_nothing_in_the_arena(tmp_path):
    async with open_service(tmp_path) as service, connect(service.unix_url, TOKEN, shared_memory=True) as client:
        await wait_mapped(client)
        service.engine.hold()
        jobs = [job(n, fails=n % 2) for n in range(16)]
        jobs[4] = msgspec.structs.replace(jobs[4], keep_partial=False)
        await client.submit(jobs)
        await client.cancel(["j4", "j5", "j15"])
        service.engine.release()
        ends = {outcome.job_id: outcome async for outcome in client.results(16)}
        assert {ends[f"j{n}"].status for n in (4, 5, 15)} == {"cancelled"}
        assert {ends[f"j{n}"].error_code for n in (1, 3, 7)} == {ends["j1"].error_code} != {None}
        assert all(len(ends[f"j{n}"].attempts) == 1 for n in (1, 3, 7)), "they were tried twice"
        client.acknowledge(client.cursor)
        await service.wait_empty()


async def test_a_full_arena_holds_up_new_rollouts_and_no_running_one(tmp_path):
    arena = ArenaConfig(size_bytes=20 * 4096 * 9, room_timeout_s=60)
    async with open_service(tmp_path, arena=arena, max_model_len=20_000, workers=32) as service:
        async with connect(service.endpoints["url"], TOKEN) as client:
            service.engine.hold()
            await client.submit([job(n) for n in range(24)])
            while (await service.arena())["waiting"] < 4:
                await trio.sleep(0.02)
            waiting = [view for view in (await client.status())["jobs"] if view["waiting_on"] == "arena room"]
            assert len(waiting) == 4, "one for each INIT worker"
            assert (await service.arena())["buffers_open"] == 3
            service.engine.release()
            async for outcome in client.results(24):
                assert is_whole(outcome)
        statistics = await service.arena()
        assert (statistics["private_total"], statistics["spilled_total"]) == (0, 0)
        await service.wait_empty()


async def test_an_arena_without_room_for_one_rollout_changes_nothing_but_the_counter(tmp_path):
    arena = ArenaConfig(size_bytes=4 * 4096 * 9)
    async with open_service(tmp_path, arena=arena, max_model_len=20_000) as service:
        async with connect(service.unix_url, TOKEN, shared_memory=True) as client:
            await client.submit([job(n) for n in range(4)])
            async for outcome in client.results(4):
                assert is_whole(outcome)
        assert (await service.arena())["private_total"] == 4


async def test_two_hundred_rollouts_at_once(tmp_path):
    async with open_service(tmp_path, workers=200) as service:
        async with connect(service.unix_url, TOKEN, shared_memory=True) as client:
            await wait_mapped(client)
            service.engine.hold()
            await client.submit([job(n) for n in range(200)])
            while service.engine.stats.running < 200:
                await trio.sleep(0.05)
            assert (await service.arena())["buffers_open"] == 200
            service.engine.release()
            async for outcome in client.results(200):
                assert is_whole(outcome)
        await service.wait_empty()
        assert (await service.arena())["private_total"] == 0


TRAINER = """
import sys, tracemalloc
from pathlib import Path
import msgspec
from prorl_trio.client import BlockingClient
from prorl_trio.types.models import JobSpec

url, token, session, specs = sys.argv[1:]
specs = msgspec.msgpack.decode(Path(specs).read_bytes(), type=list[JobSpec])
with BlockingClient(url, token, session, shared_memory=True) as client:
    print("ready", flush=True)
    sys.stdin.readline()
    client.submit(specs)
    tracemalloc.start()
    for outcome in client.results(len(specs)):
        (segment,) = outcome.trajectory.segments
        print(outcome.job_id, int(segment.token_ids.sum()), len(segment), flush=True)
        sys.stdin.readline()
    print("peak", tracemalloc.get_traced_memory()[1], flush=True)
"""


class Trainer:
    """A process that maps the arena; takes the next outcome for each `go_on`."""

    def __init__(self, process):
        self.process, self._rest = process, b""

    async def go_on(self):
        await self.process.stdin.send_all(b"\n")

    async def next_line(self):
        while b"\n" not in self._rest:
            chunk = await self.process.stdout.receive_some()
            assert chunk, "the trainer ended"
            self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode().split()


@asynccontextmanager
async def open_trainer(service, tmp_path, jobs):
    """A trainer whose session is `s`, about to submit `jobs`; it has mapped the arena."""
    specs = tmp_path / "specs"
    specs.write_bytes(msgspec.msgpack.encode(jobs))
    command = [sys.executable, "-c", TRAINER, service.unix_url, TOKEN, "s", str(specs)]
    async with trio.open_nursery() as nursery:
        run = partial(
            trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False, deliver_cancel=end
        )
        trainer = Trainer(await nursery.start(run))
        assert await trainer.next_line() == ["ready"]
        while not (await service.arena())["readers"]:
            await trio.sleep(0.02)
        await trainer.go_on()
        yield trainer
        nursery.cancel_scope.cancel()


async def end(process):
    process.kill()


async def test_a_killed_trainers_pins_end_and_the_next_one_gets_its_outcomes(tmp_path):
    async with open_service(tmp_path) as service:
        async with open_trainer(service, tmp_path, [job(n) for n in range(8)]) as trainer:
            first, *_ = await trainer.next_line()
            assert (await service.arena())["blocks_pinned"] > 0
            trainer.process.kill()
            await trainer.process.wait()
            while (await service.arena())["readers"]:
                await trio.sleep(0.02)
        async with connect(service.unix_url, TOKEN, session_id="s", shared_memory=True) as client:
            await wait_mapped(client)
            got = [outcome.job_id async for outcome in client.results(8) if is_whole(outcome)]
        assert first in got
        assert sorted(got) == sorted(f"j{n}" for n in range(8))
        await service.wait_empty()


async def test_a_trainer_process_reads_outcomes_without_memory_for_their_tokens(tmp_path):
    tokens = 100_000
    # In one piece: no completion is streamed token by token to show the engine's pace.
    sizes = {"max_model_len": 120_000, "tokens": tokens, "slice_tokens": 0}
    async with open_service(tmp_path, first_id=1_000, **sizes) as service:
        async with open_trainer(service, tmp_path, [job(n, tokens=tokens) for n in range(3)]) as trainer:
            for _ in range(3):
                _, total, length = await trainer.next_line()
                assert int(length) > tokens
                assert int(total) > 999 * tokens, "these ids have no text"
                await trainer.go_on()
            name, peak_bytes = await trainer.next_line()
            assert await trainer.process.wait() == 0, "its last acknowledgement is sent"
        assert name == "peak"
        assert int(peak_bytes) < tokens * 9 / 3
        assert (await service.arena())["shared"]["sent_token_bytes_total"] > 3 * tokens * 9
        await service.wait_empty()


async def test_the_blocking_client_maps_too(tmp_path):
    async with open_service(tmp_path) as service:
        await trio.to_thread.run_sync(train_blocking, service.unix_url)
        await service.wait_empty()


def train_blocking(url):
    with BlockingClient(url, TOKEN, shared_memory=True) as client:
        client.submit([job(n) for n in range(6)])
        kept = [outcome.detached() for outcome in client.results(6)]
    assert all(map(is_whole, kept))
    assert len(pad_batch(kept, pad_token_id=0)) == 6


def test_a_socket_of_a_killed_node_is_taken_over_and_one_in_use_is_not(tmp_path):
    path = tmp_path / "folder" / "node"
    listen = ListenConfig(unix_socket=str(path))
    sockets = claim_local_sockets(listen)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(1, flush=True);"
        "sys.stdin.read()"
    )
    left = subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with left:
        left.stdout.readline()
        with pytest.raises(ConfigError, match="belongs to a node that is running"):
            claim_local_sockets(listen)
        left.kill()
    assert claim_local_sockets(listen) == sockets
    assert not path.exists()
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="is no socket"):
        claim_local_sockets(listen)
    assert path.read_bytes() == b"mine"


def test_a_path_that_cannot_be_is_an_error_where_it_was_asked_for(tmp_path, caplog):
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    for path, reason in ((open_folder / "node", "chmod 700"), (tmp_path / ("x" * 120) / "node", "shorter path")):
        with pytest.raises(ConfigError, match=reason):
            claim_local_sockets(ListenConfig(unix_socket=str(path)))
    assert claim_local_sockets(ListenConfig(endpoint_file=str(tmp_path / f"{'x' * 120}.json"))) is None
    assert "no socket for trainers on this host" in caplog.text
    assert claim_local_sockets(ListenConfig()) is None
    assert claim_local_sockets(ListenConfig(unix_socket="", endpoint_file=str(tmp_path / "endpoint.json"))) is None
