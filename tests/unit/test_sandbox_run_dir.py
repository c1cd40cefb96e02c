"""The node's private folder: where it may be, who owns it, what is swept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from prorl_trio.file_systems import file_system_of
from prorl_trio.sandbox import reaper
from prorl_trio.sandbox.providers.userns import user_namespace_remedy
from prorl_trio.sandbox.run_dir import (
    MARKER_NAME,
    MAX_SOCKET_PATH_BYTES,
    check_base,
    open_run_dir,
    open_shared_run_dir,
    sweep,
)
from prorl_trio.types.errors import SandboxUnavailable

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /tmp rw shared:2 - tmpfs tmpfs rw
41 22 0:40 / /home rw shared:3 - nfs4 server:/home rw
42 22 0:41 / /scratch/with\\040space rw - lustre mds:/scratch rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib", "ext4"),
        ("/tmp/x", "tmpfs"),
        ("/home/me", "nfs4"),
        ("/homes", "ext4"),
        ("/scratch/with space/x", "lustre"),
    ],
)
def test_file_system_by_longest_mount_point(path, kind):
    assert file_system_of(Path(path), MOUNTS) == kind


def test_network_file_systems_are_refused():
    check_base(Path("/tmp"), MOUNTS)
    with pytest.raises(SandboxUnavailable, match=r"/home/me is on a network file system \(nfs4\).*runtime_dir"):
        check_base(Path("/home/me"), MOUNTS)


def test_long_paths_are_refused():
    with pytest.raises(SandboxUnavailable, match=f"bytes, above {MAX_SOCKET_PATH_BYTES}"):
        check_base(Path("/tmp") / ("x" * 80), MOUNTS)


async def test_shared_by_all_users_and_removed_by_the_last(tmp_path):
    with trio.fail_after(30):
        async with open_run_dir(tmp_path) as first:
            async with open_run_dir(tmp_path) as second:
                assert first is second
                assert first.path.stat().st_mode & 0o777 == 0o700
            assert first.path.exists()
            async with first.open_sandbox_dir() as folder:
                assert len(os.fsencode(folder.socket)) <= MAX_SOCKET_PATH_BYTES
                assert folder.control.stat().st_mode & 0o777 == 0o700
            assert not folder.path.exists()
        assert list(tmp_path.iterdir()) == []
        assert reaper.descendants(os.getpid()) == set()


async def test_a_live_folder_is_not_swept_and_a_dead_one_is(tmp_path):
    with trio.fail_after(30):
        dead = tmp_path / "prorl-1-abcdefgh"
        dead.mkdir()
        (dead / MARKER_NAME).touch()
        file, checkout, unmarked = strangers = [tmp_path / f"prorl-{name}" for name in ("file", "trio", "1-unmarked")]
        file.touch()
        checkout.mkdir()
        (checkout / MARKER_NAME).touch()
        unmarked.mkdir()
        async with open_run_dir(tmp_path) as alive:
            assert not dead.exists()
            await trio.to_thread.run_sync(sweep, tmp_path)
            assert alive.path.exists()
        assert sorted(tmp_path.iterdir()) == sorted(strangers)


def test_reap_ends_recorded_processes_and_spares_reused_pids(tmp_path):
    folder = tmp_path / "run" / "sbx"
    folder.mkdir(parents=True)
    with subprocess.Popen(["sleep", "3604"]) as mine, subprocess.Popen(["sleep", "3605"]) as reused:
        recorded = reaper.identify(mine.pid)
        other = reaper.identify(reused.pid)
        assert recorded is not None
        assert other is not None
        reaper.write_record(folder, [recorded, reaper.ProcessId(other.pid, other.start_time - 1)])
        with (folder / reaper.RECORD_NAME).open("a") as record:
            record.write("12")  # the node was killed while it wrote
        reaper.reap(folder.parent)
        assert mine.wait(5) == -9
        assert reused.poll() is None
        reused.kill()
    assert list(tmp_path.iterdir()) == []


def test_a_pid_with_another_start_time_is_neither_killed_nor_waited_for(monkeypatch):
    """Each step by itself: between two of them the pid may have been used again."""
    with subprocess.Popen(["sleep", "3606"]) as child:
        process = reaper.identify(child.pid)
        assert process is not None
        sent = []
        with monkeypatch.context() as patch:
            patch.setattr(reaper.os, "kill", lambda *signalled: sent.append(signalled))
            for start_time in (process.start_time - 1, process.start_time + 1, 0):
                other = reaper.ProcessId(process.pid, start_time)
                assert not reaper.is_alive(other)
                assert reaper.wait_gone([other], 3600) == set()
                reaper.kill([other])
            assert sent == []
            reaper.kill([process])
            assert sent == [(process.pid, signal.SIGKILL)]
        assert reaper.wait_gone([process], 0.0) == {process}
        reaper.kill([process])
        assert child.wait(5) == -signal.SIGKILL


def test_the_reaper_needs_nothing_but_the_standard_library():
    code = "import sys; sys.path.append(sys.argv[1]); import reaper; print([m for m in sys.modules if 'trio' in m])"
    argv = [sys.executable, "-I", "-S", "-c", code, str(Path(reaper.__file__).parent)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces="),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor"),
        ("user/max_user_namespaces", "1000", "container"),
    ],
)
def test_forbidden_user_namespaces_name_the_setting(setting, value, words, tmp_path):
    path = tmp_path / setting
    path.parent.mkdir(parents=True)
    path.write_text(value + "\n")
    assert words in user_namespace_remedy(tmp_path)


NODE_KILLED_WHILE_UNBORN = """
import os, signal, sys
from pathlib import Path
from prorl_trio.sandbox import run_dir

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(run_dir.fcntl if sys.argv[2] == "flock" else run_dir.os, sys.argv[2], die)
run_dir.RunDir(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("moment", ["flock", "rename"])
def test_killed_before_the_folder_has_its_name(moment, tmp_path):
    subprocess.run([sys.executable, "-c", NODE_KILLED_WHILE_UNBORN, tmp_path, moment], check=False, timeout=30)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("new-prorl-")
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unborn_folders_of_others_are_not_swept(tmp_path):
    namespace = os.stat("/proc/self/ns/pid").st_ino
    own = reaper.identify(os.getpid())
    living = f"new-prorl-{namespace}-{own.start_time}-{own.pid}-abcdefgh"
    elsewhere = f"new-prorl-{namespace + 1}-1-4194303-abcdefgh"
    full = f"new-prorl-{namespace}-1-4194303-abcdefgh"
    for name in ("new-prorl-notes", living, elsewhere, full):
        (tmp_path / name).mkdir()
    (tmp_path / full / "somebody's").touch()
    sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


async def test_a_reaper_that_somebody_ends_is_replaced(tmp_path):
    with trio.fail_after(30):
        async with open_shared_run_dir(tmp_path), open_run_dir(tmp_path) as run_dir:
            first = run_dir._reaper
            first.kill()
            while run_dir._reaper is first:
                await trio.sleep(0.01)
            assert run_dir._reaper.returncode is None
            assert run_dir.path.is_dir()
    assert list(tmp_path.iterdir()) == []
