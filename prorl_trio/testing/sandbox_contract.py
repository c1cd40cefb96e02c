"""The contract of sandbox providers, as checks that anyone can run against theirs.

`CORE_CHECKS` hold for any provider, also an in-memory fake; `PROCESS_CHECKS` for those that start processes here;
`ISOLATION_CHECKS` for those that say `isolated`, `LAYER_CHECKS` for those that say `has_layers` and `NO_LAYER_CHECKS`
for the others. A check takes a `Contract` and raises AssertionError. Each has its own
deadline. They use what a sandbox itself offers, so they hold for whatever is inside.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final
import prorl_trio.types
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.testing.sandbox_check import ACTION_TIMEOUT_S, Contract, bash, checked_sandbox, planted_secret
from prorl_trio.testing.sandbox_check import Contract
from prorl_trio.testing.sandbox_core_checks import CORE_CHECKS
from prorl_trio.testing.sandbox_layer_checks import LAYER_CHECKS, NO_LAYER_CHECKS
from prorl_trio.testing.sandbox_process_checks import PROCESS_CHECKS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ['CORE_CHECKS', 'Contract', 'ISOLATION_CHECKS', 'LAYER_CHECKS', 'NO_LAYER_CHECKS', 'PROCESS_CHECKS']



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
