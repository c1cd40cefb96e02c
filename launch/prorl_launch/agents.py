"""`prorl-trio agents`: install existing agents for sandboxes."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.table import Table

from prorl_launch.bundle import fill_python, find_interpreter
from prorl_launch.locks import WHEELS_ONLY, agent_lock, is_made_for, serves
from prorl_launch.progress import SetupError, run_step
from prorl_launch.venv import exclusive, run_pip
from prorl_trio.agents.preset import INSIDE, INSTALLED, PACKAGES, presets
from prorl_trio.client.terminal import Console, say

if TYPE_CHECKING:
    from prorl_trio.agents.preset import Preset

UNLOCKED: Final = frozenset({"openhands"})
"""Built-in agents without a lock, because a required package is only published as source."""


@click.group()
def agents() -> None:
    """Install third-party agents, which jobs may name.

    A job with `agent="codex"` runs that program in the task's sandbox, and the policy answers its model requests. See
    docs/agents.md.
    """


@agents.command("list")
def list_agents() -> None:
    """List the available agents, and whether each is installed here."""
    table = Table("agent", "version", "installed", "from")
    for name, preset in presets().items():
        installed = "[green]yes[/green]" if preset.is_installed else f"no: prorl-trio agents install {name}"
        table.add_row(name, preset.versions[0], installed, preset.index)
    Console().print(table)


@agents.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--if-possible", is_flag=True, help="Warn about agents that cannot be installed, and continue.")
def install(names: tuple[str, ...], if_possible: bool) -> None:
    """Install agents from npm or PyPI into the cache, for sandboxes on this machine. Installed agents are skipped."""
    known = presets()
    for name in names:
        if name not in known:
            raise click.UsageError(f"there is no agent {name!r}; there are: {', '.join(known)}")
    for name in names:
        try:
            say(f"{name}: {install_agent(known[name])}")
        except SetupError as exc:
            if not if_possible:
                raise click.ClickException(f"{name}: {exc}") from exc
            say(f"WARNING: {name} cannot be installed: {exc}")


def install_agent(preset: Preset) -> Path:
    """Install an agent unless it is installed. Return its folder, which is always complete or absent. Blocks.

    Raises:
        SetupError: npm or pip failed or is missing.
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


def packages(preset: Preset) -> list[str]:
    """Return the packages of an agent, with their versions."""
    return [source.format(version=preset.versions[0]) for source in preset.source]


def described() -> list[dict[str, object]]:
    """Return the inputs of the built-in presets' locks as JSON values; see `prorl_launch.relock`."""
    ours = [each for each in presets().values() if each.start.__module__.startswith("prorl_trio.agents.")]
    return [
        {
            "name": each.name,
            "index": each.index,
            "python": each.python,
            "packages": packages(each),
            "manifest": npm_manifest(each) if each.index == "npm" else "",
        }
        for each in ours
        if each.name not in UNLOCKED
    ]


def npm_manifest(preset: Preset) -> str:
    """Return the `package.json` of a folder with an npm agent."""
    wanted = dict(each.rpartition("@")[::2] for each in packages(preset) if "@npm:" not in each)
    wanted |= dict(each.split("@", 1) for each in packages(preset) if "@npm:" in each)
    return json.dumps({"name": preset.name, "dependencies": wanted})


def _npm(preset: Preset, folder: Path) -> list[str]:
    """Return the command that installs into a folder from npm, with hashes if a lock pins the packages."""
    npm = shutil.which("npm")
    if npm is None:
        raise SetupError("npm is not installed: install Node.js, 20 or later, with its npm")
    (folder / "package.json").write_text(npm_manifest(preset))
    lock = agent_lock(preset.name, preset.index)
    if lock.exists():
        shutil.copyfile(lock, folder / "package-lock.json")
    how = ("--ignore-scripts", "--no-audit", "--no-fund", "--force")
    return [npm, "ci" if lock.exists() else "install", "--prefix", str(folder), *how]


def _install_python(preset: Preset, folder: Path, log_file: Path) -> None:
    """Install PyPI packages and a Python for them into a folder. The versions are the lock's, or the newest allowed."""
    python = find_interpreter(preset.python)
    lock, wanted = agent_lock(preset.name, preset.index), packages(preset)
    if lock.exists() and serves(lock.read_text(), python.version, (platform.system(), platform.machine())):
        if not is_made_for(lock.read_text(), wanted):
            raise SetupError(f"{lock} was made for other packages than the preset names; run: make lock")
        wanted = [*WHEELS_ONLY, "--no-deps", "--require-hashes", "--requirement", str(lock)]
    install = ["install", "--no-compile", "--target", str(folder / PACKAGES), *wanted]
    run_pip(f"agent {preset.name}", str(python.program), install, log_file=log_file, pip_of=sys.executable)
    inside = f"{INSIDE}/{preset.name}"
    fill_python(folder, inside, python, [f"{inside}/{PACKAGES}"])
