"""An arena under any interleaving of writers, readers and releases, against a model of plain lists."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from prorl_ipc.arena import Blocks, open_arena
from prorl_ipc.errors import ArenaFull, StaleReference

BLOCK_TOKENS = 8
BLOCKS = 24
COUNTS = st.integers(0, 5 * BLOCK_TOKENS)


class Written:
    """What a buffer must hold, and who holds it."""

    def __init__(self):
        self.ids, self.logprobs, self.mask = [], [], []
        self.ref, self.released, self.readers = None, False, set()

    @property
    def live(self):
        return not self.released or bool(self.readers)


class ArenaMachine(RuleBasedStateMachine):
    buffers = Bundle("buffers")
    readers = Bundle("readers")

    def __init__(self):
        super().__init__()
        size = BLOCKS * (BLOCK_TOKENS * 9 + 16) + 2 * 4096
        self._opened = open_arena(size, block_tokens=BLOCK_TOKENS, keep_free_bytes=5 * 4096)
        self.arena = self._opened.__enter__()
        assert self.arena.memory.total_blocks >= BLOCKS
        self.model = {}
        self.generations = {}
        self.next_id = 0

    def teardown(self):
        for buffer in self.model:
            buffer.release()
        for written in self.model.values():
            for reader in written.readers:
                self.arena.remove_reader(reader)
        assert self.arena.statistics().blocks_used == 0
        assert self.arena.statistics().largest_free_run_blocks == self.arena.memory.total_blocks
        self._opened.__exit__(None, None, None)

    @rule(target=buffers, tokens=COUNTS)
    def open(self, tokens):
        fits = self.arena.has_room(tokens)
        try:
            buffer = self.arena.open_nowait(tokens)
        except ArenaFull:
            assert not fits
            return multiple()
        assert fits
        self.model[buffer] = Written()
        return buffer

    @rule(buffer=buffers, count=COUNTS, sampled=st.booleans())
    def append(self, buffer, count, sampled):
        written = self.model[buffer]
        ids = list(range(self.next_id, self.next_id + count))
        logprobs = [-float(i % 97) for i in ids]
        self.next_id += count
        try:
            buffer.append(ids, logprobs if sampled else None)
        except StaleReference:
            assert written.released
        except ValueError:
            assert written.ref is not None
        except ArenaFull:
            assert not self.arena.has_room(len(buffer) + count)
        else:
            assert not written.released
            assert written.ref is None
            written.ids += ids
            written.logprobs += logprobs if sampled else [0.0] * count
            written.mask += [int(sampled)] * count

    @rule(buffer=buffers)
    def seal(self, buffer):
        written = self.model[buffer]
        try:
            ref = buffer.seal()
        except StaleReference:
            assert written.released
            return
        assert written.ref in (None, ref)
        if written.ref is None:
            assert ref.generation > self.generations.get(ref.offset, 0), "a generation never comes again"
            self.generations[ref.offset] = ref.generation
        written.ref = ref
        assert ref.length == len(written.ids)
        assert ref.capacity == max(1, -(-ref.length // BLOCK_TOKENS)) * BLOCK_TOKENS, "it shrinks to what it needs"

    @rule(target=readers)
    def add_reader(self):
        return self.arena.add_reader()

    @rule(buffer=buffers, reader=readers)
    def pin(self, buffer, reader):
        written = self.model[buffer]
        if written.ref is None:
            return
        try:
            self.arena.pin(written.ref, reader)
        except StaleReference:
            assert not written.live
        else:
            assert written.live
            written.readers.add(reader)

    @rule(buffer=buffers, reader=readers)
    def unpin(self, buffer, reader):
        written = self.model[buffer]
        if written.ref is not None:
            self.arena.unpin(written.ref, reader)
            written.readers.discard(reader)

    @rule(reader=consumes(readers))
    def remove_reader(self, reader):
        self.arena.remove_reader(reader)
        for written in self.model.values():
            written.readers.discard(reader)

    @rule(buffer=buffers)
    def release(self, buffer):
        buffer.release()
        self.model[buffer].released = True

    @invariant()
    def contents_are_intact_and_stale_is_stale(self):
        for buffer, written in self.model.items():
            views = []
            if not written.released:
                views.append(buffer.arrays())
            if written.ref is not None:
                try:
                    views.append(self.arena.memory.view(written.ref))
                    assert written.live
                except StaleReference:
                    assert not written.live
            for ids, logprobs, mask in views:
                assert ids.tolist() == written.ids
                assert logprobs.tolist() == written.logprobs
                assert mask.tolist() == written.mask

    @invariant()
    def blocks_are_conserved_and_nobody_overlaps(self):
        taken = []
        for buffer, written in self.model.items():
            if written.live:
                taken += range(buffer._first, buffer._first + buffer.blocks)
        assert len(taken) == len(set(taken))
        statistics = self.arena.statistics()
        free = [block for start, end in self.arena._blocks.runs() for block in range(start, end)]
        assert sorted(taken + free) == list(range(self.arena.memory.total_blocks))
        assert (statistics.blocks_used, statistics.blocks_free) == (len(taken), len(free))
        assert statistics.high_water_blocks >= len(taken)
        live = [written for written in self.model.values() if written.live]
        assert statistics.buffers_sealed == sum(written.ref is not None for written in live)
        assert statistics.buffers_open == sum(written.ref is None for written in live)


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArena = ArenaMachine.TestCase


class BlocksMachine(RuleBasedStateMachine):
    """The allocator alone, against a set of free blocks."""

    TOTAL = 40
    runs = Bundle("runs")

    def __init__(self):
        super().__init__()
        self.blocks = Blocks(self.TOTAL)
        self.free = set(range(self.TOTAL))

    @rule(target=runs, count=st.integers(1, 12))
    def take(self, count):
        first_fit = next(
            (first for first in range(self.TOTAL) if self.free.issuperset(range(first, first + count))), None
        )
        assert self.blocks.take(count) == first_fit
        if first_fit is None:
            return multiple()
        self.free -= set(range(first_fit, first_fit + count))
        return first_fit, count

    @rule(run=consumes(runs), kept=st.integers(0, 11))
    def give_back_all_but_a_beginning(self, run, kept):
        first, count = run
        kept = min(kept, count)
        if kept < count:
            self.blocks.give_back(first + kept, count - kept)
            self.free |= set(range(first + kept, first + count))

    @rule(first=st.integers(-3, TOTAL), count=st.integers(-1, 6))
    def a_double_free_is_refused_and_changes_nothing(self, first, count):
        wanted = set(range(first, first + count))
        if count >= 1 and wanted <= set(range(self.TOTAL)) and not wanted & self.free:
            return
        before = list(self.blocks.runs())
        try:
            self.blocks.give_back(first, count)
        except ValueError:
            assert list(self.blocks.runs()) == before
        else:
            raise AssertionError(f"blocks {first}, {count} of them, were taken back")

    @invariant()
    def free_runs_are_maximal(self):
        runs = list(self.blocks.runs())
        assert {block for start, end in runs for block in range(start, end)} == self.free
        assert all(end < start for (_, end), (start, _) in pairwise(runs))
        assert self.blocks.free == len(self.free)
        assert self.blocks.largest_free_run == max((end - start for start, end in runs), default=0)
        assert np.all(np.diff([start for start, _ in runs]) > 0)


BlocksMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = BlocksMachine.TestCase
