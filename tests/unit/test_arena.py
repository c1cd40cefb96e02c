from __future__ import annotations

import fcntl
import gc
import mmap
import os
import weakref

import numpy as np
import pytest
import trio

from prorl_ipc import arena as arena_module
from prorl_ipc.arena import default_arena_bytes, open_arena
from prorl_ipc.arena_memory import ArenaRef, map_memory
from prorl_ipc.errors import ArenaFull, ProtocolViolation, StaleReference
from support.addresses import offset_in

MIB = 1024 * 1024


@pytest.fixture
def arena():
    with open_arena(MIB, block_tokens=1024) as opened:
        yield opened


def fill(arena, tokens, first=0):
    buffer = arena.open_nowait()
    buffer.append(np.arange(first, first + tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32))
    return buffer


def test_prompts_and_completions_are_told_apart(arena):
    buffer = arena.open_nowait()
    buffer.append([1, 2, 3])
    buffer.append([4, 5], [-0.5, -0.25])
    buffer.append([])
    ids, logprobs, mask = buffer.arrays()
    assert (ids.dtype, logprobs.dtype, mask.dtype) == (np.int32, np.float32, np.uint8)
    assert ids.tolist() == [1, 2, 3, 4, 5]
    assert logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, -0.25]
    assert mask.tolist() == [0, 0, 0, 1, 1]


def test_nothing_is_left_of_earlier_tokens_in_recycled_memory(arena):
    fill(arena, 500).release()
    buffer = arena.open_nowait()
    buffer.append([7] * 500)
    assert not buffer.arrays().logprobs.any()
    assert not buffer.arrays().loss_mask.any()


def test_growth_doubles_and_sealing_shrinks(arena):
    buffer = arena.open_nowait()
    sizes = set()
    for n in range(40):
        buffer.append([n] * 512)
        sizes.add(buffer.blocks)
    assert sizes == {1, 2, 4, 8, 16, 32}
    ref = buffer.seal()
    assert buffer.blocks == 20
    assert (ref.length, ref.capacity) == (20 * 1024, 20 * 1024)
    assert arena.statistics().blocks_used == 20
    assert buffer.arrays().token_ids.tolist() == [n for n in range(40) for _ in range(512)]


def test_a_buffer_that_cannot_double_grows_as_far_as_it_must(arena):
    free = arena.statistics().blocks_free
    beside = arena.open_nowait((free - 2 - 3) * 1024)
    buffer = arena.open_nowait(2048)
    buffer.append(list(range(2048)))
    buffer.append([9])
    assert buffer.blocks == 3
    with pytest.raises(ArenaFull, match=r"no room for 4096 tokens .* largest free run holds 2048"):
        buffer.append([9] * 1024)
    assert buffer.arrays().token_ids.tolist() == [*range(2048), 9], "what was there is still there"
    beside.release()
    buffer.append([9] * 1024)
    assert len(buffer) == 2048 + 1025


def test_what_is_not_int32_is_refused_and_changes_nothing(arena):
    buffer = arena.open_nowait()
    buffer.append([1])
    with pytest.raises(OverflowError):
        buffer.append([2, 2**31])
    with pytest.raises(TypeError, match="int64"):
        buffer.append(np.asarray([2], dtype=np.int64))
    with pytest.raises(ValueError, match="2 token ids and 1 logprobs"):
        buffer.append([2, 3], [0.0])
    assert buffer.arrays().token_ids.tolist() == [1]


def test_a_sealed_buffer_is_final(arena):
    buffer = fill(arena, 3)
    ref = buffer.seal()
    assert buffer.seal() is ref is buffer.ref
    with pytest.raises(ValueError, match="sealed"):
        buffer.append([1])


def test_a_released_buffer_is_gone_and_its_reference_stale(arena):
    buffer = fill(arena, 3)
    ref = buffer.seal()
    buffer.release()
    buffer.release()
    for use in (buffer.arrays, buffer.seal, lambda: buffer.append([1]), lambda: arena.memory.view(ref)):
        with pytest.raises(StaleReference):
            use()
    again = fill(arena, 3)
    assert again.seal().offset == ref.offset, "the same place"
    assert again.seal().generation > ref.generation
    with pytest.raises(StaleReference, match="acknowledged or released"):
        arena.memory.view(ref)


def test_a_pin_outlives_the_release_and_ends_with_the_reader(arena):
    buffer = fill(arena, 3)
    ref = buffer.seal()
    one, other = arena.add_reader(), arena.add_reader()
    arena.pin(ref, one)
    arena.pin(ref, one)
    arena.pin(ref, other)
    buffer.release()
    assert arena.statistics().blocks_pinned == 1
    arena.unpin(ref, one)
    assert arena.memory.view(ref).token_ids.tolist() == [0, 1, 2]
    arena.remove_reader(other)
    assert arena.statistics().blocks_used == 0
    arena.unpin(ref, one)
    with pytest.raises(StaleReference):
        arena.pin(ref, one)
    with pytest.raises(StaleReference, match="is gone"):
        arena.pin(fill(arena, 1).seal(), other)


