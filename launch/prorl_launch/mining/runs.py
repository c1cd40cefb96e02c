"""Runs of a row's tests where no node is: the sandboxes that a node's own grader asks for."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

import msgspec

from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.grading.repository import run_suite
from prorl_trio.tasks.handlers.swe import SwePayload, grade_change
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractContextManager

    from prorl_trio.agent.activity import Charge
    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.host import SandboxHost
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.tasks.grading.repository import Graded, Suite, SuiteRun
    from prorl_trio.types.models import TaskInstance


class LocalBench:
    """The sandboxes of this machine for `prorl_trio.tasks.grading`, each run in one of its own."""

    def __init__(self, host: SandboxHost, config: SandboxConfig) -> None:
        self._host = host
        self.config = config

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """See `prorl_trio.tasks.grading.verifier.Bench`."""
        sandbox = await self._host.open(spec)
        try:
            yield sandbox
        finally:
            await sandbox.aclose()  # noqa: ASYNC102 - it shields itself

    def waiting(self, what: str, charge: Charge) -> AbstractContextManager[None]:
        """Charge nobody."""
        del what, charge
        return nullcontext()

    def standing_in_line(self, what: str, charge: Charge, *, at_most_s: float) -> AbstractContextManager[None]:
        """Charge nobody."""
        del what, charge, at_most_s
        return nullcontext()

    def stage_left_s(self) -> float:
        """Return that there is no limit but the tests' own."""
        return math.inf

    def spec(self, layers: tuple[str, ...], env: Mapping[str, str]) -> SandboxSpec:
        """Return sandboxes over the host's userland."""
        limits, start_timeout_s = self.config.limits, self.config.start_timeout_s
        return SandboxSpec(image="host", layers=layers, env=dict(env), limits=limits, start_timeout_s=start_timeout_s)

    async def run(self, suite: Suite, patch: bytes | None) -> SuiteRun:
        """Run tests once, with a patch to the repository unless it is None. Errors as `grade`."""
        return await run_suite(self, patch, suite)

    async def grade(self, payload: SwePayload, patch: bytes | None) -> Graded:
        """Grade a change as a node does, or the repository as it is.

        Raises:
            EvaluationError, SandboxUnavailable, SandboxLost: infrastructure; nothing is known of the tests.
        """
        return await grade_change(self, payload, patch, self.config)


def payload_of(row: TaskInstance) -> SwePayload:
    """Return the repository and the tests of a row.

    Raises:
        ConfigError: it is no row of the handler `swe`.
    """
    try:
        if row.handler != "swe":
            raise ConfigError(
                f"{row.instance_id}: only rows of the handler `swe` can be verified, not of {row.handler}"
            )
        return msgspec.convert(row.payload, SwePayload)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{row.instance_id}: {exc}") from exc
