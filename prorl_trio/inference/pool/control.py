"""Control of one engine: pauses, weights from a folder, and what the weights are called."""

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
"""For an engine that is to go on before its client is closed."""


class WeightsOnTrial(NamedTuple):
    """Weights that an engine was told to load in a pause, or that a trainer moves there itself (no `folder`).

    `loaded`: it said that it has them.
    """

    folder: str
    timeout_s: float
    loaded: bool


class AdapterOnTrial(NamedTuple):
    """A LoRA adapter that an engine was told to load in a pause. `loaded`: it said that it has it."""

    name: str
    loaded: bool


class OtherWeights(BackendError):
    """An engine says that it has weights of another version than it should. Not retryable."""

    def __init__(self, url: str, heard: str, policy_version: str) -> None:
        super().__init__(f"{url}: it says that its weights are {heard}, and not {policy_version}", retryable=False)


class EngineControl:
    """The engine of one backend, as it is told to stand still, which weights to have, and what these are called.

    Attributes:
        info: what is known of it.
        paused: by its own API, or it may be: no answer came.
        why_paused: why it is still paused after the pool's resume.
        weights: what those of its version can be loaded from again, if that is known.
        trial: the ones it may have instead, until a resume announces them or takes them back.
        named: what they were called on trial; empty: nothing.
        adapter, adapter_trial: the LoRA adapter that it samples with (empty: none), and the one on trial.
    """

    def __init__(self, client: EngineClient, info: EngineInfo, versions: VersionOrder) -> None:
        """Versions that are in force here and that no resume announced are noted in `versions`."""
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
        """Begin anew, as whoever added it just found it to be `info`.

        What it has are weights of a version of the policy.
        """
        known, versions = self.info, self._versions
        if info.policy_version == UNKNOWN_VERSION:
            info = msgspec.structs.replace(info, policy_version=versions.current)
        elif info.label == known.label:  # added again, with the weights that it had
            info = msgspec.structs.replace(info, policy_version=known.policy_version)
        if info.label in (UNNAMED, "") or info.label != known.label:  # with what it was started with, at best
            self.weights = info.weights if versions.current == UNKNOWN_VERSION else ""
        self.weights = self.weights or versions.folder(info.policy_version)
        self.trial, self.adapter_trial, self.named = None, None, ""
        self.info = info
        versions.note(info.policy_version)

    def heard(self, label: str, since: EngineInfo) -> None:
        """Take its own name for its weights, from a call that was made when `since` was known of it.

        Weights that got another name without a resume of the pool are recorded under that from now on. One that has no
        name for them any more was started again: that is for the probe to judge, see `lost_weights`.
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
        """Take what a probe found, begun when `since` was known. What the pool calls its weights stays."""
        self.heard(found.label, since)
        known = self.info
        self.info = msgspec.structs.replace(found, label=known.label, policy_version=known.policy_version)

    def lost_weights(self, found: EngineInfo, since: EngineInfo) -> bool:
        """Return whether a probe, begun when `since` was known, shows that it was started again.

        Its weights had a name, and have none now, so they are not those that tokens would be recorded under.
        """
        return found.label == UNNAMED and self.info.label == since.label and since.label not in ("", UNNAMED)

    async def operate(self, request: PauseBackends | WeightsStep) -> EngineAnswer:
        """Have it take one step of a policy update: stop sampling, or load or confirm weights or an adapter, on trial.

        `not_offered`, and nothing has changed, where it has no API for that.

        Raises:
            OtherWeights: it says that it has weights of another version.
            BackendError: it failed. It counts as paused, and what it was to load stays on trial, as it may have it.
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
        """Have it say that its weights are of that version. False: it says nothing."""
        version, names = wanted.policy_version, True  # it has names for its weights
        if wanted.tell:
            self.named = version
            if error := await self.label(version, wanted.timeout_s):
                raise BackendError(error, retryable=True)
            names = bool(self.info.label)  # as it answered; a completion that ends meanwhile may tell of another
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
        """Return whether weights or an adapter are on trial that it never said it has."""
        trials = (self.trial, self.adapter_trial)
        return any(trial is not None and not trial.loaded for trial in trials)

    def announce(self, policy_version: str) -> None:
        """Record what it samples next under this version: its weights on trial are the policy's now."""
        if self.trial is not None:
            self.weights = self.trial.folder
            self._versions.locate(policy_version, "" if self.adapter_trial else self.weights)
        elif policy_version != self.info.policy_version and self.adapter_trial is None:  # somebody else has moved them
            self.weights = ""
        if self.trial is not None or self.adapter_trial is not None:  # whole weights have no adapter
            self._use_adapter("" if self.adapter_trial is None else self.adapter_trial.name)
        self.trial, self.adapter_trial, self.named = None, None, ""
        self.info = msgspec.structs.replace(self.info, policy_version=policy_version)

    def _use_adapter(self, name: str) -> None:
        if name != self.adapter:
            self._outdated += [self.adapter] if self.adapter else []
            self.adapter = name
            self.client.use_adapter(name)

    async def unload_outdated(self, timeout_s: float) -> None:
        """Have it forget adapters that nothing is sampled with any more. One that fails to is logged."""
        async with self._lock:
            while self._outdated:
                name = self._outdated.pop()
                try:
                    await self.client.unload_adapter(name, timeout_s=timeout_s)
                except BackendError as exc:
                    logger.warning("backend %s keeps the adapter %s: %s", self.client.url, name, exc)

    async def unpause(self, timeout_s: float) -> None:
        """Resume it if it was paused here, also if it is just being told to pause: then after that.

        One that has weights on trial gets its former ones first: see `restore`.

        Raises:
            BackendError: it failed, and counts as paused.
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
        """Give it its former weights and their name back, if it has others on trial, in the time that it had for those.

        Raises:
            BackendError: it failed; they stay on trial.
        """
        async with self._lock:
            await self._restore(timeout_s)

    async def label(self, policy_version: str, timeout_s: float) -> str:
        """Tell it what its weights are called from now on. Why it failed, or nothing."""
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
        if self.named:  # or tokens of the former weights would be of the later version
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
        """Close the client. An engine that was paused here is told to go on before, as nobody else would."""
        with trio.move_on_after(UNPAUSE_GRACE_S), suppress(BackendError):
            await self.unpause(UNPAUSE_GRACE_S)
        if self.paused:
            logger.warning("backend %s did not answer its resume, and is left as it is", self.client.url)
        await self.client.aclose()
