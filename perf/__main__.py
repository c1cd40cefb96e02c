"""List the available benchmarks: `python -m perf`."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from perf.harness import FILE_COLUMNS, describe_machine

FOLDER: Final = Path(__file__).parent
STARTS_ONE: Final = re.compile(r"^    sys\.exit\(run_benchmark\(", re.MULTILINE)
NOTES: Final = (
    "Each is `python -m perf.NAME [--quick] [--json FILE]`: a table for people, and with --json FILE flat "
    '{"metric": number}, and a plot beside it. `python -m perf.NAME --help` says how it is done.',
    "`python -m perf.paper [--quick]` runs those that measure the paper's tables and figures, or what it left out, and "
    "makes one report of them.",
    "Peers are installed by `python -m perf.peers setup`, each in an environment of its own; who is missing is left "
    "out, and said. `python -m perf.peers status` lists them.",
)


def find_benchmarks(folder: Path = FOLDER) -> dict[str, str]:
    """Return the first sentences of each benchmark module, by its name."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        source = path.read_text()
        if STARTS_ONE.search(source):
            said = ast.get_docstring(ast.parse(source)) or ""
            found[f"perf.{path.stem}"] = " ".join(said.partition("\n\n")[0].split())
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the list. Return the exit code, 0."""
    argparse.ArgumentParser(prog="python -m perf", description=__doc__, epilog=" ".join(NOTES)).parse_args(argv)
    table = Table(title="Benchmarks", show_lines=True)
    table.add_column("python -m", no_wrap=True)
    table.add_column("what it measures")
    for name, said in find_benchmarks().items():
        table.add_row(name, said)
    console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)
    console.print(table, markup=False)
    for note in (*NOTES, f"this machine: {describe_machine()}"):
        console.print(note, style="dim", highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
