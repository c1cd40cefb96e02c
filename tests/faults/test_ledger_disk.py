"""Disks that are full, fail, tear and rot: what the ledger keeps, and what it says."""

from __future__ import annotations

import errno
import random
import shutil

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio.ledger import LedgerCorrupt, LedgerFailed, LedgerFull, LedgerLimits, NewJob, database, open_ledger
from prorl_trio.types.errors import ConfigError
from support.faulty_disk import FaultyDisk

KIB = 1024
LIMITS = LedgerLimits(log_bytes=32 * KIB, reserve_bytes=64 * KIB, max_bytes=768 * KIB, retry_interval_s=0.01)
LONG_LOG = LedgerLimits(log_bytes=KIB * KIB, reserve_bytes=64 * KIB, max_bytes=16 * KIB * KIB)
CHANGED_BYTES = 150


def job(job_id, spec=b"spec"):
    return NewJob(job_id=job_id, fingerprint=b"f", spec=spec)


def jobs_of(ledger):
    recovered = ledger.recovered
    return [job.job_id for job in recovered.unfinished], [job.job_id for job in recovered.undelivered]


async def accepted_again(ledger, new):
    """Whether there is room for a reserve again is looked at once in `retry_interval_s`."""
    while True:
        try:
            await ledger.accept("s", [new])
        except LedgerFull:
            await trio.sleep(LIMITS.retry_interval_s)
        else:
            return


async def until(condition):
    while not condition():
        await trio.sleep(0.001)


async def fill(folder, outcomes, *, spec=b"spec", limits=LIMITS):
    """A ledger with these outcomes, one job unfinished."""
    async with open_ledger(folder, limits) as ledger:
        await ledger.open_session("s", 0)
        await ledger.accept("s", [job("left", spec), *(job(f"{n}") for n in range(len(outcomes)))])
        for number, outcome in enumerate(outcomes):
            await ledger.finish("s", f"{number}", 1, number + 1, [outcome])


def change(folder, content, *, by=1, at=0):
    """Change a byte of what is stored, wherever it is."""
    for path in folder.iterdir():
        if (found := path.read_bytes().find(content)) >= 0:
            with path.open("r+b") as file:
                file.seek(found + at)
                file.write(bytes([content[at] ^ by]))
            return
    raise AssertionError(f"{content!r} is not in {folder}")


async def killed(folder, left, outcomes):
    """What a killed process leaves in `left`: its log is not in the database yet."""
    async with open_ledger(folder, LONG_LOG) as ledger:
        await ledger.open_session("s", 0)
        await ledger.accept("s", [job("left"), *(job(f"{n}") for n in range(len(outcomes)))])
        for number, outcome in enumerate(outcomes):
            await ledger.finish("s", f"{number}", 1, number + 1, [outcome])
        shutil.copytree(folder, left)
    (left / "ledger-1.db-shm").unlink()


async def test_a_torn_log_ends_where_it_is_torn(memory_path):
    with trio.fail_after(60):
        await killed(memory_path / "made", memory_path / "whole", [b"first", b"second"])
        content = (memory_path / "whole" / "ledger-1.db-wal").read_bytes()
        seen = set()
        for size in (*range(content.index(b"spec"), len(content), 1999), len(content)):
            folder = memory_path / "torn"
            shutil.copytree(memory_path / "whole", folder)
            (folder / "ledger-1.db-wal").write_bytes(content[:size] + bytes(size % 2 * 10_000))
            async with open_ledger(folder, LIMITS) as ledger:
                assert ledger.recovered.damage == []
                unfinished, undelivered = jobs_of(ledger)
                seen.add(len(undelivered))
                assert undelivered == [*"01"[: len(undelivered)]]
                assert unfinished in ([], ["left", *"01"[len(undelivered) :]])
            shutil.rmtree(folder)
        assert seen == {0, 1, 2}


async def test_a_log_that_changed_before_its_end_is_said_to_have_lost_something(memory_path):
    """It is no torn one: what comes behind the change was synced, and is lost with it."""
    with trio.fail_after(20):
        await killed(memory_path / "made", memory_path / "left", [b"first outcome", b"second outcome", b"third"])
        change(memory_path / "left", b"first outcome")
        async with open_ledger(memory_path / "left", LIMITS) as ledger:
            assert jobs_of(ledger) == (["left", "0", "1", "2"], [])
            assert "cannot be read in" in ledger.recovered.damage[0]
            assert "may be lost" in ledger.recovered.damage[0]
        async with open_ledger(memory_path / "left", LIMITS) as ledger:
            assert ledger.recovered.damage == [], "it is said once"
        assert {path.name for path in (memory_path / "left").glob("*.db")} == {"ledger-1.db", "ledger-2.db"}


