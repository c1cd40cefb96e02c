"""The small project for the trace: a package with tests, documents, a log and a table. It is always the same."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

MTIME_S = 1_700_000_000
"""Modification time of every file and folder, so that listings of copies are equal."""
PLUGINS = ("barcode", "bundle", "coupon", "discount", "export", "freight", "gift", "invoice", "ledger", "loyalty")
LOG_LINES = 2_000
CSV_ROWS = 400

FILES: dict[str, str] = msgspec.json.decode((Path(__file__).parent / "traces/project.json").read_bytes())


def write_project(root: Path) -> None:
    """Write the project into `root/project`. `root` must exist and have no `project`."""
    project = root / "project"
    files = FILES | {f"src/inventory/plugins/{name}.py": _plugin(index, name) for index, name in enumerate(PLUGINS)}
    files |= {"src/inventory/plugins/__init__.py": "", "logs/app.log": _log(), "fixtures/items.csv": _table()}
    for name, text in files.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder, _, names in os.walk(project, topdown=False):
        for name in (*names, "."):
            os.utime(os.path.join(folder, name), (MTIME_S, MTIME_S))


def _plugin(index: int, name: str) -> str:
    return (
        f'"""The plugin {name}."""\n\nfrom inventory.pricing import discounted\n\nPRIORITY = {index * 7 % 10}\n\n\n'
        f"def apply(amount):\n    # TODO: make {name} configurable\n    return discounted(amount, {index + 1})\n"
    )


def _log() -> str:
    levels = ("INFO", "INFO", "WARNING", "INFO", "INFO", "DEBUG", "ERROR")
    return "".join(
        f"2024-03-{1 + index * 28 // LOG_LINES:02d} {levels[(index + 1) * index % 7]} "
        f"inventory.{PLUGINS[index * 13 % 10]} request={index:05d} took={index * 37 % 911} status="
        f"{500 if index % 97 == 0 else 200}\n"
        for index in range(LOG_LINES)
    )


def _table() -> str:
    rows = (f"{PLUGINS[index % 10]}-{index:04d},{index * 31 % 50},{index * 17 % 2000}\n" for index in range(CSV_ROWS))
    return "sku,quantity,price\n" + "".join(rows)
