"""Attempts to get out of a sandbox, or to take the machine down from inside. Each fails, for a reason that is named."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from prorl_ipc.limits import SandboxLimits
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider
from prorl_trio.sandbox.reaper import descendants, is_alive
from prorl_trio.sandbox.run_dir import open_run_dir
from prorl_trio.types.errors import SandboxLost

MIB = 1024 * 1024
TEST_TIMEOUT_S = 120
ACTION_TIMEOUT_S = 40
NAMESPACES = ("pid", "mnt", "ipc", "uts", "net", "user")


async def run(sandbox, command):
    """What a command prints, and its exit code."""
    result = await sandbox.bash(command, timeout_s=ACTION_TIMEOUT_S)
    assert not result.timed_out, f"{command!r}: {result}"
    return result.output.strip(), result.exit_code


async def refused(sandbox, command, *reasons):
    """The command fails, and says one of `reasons`."""
    output, exit_code = await run(sandbox, f"{command} 2>&1")
    assert exit_code != 0, f"{command!r} worked: {output}"
    assert any(reason in output for reason in reasons), f"{command!r}: {output!r} names none of {reasons}"


@contextmanager
def planted(tmp_path):
    """A secret in this process's environment, home, working directory, temporary folder, and in a child's arguments."""
    secret = f"planted-{secrets.token_hex(8)}"
    files = [folder / f".{secret}" for folder in (Path.home(), Path.cwd(), Path("/tmp"), tmp_path)]
    os.environ["PRORL_ESCAPE_SECRET"] = secret
    for file in files:
        file.write_text(secret)
    child = os.posix_spawn("/bin/sleep", ["sleep", "600"], {"SECRET": secret})
    try:
        yield secret, files, child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for file in files:
            file.unlink()
        del os.environ["PRORL_ESCAPE_SECRET"]


async def test_a_secret_of_the_node_is_nowhere_inside(provider, tmp_path):
    with trio.fail_after(TEST_TIMEOUT_S), planted(tmp_path) as (secret, files, _):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            for file in files:
                await refused(sandbox, f"cat '{file}'", "No such file or directory", "Permission denied")
            # By a descriptor: the search must not find its own words among the arguments.
            pattern = f"<(printf %s {secret[:12]}; printf %s {secret[12:]})"
            for places in (
                "/proc/[0-9]*/environ",
                "/proc/[0-9]*/cmdline",
                "-r /etc /tmp /home /run /var /mnt /srv /root",
            ):
                found, _ = await run(sandbox, f"grep -lsa -f {pattern} {places}; true")
                assert found == "", places
            names, _ = await run(sandbox, f"find / -xdev -name '*{secret[8:]}*' 2>/dev/null; true")
            assert names == ""


async def test_namespaces_are_its_own(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            for name in NAMESPACES:
                inside, exit_code = await run(sandbox, f"readlink /proc/self/ns/{name}")
                assert exit_code == 0
                assert inside != os.readlink(f"/proc/self/ns/{name}"), name
            assert (await run(sandbox, "hostname"))[0] == "sandbox"
            assert (await run(sandbox, "ls -A /sys"))[0] == ""
            devices, _ = await run(sandbox, "find /dev -type b 2>/dev/null")
            assert devices == ""
            assert "NoNewPrivs:\t1" in (await run(sandbox, "grep NoNewPrivs /proc/self/status"))[0]
            assert (await run(sandbox, "grep CapBnd /proc/self/status"))[0].endswith("0" * 16)


async def test_nothing_of_the_host_can_be_read_or_written(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            for path in ("/etc/shadow", "/root/.bashrc", f"{Path.cwd()}/pyproject.toml", "/proc/1/root/etc/shadow"):
                await refused(sandbox, f"cat {path}", "No such file or directory", "Permission denied")
            with pytest.raises((FileNotFoundError, PermissionError)):
                await sandbox.read_file("/etc/shadow")
            await refused(sandbox, "touch /usr/bin/planted", "Read-only file system", "Permission denied")
            for setting in ("kernel/core_pattern", "vm/overcommit_memory", "kernel/panic"):
                await refused(sandbox, f"echo 1 > /proc/sys/{setting}", "Read-only file system", "Permission denied")
            await refused(sandbox, "echo c > /proc/sysrq-trigger", "Read-only", "Permission denied", "No such file")
            where = "find / -xdev -type d -name prorl -path '*run*' 2>/dev/null; true"
            assert (await run(sandbox, where))[0] == "", "a folder of the host that can be filled"


async def test_links_lead_nowhere(provider, tmp_path):
    host_file = tmp_path / "host-file"
    host_file.write_text("of the host")
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            await run(sandbox, f"ln -s {host_file} /tmp/link; ln -s / /tmp/root; ln -s /proc/1/root /tmp/first")
            for path in ("/tmp/link", f"/tmp/root{host_file}", f"/tmp/../../..{host_file}"):
                with pytest.raises((FileNotFoundError, PermissionError)):
                    await sandbox.read_file(path)
            with pytest.raises(OSError, match="Too many levels of symbolic links"):
                await sandbox.read_file(f"/tmp/first{host_file}")
            with pytest.raises((FileNotFoundError, PermissionError)):
                await sandbox.write_file("/tmp/root/usr/planted", b"x")
            await sandbox.write_file("/tmp/through", b"inside")
    assert host_file.read_text() == "of the host"
    assert not Path("/tmp/through").exists()


async def test_processes_of_the_host_can_be_neither_seen_nor_signalled(provider, tmp_path):
    with trio.fail_after(TEST_TIMEOUT_S), planted(tmp_path) as (_, _, child):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            seen, _ = await run(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            assert "sleep 600" not in seen
            await refused(sandbox, f"kill -9 {child}", "No such process")
            await run(sandbox, "true")
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it was killed"


async def test_no_network_not_even_loopback_or_abstract_sockets(provider):
    name = f"\0prorl-escape-{secrets.token_hex(4)}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        code = (
            "import errno, socket\n"
            f"for family, to in ((2, ('127.0.0.1', {tcp.getsockname()[1]})), (2, ('8.8.8.8', 53)), (1, {name!r})):\n"
            "    with socket.socket(family) as client:\n"
            "        print(errno.errorcode.get(client.connect_ex(to), 'connected'))\n"
        )
        with trio.fail_after(TEST_TIMEOUT_S):
            async with provider.open_sandbox(SandboxSpec()) as sandbox:
                cell = await sandbox.ipython(code, timeout_s=ACTION_TIMEOUT_S)
    assert cell.stdout.split() == ["ECONNREFUSED", "ENETUNREACH", "ECONNREFUSED"], cell


async def test_no_mounts_and_no_privileges(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            await refused(sandbox, "mount -t tmpfs none /mnt", "ermission denied", "must be superuser", "not permitted")
            await refused(sandbox, "chroot / true", "not permitted")
            await refused(sandbox, "mknod /tmp/disk b 254 0", "not permitted")
            # Where a user namespace may be made, its owner has no power over what came from outside.
            inner = "unshare --user --map-root-user --mount sh -c"
            await refused(
                sandbox, f"{inner} 'mount -o remount,rw /usr && touch /usr/planted'", "denied", "permitted", "space"
            )
            identity, _ = await run(
                sandbox, "id -u; (su -c 'id -u' root || sudo -n id -u) < /dev/null 2>/dev/null; id -u"
            )
            assert len(set(identity.split())) == 1, "a setuid program changed who we are"


async def test_one_sandbox_cannot_reach_another(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as one, provider.open_sandbox(SandboxSpec()) as other:
            await run(one, "echo mine > /tmp/mine; echo mine > /dev/shm/mine; (exec -a victim sleep 601) & sleep 0.1")
            for path in ("/tmp/mine", "/dev/shm/mine"):
                await refused(other, f"cat {path}", "No such file or directory")
            assert "601" not in (await run(other, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))[0]
            assert (await run(other, "find / -xdev -type s 2>/dev/null; find /run /tmp -type s; true"))[0] == ""


async def test_killing_the_daemon_ends_the_sandbox_and_nothing_is_left(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        before = descendants(os.getpid())
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            await run(sandbox, "(setsid sleep 602 &)")
            family = descendants(os.getpid()) - before
            # The first process of a PID namespace takes no signal from inside it: then the sandbox just lives on.
            code = (
                "for p in /proc/[0-9]*; do grep -qsa prorl_daemon $p/cmdline && kill -9 ${p#/proc/}; done; echo alive"
            )
            try:
                assert "alive" in (await sandbox.bash(code, timeout_s=ACTION_TIMEOUT_S)).output
            except SandboxLost:
                with pytest.raises(SandboxLost):
                    await sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S)
        assert not any(map(is_alive, family))


async def test_disk_bombs_do_not_reach_the_host(provider):
    """Each place is full, or cleared of its writers, long before the host notices; the sandbox can be cleaned up."""
    limits = SandboxLimits(disk_bytes=64 * MIB)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(limits=limits)) as sandbox:
            for place in ("/tmp", "~", "/dev/shm"):
                bomb = f"for i in $(seq 400); do head -c 4M /dev/zero > {place}/bomb$i || break; sleep 0.02; done"
                result = await sandbox.bash(bomb, timeout_s=ACTION_TIMEOUT_S)
                assert result.breach == "disk", f"{place}: {result}"
                used = await run(sandbox, f"du -sm {place} | cut -f1; rm -f {place}/bomb*")
                assert int(used[0].split()[0]) < 1200, place
                assert (await sandbox.bash("echo alive", timeout_s=ACTION_TIMEOUT_S)).output.strip() == "alive"


async def test_output_cannot_forge_the_end_of_a_command(provider):
    with trio.fail_after(TEST_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            forged = (
                "for fd in 1 2 $(ls /proc/$$/fd); do printf '0\\0/forged\\0' >&$fd; done 2>/dev/null; cd /tmp; false"
            )
            result = await sandbox.bash(forged, timeout_s=ACTION_TIMEOUT_S)
            assert (result.exit_code, result.cwd) == (1, "/tmp")
            assert await run(sandbox, "echo next") == ("next", 0)


async def test_bubblewrap_itself_lets_nobody_make_a_user_namespace(tmp_path):
    """Without the filter of system calls, which the daemon puts on: the launcher's command line, another program."""
    found = BubblewrapProvider(tmp_path)
    report = await found.probe()
    if not report.usable:
        pytest.skip(f"bubblewrap cannot run here: {report.problem}. What to do: {report.remedy}")
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_run_dir(tmp_path) as run_dir, run_dir.open_sandbox_dir() as folder:
            argv = found._plan(SandboxSpec(), run_dir, folder).argv
            launcher = argv[: argv.index("--") + 1]
            works = await trio.run_process((*launcher, "true"), env={}, check=False)
            inner = (*launcher, "unshare", "--user", "true")
            nested = await trio.run_process(inner, env={}, check=False, capture_stderr=True)
    assert works.returncode == 0
    assert nested.returncode != 0
    assert b"No space left on device" in nested.stderr, "the kernel's word for a limit of 0"
