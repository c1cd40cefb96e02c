"""The policy of `perf.race`: SmolLM2, after the demonstrations by which `prorl-trio learn` shows the tool to it.

Untrained, it calls no tool, and a race would be one of single completions.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

import trio

from launch.learn import SHARED_CORES
from launch.learning.record import CHECKPOINTS, SETTINGS, Settings, write_atomically
from launch.paths import checkout_dir, trainer_python
from launch.supervised import open_supervised

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["make_policy", "with_tool_results"]

WEIGHTS: Final = "model.safetensors"
TEMPLATE: Final = "chat_template.jinja"
MESSAGE: Final = re.compile(r"\{\{[^{}]*message\['content'\][^{}]*\}\}")
NOT_A_RESULT: Final = "{% if message['role'] != 'tool' %}"
RESULT: Final = (
    r"{% else %}{{ '<|im_start|>user\n<tool_response>\n' + message['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{% endif %}"
)
GRACE_S: Final = 5.0
LOG_TAIL_BYTES: Final = 2000


async def make_policy(model: Path, folder: Path) -> Path:
    """Show `model` the demonstrations; return a folder below `folder` that an engine can serve. Takes a minute or two.

    Raises:
        RuntimeError: the training failed; the message has the end of its log.
    """
    run, log_file = folder / "demonstrations", folder / "demonstrations.log"
    run.mkdir()
    write_atomically(run / SETTINGS, Settings(model=str(model)))
    command = [str(trainer_python("train")), "-m", "launch.learning.warm_up", str(run)]
    env = {**os.environ, "PYTHONPATH": str(checkout_dir()), "HF_HUB_OFFLINE": "1", **SHARED_CORES}
    async with open_supervised(command, env=env, log_file=log_file, grace_s=GRACE_S) as process:
        code = await process.wait()
    if code:
        said = (await trio.Path(log_file).read_bytes())[-LOG_TAIL_BYTES:].decode(errors="replace")
        raise RuntimeError(f"the demonstrations ended with exit code {code}; the end of the log:\n{said}")
    checkpoint = max((run / CHECKPOINTS).glob("step-*"))
    return serve_folder(model, checkpoint / WEIGHTS, folder / "policy")


def serve_folder(model: Path, weights: Path, folder: Path) -> Path:
    """Make `folder` of links to the files of `model`, with other weights, and a template for tools; return it."""
    folder.mkdir()
    for path in model.iterdir():
        if path.name == TEMPLATE:
            (folder / TEMPLATE).write_text(with_tool_results(path.read_text()))
        else:
            (folder / path.name).symlink_to(weights if path.name == WEIGHTS else path)
    return folder


def with_tool_results(template: str) -> str:
    """Return a chat template that writes results of tools as the node does where a model's own knows no tools.

    So everybody's prompts are those that the demonstrations had, the engine's own rendering of chats included.

    Raises:
        ValueError: it has not one place where messages are written.
    """
    changed, places = MESSAGE.subn(lambda found: f"{NOT_A_RESULT}{found[0]}{RESULT}", template)
    if places != 1:
        raise ValueError(f"the chat template writes messages in {places} places")
    return changed
