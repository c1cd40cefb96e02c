"""cgroups, over a tree of files in place of the kernel's; and, where one can be made, over the kernel's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from prorl_ipc.limits import SandboxLimits
from prorl_trio.sandbox import reaper
from prorl_trio.sandbox.limits.cgroup import CONTROLLERS, CgroupSite, find_site, open_cgroup
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers import start
from prorl_trio.sandbox.providers.registry import ProcessProvider
from prorl_trio.types.errors import SandboxUnavailable
from support.skips import because

MIB = 1024 * 1024
WRITABLE_CGROUPS = "run where cgroups of version 2 are mounted and may be written (a container: --cgroupns=private)"
LIMITS = SandboxLimits(memory_bytes=64 * MIB, disk_bytes=MIB, max_processes=20)
UNIFIED = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


def group(path, enabled=""):
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.subtree_control").write_text(enabled)
    (path / "cgroup.procs").touch()
    (path / "cgroup.controllers").write_text("cpu memory pids")
    return path


@pytest.fixture
def machine(tmp_path):
    """`/` of cgroups, and a file that says in which this process is."""
    (tmp_path / "own").write_text("0::/user/job/node\n")
    for path in ("", "user", "user/job", "user/job/node"):
        group(tmp_path / "cgroup" / path)
    return tmp_path / "cgroup", tmp_path / "own"


@pytest.mark.parametrize("place", ["user/job/node", "user/job"])
def test_the_own_cgroup_or_the_one_above_it(machine, place):
    (machine[0] / place / "cgroup.subtree_control").write_text("cpu memory pids")
    assert find_site(*machine) == CgroupSite(machine[0] / place)


def test_one_without_the_controllers_is_no_place(machine):
    (machine[0] / "user/job/node/cgroup.subtree_control").write_text("cpu pids")
    (machine[0] / "user/cgroup.subtree_control").write_text("cpu memory pids")
    site = find_site(*machine)
    assert site.path is None
    assert "/user/job/node does not enable memory" in site.problem


def test_one_that_is_not_ours(machine, monkeypatch):
    (machine[0] / "user/job/cgroup.subtree_control").write_text("memory pids")
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != machine[0] / "user/job")
    assert find_site(*machine) == CgroupSite(None, "/user/job is not writable")


def test_the_old_cgroups(machine):
    machine[1].write_text("5:memory:/job\n")
    assert "version 2" in find_site(*machine).problem


def test_the_root_has_nothing_above_it(machine):
    machine[1].write_text("0::/\n")
    (machine[0].parent / "cgroup.subtree_control").write_text("memory pids")
    assert find_site(*machine).path is None
    (machine[0] / "cgroup.subtree_control").write_text("memory pids")
    assert find_site(*machine).path == machine[0]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "prorl-1-abcdefgh" / "sbx-1"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def rmdir_as_in_the_kernel(monkeypatch):
    """There the files of a cgroup go with it."""
    remove = os.rmdir

    def rmdir(path, **options):
        if os.path.basename(path).startswith(reaper.CGROUP_PREFIX):
            for file in os.scandir(path):
                os.unlink(file)
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)


@pytest.mark.usefixtures("rmdir_as_in_the_kernel")
async def test_limits_record_and_removal(machine, folder):
    async with open_cgroup(machine[0], folder, LIMITS) as cgroup:
        assert (folder / "cgroup").read_text() == str(cgroup.path)
        assert (cgroup.path / "memory.max").read_text() == str((64 + 4 + 256) * MIB)
        assert (cgroup.path / "pids.max").read_text() == "84"
        assert not (cgroup.path / "memory.swap.max").exists()
    assert not cgroup.path.exists()


@pytest.mark.usefixtures("rmdir_as_in_the_kernel")
async def test_a_breach_is_told_once(machine, folder):
    async with open_cgroup(machine[0], folder, LIMITS) as cgroup:
        assert cgroup.next_breach() == ("", "")
        (cgroup.path / "memory.events").write_text("low 0\nmax 0\noom 0\noom_kill 1\n")  # by the machine's own need
        assert cgroup.next_breach() == ("", "")
        (cgroup.path / "memory.events").write_text("low 0\nmax 40\noom 2\noom_kill 2\n")
        assert cgroup.next_breach()[0] == "memory"
        assert cgroup.next_breach() == ("", "")
        (cgroup.path / "pids.events").write_text("max 7\n")
        breach, text = cgroup.next_breach()
        assert (breach, "20 of them" in text) == ("processes", True)
        assert cgroup.next_breach() == ("", "")


@pytest.mark.usefixtures("rmdir_as_in_the_kernel")
async def test_one_that_cannot_be_made(folder, tmp_path):
    with pytest.raises(SandboxUnavailable, match="cannot make the cgroup"):
        async with open_cgroup(tmp_path / "no such place", folder, LIMITS):
            pass


@pytest.mark.usefixtures("rmdir_as_in_the_kernel")
async def test_a_sandbox_starts_in_its_cgroup_and_its_results_name_what_the_kernel_did(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "own_site", lambda: CgroupSite(machine[0]))
    run = tmp_path / "run"
    run.mkdir()
    with trio.fail_after(60):
        async with ProcessProvider(run).open_sandbox(SandboxSpec(limits=LIMITS)) as sandbox:
            (cgroup,) = machine[0].glob(f"{reaper.CGROUP_PREFIX}*")
            assert int((cgroup / "cgroup.procs").read_text()) in {p.pid for p in reaper.descendants(os.getpid())}
            assert (await sandbox.bash("echo fine", timeout_s=20)).breach == ""
            (cgroup / "memory.events").write_text("oom 1\noom_kill 1\n")
            result = await sandbox.bash("echo killed", timeout_s=20)
            assert (result.breach, "kernel" in result.breach_text) == ("memory", True)
            assert (await sandbox.exec(["true"], timeout_s=20)).breach == ""
    assert not cgroup.exists()


@pytest.mark.usefixtures("rmdir_as_in_the_kernel")
def test_the_reaper_removes_what_was_recorded_and_only_that(folder, tmp_path):
    ours, others = tmp_path / f"sandbox-of-{folder.parent.name}-sbx-1", tmp_path / "sandbox-of-prorl-2-abcdefgh-sbx-1"
    for path in (ours, others):
        path.mkdir()
    another = folder.parent / "sbx-2"
    another.mkdir()
    reaper.write_cgroup_record(folder, ours)
    reaper.write_cgroup_record(another, others)
    reaper._reap_cgroups(folder.parent)
    assert not ours.exists()
    assert others.exists()


@pytest.fixture
def real_group():
    """A cgroup of the kernel's own, perhaps without controllers."""
    for mount in UNIFIED:
        path = mount / f"{reaper.CGROUP_PREFIX}test-{os.getpid()}"
        try:
            if not (mount / "cgroup.procs").exists() or not (mount / "cgroup.controllers").exists():
                continue
            path.mkdir()
        except OSError:
            continue
        yield path
        if path.exists():
            path.rmdir()
        return
    pytest.skip(because("no cgroup of version 2 can be made here", WRITABLE_CGROUPS))


def test_a_real_cgroup_is_emptied_and_removed(real_group):
    sleeper = "import os, sys, time; open(sys.argv[1] + '/cgroup.procs', 'w').write('0'); print(flush=True); "
    sleeper += "os.fork(); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", sleeper, str(real_group)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert reaper.remove_cgroup(real_group)
        assert process.wait(20) == -9
    assert not real_group.exists()
    assert reaper.remove_cgroup(real_group), "one that is gone is fine"


async def test_the_kernels_limits_are_named_in_the_result(tmp_path):
    site = find_site()
    if site.path is None:
        pytest.skip(because(f"the kernel keeps no limits of sandboxes here: {site.problem}", WRITABLE_CGROUPS))
    assert set((site.path / "cgroup.subtree_control").read_text().split()) >= CONTROLLERS
    hog = "import os\nfor i in range(99):\n fd = os.memfd_create('x')\n os.write(fd, bytes(16 * 2**20))"
    with trio.fail_after(60):
        async with ProcessProvider(tmp_path).open_sandbox(SandboxSpec(limits=LIMITS)) as sandbox:
            result = await sandbox.exec(["python3", "-c", hog], timeout_s=40)
    assert (result.breach, result.exit_code) == ("memory", 137)
