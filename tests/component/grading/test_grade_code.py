"""Verdicts on code in real sandboxes: what is right, what is wrong, and what hangs, crashes and cheats."""

from __future__ import annotations

import math

import pytest
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.grading import (
    AssertTests,
    FunctionCase,
    FunctionTests,
    OutputCase,
    OutputTests,
    Tolerance,
    UnitTests,
    grade_code,
)
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers import choose_provider
from prorl_trio.types.models import JobSpec, TaskInstance

RESOURCES = Resources(
    config=NodeConfig(model=ModelConfig(path="none")), chat_format=None, backends=None, scorers=None
)


@pytest.fixture
async def grade():
    provider = await choose_provider(RESOURCES.config.sandbox)
    async with open_sandbox_host(provider) as host:

        async def run(solution, tests):
            instance = TaskInstance(instance_id="i", handler="code", payload={})
            context = RolloutContext(spec=JobSpec(job_id="j", instance=instance), resources=RESOURCES, sandboxes=host)
            with trio.fail_after(120):
                return await grade_code(context, solution, tests, SandboxSpec())

        yield run


def statuses(verdict):
    return [test.status for test in verdict.tests]
