"""The owner of a process tree, with trees that do not want to end."""

from __future__ import annotations

import errno
import os

import pytest
import trio

from prorl_trio.sandbox import process_tree
from prorl_trio.sandbox.process_tree import STDERR_TAIL_BYTES, open_process_tree
from prorl_trio.sandbox.reaper import RECORD_NAME, descendants, is_alive
from prorl_trio.types.errors import SandboxUnavailable

ENV = {"PATH": os.defpath}


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(process_tree, "GRACE_S", 0.1)


def _open(script, folder, start_timeout_s=10.0):
    argv = ("sh", "-c", script)
    return open_process_tree(argv, env=ENV, stdin_line=b"token\n", folder=folder, start_timeout_s=start_timeout_s)


async def _open_and_close(script, folder, start_timeout_s=10.0):
    async with _open(script, folder, start_timeout_s):
        pass


@pytest.mark.alone
async def test_gets_its_line_is_recorded_and_ends_with_its_stdin(tmp_path):
    with trio.fail_after(20):
        async with _open('read line; echo "$line" >&2; echo READY; cat', tmp_path) as tree:
            assert f"{tree.pid} " in (tmp_path / RECORD_NAME).read_text()
            started = trio.current_time()
        assert trio.current_time() - started < 1.0
        assert tree.describe_exit() == "exit code 0"


@pytest.mark.parametrize("pipes", [0, 1, 2])
async def test_without_descriptors_it_is_tried_again_and_nothing_is_left(tmp_path, monkeypatch, pipes):
    left, pipe = iter([os.pipe] * pipes), os.pipe

    def few():
        if next(left, None) is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pipe()

    open_now = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pipe", few)
    with pytest.raises(SandboxUnavailable, match="sh cannot be run: Too many open files") as refused:
        await _open_and_close("echo READY; cat", tmp_path)
    assert refused.value.retryable
    assert set(os.listdir("/proc/self/fd")) == open_now


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("echo READY; sleep 3609", id="deaf"),
        pytest.param("trap '' TERM INT HUP; echo READY; while :; do sleep 3609; done", id="ignores-signals"),
        pytest.param("trap '' TERM; (trap '' TERM; sleep 3609) & sleep 3609 & echo READY; wait", id="children"),
        pytest.param("setsid sh -c 'trap \"\" TERM; sleep 3609; :' & sleep 0.1; echo READY; cat", id="new-session"),
    ],
)
async def test_stubborn_trees_end(script, tmp_path, short_grace):
    with trio.fail_after(20):
        async with _open(script, tmp_path) as tree:
            family = descendants(os.getpid())
            assert family
        assert not any(map(is_alive, family | tree.members))
        assert descendants(os.getpid()) == set()


@pytest.mark.parametrize(
    ("script", "words", "retryable"),
    [
        ("echo all is lost >&2; exit 7", "exit code 7; it said: all is lost", True),
        ("kill -9 $$", "killed by SIGKILL", True),
        ("echo SOMETHING; sleep 3609", "did not start: running", False),
        ("head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1", "exit code 1", True),
        ("exec 1>&-; sleep 3609", "did not start", False),
    ],
)
async def test_a_failed_start_says_why(script, words, retryable, tmp_path, short_grace, monkeypatch):
    monkeypatch.setattr(process_tree, "LAST_WORDS_TIMEOUT_S", 0.3)
    with trio.fail_after(20), pytest.raises(SandboxUnavailable, match=words) as caught:
        await _open_and_close(script, tmp_path)
    assert len(str(caught.value)) < STDERR_TAIL_BYTES + 200
    assert caught.value.retryable is retryable
    assert descendants(os.getpid()) == set()


async def test_a_slow_start_names_the_limit(tmp_path):
    with trio.fail_after(20), pytest.raises(SandboxUnavailable, match=r"not ready within 0\.2 s"):
        await _open_and_close("sleep 3609", tmp_path, 0.2)


async def test_a_missing_program_leaves_no_file_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(20), pytest.raises(SandboxUnavailable, match="cannot be run: No such file"):
        async with open_process_tree(
            ("/no/such/program",), env=ENV, stdin_line=b"\n", folder=tmp_path, start_timeout_s=5
        ):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_flood_on_stderr_is_bounded_and_blocks_nobody(tmp_path):
    script = "echo READY; head -c 3000000 /dev/zero | tr '\\0' x >&2; echo last words >&2; exec 2>&-; cat"
    with trio.fail_after(20):
        async with _open(script, tmp_path) as tree:
            await tree._stderr_ended.wait()
            assert tree.stderr_tail().endswith("last words")
            assert len(tree.stderr_tail()) <= STDERR_TAIL_BYTES


@pytest.mark.parametrize(
    ("script", "from_inside"),
    [
        pytest.param("exit 0", True, id="ended-by-itself"),
        pytest.param("exit 3", True, id="failed"),
        pytest.param("exit 139", True, id="its-daemon-crashed"),
        pytest.param("exit 137", False, id="its-daemon-was-killed"),
        pytest.param("exit 70", False, id="an-error-of-its-daemon's-own"),
        pytest.param("kill -9 $$", False, id="killed"),
        pytest.param("kill -15 $$", False, id="terminated"),
        pytest.param("sleep 3609", True, id="silent"),
    ],
)
async def test_how_a_tree_ended_tells_from_where(script, from_inside, tmp_path, short_grace, monkeypatch):
    monkeypatch.setattr(process_tree, "EVIDENCE_TIMEOUT_S", 0.0 if script.startswith("sleep") else 5.0)
    with trio.fail_after(20):
        async with _open(f"echo READY; read line; {script}", tmp_path) as tree:
            assert await tree.ended_from_inside(isolated=True) is from_inside
            if script.startswith("sleep"):
                assert not await tree.ended_from_inside(isolated=False)
        assert not await tree.ended_from_inside(isolated=True)  # it is we who ended it, if it had not ended
