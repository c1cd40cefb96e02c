"""The contract of sandbox providers, as checks that anyone can run against theirs.

`CORE_CHECKS` hold for any provider, also an in-memory fake; `PROCESS_CHECKS` for those that start processes here;
`ISOLATION_CHECKS` for those that say `isolated`, `LAYER_CHECKS` for those that say `has_layers` and `NO_LAYER_CHECKS`
for the others. A check takes a `Contract` and raises AssertionError. Each has its own
deadline. They use what a sandbox itself offers, so they hold for whatever is inside.
"""

from __future__ import annotations

import secrets
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

import prorl_trio.types
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.transfer import TransferOptions
from prorl_trio.testing.sandbox_check import (
    ACTION_TIMEOUT_S,
    CHECK_TIMEOUT_S,
    Contract,
    bash,
    checked_sandbox,
    open_and_close,
    planted_secret,
    raises,
)
from prorl_trio.testing.sandbox_core_checks import CORE_CHECKS
from prorl_trio.testing.sandbox_process_checks import PROCESS_CHECKS
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

__all__ = ["CORE_CHECKS", "ISOLATION_CHECKS", "LAYER_CHECKS", "NO_LAYER_CHECKS", "PROCESS_CHECKS", "Contract"]


@contextmanager
def _layers(**files: dict[str, str]) -> Iterator[dict[str, Path]]:
    """Folders by name, each with these files."""
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
    """All layers are seen; of a file that two of them have, the later one is."""
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
    """Changes are seen inside, and by nobody else: neither on the host nor in another sandbox."""
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
    """An upload replaces files and folders of a layer as a whole, as any other, and goes beside them."""
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
            # Beside the layer's, over it, and over what came of that.
            for number, remote in enumerate(("/testbed/other", "/testbed/repo", "/testbed/repo")):
                await sandbox.upload(folders["new"], remote, options=options)
                await sandbox.download(remote, folders["out"] / f"{number}")
                assert _files(folders["out"] / f"{number}") == new
            await sandbox.upload(folders["new"] / "own", "/testbed/file", options=options)
            assert await sandbox.read_file("/testbed/file") == b"new"


def _files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


async def check_missing_layers(contract: Contract) -> None:
    """A folder or a digest that is not there, and what is neither, is refused by its name."""
    unknown = f"sha256:{'0' * 64}"
    with trio.fail_after(CHECK_TIMEOUT_S):
        for layer in ("/no/such/layer", unknown, "a-name"):
            error = await raises(SandboxUnavailable, open_and_close(contract, SandboxSpec(layers=(layer,))))
            assert layer in str(error)


async def check_what_layers_cannot_cover(contract: Contract) -> None:
    """The userland of `host`, and what a launcher would run before the daemon, are refused by their names."""
    with trio.fail_after(CHECK_TIMEOUT_S), _layers(x={"usr/bin/x": ""}, y={".singularity.d/env/x.sh": ""}) as folders:
        for name, covered in (("x", "/usr"), ("y", "/.singularity.d")):
            error = await raises(SandboxUnavailable, open_and_close(contract, _spec(folders[name])))
            assert str(folders[name]) in str(error)
            assert covered in str(error)


async def check_layers_are_refused(contract: Contract) -> None:
    """A provider without layers says so, instead of starting a sandbox that lacks them."""
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
"""For providers that say `has_layers`."""

NO_LAYER_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (check_layers_are_refused,)
"""For the others."""


async def check_own_processes_only(contract: Contract) -> None:
    """A PID namespace of its own, without capabilities, and no secret of this process in any environment inside."""
    with planted_secret() as secret:
        async with checked_sandbox(contract) as sandbox:
            assert int(await bash(sandbox, "ls -d /proc/[0-9]* | wc -l")) < 15
            assert secret not in await bash(sandbox, "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true")
            assert int((await bash(sandbox, "grep CapEff /proc/self/status")).split()[1], 16) == 0
            assert await bash(sandbox, "cat /proc/sys/kernel/hostname") == "sandbox"


async def check_no_network(contract: Contract) -> None:
    """The host's loopback and its abstract sockets cannot be reached; with `network`, they can."""
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


async def check_host_is_invisible(contract: Contract) -> None:
    """The home directory, the checkout, other users and the run folder of the host are not there."""
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
    """Only the home directory, /tmp and /dev/shm can be written; kernel settings cannot, not even by root's sandbox."""
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
    """A sandbox sees no control socket: not another's, nor its own."""
    async with checked_sandbox(contract) as first, contract.provider.open_sandbox(SandboxSpec()) as second:
        await bash(second, "touch /tmp/second")
        found = await bash(first, "find /run /tmp /var /home /mnt /dev -type s 2>/dev/null; true")
        assert found == ""
        assert await bash(first, "test -e /tmp/second && echo seen || echo hidden") == "hidden"


ISOLATION_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_own_processes_only,
    check_no_network,
    check_host_is_invisible,
    check_read_only,
    check_other_sandboxes_are_invisible,
)
