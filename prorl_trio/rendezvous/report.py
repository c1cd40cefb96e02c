"""The nodes of a fleet's folder as a user may see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.rendezvous.watch import FleetWatch

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["NodeReport", "look_at_nodes"]

_SECRET: Final = "token"


class NodeReport(msgspec.Struct, frozen=True):
    """The nodes of a fleet, without their tokens.

    Attributes:
        nodes: the entry of each by its name, with `life` and `age_s` as in `FoundNode`.
        broken: why files of the folder were left out, by their path.
    """

    nodes: dict[str, dict[str, Any]]
    broken: dict[str, str]


def look_at_nodes(folder: str | PathLike[str]) -> NodeReport:
    """Return the nodes with an entry in the folder. Blocks on the disk.

    Raises:
        ConfigError: the folder is missing, or others can enter it.
    """
    view = FleetWatch(folder).read()
    nodes: dict[str, dict[str, Any]] = {}
    for name, found in view.nodes.items():
        entry = msgspec.to_builtins(found.entry)
        shown = {field: value for field, value in entry.items() if field != _SECRET}
        nodes[name] = {**shown, "life": found.life, "age_s": round(found.age_s, 1)}
    return NodeReport(nodes, view.broken)
