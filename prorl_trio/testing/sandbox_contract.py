"""The contract of sandbox providers, as checks that you can run on your own provider.

`CORE_CHECKS` apply to any provider, including an in-memory fake, and `PROCESS_CHECKS` to providers that start processes
here. `ISOLATION_CHECKS` apply if `isolated` is set, `LAYER_CHECKS` if `has_layers` is set, and `NO_LAYER_CHECKS`
otherwise. A check takes a `Contract` and raises AssertionError. Each has its own deadline. They use only the sandbox's
own features, so they apply to any image.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

import prorl_trio.types
from prorl_ipc.file_calls import EditFile
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.reaper import descendants
from prorl_trio.sandbox.sandbox import ShellBusy, ShellIdle
from prorl_trio.sandbox.transfer import TransferOptions
from prorl_trio.testing.sandbox_check import (
    ACTION_TIMEOUT_S,
    CHECK_TIMEOUT_S,
    Contract,
    assert_no_more,
    bash,
    checked_sandbox,
    command_of,
    open_and_close,
    planted_secret,
    raises,
    traces,
)
from prorl_trio.testing.sandbox_process_checks import PROCESS_CHECKS
from prorl_trio.types.errors import SandboxLost, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from prorl_trio.sandbox.sandbox import Sandbox

__all__ = ["CORE_CHECKS", "ISOLATION_CHECKS", "LAYER_CHECKS", "NO_LAYER_CHECKS", "PROCESS_CHECKS", "Contract"]


async def check_bash_keeps_state(contract: Contract) -> None:
    """Variables and the working directory persist from one command to the next."""
    async with checked_sandbox(contract) as sandbox:
        await bash(sandbox, "greeting=hello\ncd /tmp")
        assert await bash(sandbox, "echo $greeting") == "hello"
        result = await sandbox.bash("pwd", timeout_s=ACTION_TIMEOUT_S)
        assert (result.output.strip(), result.cwd) == ("/tmp", "/tmp")


async def check_exit_code_is_a_result(contract: Contract) -> None:
    """A command that fails is not an error."""
    async with checked_sandbox(contract) as sandbox:
        assert (await sandbox.bash("false", timeout_s=ACTION_TIMEOUT_S)).exit_code == 1
        assert (await sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S)).exit_code == 0
        ended = await sandbox.bash("exit 3", timeout_s=ACTION_TIMEOUT_S)
        assert (ended.exit_code, ended.restarted) == (3, True)
        assert await bash(sandbox, "echo again") == "again"


async def check_bash_timeout(contract: Contract) -> None:
    """A command that exceeds its time is stopped, and the sandbox stays usable."""
    async with checked_sandbox(contract) as sandbox:
        result = await sandbox.bash("echo before\nsleep 3600", timeout_s=0.3)
        assert result.timed_out
        assert result.output.startswith("before")
        assert await bash(sandbox, "echo after") == "after"


async def check_environment_is_as_specified(contract: Contract) -> None:
    """Variables of the spec are set for the tools."""
    async with checked_sandbox(contract, SandboxSpec(env={"FLAVOUR": "vanilla"})) as sandbox:
        assert await bash(sandbox, "echo $FLAVOUR") == "vanilla"


async def check_ipython_keeps_state(contract: Contract) -> None:
    """Names persist, the last expression is the result, an exception is a result too, a restart clears the state."""
    async with checked_sandbox(contract) as sandbox:
        first = await sandbox.ipython("x = 41", timeout_s=ACTION_TIMEOUT_S)
        assert (first.result, first.error) == (None, None)
        second = await sandbox.ipython("print(x)\nx + 1", timeout_s=ACTION_TIMEOUT_S)
        assert (second.stdout, second.result) == ("41\n", "42")
        failed = await sandbox.ipython("1 / 0", timeout_s=ACTION_TIMEOUT_S)
        assert failed.error is not None
        assert failed.error.name == "ZeroDivisionError"
        await sandbox.restart_ipython()
        forgotten = await sandbox.ipython("x", timeout_s=ACTION_TIMEOUT_S)
        assert forgotten.error is not None
        assert forgotten.error.name == "NameError"


async def check_unknown_kernel(contract: Contract) -> None:
    """A missing Jupyter kernel is refused by name; the sandbox and its own shell stay usable."""
    async with checked_sandbox(contract) as sandbox:
        await sandbox.ipython("x = 41", timeout_s=ACTION_TIMEOUT_S)
        error = await raises(
            SandboxUnavailable, sandbox.ipython("1", timeout_s=ACTION_TIMEOUT_S, kernel="no-such-kernel")
        )
        assert "no-such-kernel" in str(error)
        await raises(SandboxUnavailable, sandbox.restart_ipython(kernel="no-such-kernel"))
        assert (await sandbox.ipython("x", timeout_s=ACTION_TIMEOUT_S)).result == "41"


async def check_files_round_trip(contract: Contract) -> None:
    """5 MB are returned bit for bit; unreadable files give the same errors as ordinary file access."""
    content = os.urandom(5 * 1024 * 1024)
    async with checked_sandbox(contract) as sandbox:
        folder = f"/tmp/files-{secrets.token_hex(4)}"
        path = f"{folder}/deep/er/file"
        await sandbox.write_file(path, content)
        assert await sandbox.read_file(path) == content
        await sandbox.write_file(path, b"")
        assert await sandbox.read_file(path) == b""
        await sandbox.write_file(path, b"123")
        await raises(FileNotFoundError, sandbox.read_file(f"{folder}/none"))
        await raises(IsADirectoryError, sandbox.read_file(folder))
        await raises(ValueError, sandbox.read_file(path, max_bytes=2))
        await raises(ValueError, sandbox.read_file("three"))
        await sandbox.bash(f"rm -r {folder}", timeout_s=ACTION_TIMEOUT_S)  # some providers share /tmp


async def check_exec_is_one_shot(contract: Contract) -> None:
    """A program's streams are separate and exact. Exit codes and timeouts are results; an unknown program is not."""
    async with checked_sandbox(contract) as sandbox:
        echoed = await sandbox.exec(["echo", "two  words"], timeout_s=ACTION_TIMEOUT_S)
        assert (echoed.exit_code, echoed.stdout, echoed.stderr) == (0, b"two  words\n", b"")
        content = bytes(range(256)) * 1000
        assert (await sandbox.exec(["cat"], timeout_s=ACTION_TIMEOUT_S, stdin=content)).stdout == content
        assert (await sandbox.exec(["false"], timeout_s=ACTION_TIMEOUT_S)).exit_code == 1
        late = await sandbox.exec(["sleep", "3600"], timeout_s=0.2)
        assert (late.exit_code, late.timed_out) == (None, True)
        await raises(FileNotFoundError, sandbox.exec(["no-such-program"], timeout_s=ACTION_TIMEOUT_S))
        assert await bash(sandbox, "echo alive") == "alive"


