"""`prorl-trio examples`: list or copy the programs and service files in the package."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import click

from prorl_launch.paths import checkout_dir
from prorl_trio.client.terminal import say
from prorl_trio.types.errors import ConfigError

_FOLDERS = ("examples", "launch/kubernetes", "launch/systemd", "launch/grafana")


@click.group(invoke_without_command=True)
@click.pass_context
def examples(context: click.Context) -> None:
    """List the shipped examples, or copy them.

    The examples are short programs for trainers, handlers and sandboxes, manifests for Kubernetes, a systemd unit, and
    a dashboard with alert rules for Grafana and Prometheus.

    \b
        prorl-trio examples
        prorl-trio examples copy my-examples
        python my-examples/examples/handler.py
    """
    if context.invoked_subcommand is None:
        for path in _files():
            say(f"{path.relative_to(checkout_dir())}: {_first_sentence(path)}")


@examples.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def copy(folder: Path) -> None:
    """Copy all examples to DIR, which is created. If a file already exists, it is an error and nothing is copied."""
    found = {path: folder / path.relative_to(checkout_dir()) for path in _files()}
    if there := [str(target) for target in found.values() if target.exists()]:
        raise ConfigError(f"{there[0]} is there already; copy to another folder")
    for path, target in found.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    say(f"{len(found)} files are in {folder}")


def _files() -> list[Path]:
    found = [path for name in _FOLDERS for path in sorted((checkout_dir() / name).rglob("*"))]
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def _first_sentence(path: Path) -> str:
    """Return a file's description: the first line of its docstring, or its first comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return text.partition("\n")[0].removeprefix("#").strip()