async def test_an_outcome_that_holds_a_copy_of_the_log_is_an_outcome(memory_path):
    with trio.fail_after(20):
        await killed(memory_path / "made", memory_path / "left", [b"first"])
        forged = (memory_path / "left" / "ledger-1.db-wal").read_bytes()
        await killed(memory_path / "again", memory_path / "other", [forged, b"second"])
        async with open_ledger(memory_path / "other", LIMITS) as ledger:
            assert jobs_of(ledger) == (["left"], ["0", "1"])
            assert ledger.recovered.damage == []
            assert await ledger.read(ledger.recovered.undelivered[0].outcome) == forged


async def test_a_changed_payload_costs_its_own_job_only(memory_path):
    with trio.fail_after(20):
        await fill(memory_path, [b"first outcome" * 5_000, b"second outcome"], spec=b"the spec")
        change(memory_path, b"first outcome", at=3)
        change(memory_path, b"the spec", by=0x10)
        for _ in range(2):
            async with open_ledger(memory_path, LIMITS) as ledger:
                assert jobs_of(ledger) == (["left"], ["0", "1"])
                first, second = ledger.recovered.undelivered
                with pytest.raises(LedgerCorrupt, match=r"the outcome of job '0' is damaged in .*ledger-1\.db"):
                    await ledger.read(first.outcome)
                with pytest.raises(LedgerCorrupt, match="the spec of job 'left' is damaged"):
                    await ledger.read(ledger.recovered.unfinished[0].spec)
                assert await ledger.read(second.outcome) == b"second outcome"
        async with open_ledger(memory_path, LIMITS) as ledger:
            await ledger.acknowledge("s", 1)  # it can be let go of as any other


NAMES = [f"{n:03}" for n in range(40)]


async def many(folder):
    async with open_ledger(folder, LIMITS) as ledger:
        await ledger.open_session("s", 0)
        for name in NAMES:
            await ledger.accept("s", [NewJob(job_id=name, fingerprint=name.encode(), spec=b"spec of " + name.encode())])
        for cursor, name in enumerate(NAMES[:20], 1):
            await ledger.finish("s", name, 1, cursor, [b"outcome of " + name.encode()])
        await ledger.acknowledge("s", 5)


async def test_a_changed_byte_anywhere_is_said_or_changes_nothing(memory_path, caplog):
    """Wherever it is: what is not said to be damaged is what was stored."""
    await many(memory_path / "whole")
    content = (memory_path / "whole" / "ledger-1.db").read_bytes()
    chance, said = random.Random(3), 0
    filled = [at for at in range(len(content)) if content[at]]  # free space is nobody's
    with trio.fail_after(60):
        await trio.lowlevel.checkpoint()
        for at in chance.sample(filled, CHANGED_BYTES):
            folder = memory_path / "changed"
            shutil.copytree(memory_path / "whole", folder)
            changed = bytearray(content)
            changed[at] ^= 1 << chance.randrange(8)
            (folder / "ledger-1.db").write_bytes(changed)
            try:
                async with open_ledger(folder, LIMITS) as ledger:
                    said += await look(ledger)
            except ConfigError as exc:
                said += 1
                assert "cannot be read at all" in str(exc) or "is of version" in str(exc)  # noqa: PT017
            shutil.rmtree(folder)
    assert said > CHANGED_BYTES // 4


async def look(ledger):
    """Whether damage was said; if not, everything is as it was."""
    said = bool(ledger.recovered.damage)
    for jobs, what in ((ledger.recovered.unfinished, "spec"), (ledger.recovered.undelivered, "outcome")):
        for found in jobs:
            assert found.job_id in NAMES
            assert found.fingerprint == found.job_id.encode()
            try:
                payload = await ledger.read(getattr(found, what))
            except LedgerCorrupt:
                said = True
            else:
                assert payload == f"{what} of {found.job_id}".encode()
    if not ledger.recovered.damage:
        assert jobs_of(ledger) == (NAMES[20:], NAMES[5:20])
        (session,) = ledger.recovered.sessions
        assert (session.acked, session.last) == (5, 20)
        assert {job.state for job in (await ledger.lookup(NAMES[:5])).values()} == {"acknowledged"}
    return said


