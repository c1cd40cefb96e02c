"""Updates of the policy's weights, as a block. Used by `RolloutClient.policy_update`."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.client.errors import PolicyUpdateFailed
from prorl_trio.types.backends import (
    ConfirmWeights,
    ExpectTransfer,
    LoadAdapter,
    LoadWeights,
    PauseBackends,
    RenewUpdate,
    ResumeBackends,
    UpdateReport,
)
from prorl_trio.types.errors import BackendsBusy, ServiceError
from prorl_trio.weights.source import check_adapter_weights, check_weights, name_tied_head, stage_weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from prorl_trio.client.backend_calls import BackendCalls
    from prorl_trio.types.backends import NodeRequest, PauseMode, UpdatedBackend
    from prorl_trio.weights.check import WeightCheck
    from prorl_trio.weights.safetensors import StateDict
    from prorl_trio.weights.source import StagedWeights

logger = logging.getLogger(__name__)

BUSY_RETRY_S: Final = 0.1
"""Pause in seconds between two resume attempts, while the node still rolls back a cancelled step."""
LEASE_S: Final = 60.0
"""Seconds without a message from the trainer after which a node abandons its update. Reconnecting
usually takes less."""
RENEWALS: Final = 3
"""Renewals within one lease."""
CANNOT_LOAD: Final = (
    "it loads no weights from a folder: start vLLM with VLLM_SERVER_DEV_MODE=1, or move them there by other means"
)
NO_ADAPTERS: Final = (
    "it takes no LoRA adapters: start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True (SGLang with "
    "--enable-lora), or load whole weights"
)
NO_CHECKPOINTS: Final = "it has no checkpoints of its own: only a Tinker server does (backends.engine)"
SAYS_NOTHING: Final = (
    "it does not say which weights it has: start vLLM with VLLM_SERVER_DEV_MODE=1, or move them without transfer()"
)


@asynccontextmanager
async def open_policy_update(
    clients: Sequence[BackendCalls],
    version: str,
    *,
    mode: PauseMode = "wait",
    timeout_s: float = 600.0,
    max_idle_s: float | None = None,
) -> AsyncIterator[PolicyUpdate]:
    """Pause the backends of several nodes for the block. Resume all nodes with `version`, or none.

        async with open_policy_update([client, other], "2") as update:
            await update.load_folder("/checkpoints/2")

    Each step runs on all nodes at once, and fails if it fails on one node. The first node resumes only after all
    engines have reported the new weights. Only a node that is lost at that very moment stays at the old version, which
    it restores by itself. See `RolloutClient.policy_update` for one node, arguments and errors.

    After an exception or a cancel, leaving blocks for up to `timeout_s` until the old version is restored.
    """
    update = PolicyUpdate(clients, version, mode=mode, timeout_s=timeout_s, max_idle_s=max_idle_s)
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

    The nodes abandon the update if the trainer is lost, or begins no step for `max_idle_s`.

    Attributes:
        report: the result of the last step for each backend; `undo` does not set it.
    """

    def __init__(
        self,
        clients: Sequence[BackendCalls],
        version: str,
        *,
        mode: PauseMode,
        timeout_s: float,
        max_idle_s: float | None,
    ) -> None:
        self._clients = clients
        self._stores = clients[0].weight_stores
        self._version = version
        self._mode: PauseMode = mode
        self._timeout_s = timeout_s
        self._max_idle_s = timeout_s if max_idle_s is None else max_idle_s
        self._holder = _holder_name(version)
        self._begun = False
        self._in_step = False
        self._last_step_s = 0.0
        self._renewing = trio.CancelScope()
        self._announced = False
        self._staged = False
        self._replaced = False
        """Full weights were transferred, so the engines no longer have the previous ones."""
        self._written: Path | None = None
        self.report: UpdateReport | None = None

    async def load_folder(
        self,
        folder: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        check: WeightCheck = "values",
    ) -> None:
        """Have every engine replace its weights with the weights in `folder`, a path that all engines can read.

        This process first checks the folder, from the headers of its safetensors files and their bytes. A node need not
        see it. The folder must contain exactly the tensors of the model that the engines serve, with the same shapes
        and dtypes, and without NaN or infinity. Engines convert between float32, bfloat16 and float16. Fields of its
        `config.json` must agree with the model's.

        A tied output layer is optional. If it is missing, engines on this host receive it through a folder of links in
        /dev/shm, because vLLM on a CPU has a copy that is only updated by name.

        Args:
            folder: has `model.safetensors`, or several such files, with or without an index.
            base: the model to compare with. None: the model that the engines were started with, if its folder is
                visible here.
            check: `headers` reads no element values (reading takes some 10 s for a model of 16 GB). `none` checks
                nothing: use it for a folder that this process cannot read.

        Raises:
            WeightsRefused: the weights are incomplete, or of another model; the message names the tensor. Or no model
                to compare them with is visible.
            PolicyUpdateFailed: an engine failed, or does not support this load.
        """
        path = await check_weights(folder, self._backends, base, check)
        linked = None
        if check != "none":
            self._staged = True
            linked = await name_tied_head(self._stores, path, self._backends, base)
        self._written = linked
        await self._load(linked or path)

    async def load_state_dict(
        self,
        state: StateDict,
        folder: str | os.PathLike[str] | None = None,
        *,
        base: str | os.PathLike[str] | None = None,
        check: WeightCheck = "values",
    ) -> None:
        """Write tensors to a folder that the engines can read, and have every engine load them.

        The tensors are checked like those of `load_folder` while they are written. The folder is removed when a later
        version is in use, when this update is abandoned, or when the client is closed. After a kill, it is removed
        `store.AFTER_KILL_S` later.

        Args:
            state: names as in the model's own files, with torch tensors (of any device) or numpy arrays. It is a
                mapping, a list of mappings, or an iterator of pairs. A worker thread reads an iterator one item at a
                time.
            folder: the parent of the new folder, on a file system that all engines see. None: /dev/shm, if all engines
                are on this host.
            base: the model folder from which configuration and tokenizer are copied, and with which the tensors are
                compared. None: the model that the engines were started with, if its folder is visible here.
            check: see `load_folder`; `none` checks nothing.

        Raises:
            WeightsRefused: the tensors do not match the model; the disk is full; engines are on other hosts and
                `folder` is not given; or no model folder is visible.
            PolicyUpdateFailed: an engine failed, or does not support this load.
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
        """Create the folder for `load_state_dict`.

        The caller fills it with `StagedWeights.write` in its own thread.

        Raises:
            WeightsRefused: see `load_state_dict`.
        """
        self._staged = True
        return await stage_weights(self._stores, folder, self._backends, base, check)

    async def load_staged(self, staged: StagedWeights) -> None:
        """Have every engine load the staged weights. Raises PolicyUpdateFailed, see `load_folder`."""
        self._written = staged.path
        await self._load(staged.path)

    async def load_adapter(
        self,
        name: str,
        folder: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        check: WeightCheck = "values",
    ) -> None:
        """Have every engine sample with the LoRA adapter in `folder`, as `NAME-vVERSION`, once the block has ended.

        The previous adapter is then unloaded. Keep its folder until that point, because a failed update reverts to it.
        This process first checks the adapter, as `load_folder` checks weights: its tensors must be pairs that fit the
        model's matrices. Full weights that are loaded later are used without an adapter. The update's mode must not be
        `keep`.

        Args:
            name: the adapter's name, the same in every version.
            folder: has `adapter_config.json` and `adapter_model.safetensors`, as PEFT writes them.
            base: see `load_folder`.
            check: see `load_folder`.

        Raises:
            WeightsRefused: the adapter is incomplete, or of another model; the message names the tensor.
            PolicyUpdateFailed: an engine failed, or does not support adapters.
            UpdateRefused: completions were kept in engines (`keep`) and would continue with the previous adapter.
        """
        path = await check_adapter_weights(folder, self._backends, base, check)
        name = f"{name}-v{self._version}"
        await self._step(LoadAdapter(name, str(path), self._timeout_s, self._holder), NO_ADAPTERS)

    async def load_checkpoint(self, path: str) -> None:
        """Have every engine sample from a checkpoint in the server's own store, such as `tinker://RUN/sampler_weights/7`.

        Only Tinker servers have such checkpoints. Completions in flight keep the former one, and are recorded under its
        version, so that the mode `keep` is exact.

        Raises:
            PolicyUpdateFailed: an engine has no such checkpoint, or is not a Tinker server.
        """
        self._written = None
        self._replaced = True
        await self._step(LoadWeights(path, self._timeout_s, self._holder), NO_CHECKPOINTS)

    @asynccontextmanager
    async def transfer(self) -> AsyncIterator[None]:
        """Open a block in which the trainer itself transfers the weights, by NCCL or the engines' own API.

            async with update.transfer():
                ...  # for vLLM: /start_weight_update, /update_weights, /finish_weight_update

        The trainer also sends the version to each engine (vLLM: `weight_version` of `/finish_weight_update`, or
        `/update_weight_version`). When the block ends, each engine must report this version (`/weight_info`). If the
        block fails, or an engine reports another version, every engine reloads its previous weights from their folder.
        An engine whose previous weights were transferred as well has no such folder: it gets no tasks until it has
        weights again.

        Raises:
            PolicyUpdateFailed: an engine does not have the weights of the version, or does not report its version.
        """
        await self.begin_transfer()
        yield
        await self.end_transfer()

    async def begin_transfer(self) -> None:
        self._replaced, self._written = True, None
        await self._step(ExpectTransfer(self._timeout_s, self._holder))

    async def end_transfer(self) -> None:
        """End the block of `transfer`. Raises PolicyUpdateFailed."""
        confirm = ConfirmWeights(self._version, self._timeout_s, self._holder, tell=False)
        await self._step(confirm, SAYS_NOTHING)

    async def begin(self) -> None:
        """Pause the backends. If this raises, the caller must call `undo`.

        Raises:
            PolicyUpdateFailed: an engine failed to pause.
            PauseTimeout: the pause took too long.
            BackendsBusy: another pause or resume is running, or another trainer's update.
        """
        self._begun = True
        self._clients[0].run_in_background(self._renew)
        await self._step(PauseBackends(self._mode, self._timeout_s, self._holder, LEASE_S))

    async def finish(self) -> None:
        """Resume with the new version. If this raises, the caller must call `undo`.

        If a backend fails to resume, this does not raise: the failure is logged, and `report` names the backend.

        Raises:
            PolicyUpdateFailed: an engine does not report the new weights.
            UpdateRefused: the block ignored a load that failed, or the nodes have abandoned the update.
        """
        await self._step(ConfirmWeights(self._version, self._timeout_s, self._holder))
        self._announced = True
        self.report = await self._resume(self._version)
        self._renewing.cancel()
        if self._replaced:
            await trio.to_thread.run_sync(self._stores.use, self._written)
        for url, why in _failed(self.report).items():
            logger.warning("backend %s has the weights of version %s, but: %s", url, self._version, why)

    async def undo(self) -> None:
        """Resume with the old version and its weights. Does nothing if `begin` was not called or changed nothing.

        Errors are logged, not raised. An engine that does not get its weights back receives no tasks until it has them.
        """
        if not self._begun:
            await trio.lowlevel.checkpoint()
            return
        self._renewing.cancel()
        try:
            report = await self._resume(None)
        except ServiceError as exc:
            logger.error("the update to %s is given up, but the backends are not resumed: %s", self._version, exc)
            return
        if self._staged and not self._announced:
            await trio.to_thread.run_sync(self._stores.discard_unused)
        for url, why in _failed(report).items():
            logger.error("backend %s is given no tasks until it has its weights again: %s", url, why)

    @property
    def _backends(self) -> list[UpdatedBackend]:
        """Return the backends as the last step left them."""
        return [] if self.report is None else self.report.backends

    async def _load(self, folder: Path) -> None:
        self._replaced = True
        await self._step(LoadWeights(str(folder), self._timeout_s, self._holder), CANNOT_LOAD)

    async def _step(self, request: NodeRequest[UpdateReport], not_offered: str = "") -> None:
        """Run a step on all nodes.

        `not_offered` is the reason to report for an engine that does not support the step.
        """
        self._in_step = True
        try:
            self.report = report = await self._all(request)
        finally:
            self._in_step = False
            self._last_step_s = trio.current_time()
        failed = _failed(report)
        if not_offered:
            failed |= {each.url: not_offered for each in report.backends if each.engine == "not_offered"}
        if failed:
            raise PolicyUpdateFailed(self._version, failed)

    async def _all(self, request: NodeRequest[UpdateReport], busy_s: float = 0.0) -> UpdateReport:
        """Send a request to all nodes at once, and merge their answers.

        Raises the first error when all nodes have answered.

        A request to a busy node is retried for `busy_s` seconds.
        """
        give_up_s = trio.current_time() + busy_s
        answers: dict[int, UpdateReport] = {}
        errors: list[ServiceError] = []

        async def ask_one(number: int) -> None:
            try:
                while number not in answers:
                    try:
                        answers[number] = await self._clients[number].operate(request)
                    except BackendsBusy:
                        if trio.current_time() >= give_up_s:
                            raise
                        await trio.sleep(BUSY_RETRY_S)
            except ServiceError as exc:
                errors.append(exc)

        async with open_single_nursery() as nursery:
            for number in range(len(self._clients)):
                nursery.start_soon(ask_one, number)
        if errors:
            raise errors[0]
        reports = [answers[number] for number in range(len(self._clients))]
        return UpdateReport(
            paused=all(report.paused for report in reports),
            waiting=sum(report.waiting for report in reports),
            backends=[backend for report in reports for backend in report.backends],
        )

    async def _resume(self, version: str | None) -> UpdateReport:
        return await self._all(ResumeBackends(version, self._holder), busy_s=self._timeout_s)

    async def _renew(self) -> None:
        """Renew the leases until the update is over.

        If this fails, or no step is made in time, the nodes abandon the update.
        """
        with self._renewing:
            while True:
                await trio.sleep(LEASE_S / RENEWALS)
                if not self._in_step and trio.current_time() - self._last_step_s > self._max_idle_s:
                    logger.error(
                        "the update to %s had no step for %g s: its backends go back to the old version",
                        self._version,
                        self._max_idle_s,
                    )
                    return
                try:
                    await self._all(RenewUpdate(self._holder))
                except ServiceError as exc:  # the next step reports it, or the node still pauses
                    logger.debug("the lease of the update to %s is not renewed: %s", self._version, exc)


def _holder_name(version: str) -> str:
    """Return a readable name that no other update has."""
    return f"{socket.gethostname()[:60]} pid {os.getpid()} to version {version[:40]} ({uuid.uuid4().hex[:8]})"


def _failed(report: UpdateReport) -> dict[str, str]:
    return {each.url: each.error for each in report.backends if each.engine == "failed"}
