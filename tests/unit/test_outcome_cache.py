"""Which outcomes leave memory, and in which order; and a feed that has to read some of them back."""

from __future__ import annotations

import msgspec
import pytest
import trio

from prorl_ipc.session import OutcomeFrame
from prorl_trio.sessions.feed import READ_AHEAD_BYTES, READ_AHEAD_OUTCOMES, Feed
from prorl_trio.sessions.outcome_log import OutcomeCache, OutcomeLog

KIB = 1024
BLOB = msgspec.msgpack.encode(bytes(KIB - 3))


def fill(log, count, blob=BLOB):
    for n in range(count):
        log.append(f"job-{n}", blob)


def hot(log):
    return [cursor for cursor in log.cursors() if log.in_memory(cursor)]


def cursor_of(frame):
    return msgspec.msgpack.decode(frame, type=OutcomeFrame).cursor


def test_without_a_cache_everything_stays():
    log = OutcomeLog()
    fill(log, 5)
    assert hot(log) == [1, 2, 3, 4, 5]
    assert log.memory_bytes == log.size_bytes == 5 * KIB


def test_what_comes_last_for_a_trainer_leaves_first():
    cache = OutcomeCache(3 * KIB)
    log = OutcomeLog(0, cache.share())
    feed = Feed(log, 0)
    fill(log, 5)
    assert hot(log) == [1, 2, 3]
    assert cursor_of(feed.next_frame()) == 1
    log.append("late", BLOB)  # what was sent makes room for it
    assert hot(log) == [2, 3, 6]
    assert (log.size_bytes, log.memory_bytes) == (6 * KIB, 3 * KIB)
    assert cache.statistics() == {
        "bytes": 3 * KIB,
        "max_bytes": 3 * KIB,
        "outcomes": 3,
        "hits_total": 1,
        "misses_total": 0,
        "evicted_total": 3,
    }


def test_an_outcome_is_not_evicted_before_it_is_offered():
    cache = OutcomeCache(0)
    log = OutcomeLog(0, cache.share())
    first, second = log.reserve("a", BLOB), log.reserve("b", BLOB)
    log.offer(second)
    assert log.memory_bytes == 2 * KIB
    log.offer(first)
    assert (log.memory_bytes, cache.size_bytes) == (0, 0)


def test_sessions_without_a_trainer_give_way_first_and_then_the_one_that_has_most():
    cache = OutcomeCache(6 * KIB)
    away, slow, fast = (OutcomeLog(0, cache.share()) for _ in range(3))
    Feed(slow, 0)
    Feed(fast, 0)
    fill(away, 3)
    fill(slow, 3)
    fast.append("a", BLOB)
    assert (hot(away), hot(slow), hot(fast)) == ([1, 2], [1, 2, 3], [1])
    fill(slow, 3)
    assert (hot(away), hot(slow), hot(fast)) == ([], [1, 2, 3, 4, 5], [1])
    fast.append("b", BLOB)
    assert (hot(slow), hot(fast)) == ([1, 2, 3, 4], [1, 2])
    slow.nobody_there()
    fast.append("c", BLOB)
    assert (hot(slow), hot(fast)) == ([1, 2, 3], [1, 2, 3])


def test_what_is_forgotten_or_closed_leaves_the_cache():
    cache = OutcomeCache(9 * KIB)
    first, second = OutcomeLog(0, cache.share()), OutcomeLog(0, cache.share())
    fill(first, 4)
    fill(second, 4)
    first.forget("job-1")
    first.ack(1)
    assert cache.size_bytes == 6 * KIB
    second.close()
    second.close()
    assert (cache.size_bytes, len(second), second.size_bytes, second.job_id(1)) == (2 * KIB, 0, 0, "")
    fill(first, 7)  # a closed share is asked for nothing any more
    assert cache.size_bytes == 9 * KIB


def test_a_restored_outcome_is_on_the_disk_alone_and_a_replaced_one_in_memory_for_good():
    cache = OutcomeCache(KIB)
    log = OutcomeLog(3, cache.share())
    log.recover("a", 5, 700)
    log.recover("b", 6, 800)
    assert list(log.cursors()) == [5, 6]
    assert (log.acked, log.last, log.size_bytes, log.memory_bytes) == (4, 6, 1500, 0)
    assert (log.outcome_bytes(5), log.outcome_bytes(6), log.outcome(5)) == (700, 800, None)
    log.replace(5, b"lost")
    fill(log, 3)
    assert log.outcome(5) == b"lost"
    log.ack(6)
    assert log.memory_bytes == cache.size_bytes == KIB


# ---------------------------------------------------------------- reading back


