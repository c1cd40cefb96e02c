"""A whole node, as a process, on a machine that runs out of space or descriptors: jobs wait, and that is all."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_ipc.channel import serve_connections
from prorl_trio.client import connect
from prorl_trio.types.models import RetryPolicy
from support.small_disk import fill, small_disk
from support.soak import Leftovers, adopted_orphans, open_world
from support.soak.trainer import soak_spec

pytestmark = pytest.mark.alone

DISK_BYTES = 24 * 1024 * 1024
DEADLINE_S = 180
JOBS = 20


def specs(prefix):
    return [msgspec.structs.replace(soak_spec(f"{prefix}-{n}"), retry=RetryPolicy(max_attempts=3)) for n in range(JOBS)]


async def outcomes(client, number):
    return [outcome async for outcome in client.results(number)]


def check(found):
    assert {(each.status, each.reward, each.attempt) for each in found} == {("completed", 1.0, 1)}
    assert len(found) == JOBS


async def wait_paused(client, *, paused):
    while bool((await client.status())["sandboxes"]["paused"]) is not paused:
        await trio.sleep(0.1)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="m-") as path, adopted_orphans():
        yield Path(path)


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["process", "bubblewrap"])
async def test_a_full_disk_under_the_runtime_folder_makes_jobs_wait(folder, provider):
    with small_disk(folder / "disk", DISK_BYTES), trio.fail_after(DEADLINE_S):
        config = {"provider": provider, "max_warm": 2, "runtime_dir": str(folder / "disk" / "r")}
        async with open_world(folder, jobs=0, sandbox=config) as world:
            left = Leftovers(world.temp)
            async with connect(world.url, world.token, connect_timeout_s=60) as client:
                await client.submit(specs("before"))
                check(await outcomes(client, JOBS))
                fill(folder / "disk" / "ballast")
                await client.submit(specs("full"))
                await wait_paused(client, paused=True)
                assert "No space left on device" in (await client.status())["sandboxes"]["paused"]
                (folder / "disk" / "ballast").unlink()
                check(await outcomes(client, JOBS))
                await wait_paused(client, paused=False)
        assert left.find() == set()


@pytest.mark.slow
async def test_a_runtime_folder_that_is_removed_is_made_anew(folder):
    with trio.fail_after(DEADLINE_S):
        runtime = folder / "r"
        config = {"provider": "process", "max_warm": 0, "runtime_dir": str(runtime)}
        async with (
            open_world(folder, jobs=0, sandbox=config) as world,
            connect(world.url, world.token, connect_timeout_s=60) as client,
        ):
            await client.submit(specs("before"))
            check(await outcomes(client, JOBS))
            shutil.rmtree(runtime)
            await client.submit(specs("after"))
            check(await outcomes(client, JOBS))
        assert list(runtime.iterdir()) == []


@pytest.mark.slow
async def test_a_lack_of_descriptors_makes_jobs_wait(folder):
    with trio.fail_after(DEADLINE_S):
        async with (
            open_world(folder, jobs=0, sandbox={"provider": "process", "max_warm": 2}) as world,
            connect(world.url, world.token, connect_timeout_s=60) as client,
        ):
            await client.submit(specs("before"))
            check(await outcomes(client, JOBS))
            pid = world.node.pid
            used = len(os.listdir(f"/proc/{pid}/fd"))
            soft, hard = resource.prlimit(
                pid, resource.RLIMIT_NOFILE, (used + 2, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            )
            assert soft > used
            await client.submit(specs("short"))
            await trio.sleep(5)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(4096, hard), hard))
            check(await outcomes(client, JOBS))


async def test_a_listener_outlives_a_lack_of_descriptors(monkeypatch, caplog):
    errors = [OSError(24, "Too many open files")] * 3 + [OSError(28, "No space left on device")]
    accept = trio.SocketListener.accept

    async def fails(self):
        if errors:
            raise errors.pop()
        return await accept(self)

    monkeypatch.setattr(trio.SocketListener, "accept", fails)

    async def answer(stream):
        await stream.send_all(b"here")

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_connections, listener, answer, nursery)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                assert await stream.receive_some() == b"here"
            nursery.cancel_scope.cancel()
    assert errors == []
    assert caplog.text.count("no connection can be accepted") == 2
