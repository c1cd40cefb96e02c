"""The base of the sandbox contract's checks: a sandbox to check, and a check that it is completely removed."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import trio

from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.reaper import descendants

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

    from prorl_trio.sandbox.provider import SandboxProvider
    from prorl_trio.sandbox.sandbox import Sandbox


CHECK_TIMEOUT_S: Final = 60.0
ACTION_TIMEOUT_S: Final = 20.0

E = TypeVar("E", bound=Exception)

_MOUNTS: Final = Path("/proc/self/mounts")
_USER_NAMESPACE: Final = "/proc/self/ns/user"
_NS_GET_USERNS: Final = 0xB701
"""See ioctl_ns(2)."""
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


def mounts_of_sandboxes() -> frozenset[str]:
    """Return the lines of /proc/self/mounts, without namespaces that a rootless sandbox cannot have created.

    A mount keeps a namespace alive, as with `ip netns add` and Docker. It belongs to the user namespace in which it was
    created, and each sandbox has its own user namespace. So a namespace that belongs to ours, or to a parent of ours,
    belongs to another program. In doubt, the line is included.
    """
    lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return frozenset(line for line in lines if not _is_namespace_of_a_stranger(line))


def _is_namespace_of_a_stranger(line: str) -> bool:
    _, place, kind, *_ = line.split(" ")
    if kind != "nsfs":
        return False
    path = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), place)
    try:
        namespace = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    except PermissionError:  # it belongs to a user namespace that is not below ours
        return True
    except OSError:
        return False
    finally:
        os.close(namespace)
    try:
        return os.fstat(owner).st_ino == os.stat(_USER_NAMESPACE).st_ino
    finally:
        os.close(owner)


class Contract(NamedTuple):
    """The provider to check. `base` is its `runtime_dir`, which is empty and used only by it."""

    provider: SandboxProvider
    base: Path


@asynccontextmanager
async def checked_sandbox(contract: Contract, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
    """Open a sandbox for a check, and verify afterwards that it is completely removed."""
    with trio.fail_after(CHECK_TIMEOUT_S):
        before = traces(contract.base)
        async with contract.provider.open_sandbox(spec or SandboxSpec()) as sandbox:
            yield sandbox
        assert_no_more(before, traces(contract.base))


class Traces(NamedTuple):
    """The traces of sandboxes: processes below this one, mounts on this machine, files in `base`, open fds."""

    processes: frozenset[str]
    mounts: frozenset[str]
    files: frozenset[str]
    open_fds: int


def traces(base: Path) -> Traces:
    """Return the current traces."""
    return Traces(
        frozenset(f"{process.pid} {command_of(process.pid)}" for process in descendants(os.getpid())),
        mounts_of_sandboxes(),
        frozenset(str(path) for path in base.rglob("*")),
        len(os.listdir("/proc/self/fd")),
    )


def assert_no_more(before: Traces, after: Traces) -> None:
    """Assert that nothing created between the two remains."""
    assert after.processes <= before.processes, f"processes left: {after.processes - before.processes}"
    assert after.mounts <= before.mounts, f"mounts left: {after.mounts - before.mounts}"
    assert after.files <= before.files, f"files left: {after.files - before.files}"
    assert after.open_fds <= before.open_fds, f"{after.open_fds - before.open_fds} file descriptors left open"


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


async def bash(sandbox: Sandbox, command: str) -> str:
    """Return the output of a command that must succeed."""
    result = await sandbox.bash(command, timeout_s=ACTION_TIMEOUT_S)
    assert result.exit_code == 0, f"{command!r} exited with {result.exit_code}: {result.output}"
    return result.output.strip()


async def raises(kind: type[E], action: Awaitable[object]) -> E:
    """Return the exception of `kind` that `action` must raise."""
    try:
        await action
    except kind as exc:
        return exc
    raise AssertionError(f"{kind.__name__} was not raised")


async def open_and_close(contract: Contract, spec: SandboxSpec) -> None:
    """Open a sandbox without using it."""
    async with contract.provider.open_sandbox(spec):
        pass


@contextmanager
def planted_secret() -> Iterator[str]:
    """Put a secret into the environment of this process."""
    secret = f"planted-{secrets.token_hex(8)}"
    os.environ["PRORL_PLANTED"] = secret
    try:
        yield secret
    finally:
        del os.environ["PRORL_PLANTED"]
