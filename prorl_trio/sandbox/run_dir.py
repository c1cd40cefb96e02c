"""The node's private folder on a local disk: the empty root, one folder per sandbox, and the reaper that watches it.

The holder of the lock on the folder owns it, and the kernel releases the lock when its process ends. A folder `prorl-*`
that can be locked therefore belongs to a dead node. The reaper of that node removes it, or, if it was killed as well,
the next node that starts here.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio
from trio.lowlevel import RunVar

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.file_systems import NETWORK_FILE_SYSTEMS, file_system_of
from prorl_trio.sandbox import reaper
from prorl_trio.sandbox.limits.pid_limit import PidLimiter
from prorl_trio.sandbox.process_tree import reap_leaders
from prorl_trio.sandbox.runtime.interpreter import own_python
from prorl_trio.sandbox.runtime.runtime import LIB_DIR
from prorl_trio.sandbox.runtime.skeleton import build_skeleton
from prorl_trio.supervision import service_task
from prorl_trio.threads import run_blocking
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MAX_SOCKET_PATH_BYTES: Final = 107
CONTROL_NAME: Final = "c"
SOCKET_NAME: Final = "s"
CLOSE_TIMEOUT_S: Final = 10.0
REMAINS_DELAY_S: Final = 0.1
"""Delay between two attempts to end remains of a sandbox; doubled each time, up to `MAX_REMAINS_DELAY_S`."""
MAX_REMAINS_DELAY_S: Final = 10.0

logger = logging.getLogger(__name__)

_PREFIX: Final = "prorl-"
_UNBORN_PREFIX: Final = "new-prorl-"
_NAME: Final = re.compile(r"prorl-[0-9]+-[a-z0-9_]{8}")
_UNBORN_NAME: Final = re.compile(r"new-prorl-(?P<namespace>[0-9]+)-(?P<start_time>[0-9]+)-(?P<pid>[0-9]+)-[a-z0-9_]{8}")
MARKER_NAME: Final = ".prorl-run-dir"
"""A file in every run folder. A folder without it is never swept, whatever its name."""


class SandboxDir:
    """The folder of one sandbox, which cannot see it. `control` holds the socket.

    Names are short, because the path of a socket may have 107 bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sandbox_id = path.name
        self.control = path / CONTROL_NAME
        self.socket = self.control / SOCKET_NAME
        self.held = contextlib.ExitStack()
        """Resources reserved until the sandbox has ended, such as its image."""

    @functools.cached_property
    def home(self) -> Path:
        """A folder for a program that needs a home directory outside of its sandbox, made at its first use."""
        path = self.path / "home"
        path.mkdir(mode=0o700)
        return path


