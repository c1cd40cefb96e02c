"""The user's view of the head and the nodes in a fleet's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.rendezvous.folder import HEAD_FILE
from prorl_trio.rendezvous.head import find_head
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from os import PathLike

_SECRET: Final = "token"


class FleetReport(msgspec.Struct, frozen=True):
    """The entries of a fleet, without their tokens, with `life` and `age_s` as in `FoundNode`.

    Attributes:
        head: None if the fleet lacks a head.
        nodes: each node by name.
        broken: why files of the folder were skipped, by path.
    """

    head: dict[str, Any] | None
    nodes: dict[str, dict[str, Any]]
    broken: dict[str, str]


def look_at_fleet(folder: str | PathLike[str]) -> FleetReport:
    """Return the entries in the folder. Blocks on the disk.

    Raises:
        ConfigError: the folder is missing, or others can access it.
    """
    watch = FleetWatch(folder)
    view = watch.read()
    nodes = {name: _shown(found.entry, found.life, found.age_s) for name, found in view.nodes.items()}
    head, broken = None, dict(view.broken)
    try:
        head = _shown(*find_head(watch.path))
    except FileNotFoundError:
        pass
    except ConfigError as exc:
        broken[str(watch.path / HEAD_FILE)] = str(exc)
    return FleetReport(head, nodes, broken)


def _shown(entry: msgspec.Struct, life: str, age_s: float) -> dict[str, Any]:
    fields = {field: value for field, value in msgspec.to_builtins(entry).items() if field != _SECRET}
    return {**fields, "life": life, "age_s": round(age_s, 1)}