async def check_editor(contract: Contract) -> None:
    """An agent's editor creates a file once, replaces a unique text, and reports a failed edit."""
    async with checked_sandbox(contract) as sandbox:
        path = f"/tmp/edited-{secrets.token_hex(4)}"
        assert (await sandbox.edit_file(EditFile(command="create", path=path, file_text="a\nb\nb\n"))).ok
        assert not (await sandbox.edit_file(EditFile(command="create", path=path, file_text="other"))).ok
        assert not (await sandbox.edit_file(EditFile(command="str_replace", path=path, old_str="b", new_str="c"))).ok
        assert (await sandbox.edit_file(EditFile(command="str_replace", path=path, old_str="a", new_str="x"))).ok
        viewed = await sandbox.edit_file(EditFile(command="view", path=path))
        assert viewed.ok
        assert viewed.output.endswith("     1\tx\n     2\tb\n     3\tb\n")
        assert await sandbox.read_file(path) == b"x\nb\nb\n"
        await sandbox.bash(f"rm {path}", timeout_s=ACTION_TIMEOUT_S)  # some providers share /tmp
        assert not (await sandbox.edit_file(EditFile(command="view", path="/tmp/none"))).ok


async def check_folders_travel(contract: Contract) -> None:
    """A folder is uploaded and downloaded bit for bit; existing files are overwritten only on request."""
    async with checked_sandbox(contract) as sandbox:
        remote = f"/tmp/tree-{secrets.token_hex(4)}"
        with tempfile.TemporaryDirectory() as scratch:
            await _travel(sandbox, Path(scratch), remote)
        await sandbox.bash(f"rm -r {remote}", timeout_s=ACTION_TIMEOUT_S)  # some providers share /tmp