class RunDir:
    """A locked folder of this process. `open_run_dir` creates it."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._reaper: trio.Process | None = None
        self._reaper_turn = trio.Lock()
        self.pid_limiter = PidLimiter()
        self.remains: set[Path] = set()
        """Folders of sandboxes with surviving processes or cgroups."""
        self._remains_came = trio.Event()
        self.is_lost = False
        """True if the folder was missing when it was needed, because it was removed."""
        self._claim()

    def _claim(self) -> None:
        """Make the locked folder. Blocks."""
        base = self._base
        base.mkdir(parents=True, exist_ok=True)
        # Until it is locked, only its name identifies its owner: a pid, and the start time that makes it unique.
        prefix = f"{_UNBORN_PREFIX}{_pid_namespace()}-{_start_time()}-"
        unborn = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base)
        path = base / (_PREFIX + os.path.basename(unborn).removeprefix(prefix))
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(shutil.rmtree, unborn, ignore_errors=True)
            lock = os.open(unborn, os.O_RDONLY | os.O_DIRECTORY)
            unless_made.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(unborn, MARKER_NAME).touch()
            # Only now it gets the name under which other nodes look for folders without an owner.
            os.rename(unborn, path)
            unless_made.pop_all()
        _locks.add(lock)
        self.path, self._lock = path, lock
        self.root = self.path / "root"
        """The empty root of the `host` image."""
        self.lib = self.root / LIB_DIR.lstrip("/")
        """The daemon's code."""

    async def renew(self) -> None:
        """Make another folder after this one was removed. Live sandboxes continue; errors as of a start."""
        logger.error("somebody has removed %s; another folder takes its place", self.path)
        path, lock = self.path, self._lock
        await run_blocking(self._claim)
        _locks.discard(lock)
        os.close(lock)  # the reaper of the old folder ends now, as the folder is gone
        await run_blocking(shutil.rmtree, path, True)  # it exists if an earlier attempt failed halfway
        if self._reaper is not None:
            await self._reaper.wait()
        await self._start()
        self.is_lost = False

    async def _start(self) -> None:
        await self._start_reaper()
        await run_blocking(self.pid_limiter.start)
        await run_blocking(build_skeleton, self.root)

    async def keep_reaper(self) -> None:
        """Start a reaper unless one runs, and wait for its end, which is an error. For a supervisor that repeats it.

        A reaper may be killed, for example by the kernel when memory runs out.

        Raises:
            SandboxUnavailable: it has ended.
            OSError: it cannot be started.
        """
        await self._start_reaper()
        assert self._reaper is not None, "it was started"
        code = await self._reaper.wait()
        raise SandboxUnavailable(f"the reaper of {self.path} ended (exit status {code})")

    async def reap_remains(self) -> None:
        """End processes that outlived their sandbox, with retries; runs until cancelled."""
        delay_s = REMAINS_DELAY_S
        while True:
            await trio.lowlevel.checkpoint()
            if not self.remains:
                delay_s = REMAINS_DELAY_S
                self._remains_came = trio.Event()
                await self._remains_came.wait()
            for path in sorted(self.remains):
                if await run_blocking(_reap_and_remove, path):
                    self.remains.discard(path)
                    reap_leaders()
                    logger.warning("what was left of sandbox %s is gone", path.name)
            if self.remains:
                await trio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_REMAINS_DELAY_S)

    async def _start_reaper(self) -> None:
        async with self._reaper_turn:
            if self._reaper is not None and self._reaper.poll() is None:
                return
            command = [own_python(), "-I", "-S", reaper.__file__, str(self.path)]
            self._reaper = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env={},
            )

    async def _aclose(self) -> None:
        await run_blocking(self.pid_limiter.close)
        left = []
        for path in sorted(self.remains):
            try:
                if not await run_blocking(_reap_and_remove, path):
                    left.append(path)
            except OSError:
                left.append(path)
        reap_leaders()
        if left:
            logger.error("left to the reaper: what is still there of %s", ", ".join(path.name for path in left))
        else:
            await run_blocking(shutil.rmtree, self.path, True)
            if self._reaper is not None:
                self._reaper.kill()
                await self._reaper.wait()
        _locks.discard(self._lock)
        os.close(self._lock)

    @asynccontextmanager
    async def open_sandbox_dir(self) -> AsyncIterator[SandboxDir]:
        """Make a folder for one sandbox, and remove it on exit, or later if recorded processes still live."""
        folder = SandboxDir(self.path / f"sbx-{secrets.token_hex(4)}")
        try:
            try:
                await run_blocking(_make_sandbox_dir, folder)
            except OSError as exc:
                self.is_lost = isinstance(exc, FileNotFoundError) and not self.path.exists()
                raise SandboxUnavailable.refused(f"cannot make the folder of sandbox {folder.sandbox_id}", exc) from exc
            yield folder
        finally:
            gone, why = False, ""
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                try:
                    gone = await run_blocking(_remove_sandbox_dir, folder)
                except Exception as exc:  # no descriptor, or no thread
                    why = f" ({exc!r})"
            if not gone:
                logger.error(
                    "something of sandbox %s outlived its end%s; the node goes on with it", folder.sandbox_id, why
                )
                self.remains.add(folder.path)
                self._remains_came.set()


def _remove_sandbox_dir(folder: SandboxDir) -> bool:
    """Remove it, unless its recorded processes still exist, which need the record."""
    folder.held.close()
    return not reaper.has_remains(folder.path) and _remove(folder.path)


def _reap_and_remove(path: Path) -> bool:
    return reaper.reap_sandbox(path) and _remove(path)


def _remove(path: Path) -> bool:
    """Return whether the folder is completely removed, which fails without a descriptor, for example."""
    with contextlib.suppress(OSError):  # there is more in it
        for name in (f"{CONTROL_NAME}/{SOCKET_NAME}", reaper.RECORD_NAME):
            os.unlink(f"{path}/{name}")
        os.rmdir(f"{path}/{CONTROL_NAME}")
        os.rmdir(path)
        return True
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def remains_count() -> int:
    """Return the number of this node's sandboxes with surviving processes or cgroups."""
    by_base = _shared.get({})
    return sum(len(shared.run_dir.remains) for shared in by_base.values() if shared.run_dir is not None)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time() -> int:
    process = reaper.identify(os.getpid())
    assert process is not None, "this process is alive"
    return process.start_time


def _make_sandbox_dir(folder: SandboxDir) -> None:
    for path in (folder.path, folder.control):
        os.mkdir(path, mode=0o700)


class _Shared:
    """A run folder and the number of its users."""

    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.users = 0
        self.run_dir: RunDir | None = None


_shared: RunVar[dict[Path, _Shared]] = RunVar("prorl_trio.sandbox.run_dir")
_locks: set[int] = set()


def _drop_locks() -> None:
    """Drop the locks in a forked child: a copy would hold a dead node's folder during the child's lifetime."""
    for lock in _locks:
        os.close(lock)
    _locks.clear()


