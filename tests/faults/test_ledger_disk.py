"""Disks that are full, fail, tear and rot: what the ledger keeps, and what it says."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import trio
import trio.testing

from prorl_trio.ledger import LedgerCorrupt, LedgerFailed, LedgerFull, LedgerLimits, NewJob, open_ledger
from prorl_trio.testing.faulty_disk import FaultyDisk

KIB = 1024
LIMITS = LedgerLimits(log_bytes=32 * KIB, reserve_bytes=64 * KIB, max_bytes=512 * KIB, retry_interval_s=0.01)


def job(job_id, spec=b"spec"):
    return NewJob(job_id=job_id, fingerprint=b"f", spec=spec)


def jobs_of(ledger):
    recovered = ledger.recovered
    return [job.job_id for job in recovered.unfinished], [job.job_id for job in recovered.undelivered]


async def until(condition):
    while not condition():
        await trio.sleep(0.001)


async def fill(folder, outcomes, *, spec=b"spec"):
    """A ledger with these outcomes, one job unfinished; returns its one segment."""
    async with open_ledger(folder, LIMITS) as ledger:
        await ledger.open_session("s", 0)
        await ledger.accept("s", [job("left", spec), *(job(f"{n}") for n in range(len(outcomes)))])
        for number, outcome in enumerate(outcomes):
            await ledger.finish("s", f"{number}", 1, number + 1, [outcome])
    (segment,) = folder.glob("*.log")
    return segment


@pytest.mark.parametrize("with_index", [True, False])
async def test_a_torn_tail_is_cut_off_wherever_it_is_torn(tmp_path, with_index):
    with trio.fail_after(60):
        segment = await fill(tmp_path / "whole", [b"first", b"second"])
        content = segment.read_bytes()
        ends = [content.index(text) + len(text) for text in (b"first", b"second")]
        start = content.rindex(bytes.fromhex(segment.stem.partition("-")[2]), 0, content.index(b"first"))
        for size in range(start, len(content) + 1, 4 if with_index else 1):
            # With the index, a tail that is there but wrong is known to have been right: see the tests below.
            for padding in (b"",) if with_index or size % 4 else (bytes(100),):
                folder = tmp_path / "torn"
                shutil.copytree(tmp_path / "whole", folder)
                (folder / segment.name).write_bytes(content[:size] + padding)
                if not with_index:
                    (folder / "index.snapshot").unlink()
                async with open_ledger(folder, LIMITS) as ledger:
                    whole = sum(end <= size for end in ends)
                    assert jobs_of(ledger) == (["left", *("0", "1")[whole:]], ["0", "1"][:whole])
                    assert ledger.recovered.damage == []
                    await ledger.finish("s", "left", 1, 9, [b"and on it goes"])
                async with open_ledger(folder, LIMITS) as ledger:
                    assert len(ledger.recovered.undelivered) == whole + 1
                shutil.rmtree(folder)


async def test_a_changed_payload_costs_its_own_job_only(tmp_path):
    with trio.fail_after(20):
        segment = await fill(tmp_path, [b"first outcome", b"second outcome"], spec=b"the spec")
        content = bytearray(segment.read_bytes())
        for text in (b"first outcome", b"the spec"):
            content[content.index(text) + 2] ^= 0x10
        segment.write_bytes(content)
        for _ in range(2):
            async with open_ledger(tmp_path, LIMITS) as ledger:
                assert jobs_of(ledger) == (["left"], ["0", "1"])
                first, second = ledger.recovered.undelivered
                with pytest.raises(
                    LedgerCorrupt, match=r"the outcome of job '0' is damaged at offset \d+ of segment 1"
                ):
                    await ledger.read(first.outcome)
                with pytest.raises(LedgerCorrupt, match="the spec of job 'left' is damaged"):
                    await ledger.read(ledger.recovered.unfinished[0].spec)
                assert await ledger.read(second.outcome) == b"second outcome"
            (tmp_path / "index.snapshot").unlink()


async def test_a_changed_payload_stays_reported_when_its_segment_is_gone(tmp_path):
    with trio.fail_after(20):
        segment = await fill(tmp_path, [b"first outcome", b"second outcome"])
        content = bytearray(segment.read_bytes())
        content[content.index(b"first outcome")] ^= 1
        segment.write_bytes(content)
        async with open_ledger(tmp_path, LIMITS) as ledger:
            first, second = ledger.recovered.undelivered
            await ledger.open_session("t", 0)
            for number in range(1, 30):
                await ledger.accept("t", [job(f"t{number}")])
                await ledger.finish("t", f"t{number}", 1, number, [bytes(10 * KIB)])
                await ledger.acknowledge("t", number)
            assert not segment.exists()
            with pytest.raises(LedgerCorrupt, match="is lost: it was damaged"):
                await ledger.read(first.outcome)
            assert await ledger.read(second.outcome) == b"second outcome"
        (tmp_path / "index.snapshot").unlink()
        async with open_ledger(tmp_path, LIMITS) as ledger:
            with pytest.raises(LedgerCorrupt, match="is lost: it was damaged"):
                await ledger.read(first.outcome)
            await ledger.acknowledge("s", 1)
            assert await ledger.read(second.outcome) == b"second outcome"


async def test_a_changed_record_is_said_and_the_others_are_read(tmp_path):
    with trio.fail_after(60):
        segment = await fill(tmp_path / "whole", [b"first", b"second", b"third"])
        (tmp_path / "whole" / "index.snapshot").unlink()
        content = segment.read_bytes()
        salt = bytes.fromhex(segment.stem.partition("-")[2])
        start = content.rindex(salt, 0, content.index(b"second"))
        for offset in range(start, content.index(b"second"), 3):
            folder = tmp_path / "changed"
            shutil.copytree(tmp_path / "whole", folder)
            changed = bytearray(content)
            changed[offset] ^= 0x40
            (folder / segment.name).write_bytes(changed)
            async with open_ledger(folder, LIMITS) as ledger:
                assert jobs_of(ledger) == (["left", "1"], ["0", "2"])
                assert len(ledger.recovered.damage) == 1
                assert segment.name in ledger.recovered.damage[0]
            shutil.rmtree(folder)


async def test_a_payload_cannot_pose_as_a_record(tmp_path):
    """A copy of the log's own records, as an outcome, is an outcome, even where the record around it is damaged."""
    with trio.fail_after(20):
        segment = await fill(tmp_path / "one", [b"first", b"second"])
        (tmp_path / "two").mkdir()
        forged = segment.read_bytes()
        segment = await fill(tmp_path / "two", [forged, b"next"])
        (tmp_path / "two" / "index.snapshot").unlink()
        content = bytearray(segment.read_bytes())
        salt = bytes.fromhex(segment.stem.partition("-")[2])
        content[content.rindex(salt, 0, content.index(b"first")) + 20] ^= 1
        segment.write_bytes(content)
        async with open_ledger(tmp_path / "two", LIMITS) as ledger:
            assert jobs_of(ledger) == (["left", "0"], ["1"])
            assert await ledger.read(ledger.recovered.undelivered[0].outcome) == b"next"


