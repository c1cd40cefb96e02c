"""What a disk may hold after a loss of power, from the steps that a `FaultyDisk` was asked for.

Of what was written to a file since its last sync each sector may be there or not, and so may each change of its size;
of what was created and removed in a folder since its last sync, each entry. Nothing else is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from support.faulty_disk import Step

SECTOR_BYTES: Final = 512
_SYNCED_WITH_ENTRY: Final = ("-wal", "-journal")
"""With the first sync of such a file SQLite syncs its folder, too, without asking its VFS. No more than the file's own
entry is taken to be durable by that."""


@dataclass(eq=False)
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Step] = field(default_factory=list)

    def content(self, keep: Callable[[], bool]) -> bytearray:
        content = bytearray(self.durable)
        for step in self.pending:
            if step.kind == "resize":
                if keep():
                    _resize(content, step.offset)
                continue
            start, end = step.offset, step.offset + len(step.content)
            while start < end:
                stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
                if keep():
                    if len(content) < stop:
                        _resize(content, stop)
                    content[start:stop] = step.content[start - step.offset : stop - step.offset]
                start = stop
        return content

    def sync(self) -> None:
        self.durable = self.content(lambda: True)
        self.pending.clear()


class Wreck:
    """A folder as the steps so far have left it. What is in it already is on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
        self._entries = {str(path): _File(bytearray(path.read_bytes())) for path in files}
        self._durable_entries = dict(self._entries)
        self._unsynced_folders: set[Path] = set()

    def take(self, step: Step) -> None:
        """One more step was made."""
        path = step.path
        if step.kind == "sync_folder":
            self._unsynced_folders -= {made for made in self._unsynced_folders if made.parent == Path(path)}
            if Path(path) == self._folder:
                self._durable_entries = dict(self._entries)
            return
        if step.kind == "remove":
            self._entries.pop(path, None)
            return
        if step.kind == "create" and (Path(path) == self._folder or Path(path) in self._folder.parents):
            self._unsynced_folders.add(Path(path))
            return
        file = self._entries.setdefault(path, _File())
        if step.kind == "sync":
            file.sync()
            if path.endswith(_SYNCED_WITH_ENTRY):
                self._durable_entries[path] = file
        elif step.kind != "create":
            file.pending.append(step)

    def leave(self, where: Path, chance: random.Random | None, *, kept: float) -> None:
        """Make in `where` what is left of the folder when the power is lost now. `kept` is the share of what was not
        synced that is on the disk: 1 is what a mere kill leaves, 0 the least that can be."""

        def keep() -> bool:
            return kept >= 1 or (kept > 0 and chance is not None and chance.random() < kept)

        if self._unsynced_folders and not keep():
            return  # nobody has made sure that the folder itself can be found
        where.mkdir()
        for path in sorted({*self._entries, *self._durable_entries}):  # the same chance leaves the same
            now, before = self._entries.get(path), self._durable_entries.get(path)
            file = now if now is before or keep() else before
            if file is not None:
                (where / Path(path).name).write_bytes(file.content(keep))


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))