class Disk:
    """Gives outcomes when the test lets it."""

    def __init__(self, log):
        self.log = log
        self.asked = []
        self.open = trio.Event()
        self.open.set()

    async def read(self, cursor):
        self.asked.append(cursor)
        await self.open.wait()
        await trio.lowlevel.checkpoint()
        return BLOB if self.log.job_id(cursor) else None


async def reading(nursery, feed, disk):
    """Start to read; returns when there is nothing more to be read now."""
    nursery.start_soon(feed.read_ahead, disk.read, lambda: None)
    await trio.testing.wait_all_tasks_blocked()


async def test_a_feed_reads_ahead_within_its_limits_and_sends_in_order():
    log = OutcomeLog(0, OutcomeCache(3 * KIB).share())
    feed, disk = Feed(log, 0), Disk(log)
    count = READ_AHEAD_OUTCOMES + 10
    fill(log, count)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await reading(nursery, feed, disk)
            assert disk.asked == list(range(4, READ_AHEAD_OUTCOMES + 1))
            assert feed.ahead_bytes == len(disk.asked) * KIB
            sent = []
            while len(sent) < count:
                while (frame := feed.next_frame()) is not None:
                    sent.append(cursor_of(frame))
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert sent == list(range(1, count + 1))
    assert disk.asked == list(range(4, count + 1)), "each once"
    assert (feed.ahead_bytes, feed.exhausted) == (0, True)


async def test_outcomes_in_memory_are_never_read():
    log = OutcomeLog(0, OutcomeCache(10 * KIB).share())
    feed, disk = Feed(log, 0), Disk(log)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await reading(nursery, feed, disk)
            for n in range(30):
                log.append(f"job-{n}", BLOB)
                assert cursor_of(feed.next_frame()) == n + 1
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert disk.asked == []


class AllButTheSecond:
    """References to the tokens of the first and the third job."""

    def has(self, job_id):
        return job_id != "job-1"

    def frame(self, job_id, cursor):
        return b"reference" if self.has(job_id) else None


async def test_what_goes_by_reference_is_never_read():
    log = OutcomeLog(0, OutcomeCache(0).share())
    feed, disk = Feed(log, 0, references=AllButTheSecond()), Disk(log)
    fill(log, 3)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await reading(nursery, feed, disk)
            first, second, third = (feed.next_frame() for _ in range(3))
            nursery.cancel_scope.cancel()
    assert (first, cursor_of(second), third) == (b"reference", 2, b"reference")
    assert disk.asked == [2]


async def test_large_outcomes_are_read_one_by_one_and_the_next_one_always():
    large = READ_AHEAD_BYTES // 2 + 1
    cache = OutcomeCache(2 * large)
    log = OutcomeLog(0, cache.share())
    feed, disk = Feed(log, 0), Disk(log)
    fill(log, 5, bytes(large))
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def read(cursor):
                disk.asked.append(cursor)
                await trio.lowlevel.checkpoint()
                return bytes(large)

            nursery.start_soon(feed.read_ahead, read, lambda: None)
            await trio.testing.wait_all_tasks_blocked()
            assert (disk.asked, feed.ahead_bytes) == ([3], large)
            hog = OutcomeLog(0, cache.share())
            Feed(hog, 0)
            hog.append("a", bytes(large))  # 2 has to leave
            hog.append("b", bytes(large))
            assert hot(log) == [1]
            log.nobody_there()
            hog.append("c", bytes(large))  # and 1, which is next
            assert hot(log) == []
            assert feed.next_frame() is None
            await trio.testing.wait_all_tasks_blocked()
            assert disk.asked == [3, 1]
            assert feed.ahead_bytes <= READ_AHEAD_BYTES + large
            assert feed.next_frame() is not None
            assert feed.next_frame() is None
            await trio.testing.wait_all_tasks_blocked()
            assert disk.asked == [3, 1, 2]
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["ack", "forget"])
async def test_what_is_forgotten_while_it_is_read_is_passed_over(how):
    log = OutcomeLog(0, OutcomeCache(0).share())
    feed, disk = Feed(log, 0), Disk(log)
    fill(log, 3)
    disk.open = trio.Event()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await reading(nursery, feed, disk)
            assert disk.asked == [1]
            if how == "ack":
                log.ack(1)
            else:
                log.forget("job-0")
            disk.open.set()
            await trio.testing.wait_all_tasks_blocked()
            assert disk.asked == [1, 2, 3]
            assert [cursor_of(feed.next_frame()) for _ in range(2)] == [2, 3]
            assert feed.ahead_bytes == 0
            nursery.cancel_scope.cancel()