async def _travel(sandbox: Sandbox, scratch: Path, remote: str) -> None:
    content = {"deep/er/file": os.urandom(3_000_000), "script": b"#!/bin/sh"}
    for name, data in content.items():
        _write(scratch / "in" / name, data)
    report = await sandbox.upload(scratch / "in", remote)
    assert report.size_bytes == 3_000_009
    assert await sandbox.read_file(f"{remote}/script") == content["script"]
    await raises(FileExistsError, sandbox.upload(scratch / "in", remote))
    await sandbox.upload(scratch / "in", remote, options=TransferOptions(overwrite=True))
    await sandbox.download(remote, scratch / "out")
    assert _contents(scratch / "out") == content
    await sandbox.download(f"{remote}/script", scratch / "one")
    await raises(FileExistsError, sandbox.download(remote, scratch / "out"))
    await raises(FileNotFoundError, sandbox.download("/tmp/none", scratch / "none"))
    small = TransferOptions(max_bytes=1000)
    await raises(ValueError, sandbox.download(remote, scratch / "large", options=small))
    assert sorted(os.listdir(scratch)) == ["in", "one", "out"]


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def check_output_is_capped(contract: Contract) -> None:
    """A long output is reduced to its first and last part, with a count of the omitted bytes."""
    async with checked_sandbox(contract) as sandbox:
        words = " ".join(f"word{i}" for i in range(2000))
        result = await sandbox.bash(f"echo {words}", timeout_s=ACTION_TIMEOUT_S, max_output_bytes=1000)
        assert result.dropped_bytes > 10_000
        assert len(result.output) < 1200
        assert result.output.startswith("word0 ")
        assert result.output.rstrip().endswith("word1999")


async def check_commands_that_go_on(contract: Contract) -> None:
    """A silent command is returned while running, accepts input and C-c, and blocks others; a restart ends it."""
    async with checked_sandbox(contract) as sandbox:
        result = await sandbox.bash("read name; echo got $name", timeout_s=ACTION_TIMEOUT_S, quiet_timeout_s=0.2)
        assert (result.running, result.exit_code) == (True, None)
        await raises(ShellBusy, sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S))
        result = await sandbox.bash_input(b"you\n", timeout_s=ACTION_TIMEOUT_S)
        assert (result.running, result.exit_code, result.output) == (False, 0, "got you\n")
        await raises(ShellIdle, sandbox.bash_input(b"", timeout_s=ACTION_TIMEOUT_S))
        await sandbox.bash("sleep 3604", timeout_s=ACTION_TIMEOUT_S, quiet_timeout_s=0.2)
        result = await sandbox.bash_input(b"\x03", timeout_s=ACTION_TIMEOUT_S)
        assert (result.running, result.exit_code) == (False, 130)
        await sandbox.bash("sleep 3605", timeout_s=ACTION_TIMEOUT_S, quiet_timeout_s=0.2)
        await sandbox.restart_bash()
        assert await bash(sandbox, "echo anew") == "anew"


async def check_closed_is_lost(contract: Contract) -> None:
    """After the block every call raises SandboxLost, repeatedly."""
    async with checked_sandbox(contract) as sandbox:
        pass
    with trio.fail_after(ACTION_TIMEOUT_S):
        await raises(SandboxLost, sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S))
        await raises(SandboxLost, sandbox.read_file("/tmp/three"))


async def check_error_in_the_block(contract: Contract) -> None:
    """The user's own error propagates unchanged, and the sandbox is gone."""
    error = RuntimeError("the user's own")

    async def fail() -> None:
        async with contract.provider.open_sandbox(SandboxSpec()) as sandbox:
            await bash(sandbox, "true")
            raise error

    with trio.fail_after(CHECK_TIMEOUT_S):
        before = traces(contract.base)
        assert await raises(RuntimeError, fail()) is error
        assert_no_more(before, traces(contract.base))