os.register_at_fork(after_in_child=_drop_locks)


@asynccontextmanager
async def open_run_dir(base: Path | None) -> AsyncIterator[RunDir]:
    """Open the run folder of this node below `base` (default: the system's temporary folder), shared by all its users.

    The first user makes it, after sweeping the remains of dead nodes there; the last user removes it.

    Raises:
        SandboxUnavailable: `base` cannot be used: on a network file system, too long for a socket, not writable.
    """
    base = Path(tempfile.gettempdir()) if base is None else base
    try:
        by_base = _shared.get()
    except LookupError:
        by_base = {}
        _shared.set(by_base)
    shared = by_base.setdefault(base, _Shared())
    shared.users += 1
    try:
        async with shared.lock:
            if shared.run_dir is None:
                shared.run_dir = await _make(base)
            elif shared.run_dir.is_lost:
                try:
                    await shared.run_dir.renew()
                except OSError as exc:
                    raise SandboxUnavailable.refused(f"another run folder cannot be made in {base}", exc) from exc
        yield shared.run_dir
    finally:
        shared.users -= 1
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            async with shared.lock:
                if shared.users == 0 and shared.run_dir is not None:
                    closing, shared.run_dir = shared.run_dir, None
                    await closing._aclose()


@asynccontextmanager
async def open_shared_run_dir(base: Path | None) -> AsyncIterator[None]:
    """Hold a run directory open, with its reaper watched.

    This is the real providers' `SandboxProvider.open_shared`. See `open_run_dir`.
    """
    async with open_run_dir(base) as run_dir, open_single_nursery() as nursery:
        nursery.start_soon(service_task(run_dir.keep_reaper, "reaper"))
        nursery.start_soon(service_task(run_dir.reap_remains, "remains of sandboxes"))
        yield
        nursery.cancel_scope.cancel("the sandbox host ends")


async def _make(base: Path) -> RunDir:
    what = f"no folder for control sockets can be made in {base}; sandbox.runtime_dir must be on a local disk with room"
    try:
        run_dir = await run_blocking(_prepare, base)
    except OSError as exc:
        raise SandboxUnavailable.refused(what, exc) from exc
    ready = False
    try:
        await run_dir._start()
        ready = True
    except OSError as exc:
        raise SandboxUnavailable.refused(what, exc) from exc
    finally:
        if not ready:
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await run_dir._aclose()
    return run_dir


def _prepare(base: Path) -> RunDir:
    check_base(base, Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    sweep(base)
    return RunDir(base)


def check_base(base: Path, mountinfo: str) -> None:
    """Refuse a folder where sockets or locks do not work.

    Raises:
        SandboxUnavailable: the message has the reason and a remedy.
    """
    advice = "set sandbox.runtime_dir to a short path on a local disk or tmpfs"
    longest = base / f"{_PREFIX}4194304-xxxxxxxx" / "sbx-xxxxxxxx" / CONTROL_NAME / SOCKET_NAME
    if (length := len(os.fsencode(longest))) > MAX_SOCKET_PATH_BYTES:
        raise SandboxUnavailable(
            f"control sockets in {base} would need paths of {length} bytes, above {MAX_SOCKET_PATH_BYTES}; {advice}"
        )
    if (kind := file_system_of(base, mountinfo)) in NETWORK_FILE_SYSTEMS:
        raise SandboxUnavailable(f"{base} is on a network file system ({kind}); {advice}")


def sweep(base: Path) -> None:
    """End and remove the remains of this user's dead nodes in `base`. Blocks. Ignores folders without our mark."""
    _sweep_unborn(base)
    for entry in base.glob(f"{_PREFIX}*"):
        try:
            status = entry.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and (entry / MARKER_NAME).is_file()
            if not ours or not _NAME.fullmatch(entry.name):
                continue
            lock = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            reaper.reap(entry)
        except BlockingIOError:
            pass
        except OSError as exc:
            logger.warning("what a dead node left in %s stays: %s", entry, exc)
        finally:
            os.close(lock)


def _sweep_unborn(base: Path) -> None:
    """Remove folders of nodes that were killed between making a folder and naming it; they contain only the mark.

    Folders of another PID namespace are left alone, because their owner's state is not visible from here.
    """
    namespace = _pid_namespace()
    for entry in base.glob(f"{_UNBORN_PREFIX}*"):
        name = _UNBORN_NAME.fullmatch(entry.name)
        if name is None or int(name["namespace"]) != namespace:
            continue
        if reaper.is_alive(reaper.ProcessId(int(name["pid"]), int(name["start_time"]))):
            continue
        with contextlib.suppress(OSError):  # another user's, or being swept by another node
            if entry.lstat().st_uid == os.geteuid():
                (entry / MARKER_NAME).unlink(missing_ok=True)
                entry.rmdir()
