"""Rollouts of made-up policies through a whole node of this process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from prorl_trio import JobSpec, connect
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.types.models import Outcome, TaskInstance

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_node.py"


async def outcomes_of(
    policy: Callable[[str], str],
    instances: Sequence[TaskInstance],
    *,
    timeout_s: float,
    packages: Sequence[str] = (),
    context_tokens: int = 16_000,
) -> dict[str, Outcome]:
    """Return the outcomes of a rollout of each instance, by its name. Sandboxes have `packages`; a token is a byte."""
    spec = importlib.util.spec_from_file_location("local_node_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    sampling = SamplingParams(max_output_tokens=context_tokens // 2)
    jobs = [JobSpec(job_id=each.instance_id, instance=each, sampling=sampling, max_turns=40) for each in instances]
    outcomes: dict[str, Outcome] = {}
    with trio.fail_after(timeout_s):
        async with (
            example.open_local_node(policy, packages=packages, context_tokens=context_tokens) as node,
            connect(node.url, node.token) as client,
        ):
            await client.submit(jobs)
            async for outcome in client.results():
                outcomes[outcome.job_id] = outcome
    return outcomes