async def test_what_can_be_read_of_a_damaged_database_goes_on(memory_path):
    """Pages of jobs are overwritten: the rest is there, can be used, and the next start finds nothing wrong."""
    with trio.fail_after(20):
        await many(memory_path)
        content = bytearray((memory_path / "ledger-1.db").read_bytes())
        for name in (NAMES[30], NAMES[10]):  # in the table of jobs, and wherever else the first of them is found
            page = content.index(name.encode() + b"s" + name.encode()) // database.PAGE_BYTES
            at = content.index(name.encode() + b"s" + name.encode())
            content[at] ^= 0x7F
            assert page
        (memory_path / "ledger-1.db").write_bytes(content)
        async with open_ledger(memory_path, LIMITS) as ledger:
            assert jobs_of(ledger) == (
                [n for n in NAMES[20:] if n != NAMES[30]],
                [n for n in NAMES[5:20] if n != NAMES[10]],
            )
            assert any("has changed" in sentence for sentence in ledger.recovered.damage)
            assert ledger.recovered.damage[-1].startswith("what could be read is in ledger-2.db now")
            for outcome in ledger.recovered.undelivered:
                assert await ledger.read(outcome.outcome) == b"outcome of " + outcome.job_id.encode()
            await ledger.accept("s", [job("new")])
        async with open_ledger(memory_path, LIMITS) as ledger:
            assert ledger.recovered.damage == []
            assert jobs_of(ledger)[0][-1] == "new"


async def test_a_full_disk_stops_admission_and_outcomes_go_to_the_reserve(memory_path):
    disk = FaultyDisk()
    limits = msgspec.structs.replace(LIMITS, reserve_bytes=192 * KIB)
    with trio.fail_after(20):
        async with open_ledger(memory_path, limits, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job(f"{n}") for n in (*range(1, 12), "runs")])
            disk.free_bytes = 0
            for number in range(1, 7):  # 10 KiB each, in the log and in the database
                await ledger.finish("s", f"{number}", 1, number, [bytes([number]) * 10 * KIB])
            with pytest.raises(LedgerFull, match="No space left"):
                await ledger.accept("s", [job("new")])
            with pytest.raises(LedgerFull):
                await ledger.open_session("t", 0)
            assert "No space left" in ledger.statistics().full
            assert (memory_path / "reserve").stat().st_size < limits.reserve_bytes
            async with trio.open_nursery() as nursery:
                for number in range(7, 12):
                    nursery.start_soon(ledger.finish, "s", f"{number}", 1, number, [bytes([number]) * 40 * KIB])
                await until(lambda: ledger.statistics().waiting)
                assert ledger.statistics().waiting <= 5
                await ledger.begin_attempt("runs", 1)  # what needs no space goes on meanwhile
                disk.free_bytes = None
            assert ledger.statistics().waiting == 0
            await accepted_again(ledger, job("new"))
            assert ledger.statistics().full == ""
            assert (memory_path / "reserve").stat().st_size == limits.reserve_bytes
        async with open_ledger(memory_path, LIMITS) as ledger:
            assert jobs_of(ledger) == (["runs", "new"], [str(n) for n in range(1, 12)])
            for outcome in ledger.recovered.undelivered:
                size = (10 if outcome.cursor < 7 else 40) * KIB
                assert await ledger.read(outcome.outcome) == bytes([outcome.cursor]) * size


