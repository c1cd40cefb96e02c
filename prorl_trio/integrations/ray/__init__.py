"""A fleet in a Ray cluster: one node per machine, placed and restarted by Ray. Needs `ray`; see `docs/ray.md`."""

from __future__ import annotations

from prorl_trio.integrations.ray.fleet import RayFleet, attach, start_fleet

__all__ = ["RayFleet", "attach", "start_fleet"]
