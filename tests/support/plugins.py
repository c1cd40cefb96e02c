"""Packages that look installed, with entry points of their own."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest


class Install(Protocol):
    """Installs a package that declares `entries` under a `group`: names, and the objects that they stand for."""

    def __call__(self, group: str, package: str = "own", **entries: str) -> None: ...


@contextmanager
def installer(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> Iterator[Install]:
    """Make importable `modules` of these texts; yield what installs a package with entry points of a group."""
    monkeypatch.syspath_prepend(str(folder))
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)

    def install(group: str, package: str = "own", **entries: str) -> None:
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}\n" for name, value in entries.items()]
        (info / "entry_points.txt").write_text(f"[{group}]\n" + "".join(lines))
        importlib.invalidate_caches()

    yield install
    for name in modules:
        sys.modules.pop(name, None)