def test_views_are_read_only_and_no_copies(arena):
    buffer = fill(arena, 2000)
    ref = buffer.seal()
    for views in (buffer.arrays(), arena.memory.view(ref)):
        offsets = [offset_in(arena.memory, view) - ref.offset for view in views]
        assert offsets == [0, 4 * ref.capacity, 8 * ref.capacity]
        with pytest.raises(ValueError, match="read-only"):
            views.token_ids[0] = 1


@pytest.mark.parametrize(
    "change",
    [{"offset": 0}, {"offset": 10**9}, {"capacity": 10**9}, {"length": -1}, {"length": 1025}, {"capacity": -4}],
)
def test_a_forged_reference_is_refused(arena, change):
    ref = fill(arena, 3).seal()
    fields = {name: getattr(ref, name) for name in ref.__struct_fields__} | change
    with pytest.raises(ProtocolViolation, match="does not lie in the arena"):
        arena.memory.view(ArenaRef(**fields))


def test_a_reference_into_another_arena_is_stale(arena):
    with open_arena(MIB) as other, pytest.raises(StaleReference, match=other.arena_id):
        arena.memory.view(fill(other, 1).seal())


def test_freed_memory_goes_back_to_the_system_and_neighbours_stay():
    with open_arena(64 * MIB, keep_free_bytes=MIB) as arena:
        buffers = [fill(arena, 40_000, first=k) for k in range(60)]
        refs = [buffer.seal() for buffer in buffers]
        full = arena.statistics().committed_bytes
        assert full >= 60 * 40_000 * 9
        for buffer in buffers[1::2]:
            buffer.release()
        assert arena.statistics().committed_bytes < 0.6 * full
        for k in range(0, 60, 2):
            assert np.array_equal(arena.memory.view(refs[k]).token_ids, np.arange(k, k + 40_000))
            assert (arena.memory.view(refs[k]).loss_mask == 1).all()
        for buffer in buffers:
            buffer.release()
        assert arena.statistics().committed_bytes < 0.1 * full


def test_memory_is_committed_as_it_is_written():
    with open_arena(512 * MIB) as arena:
        arena.open_nowait(10_000_000)
        assert arena.statistics().committed_bytes < MIB


async def test_waiting_for_room_ends_with_a_release(arena):
    everything = arena.statistics().blocks_free * 1024
    buffer = arena.open_nowait(everything)
    done = []

    async def wait(tokens):
        await arena.wait_room(tokens)
        done.append(tokens)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, everything)
            nursery.start_soon(wait, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert done == []
            assert not arena.has_room(1)
            buffer.append([1])
            buffer.seal()
            await trio.testing.wait_all_tasks_blocked()
            assert done == [1], "sealing has freed all but a block"
            buffer.release()
        assert done == [1, everything]
        with pytest.raises(ArenaFull):
            await arena.wait_room(everything + 1)


def test_views_outlive_the_arena_and_then_the_mapping_goes():
    with open_arena(MIB) as arena:
        view = fill(arena, 100).arrays().token_ids
        mapping = weakref.ref(arena.memory.mapping)
    del arena
    gc.collect()
    assert view.tolist() == list(range(100))
    del view
    gc.collect()
    assert mapping() is None


def test_the_read_only_descriptor_maps_and_does_not_write(arena):
    ref = fill(arena, 10).seal()
    fd = arena.open_read_only()
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 0)
        with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
            os.ftruncate(fd, 0)
        mapped = map_memory(fd)
    finally:
        os.close(fd)
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        mapped.view(ref).token_ids.flags.writeable = True
    assert mapped.view(ref).token_ids.tolist() == list(range(10))


def test_the_size_can_never_change(arena):
    with pytest.raises(PermissionError):
        os.ftruncate(arena._fd, 4096)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 8192])
def test_what_is_no_arena_is_not_mapped(content):
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, content)
        with pytest.raises(ProtocolViolation, match="not sealed"):
            map_memory(fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        with pytest.raises(ProtocolViolation, match="arena"):
            map_memory(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize(("size", "block_tokens"), [(8192, 1024), (MIB, 0), (MIB, 6)])
def test_impossible_sizes_are_refused(size, block_tokens):
    before = len(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(ValueError, match=r"arena of 8192 bytes|block_tokens"),
        open_arena(size, block_tokens=block_tokens),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_default_size_follows_the_limit_of_the_container(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{500 * MIB}\n")
    monkeypatch.setattr(arena_module, "_CGROUP_LIMITS", (str(limit), str(tmp_path / "missing")))
    assert default_arena_bytes() == 50 * MIB
    limit.write_text("max\n")
    assert 50 * MIB < default_arena_bytes() <= 1024 * MIB
