"""Losses under faults: a working node is repeatedly killed with -9, and the outcomes at its trainer are counted.

    python -m perf.faults [--quick] [--json FILE]

The node has its ledger on a disk, runs real sandboxes, and is restarted after each kill, as by an operator. Every job
must have exactly one outcome. For comparison, the same jobs run without kills.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import trio

from perf.harness import Options, Report, caption_of, run_benchmark, tell
from perf.rollouts import math_job, open_engine, submit_all
from prorl_ipc.nursery import open_single_nursery
from prorl_launch.supervised import open_supervised
from prorl_trio.client import connect

QUICK_JOBS, JOBS = 60, 400
QUICK_KILLS, KILLS = 3, 20
READY_POLL_S: Final = 0.05
READY_TIMEOUT_S: Final = 300.0
GRACE_S: Final = 3.0
TOOL_TEXT: Final = '<tool_call>{"name": "ipython", "arguments": {"code": "print(6 * 7)"}}</tool_call>'


class _Node:
    """A node that is killed on request and restarted."""

    def __init__(self, folder: Path, config: dict[str, object]) -> None:
        self._folder, self._config = folder, config
        self._kill = trio.Event()
        self.token = secrets.token_urlsafe(32)
        self.endpoint_file = folder / "endpoint.json"
        self.kills = 0
        self.down_s = 0.0

    def kill(self) -> None:
        self._kill.set()

    async def serve(self) -> None:
        """Run it until cancelled."""
        command = [sys.executable, "-m", "prorl_trio.cli", "serve", "--config", str(self._folder / "node.toml")]
        listen = {"port": 0, "endpoint_file": str(self.endpoint_file)}
        await trio.Path(self._folder / "node.toml").write_bytes(msgspec.toml.encode({**self._config, "listen": listen}))
        env = {**os.environ, "PRORL_TOKEN": self.token}
        while True:
            self._kill = trio.Event()
            log = self._folder / "node.log"
            async with open_supervised(command, env=env, log_file=log, grace_s=GRACE_S) as process:
                await self._kill.wait()
                killed_s = trio.current_time()
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()
                self.kills += 1
            self.down_s += trio.current_time() - killed_s


async def measure_delivery(folder: Path, *, jobs: int, kills: int) -> dict[str, float]:
    """Run `jobs` jobs through a node that is killed `kills` times, spread over the outcomes.

    Returns:
        `jobs`: accepted jobs. `kills`: kills of the node. `lost`: jobs without an outcome. `doubled`: outcomes beyond
        the
        first of a job. `failed`: jobs that did not complete. `again`: jobs whose outcome is from a second or later
        attempt.
        `wall_s`: from the first submission to the last outcome. `down_s`: the part of that between kills and restarts.

    Raises:
        RuntimeError: a job was rejected.
    """
    async with open_engine(folder / "model", TOOL_TEXT) as engine, open_single_nursery() as nursery:
        tables: dict[str, object] = {
            "model": {"path": str(folder / "model")},
            "ledger": {"dir": str(folder / "ledger")},
            "backends": {"urls": [engine.url], "required": True},
            "sandbox": {"max_warm": 0},
        }
        node = _Node(folder, tables)
        nursery.start_soon(node.serve)
        delivered = await _deliver(node, jobs, kills)
        nursery.cancel_scope.cancel()
    return delivered


async def _deliver(node: _Node, jobs: int, kills: int) -> dict[str, float]:
    kill_after = {round((number + 1) * jobs / (kills + 1)) for number in range(kills)}
    seen: Counter[str] = Counter()
    failed = again = 0
    with trio.fail_after(READY_TIMEOUT_S):
        while not await trio.Path(node.endpoint_file).exists():  # noqa: ASYNC110 - another process makes it
            await trio.sleep(READY_POLL_S)
    async with connect(token=node.token, endpoint_file=node.endpoint_file) as client:
        began_s = time.monotonic()
        await submit_all(client, [math_job(f"job-{number}", max_turns=2) for number in range(jobs)])
        async for outcome in client.results():
            seen[outcome.job_id] += 1
            failed += outcome.status != "completed"
            again += outcome.attempt > 1
            if seen.total() in kill_after:
                node.kill()
        wall_s = time.monotonic() - began_s
    lost, doubled = jobs - len(seen), seen.total() - len(seen)
    counts = {"jobs": jobs, "kills": node.kills, "lost": lost, "doubled": doubled, "failed": failed, "again": again}
    return {**counts, "wall_s": wall_s, "down_s": node.down_s}


async def benchmark(options: Options) -> Report:
    """Deliver jobs without kills, then with them."""
    jobs, kills = (QUICK_JOBS, QUICK_KILLS) if options.quick else (JOBS, KILLS)
    runs: dict[str, dict[str, float]] = {}
    for name, count in (("undisturbed", 0), ("killed", kills)):
        tell(f"{jobs} jobs through a node that is killed {count} times")
        with tempfile.TemporaryDirectory(prefix="pf-") as folder:
            runs[name] = await measure_delivery(Path(folder), jobs=jobs, kills=count)
    return Report(
        title="jobs through a node that is killed with -9",
        more_metrics={f"faults.{name}.{field}": value for name, run in runs.items() for field, value in run.items()},
        at_most={f"faults.{name}.{field}": 0 for name in runs for field in ("lost", "doubled")},
        notes=caption_of("faults"),
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
