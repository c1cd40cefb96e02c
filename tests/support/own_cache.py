"""A cache folder for one test, which does not make anew what takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_trio.sandbox.cache import cache_dir

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def use_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a cache folder, empty but for the sandboxes' Pythons, which take seconds to make."""
    shared = cache_dir()
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    for name in ("host-pythons", "runtimes"):
        (shared / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / name).symlink_to(shared / name)