async def test_a_full_disk_stops_admission_and_outcomes_go_to_the_reserve(tmp_path):
    disk = FaultyDisk()
    with trio.fail_after(20):
        async with open_ledger(tmp_path, LIMITS, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job(f"{n}") for n in (*range(1, 12), "runs")])
            disk.free_bytes = 0
            for number in range(1, 7):  # 10 KiB each: two go to the segment, the others need the reserve
                await ledger.finish("s", f"{number}", 1, number, [bytes([number]) * 10 * KIB])
            with pytest.raises(LedgerFull, match="No space left"):
                await ledger.accept("s", [job("new")])
            with pytest.raises(LedgerFull):
                await ledger.open_session("t", 0)
            assert "No space left" in ledger.statistics().full
            assert not (tmp_path / "reserve").exists()
            async with trio.open_nursery() as nursery:
                for number in range(7, 12):
                    nursery.start_soon(ledger.finish, "s", f"{number}", 1, number, [bytes([number]) * 10 * KIB])
                await until(lambda: ledger.statistics().waiting)
                assert ledger.statistics().waiting <= 5
                await ledger.begin_attempt("runs", 1)  # what needs no space goes on meanwhile
                disk.free_bytes = None
            assert ledger.statistics().waiting == 0
            await ledger.accept("s", [job("new")])
            assert ledger.statistics().full == ""
            assert (tmp_path / "reserve").exists()
        async with open_ledger(tmp_path, LIMITS) as ledger:
            assert jobs_of(ledger) == (["runs", "new"], [str(n) for n in range(1, 12)])
            for outcome in ledger.recovered.undelivered:
                assert await ledger.read(outcome.outcome) == bytes([outcome.cursor]) * 10 * KIB


