"""Backends without an engine, for what places tasks on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prorl_trio.config import HealthConfig
from prorl_trio.inference.engines.protocol import EngineInfo
from prorl_trio.inference.pool.backend import Backend
from prorl_trio.inference.pool.versions import VersionOrder

if TYPE_CHECKING:
    from prorl_trio.inference.pool.placement import Placement


def make_backend(url: str, weight: float = 1.0, max_tasks: int = 0) -> Backend:
    """Return a backend that takes tasks."""
    client: Any = SimpleNamespace(url=url)
    info = EngineInfo(url=url, model="m", max_model_len=9, engine="fake", policy_version="0")
    return Backend(client, info, HealthConfig(), VersionOrder(), weight=weight, max_tasks=max_tasks)


def add(placement: Placement, url: str, weight: float | None = None) -> Backend:
    """Register `url`, or have it take tasks again, as `Backends.add` does."""
    backend = placement.get(url)
    if backend is None:
        backend = make_backend(url, 1.0 if weight is None else weight, placement.max_tasks_per_backend)
        placement.add(backend)
    else:
        placement.activate(backend, weight)
    return backend
