"""Control of one engine: pauses, weights from a folder, and the name of the weights."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import trio

from prorl_trio.inference.engines.answers import UNNAMED
from prorl_trio.inference.pool.versions import UNKNOWN_VERSION
from prorl_trio.types.backends import ConfirmWeights, ExpectTransfer, LoadAdapter, LoadWeights, PauseBackends
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from prorl_trio.inference.engines.protocol import EngineClient, EngineInfo
    from prorl_trio.inference.pool.versions import VersionOrder
    from prorl_trio.types.backends import EngineAnswer, WeightsStep

logger = logging.getLogger(__name__)

UNPAUSE_GRACE_S = 4.0
"""Time to resume an engine before its client is closed."""


class WeightsOnTrial(NamedTuple):
    """Weights that an engine was asked to load during a pause, or that a trainer transfers itself (without `folder`).

    `loaded`: the engine confirmed that it has them.
    """

    folder: str
    timeout_s: float
    loaded: bool


class AdapterOnTrial(NamedTuple):
    """A LoRA adapter that an engine was asked to load during a pause. `loaded`: the engine confirmed it."""

    name: str
    loaded: bool


class OtherWeights(BackendError):
    """An engine reports weights of another version than expected. Not retryable."""

    def __init__(self, url: str, heard: str, policy_version: str) -> None:
        super().__init__(f"{url}: it says that its weights are {heard}, and not {policy_version}", retryable=False)


class EngineControl:
    """Control of one backend's engine: pause, weights, and the name of the weights.

    Attributes:
        info: the known facts about the engine.
        paused: paused by its own API, or possibly paused because no answer arrived.
        why_paused: why it is still paused after the pool's resume.
        weights: the source for reloading the weights of its version, if known.
        trial: weights that it may have instead, until a resume announces them or reverts to the former ones.
        named: their name on trial; empty if none.
        adapter, adapter_trial: the LoRA adapter in use (empty: none), and the adapter on trial.
    """

    def __init__(self, client: EngineClient, info: EngineInfo, versions: VersionOrder) -> None:
        """Versions that come into force here without an announcement are recorded in `versions`."""
        self.client = client
        self.info = info
        self.weights = info.weights
        self.trial: WeightsOnTrial | None = None
        self.named = ""
        self.adapter = ""
        self.adapter_trial: AdapterOnTrial | None = None
        self.paused = False
        self.why_paused = f"{client.url}: it was not resumed"
        self._outdated: list[str] = []
        self._versions = versions
        self._lock = trio.Lock()

    def added(self, info: EngineInfo) -> None:
        """Reset its state, because it was just added with a probe result of `info`.

        Its weights are some version of the policy.
        """
        known, versions = self.info, self._versions
        if info.policy_version == UNKNOWN_VERSION:
            info = msgspec.structs.replace(info, policy_version=versions.current)
        elif info.label == known.label:  # added again, with its former weights
            info = msgspec.structs.replace(info, policy_version=known.policy_version)
        if info.label in (UNNAMED, "") or info.label != known.label:  # it has its start weights at best
            self.weights = info.weights if versions.current == UNKNOWN_VERSION else ""
        self.weights = self.weights or versions.folder(info.policy_version)
        self.trial, self.adapter_trial, self.named = None, None, ""
        self.info = info
        versions.note(info.policy_version)

    def heard(self, label: str, since: EngineInfo) -> None:
        """Process the engine's own name for its weights, from a call made when `since` was known.

        Weights renamed without a resume of the pool are recorded under the new name from now on. If the name is gone,
        the engine was restarted; the probe handles that, see `lost_weights`.
        """
        known = self.info
        if not label or (known.label, known.policy_version) != (since.label, since.policy_version):
            return
        if not known.label:
            self.info = msgspec.structs.replace(known, label=label)
        elif label not in (known.label, UNNAMED):
            self.info = msgspec.structs.replace(known, label=label, policy_version=label)
            self.weights = ""
            self._versions.note(label)

    def probed(self, found: EngineInfo, since: EngineInfo) -> None:
        """Process the result of a probe that began when `since` was known. The pool's name for its weights stays."""
        self.heard(found.label, since)
        known = self.info
        self.info = msgspec.structs.replace(found, label=known.label, policy_version=known.policy_version)

    def lost_weights(self, found: EngineInfo, since: EngineInfo) -> bool:
        """Return whether a probe that began when `since` was known shows that the engine was restarted.

        Its weights had a name and no longer have one, so they are not the weights that tokens would be recorded under.
        """
        return found.label == UNNAMED and self.info.label == since.label and since.label not in ("", UNNAMED)

    async def operate(self, request: PauseBackends | WeightsStep) -> EngineAnswer:
        """Perform one step of a policy update: stop sampling, or load or confirm weights or an adapter on trial.

        Returns `not_offered`, without any effect, if the engine lacks an API for the step.

        Raises:
            OtherWeights: the engine reports weights of another version.
            BackendError: the step failed. The engine counts as paused, and the new weights stay on trial, because it
                may have loaded them.
        """
        async with self._lock:
            match request:
                case PauseBackends():
                    self.paused = True
                    self.paused = await self.client.pause(request.mode, timeout_s=request.timeout_s)
                    return "paused" if self.paused else "not_offered"
                case LoadWeights():
                    return "loaded" if await self._try_weights(request) else "not_offered"
                case LoadAdapter():
                    return "loaded" if await self._try_adapter(request) else "not_offered"
                case ExpectTransfer():
                    self.paused, self.trial = True, WeightsOnTrial("", request.timeout_s, loaded=False)
                    return "paused"
                case ConfirmWeights():
                    return "confirmed" if await self._confirm(request) else "not_offered"

    async def _try_weights(self, load: LoadWeights) -> bool:
        before, on_trial = (self.paused, self.trial), WeightsOnTrial(load.folder, load.timeout_s, loaded=False)
        self.paused, self.trial = True, on_trial
        if await self.client.load_weights(load.folder, timeout_s=load.timeout_s):
            self.trial = on_trial._replace(loaded=True)  # also if the backend was added again during the load
            return True
        self.paused, self.trial = before
        return False

    async def _try_adapter(self, load: LoadAdapter) -> bool:
        before, self.adapter_trial = self.adapter_trial, AdapterOnTrial(load.name, loaded=False)
        if await self.client.load_adapter(load.name, load.folder, timeout_s=load.timeout_s):
            self.adapter_trial = AdapterOnTrial(load.name, loaded=True)
            return True
        self.adapter_trial = before
        return False

    async def _confirm(self, wanted: ConfirmWeights) -> bool:
        """Ask the engine to confirm that its weights have that version. Returns False if it reports no versions."""
        version, names = wanted.policy_version, True  # whether the engine names its weights
        if wanted.tell:
            self.named = version
            if error := await self.label(version, wanted.timeout_s):
                raise BackendError(error, retryable=True)
            names = bool(self.info.label)  # read now, because a completion that ends in between may change it
            if not names:
                self.named = ""
        heard = await self.client.read_label(timeout_s=wanted.timeout_s)
        if heard not in ("", version) and names:
            raise OtherWeights(self.client.url, heard, version)
        if heard and not wanted.tell and self.trial is not None and not self.trial.folder:
            self.named = version
            self.info = msgspec.structs.replace(self.info, label=heard)
            self.trial = self.trial._replace(loaded=True)
        return bool(heard)

    @property
    def failed_to_load(self) -> bool:
        """Return whether weights or an adapter are on trial without the engine's confirmation."""
        trials = (self.trial, self.adapter_trial)
        return any(trial is not None and not trial.loaded for trial in trials)

    def announce(self, policy_version: str) -> None:
        """Record following tokens under this version: the weights on trial are now the policy's."""
        if self.trial is not None:
            self.weights = self.trial.folder
            self._versions.locate(policy_version, "" if self.adapter_trial else self.weights)
        elif policy_version != self.info.policy_version and self.adapter_trial is None:  # transferred externally
            self.weights = ""
        if self.trial is not None or self.adapter_trial is not None:  # full weights replace the adapter
            self._use_adapter("" if self.adapter_trial is None else self.adapter_trial.name)
        self.trial, self.adapter_trial, self.named = None, None, ""
        self.info = msgspec.structs.replace(self.info, policy_version=policy_version)

    def _use_adapter(self, name: str) -> None:
        if name != self.adapter:
            self._outdated += [self.adapter] if self.adapter else []
            self.adapter = name
            self.client.use_adapter(name)

    async def unload_outdated(self, timeout_s: float) -> None:
        """Unload adapters that are no longer used for sampling. Failures are logged."""
        async with self._lock:
            while self._outdated:
                name = self._outdated.pop()
                try:
                    await self.client.unload_adapter(name, timeout_s=timeout_s)
                except BackendError as exc:
                    logger.warning("backend %s keeps the adapter %s: %s", self.client.url, name, exc)

    async def unpause(self, timeout_s: float) -> None:
        """Resume the engine if it was paused here. If a pause is still in progress, resume after it.

        An engine with weights on trial gets its former weights first: see `restore`.

        Raises:
            BackendError: the resume failed; the engine counts as paused.
        """
        async with self._lock:
            self.why_paused = f"{self.client.url}: it did not answer its resume"
            try:
                await self._restore(timeout_s)
                if self.paused:
                    await self.client.resume(timeout_s=timeout_s)
                    self.paused = False
            except BackendError as exc:
                self.why_paused = str(exc)
                raise

    async def restore(self, timeout_s: float) -> None:
        """Restore the former weights and their name if others are on trial, within the same time limit as for those.

        Raises:
            BackendError: the restore failed; the weights stay on trial.
        """
        async with self._lock:
            await self._restore(timeout_s)

    async def label(self, policy_version: str, timeout_s: float) -> str:
        """Set the engine's name for its weights. Returns why it failed, or an empty string."""
        label, error = "", ""
        try:
            if await self.client.label_weights(policy_version, timeout_s=timeout_s):
                label = policy_version
        except BackendError as exc:
            error = str(exc)
        self.info = msgspec.structs.replace(self.info, label=label)
        return error

    async def _restore(self, timeout_s: float) -> None:
        if self.trial is not None:
            await self._take_back(self.trial)
            self.trial = None
        if self.adapter_trial is not None:
            if self.adapter_trial.name != self.adapter:
                self._outdated.append(self.adapter_trial.name)
            self.adapter_trial = None
        if self.named:  # otherwise tokens of the former weights would get the later version
            if error := await self.label(self.info.policy_version, timeout_s):
                raise BackendError(error, retryable=True)
            self.named = ""

    async def _take_back(self, trial: WeightsOnTrial) -> None:
        url, version = self.client.url, self.info.policy_version
        if not self.weights:
            others = f"the weights in {trial.folder}" if trial.folder else "weights that the trainer moved there"
            raise BackendError(
                f"{url}: it may have {others}, and where those of version {version} are is not "
                "known here: move them there and resume with that version, or remove it",
                retryable=False,
            )
        if not await self.client.load_weights(self.weights, timeout_s=trial.timeout_s):
            raise BackendError(
                f"{url}: it loads no weights, so those of version {version} are not back", retryable=False
            )

    async def aclose(self) -> None:
        """Close the client. An engine that was paused here is resumed first, because no other client would do so."""
        with trio.move_on_after(UNPAUSE_GRACE_S), suppress(BackendError):
            await self.unpause(UNPAUSE_GRACE_S)
        if self.paused:
            logger.warning("backend %s did not answer its resume, and is left as it is", self.client.url)
        await self.client.aclose()
