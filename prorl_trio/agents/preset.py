"""The description of an agent, and the location of its installation."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from prorl_trio.config import McpServerConfig

logger = logging.getLogger(__name__)

GROUP: Final = "prorl_trio.agents"
"""The entry-point group by which packages offer presets: `mine = "my_package.agents:PRESET"`."""
INSIDE: Final = "/opt/agents"
"""The read-only folder of agents in a sandbox. Each agent has a subfolder of its name."""
INSTALLED: Final = ".installed"
"""The file in an agent's folder that marks a finished installation."""


class AgentServer(NamedTuple):
    """An MCP server that an agent starts or connects to itself.

    Attributes:
        name: prefix of its tools' names.
        config: its declaration.
        tools: names of the tools that the agent may use.
        others: names of its other tools.
    """

    name: str
    config: McpServerConfig
    tools: Sequence[str]
    others: Sequence[str]


class Start(NamedTuple):
    """The parameters with which an agent is started.

    Attributes:
        root: the agent's installation folder, as its process sees it.
        home: a writable folder for this rollout alone.
        url: the gateway's URL, without the path of an API.
        key: the API key that the agent's SDK sends.
        model: the model name that the agent requests.
        instruction: the task.
        context_tokens: maximum length of a dialogue.
        output_tokens: maximum length of a turn.
        mcp: the MCP servers that the agent may use.
    """

    root: str
    home: str
    url: str
    key: str
    model: str
    instruction: str
    context_tokens: int
    output_tokens: int
    mcp: Sequence[AgentServer] = ()


@dataclass(frozen=True, kw_only=True)
class Started:
    """How to start an agent: its command, its environment variables, and files by their path below `Start.home`."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """An existing agent that can work on rollouts.

    Attributes:
        name: jobs request the agent by this name.
        source: the npm or PyPI packages to install; `{version}` stands for the agent's version.
        index: the package index. Agents from PyPI are installed with their own Python, see `python_program`.
        python: the minimum version of Python.
        versions: the tested versions, newest first.
        start: returns how to start the agent.
        takes_mcp: `start` passes MCP servers to the agent.
    """

    name: str
    source: tuple[str, ...]
    index: Literal["npm", "pypi"]
    versions: tuple[str, ...]
    start: Callable[[Start], Started]
    python: tuple[int, int] = (3, 11)
    takes_mcp: bool = False

    @property
    def folder(self) -> Path:
        """Return the installation folder on this machine.

        It is the root of a layer that contains the agent below `INSIDE`.
        """
        return cache_dir() / "agents" / f"{self.name}-{self.versions[0]}"

    @property
    def is_installed(self) -> bool:
        """Return whether the installation has finished."""
        return (self.folder / INSTALLED).exists()


LOADER: Final = f"ld-linux-{platform.machine().replace('_', '-')}.so." + (
    "2" if platform.machine() == "x86_64" else "1"
)
PACKAGES: Final = "packages"
"""The folder of a PyPI agent's packages, next to the `bin` and `lib` of its Python."""
_BOOT: Final = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); what = sys.argv[2]; del sys.argv[1:3]; "
    "run = runpy.run_path if what.endswith('.py') else runpy.run_module; "
    "run(what, run_name='__main__', **({} if run is runpy.run_path else {'alter_sys': True}))"
)


def python_program(start: Start, what: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module or a `.py` file with the agent's own Python instead of the image's.

    Python is started through its own loader. It therefore works in any folder and needs no environment variables, which
    the agent's child processes would inherit.
    """
    root = start.root
    python = (f"{root}/lib/{LOADER}", "--library-path", f"{root}/lib", f"{root}/bin/python3", "-I")
    return (*python, "-c", _BOOT, f"{root}/{PACKAGES}", what, *arguments)


def python_script(start: Start, text: str, **env: str) -> Started:
    """Return how to run a script with the agent's own Python.

    Its arguments are the instruction and the model's name.
    """
    argv = python_program(start, f"{start.home}/agent.py", start.instruction, start.model)
    return Started(argv=argv, env={"HOME": start.home, **env}, files={"agent.py": text})


SHELL_TOOL: Final = '''\
import subprocess


def shell(command: str) -> str:
    """Run a shell command and return its output.

    Args:
        command: what to run.
    """
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, **how)
    return f"{done.stdout[-20000:]}\\n[exit code {done.returncode}]"


'''
"""The tool of presets that are made with a framework: what such a script begins with."""


@cache
def presets() -> dict[str, Preset]:
    """Return the presets of all installed packages by name. A preset that cannot be imported is logged and skipped."""
    found: dict[str, Preset] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            preset = point.load()
        except Exception as exc:
            logger.error("the preset %r of the entry point %s cannot be loaded: %s", point.name, point.value, exc)
            continue
        found[preset.name] = preset
    return found


def find_preset(name: str) -> Preset:
    """Return the preset of an agent that is installed on this machine.

    Raises:
        ConfigError: no such agent is installed; the message contains the remedy.
    """
    preset = presets().get(name)
    if preset is None:
        raise ConfigError(f"there is no agent {name!r}; there are: {', '.join(presets()) or 'none'}")
    if not preset.is_installed:
        raise ConfigError(
            f"the agent {name!r} is not installed on this machine: run `prorl-trio agents install {name}`"
        )
    return preset
