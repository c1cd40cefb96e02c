"""The change of the policy's weights, as a block: used by `RolloutClient.policy_update`."""

from __future__ import annotations

import logging
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.client.errors import PolicyUpdateFailed
from prorl_trio.types.errors import BackendsBusy, PauseTimeout, ServiceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.client.backend_calls import BackendCalls
    from prorl_trio.types.backends import PauseMode, UpdateReport

__all__ = ["PolicyUpdate", "open_policy_update"]

logger = logging.getLogger(__name__)

BUSY_RETRY_S: Final = 0.1
"""Pause between two tries of a resume, while the node still undoes a cancelled step before it."""
CANNOT_LOAD: Final = (
    "it loads no weights from a folder: start vLLM with VLLM_SERVER_DEV_MODE=1, or move them there by other means"
)


@asynccontextmanager
async def open_policy_update(
    backends: BackendCalls, version: str, mode: PauseMode, timeout_s: float
) -> AsyncIterator[PolicyUpdate]:
    """Pause the backends for the block, and resume with `version`. See `RolloutClient.policy_update`.

    After an exception or a cancel, leaving blocks for up to `timeout_s` until the old version is back.
    """
    update = PolicyUpdate(backends, version, mode, timeout_s)
    try:
        await update.begin()
        yield update
        await update.finish()
    except BaseException:
        with trio.move_on_after(timeout_s, shield=True) as undoing:
            await update.undo()
        if undoing.cancelled_caught:
            logger.error("the update to %s is given up; the backends were not resumed in time", version)
        raise


class PolicyUpdate:
    """A change of the policy's weights while the backends are paused. See `RolloutClient.policy_update`.

    Attributes:
        report: the result of the last step for each backend; `undo` does not set it.
    """

    def __init__(self, backends: BackendCalls, version: str, mode: PauseMode, timeout_s: float) -> None:
        self._backends = backends
        self._version = version
        self._mode: PauseMode = mode
        self._timeout_s = timeout_s
        self._begun = False
        self.report: UpdateReport | None = None

    async def load_folder(self, folder: str | os.PathLike[str]) -> None:
        """Have every engine replace its weights by those in `folder`, a path on a file system that all of them see.

        Raises:
            PolicyUpdateFailed: an engine failed, or offers no such load.
        """
        report = await self._backends.load_weights(_absolute(folder), self._timeout_s)
        self._check(report, {each.url: CANNOT_LOAD for each in report.backends if each.engine == "not_offered"})

    async def begin(self) -> None:
        """Pause the backends.

        Raises:
            PolicyUpdateFailed: an engine failed to pause; the caller must call `undo`.
            PauseTimeout: the pause took too long; nothing has changed.
            BackendsBusy: another pause or resume is running; nothing has changed.
        """
        self._begun = True
        try:
            self._check(await self._backends.pause(self._mode, self._timeout_s), {})
        except (PauseTimeout, BackendsBusy):
            self._begun = False
            raise

    async def finish(self) -> None:
        """Resume with the new version. If this raises, the caller must call `undo`.

        A backend that fails does not make this raise: it is logged, and named in `report`.
        """
        self.report = await self._resume(self._version)
        for url, why in _failed(self.report).items():
            logger.warning("backend %s has the weights of version %s, but: %s", url, self._version, why)

    async def undo(self) -> None:
        """Resume with the old version and its weights. Does nothing if `begin` was not called or changed nothing.

        Errors are logged, not raised. An engine that does not get its weights back is given no tasks until it has them.
        """
        if not self._begun:
            await trio.lowlevel.checkpoint()
            return
        try:
            report = await self._resume(None)
        except ServiceError as exc:
            logger.error("the update to %s is given up, but the backends are not resumed: %s", self._version, exc)
            return
        for url, why in _failed(report).items():
            logger.error("backend %s is given no tasks until it has its weights again: %s", url, why)

    def _check(self, report: UpdateReport, others: dict[str, str]) -> None:
        self.report = report
        if failed := {**_failed(report), **others}:
            raise PolicyUpdateFailed(self._version, failed)

    async def _resume(self, version: str | None) -> UpdateReport:
        deadline_s = trio.current_time() + self._timeout_s
        while True:
            try:
                return await self._backends.resume(version)
            except BackendsBusy:
                if trio.current_time() >= deadline_s:
                    raise
            await trio.sleep(BUSY_RETRY_S)


def _absolute(folder: str | os.PathLike[str]) -> str:
    """Return the absolute path, since the engines have other working directories."""
    return os.path.abspath(folder)


def _failed(report: UpdateReport) -> dict[str, str]:
    return {each.url: each.error for each in report.backends if each.engine == "failed"}
