"""A round of `perf.race`: the tasks, the record of a run, and the common parameters. Standard library only.

It is imported by `perf.race`, and by the peers' workers in their own environments.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

ISOLATION: Final = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1"),
    *("--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"),
)
SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
INTERPRETER: Final = ("-I", "-S", "-c")
"""Start without site-packages and environment, in half the time."""
KILLED_TIMEOUT_S: Final = 5.0
NO_OUTPUT: Final = "[no output]"


class Box:
    """Runs programs, each in its own sandbox.

    Args:
        bubblewrap: the program.
        timeout_s: time limit of a call in seconds.
        max_chars: maximum length of the output; longer output is cut in the middle.
    """

    def __init__(self, bubblewrap: str, *, timeout_s: float, max_chars: int) -> None:
        self._argv = (bubblewrap, *ISOLATION, *_mounts(), "--chdir", "/tmp", "--", os.path.realpath(sys.executable))
        self._timeout_s = timeout_s
        self._max_chars = max_chars

    async def run(self, code: str) -> str:
        """Return a program's output, including its traceback. A cancel kills it."""
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            *INTERPRETER,
            code,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            printed, _ = await asyncio.wait_for(process.communicate(), self._timeout_s)
        except TimeoutError:
            return f"[stopped after {self._timeout_s:g} s]"
        finally:
            if process.returncode is None:
                process.kill()
                await asyncio.wait_for(process.wait(), KILLED_TIMEOUT_S)
        return self._shorten(printed.decode(errors="replace").rstrip("\n")) or NO_OUTPUT

    def _shorten(self, text: str) -> str:
        if len(text) <= self._max_chars:
            return text
        half = self._max_chars // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _mounts() -> list[str]:
    """Return the options for a root with the system's programs and this interpreter, but without the user's files."""
    argv = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in SYSTEM:
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            argv += ["--ro-bind", path, path]
    base = Path(sys.base_prefix).resolve()
    if not base.is_relative_to("/usr"):
        argv += ["--ro-bind", str(base), str(base)]
    return argv


LANGUAGES: Final = "python|py|ipython"
FENCE: Final = re.compile(rf"```(?:{LANGUAGES})\s*\n(.*?)```", re.DOTALL)
BOX: Final = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True, kw_only=True)
class RaceTask:
    """A question, the answer for a reward of 1, and the system prompt before it."""

    task_id: str
    question: str
    answer: str
    system_prompt: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        """Return the opening messages, which are the same for all entrants."""
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": self.question}]


@dataclass(frozen=True, kw_only=True)
class RaceRound:
    """The work of a round.

    Attributes:
        url: origin of the engine. `model`: the folder of the policy, which is also its name there.
        rollouts: number for each task, in groups. `slots`: concurrent rollouts.
        temperature, max_output_tokens: for each turn. No entrant sends a seed.
        max_turns: maximum for each rollout.
        tool_timeout_s: time limit of a call. `max_observation_chars`: a longer result is cut in the middle.
        bubblewrap: the program.
    """

    url: str
    model: str
    tasks: list[RaceTask]
    rollouts: int
    slots: int
    temperature: float
    max_output_tokens: int
    max_turns: int
    tool_timeout_s: float
    max_observation_chars: int
    bubblewrap: str

    @property
    def total(self) -> int:
        return len(self.tasks) * self.rollouts

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read_round(path: Path) -> RaceRound:
    """Return the round in a file."""
    read = json.loads(path.read_text())
    return RaceRound(**{**read, "tasks": [RaceTask(**task) for task in read["tasks"]]})


@dataclass(frozen=True, kw_only=True)
class RaceRollout:
    """A finished rollout. Seconds since the round began; `tokens`: sampled."""

    start_s: float
    end_s: float
    turns: int
    tool_calls: int
    tokens: int
    reward: float


@dataclass(frozen=True, kw_only=True)
class RaceRecord:
    """A finished round.

    Attributes:
        rollouts: the completed rollouts.
        wall_s: seconds from its beginning until the last rollout had its reward.
        framework_cpu_s: CPU seconds of the framework's own processes. `sandboxes_cpu_s`: of their children.
        machine_cpu_s: CPU seconds of all processes on the machine in that time, including the engine and unrelated
            ones.
    """

    rollouts: list[RaceRollout]
    wall_s: float
    framework_cpu_s: float
    sandboxes_cpu_s: float
    machine_cpu_s: float

    def encoded(self) -> str:
        return json.dumps(asdict(self))


def read_record(encoded: str) -> RaceRecord:
    """Return the record that `RaceRecord.encoded` wrote."""
    read = json.loads(encoded)
    return RaceRecord(**{**read, "rollouts": [RaceRollout(**rollout) for rollout in read["rollouts"]]})


class CpuClock:
    """CPU seconds of this process, of its ended children, and of the machine, since the clock was made."""

    def __init__(self) -> None:
        self._before = _cpu()

    def read(self) -> tuple[float, float, float]:
        """Return the seconds of this process, of its children, and of everything on the machine."""
        own_s, children_s, machine_s = (now - before for now, before in zip(_cpu(), self._before, strict=True))
        return own_s, children_s, machine_s


def _cpu() -> tuple[float, float, float]:
    kinds = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own_s, children_s = (usage.ru_utime + usage.ru_stime for usage in kinds)
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _waiting, irq, soft_irq = map(int, file.readline().split()[1:8])
    return own_s, children_s, (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def code_in(text: str) -> str | None:
    """Return the program that a turn runs: its first ```python block; None next to an answer."""
    found = FENCE.search(text)
    if found is None or not found[1].strip() or answer_in(text) is not None:
        return None
    return found[1]


def answer_in(text: str) -> str | None:
    """Return the last boxed answer."""
    answers = BOX.findall(text)
    return answers[-1].strip() if answers else None


def reward_of(text: str, answer: str) -> float:
    """Return 1 if the last turn's `text` has the answer in a box, else 0. Answers of word problems are integers."""
    return float(answer_in(text) == answer)
