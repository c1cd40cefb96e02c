"""The change of the policy's weights, as a block: used by `RolloutClient.policy_update`."""

from __future__ import annotations

import logging
import shutil
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.client.errors import PolicyUpdateFailed
from prorl_trio.client.weights.source import check_weights, stage_weights
from prorl_trio.types.errors import BackendsBusy, PauseTimeout, ServiceError

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator
    from pathlib import Path

    from prorl_trio.client.backend_calls import BackendCalls
    from prorl_trio.client.weights.check import WeightCheck
    from prorl_trio.client.weights.source import StagedWeights
    from prorl_trio.client.weights.store import WeightStores
    from prorl_trio.client.weights.tensors import StateDict
    from prorl_trio.types.backends import PauseMode, UpdatedBackend, UpdateReport

__all__ = ["PolicyUpdate", "open_policy_update"]

logger = logging.getLogger(__name__)

BUSY_RETRY_S: Final = 0.1
"""Pause between two tries of a resume, while the node still undoes a cancelled step before it."""
CANNOT_LOAD: Final = (
    "it loads no weights from a folder: start vLLM with VLLM_SERVER_DEV_MODE=1, or move them there by other means"
)


@asynccontextmanager
async def open_policy_update(
    backends: BackendCalls, stores: WeightStores, version: str, mode: PauseMode, timeout_s: float
) -> AsyncIterator[PolicyUpdate]:
    """Pause the backends for the block, and resume with `version`. See `RolloutClient.policy_update`.

    After an exception or a cancel, leaving blocks for up to `timeout_s` until the old version is back.
    """
    update = PolicyUpdate(backends, stores, version, mode, timeout_s)
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

    def __init__(
        self, backends: BackendCalls, stores: WeightStores, version: str, mode: PauseMode, timeout_s: float
    ) -> None:
        self._backends = backends
        self._stores = stores
        self._version = version
        self._mode: PauseMode = mode
        self._timeout_s = timeout_s
        self._begun = False
        self._written: Path | None = None
        self.report: UpdateReport | None = None

    async def load_folder(
        self,
        folder: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        check: WeightCheck = "values",
    ) -> None:
        """Have every engine replace its weights by those in `folder`, a path on a file system that all of them see.

        The folder is checked here first, from the headers of its safetensors files and their bytes: a node need not see
        it. Its tensors must be those of the model that the engines serve: all of them, no others, with their shapes
        and dtypes (an engine converts between float32, bfloat16 and float16), and without NaN and infinity; fields of
        its `config.json` must agree. A tied output layer may be there or not.

        Args:
            folder: has `model.safetensors`, or several such files, with or without an index.
            base: the model to compare with. None: what the engines were started with, where that folder is visible
                here; where it is not, the folder is compared with nothing, and its files are checked alone.
            check: `headers` looks at no element (a model of 16 GB takes some 10 s); `none` checks nothing: for a folder
                that engines see and this process does not.

        Raises:
            WeightsRefused: the weights are not whole, or of another model; the message names the tensor.
            PolicyUpdateFailed: an engine failed, or offers no such load.
        """
        await self._load(await check_weights(folder, self._before, base, check))

    async def load_state_dict(
        self,
        state: StateDict,
        folder: str | os.PathLike[str] | None = None,
        *,
        base: str | os.PathLike[str] | None = None,
        check: WeightCheck = "values",
    ) -> None:
        """Write tensors to a folder that the engines see, and have every engine replace its weights by them.

        They are checked as `load_folder` does while they are written. The folder is removed when those of a later
        version are in use, or this update is given up, or the client is closed; `store.AFTER_KILL_S` after a kill.

        Args:
            state: names as in the model's own files, with torch tensors (of any device) or numpy arrays: a mapping, a
                list of mappings, or an iterator of pairs, which a worker thread takes one at a time.
            folder: the parent of the new folder, on a file system that all engines see. None: /dev/shm, where all
                engines are on this host.
            base: the model folder that configuration and tokenizer are copied from, and that the tensors are compared
                with. None: what the engines were started with, if it is visible here.
            check: see `load_folder`; `none` checks nothing.

        Raises:
            WeightsRefused: the tensors are not those of the model; the disk is full; engines are on other hosts and
                `folder` is not given; or no model folder is visible.
            PolicyUpdateFailed: an engine failed, or offers no such load.
        """
        staged = await self.stage(folder, base=base, check=check)
        await trio.to_thread.run_sync(staged.write, state)
        await self.load_staged(staged)

    async def stage(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        base: str | os.PathLike[str] | None = None,
        check: WeightCheck = "values",
    ) -> StagedWeights:
        """Make the folder for `load_state_dict`, to be filled by `StagedWeights.write` in a thread of the caller's.

        Raises:
            WeightsRefused: see `load_state_dict`.
        """
        staged = await stage_weights(self._stores, folder, self._before, base, check)
        self._written = staged.path
        return staged

    async def load_staged(self, staged: StagedWeights) -> None:
        """Have every engine load what was written. Raises PolicyUpdateFailed: see `load_folder`."""
        await self._load(staged.path)

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
        await trio.to_thread.run_sync(self._stores.keep_only, self._written)
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
        if self._written is not None:
            await trio.to_thread.run_sync(partial(shutil.rmtree, self._written, ignore_errors=True))
        for url, why in _failed(report).items():
            logger.error("backend %s is given no tasks until it has its weights again: %s", url, why)

    async def _load(self, folder: Path) -> None:
        report = await self._backends.load_weights(str(folder), self._timeout_s)
        self._check(report, {each.url: CANNOT_LOAD for each in report.backends if each.engine == "not_offered"})

    @property
    def _before(self) -> list[UpdatedBackend]:
        """Return the backends as the last step left them."""
        return [] if self.report is None else self.report.backends

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


def _failed(report: UpdateReport) -> dict[str, str]:
    return {each.url: each.error for each in report.backends if each.engine == "failed"}
