"""A node in a process of its own that can be killed as by `kill -9`, and started again."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import pytest
import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

TESTS = Path(__file__).parents[1]
TOKEN = "a-token-for-tests-0123456789"


class Killable:
    """A node's process, which can be ended as by `kill -9` and started again, at the same port if that was noted.

    `module` is run with the path of the configuration as its last argument, and says READY.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        nursery: trio.Nursery,
        log: IO[bytes],
        module: Sequence[str] = ("prorl_trio.cli", "serve", "--config"),
    ) -> None:
        self._file, self.config, self._nursery, self._log = folder / "node.toml", config, nursery, log
        self._module = module
        self._process: trio.Process

    async def start(self, *, note_port: bool = True) -> str:
        """Start it and return its address once it is ready."""
        self._file.write_bytes(msgspec.toml.encode(self.config))
        run = partial(
            trio.run_process,
            [sys.executable, "-m", *self._module, str(self._file)],
            env={**os.environ, "PRORL_TOKEN": TOKEN, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))},
            check=False,
            stdout=subprocess.PIPE,
            stderr=self._log,
            deliver_cancel=terminate,
        )
        self._process = await self._nursery.start(run)
        assert self._process.stdout is not None
        ready = b""
        while b"READY" not in ready:
            ready += await self._process.stdout.receive_some() or pytest.fail(f"it ended, see {self._log.name}")
        url: str = msgspec.json.decode(self._file.with_name("endpoint.json").read_bytes())["url"]
        if note_port:
            self.config["listen"]["port"] = int(url.rpartition(":")[2])
        return url

    @property
    def pid(self) -> int:
        """The process id of the node that was started last."""
        return self._process.pid

    async def kill(self) -> None:
        """Kill it with -9."""
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> int:
        """Ask it to drain, and return its exit code."""
        self._process.terminate()
        return await self._process.wait()


async def terminate(process: trio.Process) -> None:
    """Kill it, as what `trio.run_process` does when it is cancelled."""
    process.kill()
