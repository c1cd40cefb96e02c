"""`sandbox.fakeroot`: root inside, who may install things there, and nothing that others may not outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from prorl_launch.doctor import _fakeroot
from prorl_trio.config import SandboxConfig
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.apptainer import ApptainerProvider
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.testing.sandbox_check import checked_sandbox
from prorl_trio.testing.sandbox_contract import CORE_CHECKS, ISOLATION_CHECKS, PROCESS_CHECKS, Contract
from prorl_trio.types.errors import ConfigError, SandboxUnavailable
from support.skips import because

TEST_TIMEOUT_S = 90
ACTION_TIMEOUT_S = 30
CHECKS = [
    check
    for check in (*CORE_CHECKS, *ISOLATION_CHECKS, *PROCESS_CHECKS)
    if check.__name__ != "check_own_processes_only"  # which wants no capability at all: see below for those it has
]
KEPT_CAPABILITIES = "00000000000000fb"
ATTEMPTS = {
    "mount -t tmpfs none /mnt": ("denied", "superuser"),
    "mount -o remount,rw /proc/sys": ("denied", "superuser"),
    "umount /proc/sys": ("superuser", "permitted", "denied"),
    "echo 1 > /proc/sys/kernel/core_pattern": ("Read-only",),
    "echo 100000 > /proc/sys/kernel/pid_max": ("Read-only",),
    "mknod /tmp/disk b 254 0": ("permitted",),
    "chroot / true": ("permitted",),
    "cat /proc/1/environ": ("denied",),
    "ls /proc/1/root/": ("denied",),
    "touch /usr/bin/planted": ("Read-only",),
    "hostname planted": ("permitted", "root", "not found"),
    "unshare --mount true": ("permitted",),
    "for p in /proc/[0-9]*; do grep -qsa prorl_daemon $p/cmdline && cat $p/environ; done; false": ("denied",),
}
AS_USER = """
import sys
from pathlib import Path
import trio
from prorl_trio.sandbox.providers.apptainer import ApptainerProvider
from prorl_trio.sandbox.provider import SandboxSpec

async def main():
    async with ApptainerProvider(Path(sys.argv[1]), fakeroot=True).open_sandbox(SandboxSpec()) as sandbox:
        print((await sandbox.bash("id -u; touch f; chown 0:0 f && grep CapEff /proc/self/status", timeout_s=30)).output)

trio.run(main)
"""


def has_ids():
    """Whether this user has a range of ids for sandboxes: root always, in these tests."""
    return os.geteuid() == 0 or _fakeroot().state == "ok"


@pytest.fixture(scope="session")
def fakeroot_report(ranged_apptainer):
    return trio.run(ApptainerProvider(executable=ranged_apptainer, fakeroot=True).probe)


@pytest.fixture
def provider(ranged_apptainer, fakeroot_report, tmp_path):
    if not fakeroot_report.usable:
        pytest.skip(f"{fakeroot_report.problem}. What to do: {fakeroot_report.remedy}")
    return ApptainerProvider(tmp_path, executable=ranged_apptainer, fakeroot=True)


async def run(sandbox, command):
    result = await sandbox.bash(command, timeout_s=ACTION_TIMEOUT_S)
    return result.output.strip(), result.exit_code


async def test_root_inside_may_give_files_away_and_become_others(provider, tmp_path):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with checked_sandbox(Contract(provider, tmp_path)) as sandbox:
            assert await run(sandbox, "id -u; id -g") == ("0\n0", 0)
            assert await run(sandbox, "touch f; chown root:root f; stat -c %u:%g f") == ("0:0", 0)
            if has_ids():
                assert await run(sandbox, "chown 5:7 f; stat -c %u:%g f") == ("5:7", 0)
                become = "python3 -c 'import os; os.setgid(7); os.setuid(5); print(os.getuid())'"
                assert await run(sandbox, become) == ("5", 0)
                slow = await sandbox.bash("python3 -c 'import os; os.setuid(5); os.system(\"sleep 300\")'", timeout_s=1)
                assert slow.timed_out
                assert (await run(sandbox, "ps -eo user:20,args | grep -c '[s]leep 300'"))[0] == "0"


async def test_root_inside_has_few_powers_and_none_over_the_machine(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            status, _ = await run(sandbox, "grep -E 'Cap|NoNew' /proc/self/status")
            powers = dict(line.split(":\t") for line in status.splitlines())
            assert powers["CapBnd"] == powers["CapPrm"] == KEPT_CAPABILITIES
            assert powers["CapInh"] == powers["CapAmb"] == "0" * 16
            assert powers["NoNewPrivs"] == "1"
            for attempt, reasons in ATTEMPTS.items():
                output, exit_code = await run(sandbox, f"({attempt}) 2>&1")
                assert exit_code != 0, f"{attempt}: it worked: {output}"
                assert any(reason in output for reason in reasons), f"{attempt}: {output}"
            # As root of a further user namespace, where one may be made.
            inner = "unshare --user --map-root-user --mount sh -c 'mount -o remount,rw /proc/sys' 2>&1"
            assert (await run(sandbox, inner))[1] != 0
            cell = await sandbox.ipython("open('/proc/self/status').read()", timeout_s=ACTION_TIMEOUT_S)
            assert f"CapBnd:\\t{KEPT_CAPABILITIES}" in cell.result


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(check, provider, tmp_path):
    await check(Contract(provider, tmp_path))


@pytest.mark.skipif(
    os.geteuid() != 0, reason=because("only root needs to pretend to be somebody else", "run the tests as root")
)
def test_as_a_normal_user_without_further_ids(provider, tmp_path):
    """Then only root is mapped. As in test_sandbox_leaks.py, the user is one of a user namespace."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip(because("there is no unshare program", "apt-get install util-linux"))
    command = [unshare, "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", AS_USER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False)
    assert done.stdout.split() == ["0", "CapEff:", KEPT_CAPABILITIES], done.stderr


@pytest.mark.skipif(
    os.geteuid() != 0, reason=because("this is what the root of the machine may not do", "run the tests as root")
)
async def test_as_root_an_image_that_runs_code_of_its_own_is_refused(provider):
    with trio.fail_after(TEST_TIMEOUT_S), pytest.raises(SandboxUnavailable, match="run the node as another user"):
        async with provider.open_sandbox(SandboxSpec(image="/some/image.sif")):
            pass


@pytest.mark.parametrize("name", ["bubblewrap", "process"])
async def test_other_providers_have_none(name):
    with pytest.raises(ConfigError, match=f"sandbox.fakeroot: the provider '{name}' has none; set sandbox.provider"):
        await choose_provider(SandboxConfig(provider=name, fakeroot=True))


@pytest.mark.usefixtures("provider")
async def test_the_automatic_choice_takes_the_one_that_has_it(ranged_apptainer, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(ranged_apptainer), prepend=os.pathsep)
    chosen = await choose_provider(SandboxConfig(fakeroot=True))
    assert isinstance(chosen, ApptainerProvider)


def test_the_doctor_says_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "subuid").write_text("somebody:100000:65536\n")
    check = _fakeroot(tmp_path)
    assert check.state == "warning"
    assert "subuid has no range" in check.detail
    assert "--add-subuids" in check.remedy
    for name in ("subuid", "subgid"):
        Path(tmp_path, name).write_text(f"{os.geteuid()}:100000:65536\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    check = _fakeroot(tmp_path)
    assert ("no newuidmap" in check.detail, "uidmap" in check.remedy) == (True, True)