async def check_unusable_image(contract: Contract) -> None:
    """The message contains the reason, and nothing remains."""
    with trio.fail_after(CHECK_TIMEOUT_S):
        before = traces(contract.base)
        error = await raises(SandboxUnavailable, open_and_close(contract, SandboxSpec(image="/does/not/exist")))
        assert "/does/not/exist" in str(error), f"the message does not name the image: {error}"
        assert_no_more(before, traces(contract.base))


async def check_one_action_at_a_time(contract: Contract) -> None:
    """Concurrent actions wait for each other, and each gets its own answer."""
    async with checked_sandbox(contract) as sandbox:
        answers: dict[int, str] = {}

        async def ask(number: int) -> None:
            answers[number] = await bash(sandbox, f"echo {number}")

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask, number)
        assert answers == {number: str(number) for number in range(5)}


async def check_two_at_once(contract: Contract) -> None:
    """Two sandboxes do not share state."""
    async with checked_sandbox(contract) as first, contract.provider.open_sandbox(SandboxSpec()) as second:
        assert first.sandbox_id != second.sandbox_id
        await bash(first, "who=first")
        await bash(second, "who=second")
        assert await bash(first, "echo $who") == "first"
        assert await bash(second, "echo $who") == "second"


async def check_cancelled_call(contract: Contract) -> None:
    """A cancelled command has ended when the call returns; the sandbox is then usable or permanently lost."""
    async with checked_sandbox(contract) as sandbox:
        await bash(sandbox, "true")
        with trio.move_on_after(0.2) as scope:
            await sandbox.bash("sleep 3601", timeout_s=3600)
        assert scope.cancelled_caught
        assert not [pid for pid in descendants(os.getpid()) if "sleep 3601" in command_of(pid.pid)]
        try:
            assert await bash(sandbox, "echo alive") == "alive"
        except SandboxLost:
            await raises(SandboxLost, sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S))


CORE_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_bash_keeps_state,
    check_exit_code_is_a_result,
    check_bash_timeout,
    check_environment_is_as_specified,
    check_ipython_keeps_state,
    check_unknown_kernel,
    check_exec_is_one_shot,
    check_files_round_trip,
    check_editor,
    check_folders_travel,
    check_output_is_capped,
    check_commands_that_go_on,
    check_closed_is_lost,
    check_error_in_the_block,
    check_unusable_image,
    check_one_action_at_a_time,
    check_two_at_once,
    check_cancelled_call,
)


@contextmanager
def _layers(**files: dict[str, str]) -> Iterator[dict[str, Path]]:
    """Create folders by name, each with these files."""
    with tempfile.TemporaryDirectory(prefix="prorl-layers-") as scratch:
        folders = {}
        for name, content in files.items():
            folders[name] = Path(scratch, name)
            folders[name].mkdir()
            for place, text in content.items():
                path = folders[name] / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        yield folders


def _spec(*layers: Path) -> SandboxSpec:
    return SandboxSpec(layers=tuple(map(str, layers)))


async def check_layers_lie_in_order(contract: Contract) -> None:
    """All layers are visible; a later layer hides files of an earlier one."""
    environment = {"opt/env/lib/a": "a", "testbed/both": "environment"}
    repository = {"testbed/own": "own", "testbed/both": "repository"}
    with _layers(environment=environment, repository=repository) as folders:
        for order, seen in (
            (("environment", "repository"), b"repository"),
            (("repository", "environment"), b"environment"),
        ):
            async with checked_sandbox(contract, _spec(*(folders[name] for name in order))) as sandbox:
                assert await sandbox.read_file("/opt/env/lib/a") == b"a"
                assert await sandbox.read_file("/testbed/own") == b"own"
                assert await sandbox.read_file("/testbed/both") == seen, order


async def check_layers_are_read_only(contract: Contract) -> None:
    """Changes are visible only inside: neither on the host nor in another sandbox."""
    with _layers(repository={"testbed/file": "before", "testbed/other": "other"}) as folders:
        spec = _spec(folders["repository"])
        async with checked_sandbox(contract, spec) as sandbox:
            await sandbox.write_file("/testbed/file", b"after")
            await sandbox.write_file("/testbed/new/file", b"new")
            assert await sandbox.read_file("/testbed/file") == b"after"
            assert await sandbox.read_file("/testbed/new/file") == b"new"
            async with contract.provider.open_sandbox(spec) as second:
                assert await second.read_file("/testbed/file") == b"before"
                await raises(FileNotFoundError, second.read_file("/testbed/new/file"))
        found = {str(path.relative_to(folders["repository"])) for path in folders["repository"].rglob("*")}
        assert found == {"testbed", "testbed/file", "testbed/other"}
        assert (folders["repository"] / "testbed/file").read_text() == "before"


