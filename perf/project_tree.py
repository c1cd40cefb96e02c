"""The small project that the trace works on: a package with tests, documents, a log and a table. Always the same."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_project"]

MTIME_S = 1_700_000_000
"""Every file and folder is of this second, so that listings do not tell the copies apart."""
PLUGINS = ("barcode", "bundle", "coupon", "discount", "export", "freight", "gift", "invoice", "ledger", "loyalty")
LOG_LINES = 2_000
CSV_ROWS = 400

PRICING = '''"""Prices, in cents."""


def total(lines):
    """The sum of quantity times price over all lines."""
    amount = 0
    for line in lines:
        amount += line.quantity * line.price
    return amount


def discounted(amount, percent):
    """The amount less so many percent, rounded down."""
    return amount - amount * percent // 10


def with_tax(amount, rate=0.19):
    return round(amount * (1 + rate))
'''

FILES = {
    ".gitignore": "__pycache__/\n.pytest_cache/\nbuild/\n",
    "README.md": "# inventory\n\nKeeps stock, prices orders, prints reports.\n\n"
    "## Usage\n\n    python -m inventory.cli total\n\n## Development\n\nRun `pytest`. TODO: describe plugins.\n",
    "pyproject.toml": '[project]\nname = "inventory"\nversion = "0.4.1"\n\n'
    '[tool.pytest.ini_options]\npythonpath = ["src"]\ntestpaths = ["tests"]\n',
    "src/inventory/__init__.py": '"""Stock and orders."""\n\n__version__ = "0.4.1"\n',
    "src/inventory/models.py": '"""What is sold."""\n\nfrom dataclasses import dataclass, field\n\n\n'
    "@dataclass\nclass Line:\n    sku: str\n    quantity: int\n    price: int\n\n\n"
    "@dataclass\nclass Order:\n    number: int\n    lines: list = field(default_factory=list)\n",
    "src/inventory/pricing.py": PRICING,
    "src/inventory/store.py": '"""Stock kept in memory."""\n\n\nclass OutOfStock(Exception):\n    pass\n\n\n'
    "class Store:\n    def __init__(self):\n        self.stock = {}\n\n"
    "    def add(self, sku, quantity):\n        self.stock[sku] = self.stock.get(sku, 0) + quantity\n\n"
    "    def take(self, sku, quantity):\n        # TODO: reserve instead of taking\n"
    "        if self.stock.get(sku, 0) < quantity:\n            raise OutOfStock(sku)\n"
    "        self.stock[sku] -= quantity\n",
    "src/inventory/parsing.py": '"""Orders from text."""\n\nfrom inventory.models import Line\n\n\n'
    "def parse_line(text):\n    # FIXME: quoted fields\n"
    '    sku, quantity, price = text.split(",")\n    return Line(sku.strip(), int(quantity), int(price))\n\n\n'
    "def parse_lines(text):\n    return [parse_line(line) for line in text.splitlines() if line.strip()]\n",
    "src/inventory/cli.py": '"""The command line."""\n\nimport sys\n\nfrom inventory.parsing import parse_lines\n'
    "from inventory.pricing import total\n\n\ndef main():\n    print(total(parse_lines(sys.stdin.read())))\n\n\n"
    'if __name__ == "__main__":\n    main()\n',
    "tests/test_pricing.py": "from inventory.models import Line\nfrom inventory.pricing import discounted, total, "
    'with_tax\n\n\ndef test_total():\n    assert total([Line("a", 2, 150), Line("b", 1, 99)]) == 399\n\n\n'
    "def test_discount():\n    assert discounted(1000, 10) == 900\n\n\n"
    "def test_tax():\n    assert with_tax(100) == 119\n",
    "tests/test_store.py": "import pytest\n\nfrom inventory.store import OutOfStock, Store\n\n\ndef test_take():\n"
    '    store = Store()\n    store.add("nut", 3)\n    store.take("nut", 2)\n    assert store.stock == {"nut": 1}\n\n\n'
    'def test_empty():\n    with pytest.raises(OutOfStock):\n        Store().take("nut", 1)\n',
    "tests/test_parsing.py": "from inventory.parsing import parse_lines\n\n\ndef test_lines():\n"
    '    assert [line.sku for line in parse_lines("nut, 2, 15\\nbolt, 1, 20\\n")] == ["nut", "bolt"]\n',
    "docs/plugins.md": "# Plugins\n\n" + "".join(f"* `{name}`: changes the price\n" for name in PLUGINS),
}


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
