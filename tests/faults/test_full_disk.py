"""The ledger's disk runs full under a whole node, as a process, on a small file system of its own."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_ipc.session import Accepted, Rejected
from prorl_trio.client import connect
from prorl_trio.ledger import LedgerLimits, open_ledger
from support.small_disk import fill, small_disk
from support.soak import Leftovers, adopted_orphans, open_world
from support.soak.trainer import soak_spec

pytestmark = pytest.mark.alone

KIB = 1024
DISK_BYTES = 4 * 1024 * KIB
SIZES = {"log_bytes": 256 * KIB, "reserve_bytes": 1024 * KIB, "max_bytes": 64 * 1024 * KIB}
JOBS = 10
PADDING_BYTES = 40 * KIB
MAX_ADMITTED = 2 * SIZES["log_bytes"] // PADDING_BYTES
DEADLINE_S = 120


@pytest.fixture
def folder():
    """Short enough for the paths of Unix sockets. `disk` in it is a small one."""
    with (
        tempfile.TemporaryDirectory(prefix="disk-") as path,
        small_disk(Path(path, "disk"), DISK_BYTES),
        adopted_orphans(),
    ):
        yield Path(path)


async def submit(client, job_id, *, patience_s=0.0):
    spec = msgspec.structs.replace(soak_spec(job_id), tags={"padding": "x" * PADDING_BYTES})
    (answer,) = await client.submit([spec], patience_s=patience_s)
    return answer


async def submit_until_refused(client):
    """The log has room for some still. Returns who found it, and what the first one to find none was told."""
    admitted = set()
    while isinstance(answer := await submit(client, f"more-{len(admitted)}"), Accepted):
        admitted.add(answer.job_id)
        assert len(admitted) <= MAX_ADMITTED
    return admitted, answer


@pytest.mark.slow
async def test_a_full_disk_stops_admission_and_nothing_else(folder):
    with trio.fail_after(DEADLINE_S):
        config = {
            "ledger": {"dir": str(folder / "disk" / "ledger"), **SIZES},
            "sandbox": {"provider": "process", "max_warm": 0},
        }
        async with open_world(folder, jobs=0, **config) as world:
            left = Leftovers(world.temp)
            await world.trainer.done.wait()  # it has nothing to submit, and its session takes room on the disk, too
            async with connect(world.url, world.token, connect_timeout_s=60) as client:
                names = {f"job-{n}" for n in range(JOBS)}
                answers = await client.submit([soak_spec(name) for name in names])
                assert all(isinstance(answer, Accepted) for answer in answers)
                world.backend.send_signal(signal.SIGSTOP)
                ballast = folder / "disk" / "ballast"
                fill(ballast)

                admitted, refused = await submit_until_refused(client)
                assert isinstance(refused, Rejected)
                assert refused.code == "admission"
                assert refused.retry_after_s
                assert "No space left on device" in refused.message
                assert "No space left on device" in (await client.status())["ledger"]["full"]

                world.backend.send_signal(signal.SIGCONT)
                outcomes = [outcome async for outcome in client.results(JOBS + len(admitted))]
                assert {outcome.status for outcome in outcomes} == {"completed"}
                assert {outcome.job_id for outcome in outcomes} == names | admitted

                ballast.unlink()
                assert isinstance(await submit(client, refused.job_id, patience_s=60), Accepted)
                assert [outcome.job_id async for outcome in client.results(1)] == [refused.job_id]
                assert (await client.status())["ledger"]["full"] == ""
        assert left.find() == set()
        async with open_ledger(folder / "disk" / "ledger", LedgerLimits(**SIZES)) as ledger:
            assert ledger.recovered.damage == []
            assert ledger.recovered.unfinished == []
            assert ledger.recovered.undelivered == []
