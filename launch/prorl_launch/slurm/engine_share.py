"""The engines of a fleet that each of its nodes uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def engines_of_node(engines: Sequence[str], machines: Sequence[str], machine: str) -> list[str]:
    """Return the machines whose engines the node on `machine` uses.

    First each node takes the engine of its own machine. The others go, one after the other, to the node that has
    fewest, the first of several. A node for which none is left shares one: it takes that of its number, counted round.

    Args:
        engines: the machines with an engine, the same list for every node.
        machines: those with a node, the same list for every node.
        machine: one of `machines`.
    """
    shares = {node: [engine for engine in engines if engine == node] for node in machines}
    for engine in engines:
        if engine not in shares:
            min(shares.values(), key=len).append(engine)
    if engines and not shares[machine]:
        return [engines[machines.index(machine) % len(engines)]]
    return shares[machine]
