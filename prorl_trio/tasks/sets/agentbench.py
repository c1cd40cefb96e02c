"""AgentBench's operating-system tasks: the set `agentbench-os`, for the handler `shell`."""

from __future__ import annotations

import base64
import posixpath
from typing import Any, Final

import msgspec

from prorl_trio.tasks.sets.wheels import WheelFile
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

_FOLDER: Final = "inspect_evals/agent_bench/data"
AGENTBENCH: Final = WheelFile("inspect-evals", "0.26.0", "3.12", f"{_FOLDER}/agent_bench_os_test.json")
"""119 tasks (Apache-2.0) of Liu et al., 2023, arXiv 2308.03688, with corrections from inspect-evals (MIT)."""
SET: Final = "agentbench-os"
HOME: Final = "/home/agent"
ANSWER_PATH: Final = "/logs/agent/answer.txt"
CHECK_TIMEOUT_S: Final = 120.0

ASKED: Final = """\
Work in /home/agent. When you are done, call finish with the answer only: a bare integer for counts, or the exact text \
that is asked for. If a script or a command is asked for, run it and answer with its output. If the system is to be \
changed, change it, and call finish."""

_END: Final = "then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
_COMPARE: Final = f"""\
expected=$(bash /tests/example.sh) || exit 1
if python3 /tests/compare.py "$(cat {ANSWER_PATH})" "$expected"; {_END}"""


def load_agentbench_os() -> list[TaskInstance]:
    """Return 109 of the 119 operating-system tasks of AgentBench, with the initial states contained in the wheel.

    An answer is compared with the output of the task's example in the verifier's own sandbox. If the agent must change
    the system, or its content is random, the agent's own sandbox is inspected.

    Raises:
        ConfigError: the wheel with the tasks is missing or damaged.
    """
    return [_instance(row) for row in agentbench_rows()]


def agentbench_rows() -> list[dict[str, Any]]:
    """Return the rows of `load_agentbench_os`, with the home directory of our sandboxes. Raises ConfigError."""
    try:
        rows: list[dict[str, Any]] = msgspec.json.decode(AGENTBENCH.read(SET), type=list[dict[str, Any]])
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{AGENTBENCH.package} {AGENTBENCH.version}, {AGENTBENCH.member}: {exc}") from exc
    return [_at_home(row) for row in rows if not any("file" in step for step in _steps(row) if isinstance(step, dict))]


def _at_home(value: Any) -> Any:
    """Replace the directories named in the rows, as the package itself does for its containers."""
    if isinstance(value, dict):
        return {key: _at_home(each) for key, each in value.items()}
    return value.replace("/root", HOME).replace("/usr", HOME) if isinstance(value, str) else value


def _steps(row: dict[str, Any]) -> list[Any]:
    create = row.get("create")
    init = create.get("init") if isinstance(create, dict) else None
    return init if isinstance(init, list) else [] if init is None else [init]


def example_of(row: dict[str, Any]) -> str:
    """Return the script that solves the row's task or prints its answer; empty if there is none. Raises ConfigError."""
    example = row["evaluation"].get("example") or row.get("example") or ""
    if isinstance(example, str):
        return example
    return example["code"] if "code" in example else _script(example["file"]).decode()


def _script(name: str) -> bytes:
    return AGENTBENCH._replace(member=f"{_FOLDER}/scripts/{name}").read(SET)


def _file(content: str | bytes) -> dict[str, Any]:
    text = content.encode() if isinstance(content, str) else content
    return {"content": base64.b64encode(text).decode(), "mode": 0o644}


def _instance(row: dict[str, Any]) -> TaskInstance:
    labels = row.get("labels") or []
    return TaskInstance(
        instance_id=f"{SET}-{row['id']}",
        handler="shell",
        family=labels[0] if labels else "",
        payload={
            "steps": [{"instruction": f"{row['description']}\n\n{ASKED}", "verifier": _verified(row)}],
            "environment": {"build": _build(row), "network": False},
        },
    )


def _verified(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "timeout_s": CHECK_TIMEOUT_S,
        **_verifier(row["evaluation"], example_of(row)),
        "separate": _is_told_by_answer(row["evaluation"]) and "/dev/urandom" not in str(row),
    }


def _build(row: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [step["code"] if isinstance(step, dict) else step for step in _steps(row)]
    if "bin/find" in str(row):
        parts.insert(0, f"mkdir -p {HOME}/bin; cp /usr/bin/find {HOME}/bin/find")
    if not parts:
        return []
    name = f"task-{row['id']}"
    script = "RANDOM=3\n" + "\n".join(parts).replace("<random-string>", name)  # the same value on every run
    path = "/tmp/init.sh"
    return [{"files": {path: _file(script)}, "command": f"bash {path}; rm -f {path}", "cwd": HOME}]


def _is_told_by_answer(evaluation: dict[str, Any]) -> bool:
    """Return whether the answer decides, rather than the state of the agent's sandbox."""
    check = evaluation.get("check")
    return "match" in evaluation or (isinstance(check, list) and not isinstance(check[0], str))


def _verifier(evaluation: dict[str, Any], example: str) -> dict[str, Any]:
    check: Any = evaluation.get("check")
    if "match" in evaluation:
        files = {
            "test.sh": f'if [ "$(cat {ANSWER_PATH})" = "$(cat /tests/answer)" ]; {_END}',
            "answer": evaluation["match"],
        }
        return _asks(files)
    if isinstance(check, dict):
        script = check["code"] if "code" in check else _script(check["file"]).decode()
    elif isinstance(check[0], str):
        script = check[0]
    else:
        compare = _script(check[1]["file"]).decode()
        return _asks({"test.sh": _COMPARE, "example.sh": example, "compare.py": compare})
    files = {"test.sh": f"cd {HOME}\nif bash /tests/check.sh; {_END}", "check.sh": script}
    return {"files": _placed(files)}


def _asks(files: dict[str, str]) -> dict[str, Any]:
    return {"files": _placed(files), "answer_path": ANSWER_PATH}


def _placed(files: dict[str, str]) -> dict[str, Any]:
    return {posixpath.join("/tests", name): _file(content) for name, content in files.items()}