async def test_who_waits_for_room_may_be_cancelled(tmp_path):
    disk = FaultyDisk()
    with trio.fail_after(20):
        async with open_ledger(tmp_path, LIMITS, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b")])
            disk.free_bytes = 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ledger.finish, "s", "a", 1, 1, [bytes(100 * KIB)])
                await until(lambda: ledger.statistics().waiting)
                nursery.cancel_scope.cancel()
            await ledger.finish("s", "b", 1, 2, [b"small"])
            await until(lambda: not ledger.statistics().waiting)
            assert (await ledger.lookup(["a"]))["a"].state == "unfinished"


async def test_acknowledging_makes_room_where_max_bytes_is_reached(tmp_path):
    with trio.fail_after(20):
        async with open_ledger(tmp_path, LIMITS) as ledger:
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


async def test_outcomes_that_wait_get_the_room_of_those_acknowledged(tmp_path):
    disk = FaultyDisk()
    limits = LedgerLimits(log_bytes=32 * KIB, reserve_bytes=32 * KIB, max_bytes=96 * KIB, retry_interval_s=60.0)
    with trio.fail_after(20):
        async with open_ledger(tmp_path, limits, disk=disk) as ledger:
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
async def test_a_disk_that_is_full_when_it_is_written_to_loses_nothing(tmp_path, written):
    """File systems that copy on write may have no space for blocks that were allocated."""
    disk = FaultyDisk()
    with trio.fail_after(20):
        async with open_ledger(tmp_path, LIMITS, disk=disk) as ledger:
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
            await ledger.accept("s", [job("d")])
        (tmp_path / "index.snapshot").unlink()
        async with open_ledger(tmp_path, LIMITS) as ledger:
            assert jobs_of(ledger) == (["d"], ["b"])
            assert ledger.recovered.damage == []


@pytest.mark.parametrize("fault", ["sync_error", "write_error"])
async def test_after_a_failed_disk_nothing_is_taken_until_it_is_reopened(tmp_path, fault):
    disk = FaultyDisk()
    with trio.fail_after(20):
        async with open_ledger(tmp_path, LIMITS, disk=disk) as ledger:
            await ledger.open_session("s", 0)
            await ledger.accept("s", [job("a"), job("b"), job("c")])
            ref = await ledger.finish("s", "a", 1, 1, [b"before"])
            setattr(disk, fault, errno.EIO)
            with pytest.raises(LedgerFailed, match="Input/output error"):
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
            assert "Input/output error" in ledger.statistics().full
        assert disk.syncs == syncs, "a failed sync was tried again"
        async with open_ledger(tmp_path, LIMITS) as ledger:
            unfinished, undelivered = jobs_of(ledger)
            assert "a" in undelivered
            assert "c" in unfinished
            assert "d" not in unfinished
            assert ledger.recovered.damage == []
            await ledger.accept("s", [job("d")])


async def test_a_ledger_opens_on_a_full_disk(tmp_path):
    disk = FaultyDisk()
    disk.free_bytes = 0
    with trio.fail_after(20):
        await fill(tmp_path, [b"first"])
        (tmp_path / "reserve").unlink()
        async with open_ledger(tmp_path, LIMITS, disk=disk) as ledger:
            assert await ledger.read(ledger.recovered.undelivered[0].outcome) == b"first"
            assert "No space left" in ledger.statistics().full
            with pytest.raises(LedgerFull):
                await ledger.accept("s", [job("new")])
            await ledger.acknowledge("s", 1)
        async with open_ledger(tmp_path, LIMITS, disk=disk) as ledger:
            assert ledger.recovered.undelivered == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
async def test_an_index_that_cannot_be_saved_costs_nothing(tmp_path, caplog):
    with trio.fail_after(20):
        (tmp_path / "index.new").symlink_to("/dev/full")
        await fill(tmp_path, [b"first"])
        assert "the index was not saved" in caplog.text
        async with open_ledger(tmp_path, LIMITS) as ledger:
            assert jobs_of(ledger) == (["left"], ["0"])
