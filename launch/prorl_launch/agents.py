"""`prorl-trio agents`: agents that people have, installed for sandboxes."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.table import Table

from prorl_launch.bundle import fill_python, find_interpreter
from prorl_launch.progress import SetupError, run_step
from prorl_launch.venv import exclusive
from prorl_trio.agents.preset import INSIDE, INSTALLED, PACKAGES, presets
from prorl_trio.client.terminal import Console, say

if TYPE_CHECKING:
    from prorl_trio.agents.preset import Preset

INSTALL_TIMEOUT_S: Final = 900.0


@click.group()
def agents() -> None:
    """Install the agents of others, which jobs may name.

    A job with `agent="codex"` is worked on by that program, in the task's sandbox; the policy answers what it asks of a
    model. See docs/agents.md.
    """


@agents.command("list")
def list_agents() -> None:
    """Show which agents there are, and which of them are installed here."""
    table = Table("agent", "version", "installed", "from")
    for name, preset in presets().items():
        installed = "[green]yes[/green]" if preset.is_installed else f"no: prorl-trio agents install {name}"
        table.add_row(name, preset.versions[0], installed, preset.index)
    Console().print(table)


@agents.command()
@click.argument("names", nargs=-1, required=True)
def install(names: tuple[str, ...]) -> None:
    """Install agents from npm or PyPI into the cache, for sandboxes of this machine. Again: nothing happens."""
    known = presets()
    for name in names:
        if name not in known:
            raise click.UsageError(f"there is no agent {name!r}; there are: {', '.join(known)}")
    for name in names:
        try:
            say(f"{name}: {install_agent(known[name])}")
        except SetupError as exc:
            raise click.ClickException(f"{name}: {exc}") from exc


def install_agent(preset: Preset) -> Path:
    """Install an agent unless it is there; return its folder, which is whole or absent at any moment. Blocks.

    Raises:
        SetupError: npm or pip failed, or is not there.
    """
    folder = preset.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.parent / f".{folder.name}.lock"):
        if preset.is_installed:
            return folder
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            inside = draft / INSIDE.lstrip("/") / preset.name
            inside.mkdir(parents=True)
            log_file = folder.parent / f"{folder.name}.log"
            if preset.index == "pypi":
                _install_python(preset, inside, log_file)
            else:
                run_step(f"agent {preset.name}", _npm(preset, inside), log_file=log_file)
            (draft / INSTALLED).write_text(preset.versions[0])
            draft.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _packages(preset: Preset) -> list[str]:
    return [source.format(version=preset.versions[0]) for source in preset.source]


def _npm(preset: Preset, folder: Path) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise SetupError("npm is not installed: install Node.js, 20 or later, with its npm")
    return [
        npm, "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", "--force",
        *_packages(preset),
    ]  # fmt: skip


def _install_python(preset: Preset, folder: Path, log_file: Path) -> None:
    """Fill a folder with packages of PyPI and a Python for them. What they depend on is the newest that they take."""
    python = find_interpreter(preset.python)
    pip = [sys.executable, "-m", "pip", "--python", str(python.program), "install", "--no-input", "--no-compile"]
    packages = str(folder / PACKAGES)
    run_step(f"agent {preset.name}", [*pip, "--target", packages, *_packages(preset)], log_file=log_file)
    inside = f"{INSIDE}/{preset.name}"
    fill_python(folder, inside, python, [f"{inside}/{PACKAGES}"])
