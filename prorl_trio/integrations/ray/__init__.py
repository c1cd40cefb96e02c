"""A fleet in a Ray cluster: one node per machine, placed and restarted by Ray. Needs `ray`; see `docs/ray.md`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prorl_trio.integrations.ray.fleet import RayFleet, attach, start_fleet

__all__ = ["RayFleet", "attach", "start_fleet"]


def __getattr__(name: str) -> object:
    """Import Ray at the first use, because `plan` does not need it."""
    if name not in __all__:
        raise AttributeError(name)
    return getattr(import_module("prorl_trio.integrations.ray.fleet"), name)