async def check_uploads_over_layers(contract: Contract) -> None:
    """An upload replaces files and folders of a layer as a whole, and can be placed next to them."""
    layer = {
        "testbed/repo/old": "old",
        "testbed/repo/in/old": "old",
        "testbed/repo/in/both": "old",
        "testbed/file": "old",
    }
    new = {"in/both": "new", "in/new/er": "new", "own": "new"}
    options = TransferOptions(overwrite=True)
    with _layers(repository=layer, new=new, out={}) as folders:
        async with checked_sandbox(contract, _spec(folders["repository"])) as sandbox:
            # Next to the layer's file, over it, and over the result.
            for number, remote in enumerate(("/testbed/other", "/testbed/repo", "/testbed/repo")):
                await sandbox.upload(folders["new"], remote, options=options)
                await sandbox.download(remote, folders["out"] / f"{number}")
                assert _files(folders["out"] / f"{number}") == new
            await sandbox.upload(folders["new"] / "own", "/testbed/file", options=options)
            assert await sandbox.read_file("/testbed/file") == b"new"


def _files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


async def check_missing_layers(contract: Contract) -> None:
    """A missing folder or digest, or an invalid layer, is refused by name."""
    unknown = f"sha256:{'0' * 64}"
    with trio.fail_after(CHECK_TIMEOUT_S):
        for layer in ("/no/such/layer", unknown, "a-name"):
            error = await raises(SandboxUnavailable, open_and_close(contract, SandboxSpec(layers=(layer,))))
            assert layer in str(error)


async def check_what_layers_cannot_cover(contract: Contract) -> None:
    """The userland of `host`, and files that a launcher would execute before the daemon, are refused by name."""
    with trio.fail_after(CHECK_TIMEOUT_S), _layers(x={"usr/bin/x": ""}, y={".singularity.d/env/x.sh": ""}) as folders:
        for name, covered in (("x", "/usr"), ("y", "/.singularity.d")):
            error = await raises(SandboxUnavailable, open_and_close(contract, _spec(folders[name])))
            assert str(folders[name]) in str(error)
            assert covered in str(error)


async def check_layers_are_refused(contract: Contract) -> None:
    """A provider without layers reports that, instead of starting a sandbox without them."""
    with trio.fail_after(CHECK_TIMEOUT_S), _layers(x={"testbed/x": ""}) as folders:
        error = await raises(SandboxUnavailable, open_and_close(contract, _spec(folders["x"])))
        assert str(folders["x"]) in str(error)
        assert contract.provider.name in str(error)


LAYER_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_layers_lie_in_order,
    check_layers_are_read_only,
    check_uploads_over_layers,
    check_missing_layers,
    check_what_layers_cannot_cover,
)
"""For providers with `has_layers`."""

NO_LAYER_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (check_layers_are_refused,)
"""For providers without `has_layers`."""


async def check_own_processes_only(contract: Contract) -> None:
    """A sandbox has its own PID namespace, without capabilities. No environment inside contains our secrets."""
    with planted_secret() as secret:
        async with checked_sandbox(contract) as sandbox:
            assert int(await bash(sandbox, "ls -d /proc/[0-9]* | wc -l")) < 15
            assert secret not in await bash(sandbox, "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true")
            assert int((await bash(sandbox, "grep CapEff /proc/self/status")).split()[1], 16) == 0
            assert await bash(sandbox, "cat /proc/sys/kernel/hostname") == "sandbox"