async def test_a_ledger_that_nobody_uses_notices_that_its_disk_has_room_again(memory_path, caplog):
    """Who asks whether the node is ready before they submit would otherwise never submit."""
    disk = FaultyDisk()
    with trio.fail_after(20):
        async with open_ledger(memory_path, LIMITS, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            disk.free_bytes = 0
            with pytest.raises(LedgerFull):
                await ledger.accept("s", [job("new")])
            assert "No space left" in ledger.statistics().full
            assert caplog.text.count("the ledger takes nothing new until there is room: No space left") == 1
            commits = ledger.statistics().commits
            disk.free_bytes = None
            await until(lambda: not ledger.statistics().full)
            assert ledger.statistics().commits == commits
            assert caplog.text.count("the ledger has room, and takes new jobs again") == 1
        disk.free_bytes = 0
        (memory_path / "reserve").unlink()
        async with open_ledger(memory_path, LIMITS, disk=disk) as ledger:
            assert "No space left" in ledger.statistics().full
            disk.free_bytes = None
            await until(lambda: not ledger.statistics().full)


async def test_who_waits_for_room_may_be_cancelled(memory_path):
    disk = FaultyDisk()
    with trio.fail_after(20):
        async with open_ledger(memory_path, LIMITS, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b")])
            disk.free_bytes = 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ledger.finish, "s", "a", 1, 1, [bytes(100 * KIB)])
                await until(lambda: ledger.statistics().waiting)
                nursery.cancel_scope.cancel()
            await ledger.finish("s", "b", 1, 2, [b"small"])
            await until(lambda: not ledger.statistics().waiting)
            assert (await ledger.lookup(["a"]))["a"].state == "stored"


async def test_acknowledging_makes_room_where_max_bytes_is_reached(memory_path):
    with trio.fail_after(20):
        async with open_ledger(memory_path, LIMITS) as ledger:
            await ledger.open_session("s", 0)
            finished = 0

            async def fill_up():
                nonlocal finished
                while finished < 100:
                    await ledger.accept("s", [job(f"{finished}")])
                    await ledger.finish("s", f"{finished}", 1, finished + 1, [bytes(20 * KIB)])
                    finished += 1

            with pytest.raises(LedgerFull, match="max_bytes"):
                await fill_up()
            assert finished >= 10
            statistics = ledger.statistics()
            assert statistics.disk_bytes <= LIMITS.max_bytes
            assert "max_bytes" in statistics.full
            await ledger.acknowledge("s", finished)
            await ledger.accept("s", [job("again")])
            assert ledger.statistics().full == ""


async def test_outcomes_that_wait_get_the_room_of_those_acknowledged(memory_path):
    disk = FaultyDisk()
    limits = LedgerLimits(log_bytes=32 * KIB, reserve_bytes=32 * KIB, max_bytes=224 * KIB, retry_interval_s=60.0)
    with trio.fail_after(20):
        async with open_ledger(memory_path, limits, disk=disk) as ledger:
            for number in range(1, 13):
                await ledger.open_session(f"s{number}", 0)
                await ledger.accept(f"s{number}", [job(f"{number}")])
            trainer_is_there = trio.Event()

            async def finish_and_acknowledge(number):
                await ledger.finish(f"s{number}", f"{number}", 1, 1, [bytes(10 * KIB)])
                await trainer_is_there.wait()
                await ledger.acknowledge(f"s{number}", 1)

            async with trio.open_nursery() as nursery:
                for number in range(1, 13):
                    nursery.start_soon(finish_and_acknowledge, number)
                await until(lambda: ledger.statistics().waiting)
                assert ledger.statistics().disk_bytes <= limits.max_bytes
                trainer_is_there.set()
            known = await ledger.lookup([f"{n}" for n in range(1, 13)])
            assert {job.state for job in known.values()} == {"acknowledged"}


@pytest.mark.parametrize("written", [0, 10, 300, 5_000])
async def test_a_disk_that_is_full_when_it_is_written_to_loses_nothing(memory_path, written):
    """File systems that copy on write may have no space for blocks that were allocated."""
    disk = FaultyDisk()
    with trio.fail_after(20):
        async with open_ledger(memory_path, LIMITS, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b")])
            await ledger.finish("s", "a", 1, 1, [b"before"])
            disk.write_error, disk.writable_bytes = errno.ENOSPC, written
            with pytest.raises(LedgerFull, match="No space left"):
                await ledger.accept("s", [job("c")])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ledger.finish, "s", "b", 1, 2, [bytes(4_000)])
                await until(lambda: ledger.statistics().waiting)
                await ledger.acknowledge("s", 1)
                disk.write_error = 0
            await accepted_again(ledger, job("d"))
        async with open_ledger(memory_path, LIMITS) as ledger:
            assert jobs_of(ledger) == (["d"], ["b"])
            assert ledger.recovered.damage == []


@pytest.mark.parametrize("fault", ["sync_error", "write_error"])
async def test_after_a_failed_disk_nothing_is_taken_until_it_is_reopened(memory_path, fault):
    disk = FaultyDisk()
    with trio.fail_after(20):
        async with open_ledger(memory_path, LIMITS, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b"), job("c")])
            ref = await ledger.finish("s", "a", 1, 1, [b"before"])
            setattr(disk, fault, errno.EIO)
            with pytest.raises(LedgerFailed, match="disk I/O error"):
                await ledger.finish("s", "b", 1, 2, [b"lost"])
            setattr(disk, fault, 0)
            syncs = disk.syncs
            with pytest.raises(LedgerFull, match="takes nothing until it is reopened"):
                await ledger.accept("s", [job("d")])
            with pytest.raises(LedgerFailed):
                await ledger.finish("s", "b", 1, 2, [b"lost"])
            await ledger.begin_attempt("c", 1)
            assert await ledger.read(ref) == b"before"
            await ledger.acknowledge("s", 1)
            assert "disk I/O error" in ledger.statistics().full
        assert disk.syncs == syncs, "a failed sync was tried again"
        async with open_ledger(memory_path, LIMITS) as ledger:
            unfinished, undelivered = jobs_of(ledger)
            assert "a" in undelivered
            assert "c" in unfinished
            assert "d" not in unfinished
            assert ledger.recovered.damage == []
            await ledger.accept("s", [job("d")])


@pytest.mark.parametrize("reserve", [True, False])
async def test_a_ledger_opens_on_a_full_disk(memory_path, reserve):
    disk = FaultyDisk()
    limits = msgspec.structs.replace(LIMITS, reserve_bytes=192 * KIB)
    with trio.fail_after(20):
        await fill(memory_path, [b"first"], limits=limits)
        if not reserve:
            (memory_path / "reserve").unlink()
        disk.free_bytes = 0
        async with open_ledger(memory_path, limits, disk=disk) as ledger:
            assert await ledger.read(ledger.recovered.undelivered[0].outcome) == b"first"
            assert ("No space left" in ledger.statistics().full) is not reserve
            with pytest.raises(LedgerFull, match="No space left"):
                await ledger.accept("s", [job("new")])
            await ledger.acknowledge("s", 1)
            if not reserve:  # there is nothing to store it with: it is made up for
                disk.free_bytes = None
                await until(lambda: not ledger.statistics().waiting)
        disk.free_bytes = 0
        async with open_ledger(memory_path, limits, disk=disk) as ledger:
            assert ledger.recovered.undelivered == []


@pytest.mark.parametrize("full", ["disk", "max_bytes"])
@pytest.mark.parametrize("together", [True, False])
async def test_a_small_outcome_does_not_pass_a_large_one_that_waits(memory_path, full, together):
    """In its group, in a later one, and for whoever looks after a kill. Other sessions do not wait for it."""
    disk = FaultyDisk()
    limits = msgspec.structs.replace(LIMITS, max_bytes=240 * KIB) if full == "max_bytes" else LIMITS
    with trio.fail_after(20):
        async with open_ledger(memory_path / "ledger", limits, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.open_session("t", 0)
            await ledger.accept("s", [job(f"{n}") for n in (1, 2, 3)])
            await ledger.accept("t", [job("other"), job("first")])
            if full == "disk":
                disk.free_bytes = 0
            async with trio.open_nursery() as nursery:
                if together:  # what comes while the disk is busy is one group
                    disk.may_sync.clear()
                    disk.syncing.clear()
                    nursery.start_soon(ledger.finish, "t", "first", 1, 1, [b"first"])
                    await trio.to_thread.run_sync(disk.syncing.wait)
                for cursor, size in ((1, 120 * KIB), (2, 10)):
                    nursery.start_soon(ledger.finish, "s", f"{cursor}", 1, cursor, [bytes(size)])
                    await trio.testing.wait_all_tasks_blocked()
                disk.may_sync.set()
                await until(lambda: ledger.statistics().waiting)
                nursery.start_soon(ledger.finish, "s", "3", 1, 3, [b"small"])
                await ledger.finish("t", "other", 1, 2, [b"small"])
                known = await ledger.lookup(["1", "2", "3"])
                assert {found.state for found in known.values()} == {"stored"}
                shutil.copytree(memory_path / "ledger", memory_path / "killed")
                if full == "max_bytes":
                    nursery.cancel_scope.cancel()
                disk.free_bytes = None
            if full == "disk":
                known = await ledger.lookup(["1", "2", "3"])
                assert {found.state for found in known.values()} == {"offered"}
        (memory_path / "killed" / "ledger-1.db-shm").unlink()
        async with open_ledger(memory_path / "killed", LIMITS) as ledger:
            unfinished, undelivered = jobs_of(ledger)
            assert unfinished[:3] == ["1", "2", "3"]
            assert set(undelivered) <= {"first", "other"}
