"""Made-up policies that put in known solutions with the editor and bash; and where data comes from."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.tasks.sets.wheels import WheelFile


class SolvesByTools:
    """Knows which solution belongs to a prompt by a text that occurs in it. Says nothing where it knows none."""

    def __init__(self, solutions: Mapping[str, str]) -> None:
        self._solutions = solutions

    def __call__(self, prompt: str) -> str:
        """Return the next turn: the editor, then bash, then finish."""
        solution = next((code for text, code in self._solutions.items() if text in prompt), None)
        done = prompt.count("<tool_response>")
        if solution is None:
            return call("finish", answer="")
        if done == 0:
            return call("str_replace_editor", command="create", path="/workspace/solution.py", file_text=solution)
        if done == 1:
            return call("bash", command="python3 /workspace/solution.py && echo it loads")
        return call("finish", answer="done")


class Step(NamedTuple):
    """A turn: a call of a tool, and a regular expression for what the policy then has to see to go on."""

    tool: str
    arguments: dict[str, object]
    sees: str


class SolvesInSteps:
    """Takes the steps that belong to a prompt by a text that occurs in it, and gives up where it sees something else.

    Attributes:
        surprised: where it gave up: the step's call, and the end of what it saw.
    """

    def __init__(self, steps: Mapping[str, Sequence[Step]]) -> None:
        self._steps = steps
        self.surprised: list[tuple[str, str]] = []

    def __call__(self, prompt: str) -> str:
        """Return the next turn."""
        steps = next(steps for text, steps in self._steps.items() if text in prompt)
        done = prompt.count("<tool_response>")
        said = prompt.rpartition("<tool_response>")[2].partition("</tool_response>")[0]
        if done and not re.search(steps[done - 1].sees, said):
            self.surprised.append((str(steps[done - 1]), said[-1500:]))
            return call("finish", answer="")
        return call(steps[done].tool, **steps[done].arguments)


class SolvesByPatch:
    """Knows which patch belongs to a prompt by the statement in it. Ends at once where it knows none."""

    def __init__(self, patches: Mapping[str, str]) -> None:
        self._patches = patches

    def __call__(self, prompt: str) -> str:
        """Return the next turn: a look at the repository, the patch by the editor, git, and finish."""
        patch = next((patch for text, patch in self._patches.items() if text in prompt), None)
        if patch is None:
            return call("finish", answer="")
        turns = (
            call("bash", command="cd /testbed && git status --short && ls"),
            call("str_replace_editor", command="create", path="/tmp/gold.diff", file_text=patch),
            call("bash", command="git apply --whitespace=nowarn /tmp/gold.diff && git diff --stat"),
        )
        done = prompt.count("<tool_response>")
        return turns[done] if done < len(turns) else call("finish", answer="done")


def call(name: str, **arguments: object) -> str:
    """Return a tool call as the tiny model's template reads it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def fetch_wheel(wheel: WheelFile) -> None:
    """Run the command that an error names, where the wheel is not there yet."""
    try:
        wheel.read("tests")
    except ConfigError:  # it is missing, or damaged
        subprocess.run([sys.executable, "-m", *shlex.split(wheel.command), "--quiet"], check=True)
