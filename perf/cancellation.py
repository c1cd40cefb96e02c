"""The time of a cancel, from the trainer's call until the rollout is completely gone, in a real sandbox.

    python -m perf.cancellation [--quick] [--json FILE]

A node in a separate process runs one rollout at a time. It is cancelled during sampling, and during a tool call that
would take minutes. `cancel` returns when the sandbox and all of its processes are gone. The node's count of live
sandboxes is checked after each cancel. For comparison, an empty request on the same connection is timed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from perf.harness import Case, Options, Report, caption_of, measure_interleaved, run_benchmark, tell
from perf.rollouts import math_job, open_engine, submit_all
from prorl_launch.node import open_node_process
from prorl_trio.client import connect

if TYPE_CHECKING:
    from prorl_trio.client import RolloutClient
    from prorl_trio.testing.fake_engine import FakeEngine

QUICK_ROUNDS, ROUNDS = 10, 100
WARM_UP_ROUNDS: Final = 1
TURN_TEXT: Final = '<tool_call>{"name": "ipython", "arguments": {"code": "import time; time.sleep(600)"}}</tool_call>'
SETTLE_S: Final = 0.5
"""Seconds after which a called tool is certainly running."""


class _Rig:
    """A node, its engine, and its trainer, which begins one rollout at a time."""

    def __init__(self, client: RolloutClient, engine: FakeEngine) -> None:
        self._client, self._engine = client, engine
        self._begun = 0

    async def cancel_while_sampling(self) -> float:
        """Return the seconds for cancelling a rollout that waits for its engine."""
        self._engine.hold()
        job_id = await self._begin()
        await self._engine.wait_until(lambda stats: stats.running == 1)
        taken_s = await self._cancel(job_id)
        self._engine.release()
        return taken_s

    async def cancel_in_a_tool(self) -> float:
        """Return the seconds for cancelling a rollout whose tool sleeps."""
        answered = self._engine.stats.completions_total
        job_id = await self._begin()
        await self._engine.wait_until(lambda stats: stats.completions_total > answered)
        await trio.sleep(SETTLE_S)
        return await self._cancel(job_id)

    async def ask(self) -> None:
        """Send a request without an effect."""
        await self._client.cancel(["never-submitted"])

    async def _begin(self) -> str:
        self._begun += 1
        job_id = f"cancelled-{self._begun}"
        await submit_all(self._client, [math_job(job_id)])
        return job_id

    async def _cancel(self, job_id: str) -> float:
        began_s = time.perf_counter()
        answer = await self._client.cancel([job_id])
        taken_s = time.perf_counter() - began_s
        status: Any = await self._client.status()
        if answer.cancelled != [job_id] or status["sandboxes"]["live"]:
            raise RuntimeError(f"after its cancel something of {job_id} is left: {answer}, {status['sandboxes']}")
        async for outcome in self._client.results(1):
            if outcome.status != "cancelled":
                raise RuntimeError(f"job {job_id} {outcome.status}: {outcome.error}")
        return taken_s


async def benchmark(options: Options) -> Report:
    """Cancel rollouts, one after the other."""
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="pc-") as name:
        tell("the node starts")
        folder = Path(name)
        config: dict[str, object] = {"model": {"path": str(folder / "model")}, "sandbox": {"max_warm": 0}}
        async with open_engine(folder / "model", TURN_TEXT) as engine:
            config["backends"] = {"urls": [engine.url], "required": True}
            async with (
                open_node_process(config, folder=folder, log_file=folder / "node.log") as node,
                connect(node.url, node.token) as client,
            ):
                rig, floor = _Rig(client, engine), "cancel.request"
                cases = [
                    Case(name="cancel.sampling", run=rig.cancel_while_sampling, self_timed=True, floor=floor),
                    Case(name="cancel.tool", run=rig.cancel_in_a_tool, self_timed=True, floor=floor),
                    Case(name=floor, run=rig.ask),
                ]
                series = await measure_interleaved(cases, rounds=rounds, warm_up_rounds=WARM_UP_ROUNDS)
    title = "cancelling a rollout, until nothing of it is left"
    return Report(title=title, series=series, notes=caption_of("cancellation"))


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
