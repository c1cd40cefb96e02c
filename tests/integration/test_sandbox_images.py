"""Images other than `host`: an unpacked directory with another userland, and the same as a .sif file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_trio.errors import SandboxLost, SandboxUnavailable
from prorl_trio.sandbox.apptainer import ApptainerProvider, find_apptainer
from prorl_trio.sandbox.bubblewrap import BubblewrapProvider
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.reaper import descendants, is_alive

PROGRAMS = ("bash", "sh", "cat", "env", "ls", "sleep")


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A root directory with bash, a handful of programs, and the libraries that they and the project's Python need."""
    root = tmp_path_factory.mktemp("image")
    for folder in ("bin", "dev", "etc", "proc", "tmp", "usr", "var"):
        (root / folder).mkdir()
    (root / "etc/motd").write_text("another userland\n")
    binaries = [Path(str(shutil.which(name))) for name in PROGRAMS]
    for binary in binaries:
        shutil.copy2(binary, root / "bin" / binary.name)
    modules = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")
    for library in _libraries([*binaries, Path(sys.executable), Path(msgspec._core.__file__), *modules]):
        target = root / str(library).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    return root


def _libraries(files):
    listed = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    words = [word for line in listed.splitlines() if line[:1].isspace() for word in line.split()]
    return {word for word in words if word.startswith("/") and Path(word).is_file()}


@pytest.fixture(scope="module")
def sif(image, tmp_path_factory):
    executable = find_apptainer()
    if executable is None:
        pytest.skip("apptainer is not installed: no .sif can be built")
    path = tmp_path_factory.mktemp("sif") / "image.sif"
    built = subprocess.run([executable, "--quiet", "build", path, image], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return path


async def _check(provider, image):
    with trio.fail_after(60):
        async with provider.open_shared():
            before = descendants(os.getpid())
            async with provider.open_sandbox(SandboxSpec(image=str(image))) as sandbox:
                result = await sandbox.bash("cat /etc/motd; ls /usr", timeout_s=20)
                assert result.output.startswith("another userland")
                assert "share" not in result.output
                written = await sandbox.bash("echo changed > /etc/motd; cat /etc/motd; pwd", timeout_s=20)
                assert written.output == "changed\n/home/agent\n"
                await sandbox.write_file("/srv/new/file", b"x" * 100_000)
                cell = await sandbox.ipython("6 * 7", timeout_s=20)
                assert cell.result == "42"
            assert descendants(os.getpid()) <= before
    if image.is_dir():
        assert (image / "etc/motd").read_text() == "another userland\n"


async def _skip_unless_usable(provider):
    report = await provider.probe()
    if not report.usable:
        pytest.skip(f"{provider.name} cannot run here: {report.problem}. What to do: {report.remedy}")


@pytest.mark.parametrize("provider_type", [ApptainerProvider, BubblewrapProvider], ids=lambda p: p.name)
async def test_directory(provider_type, image, tmp_path):
    provider = provider_type(tmp_path)
    await _skip_unless_usable(provider)
    await _check(provider, image)


async def test_sif_and_its_fuse_process(sif, tmp_path):
    provider = ApptainerProvider(tmp_path)
    await _skip_unless_usable(provider)
    await _check(provider, sif)


async def test_killed_launcher_of_a_sif_leaves_no_fuse_process(sif, tmp_path):
    provider = ApptainerProvider(tmp_path)
    await _skip_unless_usable(provider)
    with trio.fail_after(60):
        async with provider.open_shared():
            before = descendants(os.getpid())
            async with provider.open_sandbox(SandboxSpec(image=str(sif))) as sandbox:
                started = descendants(os.getpid()) - before
                (launcher,) = (p for p in started if os.getsid(p.pid) == p.pid)
                os.kill(launcher.pid, signal.SIGKILL)
                with pytest.raises(SandboxLost):
                    await sandbox.bash("sleep 100", timeout_s=200)
            assert not any(map(is_alive, started))


async def test_bubblewrap_refuses_a_sif(tmp_path):
    sif = tmp_path / "image.sif"
    sif.touch()
    with pytest.raises(SandboxUnavailable, match="unpacked directory"):
        async with BubblewrapProvider(tmp_path).open_sandbox(SandboxSpec(image=str(sif))):
            pass


@pytest.mark.parametrize("provider_type", [ApptainerProvider, BubblewrapProvider], ids=lambda p: p.name)
async def test_image_that_cannot_run_the_daemon(provider_type, tmp_path):
    image = tmp_path / "empty"
    for folder in ("proc", "dev", "tmp", "etc", "bin"):
        (image / folder).mkdir(parents=True)
    provider = provider_type(tmp_path)
    await _skip_unless_usable(provider)
    with trio.fail_after(60), pytest.raises(SandboxUnavailable, match="did not start") as caught:
        async with provider.open_sandbox(SandboxSpec(image=str(image))):
            pass
    assert "it said" in str(caught.value)