async def check_no_network(contract: Contract) -> None:
    """The host's loopback and abstract sockets are unreachable; with `network` they are reachable."""
    probe = (
        "import socket, sys\n"
        "for family, address in ((socket.AF_INET, ('127.0.0.1', {port})), (socket.AF_UNIX, '\\0{abstract}')):\n"
        "    with socket.socket(family) as client:\n"
        "        client.settimeout(2)\n"
        "        print('yes' if client.connect_ex(address) == 0 else 'no')\n"
    )
    abstract = f"prorl-contract-{secrets.token_hex(4)}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{abstract}")
        unix.listen()
        code = probe.format(port=tcp.getsockname()[1], abstract=abstract)
        for network, expected in ((False, "no\nno\n"), (True, "yes\nyes\n")):
            async with checked_sandbox(contract, SandboxSpec(network=network)) as sandbox:
                cell = await sandbox.ipython(code, timeout_s=ACTION_TIMEOUT_S)
                assert (cell.stdout, cell.error) == (expected, None), f"network={network}"


async def check_a_port_of_its_own(contract: Contract) -> None:
    """A server on a port of a sandbox's own network is reachable only from that sandbox."""
    ask = "import socket; print(socket.create_connection(('127.0.0.1', {port}), timeout=5).recv(5))"
    async with checked_sandbox(contract) as sandbox, contract.provider.open_sandbox(SandboxSpec()) as other:
        listener = await sandbox.open_port()
        port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, lambda stream: stream.send_all(b"hello"), [listener])
            for where, answered in ((sandbox, True), (other, False)):
                cell = await where.ipython(ask.format(port=port), timeout_s=ACTION_TIMEOUT_S)
                assert ("hello" in cell.stdout) == answered, cell.error
            await raises(OSError, trio.open_tcp_stream("127.0.0.1", port))  # noqa: ASYNC105 - awaited there
            nursery.cancel_scope.cancel()
        async with await sandbox.open_port(port):
            await raises(OSError, sandbox.open_port(port))
        async with contract.provider.open_sandbox(SandboxSpec(network=True)) as outside:
            await raises(SandboxUnavailable, outside.open_port())


async def check_host_is_invisible(contract: Contract) -> None:
    """The home directory, the checkout, other users and the run folder of the host are invisible."""
    checkout = Path(prorl_trio.types.__file__).parents[1]
    marker = Path.home() / f".prorl-contract-{secrets.token_hex(4)}"
    marker.touch()
    try:
        async with checked_sandbox(contract) as sandbox:
            hidden = (checkout, marker, contract.base, Path("/etc/shadow"), Path("/etc/fstab"), Path("/sys/kernel"))
            for path in hidden:
                assert await bash(sandbox, f"test -e '{path}' && echo seen || echo hidden") == "hidden", path
            users = (await bash(sandbox, "cut -d: -f1 /etc/passwd")).split()
            assert set(users) <= {"root", "agent", "nobody"}
            assert socket.gethostname() not in await bash(sandbox, "cat /etc/hosts /etc/hostname")
            assert await bash(sandbox, "echo $HOME; cd; pwd") == "/home/agent\n/home/agent"
    finally:
        marker.unlink()


async def check_read_only(contract: Contract) -> None:
    """Only the home directory, /tmp and /dev/shm are writable. Kernel settings are not, even for root's sandbox."""
    writable = ("/tmp/x", "/home/agent/x", "/dev/shm/x")
    protected = ("/x", "/usr/x", "/etc/x", "/opt/prorl/lib/x", "$(dirname $(which python3))/x")
    async with checked_sandbox(contract) as sandbox:
        for path in writable:
            await bash(sandbox, f"touch {path}")
        for path in protected:
            answer = await bash(sandbox, f"touch {path} 2>/dev/null && echo written || echo refused")
            assert answer == "refused", path
        setting = "/proc/sys/kernel/panic"
        answer = await bash(sandbox, f"cat {setting} > /tmp/v; cat /tmp/v > {setting} && echo written || echo refused")
        assert answer.endswith("refused")


async def check_other_sandboxes_are_invisible(contract: Contract) -> None:
    """A sandbox sees no control socket, neither another's nor its own."""
    async with checked_sandbox(contract) as first, contract.provider.open_sandbox(SandboxSpec()) as second:
        await bash(second, "touch /tmp/second")
        found = await bash(first, "find /run /tmp /var /home /mnt /dev -type s 2>/dev/null; true")
        assert found == ""
        assert await bash(first, "test -e /tmp/second && echo seen || echo hidden") == "hidden"


ISOLATION_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_own_processes_only,
    check_no_network,
    check_a_port_of_its_own,
    check_host_is_invisible,
    check_read_only,
    check_other_sandboxes_are_invisible,
)
