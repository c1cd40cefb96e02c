"""A trainer on groups: `python -m support.soak.group_trainer URL TOKEN FOLDER STEPS`.

For each batch it writes a line to `taken` and then, when it has "trained", the checkpoint `step-N.json`. Killed and
started again, it goes on from the last checkpoint. Exits with 0 when it has all steps.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import Final

import msgspec
import trio

from prorl_trio.client import connect
from prorl_trio.sampling import Batch, GroupRules, open_groups
from prorl_trio.types.models import TaskInstance
from support.soak.parent import end_with_parent

RULES: Final = GroupRules(size=8, groups_per_step=8, max_staleness=1, max_tries=20)
TASKS: Final = 50
TRAINING_S: Final = 0.1


class TakenLine(msgspec.Struct, frozen=True):
    """A batch as it was given: its number, and a checksum of all that is in it."""

    number: int
    checksum: int


class Checkpoint(msgspec.Struct, frozen=True):
    """The rollouts that a step was trained on."""

    step: int
    job_ids: list[str]


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return those of all steps so far, in order. Blocking."""
    found = [msgspec.json.decode(path.read_bytes(), type=Checkpoint) for path in folder.glob("step-*.json")]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _note(folder: Path, batch: Batch) -> None:
    plain = msgspec.structs.replace(batch, again=False)
    line = TakenLine(batch.number, zlib.crc32(msgspec.msgpack.encode(plain)))
    with (folder / "taken").open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def _save(folder: Path, batch: Batch) -> None:
    content = Checkpoint(batch.number, [outcome.job_id for outcome in batch.outcomes])
    fresh = folder / f"step-{batch.number}.new"
    with fresh.open("wb") as file:
        file.write(msgspec.json.encode(content))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / f"step-{batch.number}.json")


async def _work(url: str, token: str, folder: Path, steps: int) -> None:
    done = checkpoints(folder)
    trained = done[-1].step if done else 0
    tasks = [TaskInstance(instance_id=f"task-{n}", handler="dice", payload={}) for n in range(TASKS)]
    async with (
        connect(url, token, session_id="groups", connect_timeout_s=120) as client,
        open_groups(client, tasks, RULES, folder=folder / "sampling", trained=trained) as groups,
    ):
        if groups.version == str(trained - 1):  # killed between the checkpoint and `advance`
            await groups.advance(str(trained))
        for step in range(trained + 1, steps + 1):
            batch = await groups.take()
            assert (batch.number, batch.version) == (step, str(step - 1))
            _note(folder, batch)
            await trio.sleep(TRAINING_S)
            _save(folder, batch)
            await groups.advance(str(step))


if __name__ == "__main__":
    end_with_parent()
    trio.run(_work, sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
