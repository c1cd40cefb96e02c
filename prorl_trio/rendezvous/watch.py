"""The liveness of the nodes in a fleet's folder, judged without comparing the clocks of machines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from prorl_trio.rendezvous.entry import NodeEntry, has_ended
from prorl_trio.rendezvous.folder import entry_paths, read_entry, require_folder, time_there
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

Life = Literal["live", "stale", "ended"]
"""`live`: heartbeats arrive; `stale`: no heartbeat for `stale_after_s`; `ended`: the process has exited."""

NS: Final = 1_000_000_000


class FoundNode(msgspec.Struct, frozen=True, kw_only=True):
    """An entry, and the liveness of its node.

    Attributes:
        entry: the last entry read.
        life: see `Life`.
        age_s: seconds since its last heartbeat, as far as this reader knows.
    """

    entry: NodeEntry
    life: Life
    age_s: float


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """The folder at one moment: the nodes by name, and why files were skipped, by path."""

    nodes: dict[str, FoundNode]
    broken: dict[str, str]


class _Seen:
    """The last observed change of an entry's file; `changed_s` is by the reader's own monotonic clock."""

    def __init__(self, mtime_ns: int, changed_s: float) -> None:
        self.mtime_ns = mtime_ns
        self.changed_s = changed_s


class FleetWatch:
    """A reader that polls a fleet's folder. Blocks on the disk; use one thread at a time.

    A heartbeat is a *change* of the file's time that this reader observes, timed by its own monotonic clock. On the
    first read of a file, its age is measured by the disk's clock, which is the time that a new file gets there. That
    clock is wrong if each machine writes its own time (as on Lustre). A node may then first appear stale, until its
    next heartbeat is observed. A time in the future counts as a heartbeat that was just observed.

    Args:
        path: the folder.
        clock: returns monotonic seconds.
        ended: returns True for a process that has certainly exited.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        ended: Callable[[NodeEntry], bool] = lambda entry: has_ended(entry.process),
    ) -> None:
        self.path = Path(path)
        self._clock = clock
        self._ended = ended
        self._seen: dict[str, _Seen] = {}

    def read(self) -> FleetView:
        """Return the current state of the folder.

        Raises:
            ConfigError: the folder is missing, or others can access it.
        """
        folder = require_folder(self.path)
        nodes: dict[str, FoundNode] = {}
        broken: dict[str, str] = {}
        there_ns: int | None = None
        for path in entry_paths(folder):
            try:
                entry, mtime_ns = read_entry(path)
            except FileNotFoundError:
                continue  # it was removed while we read the folder
            except ConfigError as exc:
                broken[str(path)] = str(exc)
                continue
            now_s = self._clock()
            seen = self._seen.get(entry.node_id)
            if seen is None:
                there_ns = time_there(folder) if there_ns is None else there_ns
                age_s = 0.0 if there_ns is None else max(0.0, (there_ns - mtime_ns) / NS)
                seen = self._seen[entry.node_id] = _Seen(mtime_ns, now_s - age_s)
            elif mtime_ns != seen.mtime_ns:
                seen.mtime_ns, seen.changed_s = mtime_ns, now_s
            age_s = now_s - seen.changed_s
            nodes[entry.node_id] = FoundNode(entry=entry, life=self._life(entry, age_s), age_s=age_s)
        for node_id in [node_id for node_id in self._seen if node_id not in nodes]:
            del self._seen[node_id]
        return FleetView(nodes=nodes, broken=broken)

    def _life(self, entry: NodeEntry, age_s: float) -> Life:
        if entry.state == "away" or self._ended(entry):
            return "ended"
        return "live" if age_s <= entry.stale_after_s else "stale"
