"""The requests of trainers and operators to a node's pool of LLM backends, and their answers.

One request and one answer for each operation; both travel as they are through REST, and as `msgspec.Raw` through the
WebSocket (`prorl_ipc.session.CallBackends`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import msgspec

PauseMode = Literal["wait", "abort", "keep"]
"""The fate of completions in flight: `wait` for them, `abort` them (they are continued after the resume, from the
tokens that were received), or `keep` them: they continue, or stop where the engine supports it."""
EngineAnswer = Literal["paused", "loaded", "confirmed", "resumed", "not_offered", "failed"]

_Url = Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Timeout = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_Version = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Holder = Annotated[str, msgspec.Meta(max_length=200)]
_Folder = Annotated[str, msgspec.Meta(min_length=1, max_length=4000)]


class BackendList(msgspec.Struct, frozen=True, kw_only=True):
    """The pool: `urls` in order of addition, and its current state, a map."""

    urls: list[str]
    pool: Any


class UpdatedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a pause, new weights or a resume on one backend.

    Attributes:
        url: URL of the backend, as added.
        in_flight: number of running completions; after `pause`, only kept ones.
        engine: `paused`, `loaded` or `resumed` by the engine's API, `confirmed` (it reports the weights of the
            version), `not_offered` (it has no such API; the node alone holds completions back), `failed`.
        error: description of the failure.
        policy_version: version under which its next completions are recorded.
        model_folder: folder (as the engine sees it) or public name that it was started with; empty if not reported.
    """

    url: str
    in_flight: int
    engine: EngineAnswer
    error: str
    policy_version: str
    model_folder: str = ""


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pool after a pause, new weights or a resume. `waiting`: number of completions that wait for the resume."""

    paused: bool
    waiting: int
    backends: list[UpdatedBackend]


AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)


class NodeRequest(
    msgspec.Struct, Generic[AnswerT], frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Base of requests: an unknown field is an error.

    `Backends.operate` carries them out, and `RolloutClient.operate` sends them to a node. A cancel of either withdraws
    the request: it changes nothing, unless it was already carried out.

    Attributes:
        operation: name of the operation.
        answer: type of its answer.
    """

    operation: ClassVar[str]
    answer: ClassVar[type[msgspec.Struct]]


class ListBackends(NodeRequest[BackendList], frozen=True):
    """Return the current state of the pool."""

    operation: ClassVar = "list"
    answer: ClassVar = BackendList


class AddBackend(NodeRequest[BackendList], frozen=True):
    """Probe an LLM backend and add it to the pool. A drained backend becomes active again.

    Attributes:
        url: its origin, such as `http://127.0.0.1:8000`.
        weight: its share of the tasks, relative to the other backends. None: 1 for a new backend, else unchanged.
        policy_version: known version of its weights. The backend is added only if the pool has that version and no
            update is running.
        when_up: list it as `down` without a probe now. It joins when it passes its probe.

    Raises:
        BackendError: it did not pass the probe; the message has the reason.
        BackendsBusy: there is a `policy_version`, and an update is running.
    """

    operation: ClassVar = "add"
    answer: ClassVar = BackendList
    url: _Url
    weight: _Weight | None = None
    policy_version: _Version | None = None
    when_up: bool = False


class DrainBackend(NodeRequest[BackendList], frozen=True):
    """Stop new tasks on a backend, which stays in the pool.

    Each of its tasks moves at its next completion, if another backend accepts tasks.

    Raises:
        UnknownBackend: it is not in the pool.
    """

    operation: ClassVar = "drain"
    answer: ClassVar = BackendList
    url: _Url


class WeighBackend(NodeRequest[BackendList], frozen=True):
    """Set the weight of a backend: its share of future tasks.

    Raises:
        UnknownBackend: it is not in the pool.
        BackendError: `weight` is not above 0.
    """

    operation: ClassVar = "weigh"
    answer: ClassVar = BackendList
    url: _Url
    weight: _Weight


class RemoveBackends(NodeRequest[BackendList], frozen=True):
    """Remove one backend (`url`), or `all` backends. Running calls finish; jobs wait until a backend is added.

    Raises:
        UnknownBackend: it is not in the pool.
    """

    operation: ClassVar = "remove"
    answer: ClassVar = BackendList
    url: _Url | None = None
    all: bool = False

    def __post_init__(self) -> None:
        if (self.url is None) == (not self.all):
            raise ValueError("give either url or all=true")


class PauseBackends(NodeRequest[UpdateReport], frozen=True):
    """Hold back all new completions until a resume.

    Answered when the completions in flight have ended, were aborted or are kept, according to `mode`. Jobs continue to
    their next completion and wait there. Engines with a pause API are paused too; the report names failures. A paused
    pool may be paused again, in another mode. `RolloutClient.policy_update` pauses and resumes by itself.

    A pause without a `holder`, before or during an update, outlasts that update.

    Attributes:
        mode: treatment of completions in flight.
        timeout_s: time limit of the whole pause.
        holder: name chosen by the caller, new for each policy update. Until its resume, only steps with that name
            change the weights.
        lease_s: seconds without a step of the holder or a `RenewUpdate` after which the update is abandoned and the
            former weights are restored.

    Raises:
        PauseTimeout: it took longer than `timeout_s`; the pause is undone. A cancel also undoes it.
        BackendsBusy: another pause or resume is running, or another holder's update; nothing has changed.
    """

    operation: ClassVar = "pause"
    answer: ClassVar = UpdateReport
    mode: PauseMode = "wait"
    timeout_s: _Timeout = 60.0
    holder: _Holder = ""
    lease_s: _Timeout | None = None

    def __post_init__(self) -> None:
        if self.lease_s is not None and not self.holder:
            raise ValueError("a lease_s needs a holder")


class RenewUpdate(NodeRequest[UpdateReport], frozen=True):
    """Renew the lease of a holder's update.

    Raises:
        UpdateRefused: the update is over; the former version is restored.
        BackendsBusy: another holder's update is running.
    """

    operation: ClassVar = "renew_update"
    answer: ClassVar = UpdateReport
    holder: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class LoadWeights(NodeRequest[UpdateReport], frozen=True):
    """Have the engines of a paused pool load the weights in `folder`, a path as the engines see it.

    For Tinker servers it is the path of a checkpoint: `tinker://RUN/sampler_weights/NAME`.

    They are on trial: a resume with a version keeps them, and a resume without one restores the former weights. The
    report names engines that failed to load. `timeout_s` applies to each engine. After a cancel, an engine may have
    either weights.

    Raises:
        UpdateRefused: the pool is not paused, or the holder's update is over.
        BackendsBusy: another step is running, or another holder's update; nothing has changed.
    """

    operation: ClassVar = "load_weights"
    answer: ClassVar = UpdateReport
    folder: _Folder
    timeout_s: _Timeout = 600.0
    holder: _Holder = ""


class LoadAdapter(NodeRequest[UpdateReport], frozen=True):
    """Have the engines of a paused pool load the LoRA adapter in `folder`, a path as the engines see it.

    It is on trial as weights are. After a resume with a version, completions are sampled with it, and the previous
    adapter is unloaded. Each version needs a new `name`. Whole weights that are loaded later are used without an
    adapter. The report names engines that failed to load.

    Raises:
        UpdateRefused: the pool is not paused; or completions were kept in engines, which would continue with the former
            adapter; or the holder's update is over.
        BackendsBusy: another step is running, or another holder's update; nothing has changed.
    """

    operation: ClassVar = "load_adapter"
    answer: ClassVar = UpdateReport
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=400)]
    folder: _Folder
    timeout_s: _Timeout = 600.0
    holder: _Holder = ""


class ExpectTransfer(NodeRequest[UpdateReport], frozen=True):
    """Note, in a pause, that the trainer transfers new weights to the engines itself.

    They are on trial as with `LoadWeights`. A resume without a version loads the former weights from their folder; an
    engine without a known folder then takes no tasks. `timeout_s` applies to that load.

    Raises:
        UpdateRefused: the pool is not paused, or the holder's update is over.
        BackendsBusy: another step is running, or another holder's update; nothing has changed.
    """

    operation: ClassVar = "expect_transfer"
    answer: ClassVar = UpdateReport
    timeout_s: _Timeout = 600.0
    holder: _Holder = ""


class ConfirmWeights(NodeRequest[UpdateReport], frozen=True):
    """Have every engine of a paused pool confirm its version; with `tell`, after the node has set it there.

    An engine with another version, or without an answer, is `failed` in the report; engines without such an API are
    `not_offered`. A resume without a version resets the version set by `tell`.

    Raises:
        UpdateRefused: the pool is not paused, or the holder's update is over.
        BackendsBusy: another step is running, or another holder's update; nothing has changed.
    """

    operation: ClassVar = "confirm_weights"
    answer: ClassVar = UpdateReport
    policy_version: _Version
    timeout_s: _Timeout = 60.0
    holder: _Holder = ""
    tell: bool = True


class ResumeBackends(NodeRequest[UpdateReport], frozen=True):
    """Let completions begin again, recorded under `policy_version` if given. The pool need not be paused.

    Before that, the version is set in the engines and confirmed, and paused engines are resumed. The report names an
    engine that fails; it takes no tasks until it is resumed. Without a version, engines with weights on trial first
    restore the former ones. The pool stays paused if this is cancelled, and after a holder's update if another caller
    requested a pause.

    Raises:
        UpdateRefused: an engine failed to load the weights of that version, or reports another: the pool stays paused;
            or the holder's update is over, and a version is given.
        BackendsBusy: another pause or resume is running, or another holder's update; nothing has changed.
    """

    operation: ClassVar = "resume"
    answer: ClassVar = UpdateReport
    policy_version: _Version | None = None
    holder: _Holder = ""


WeightsStep: TypeAlias = LoadWeights | LoadAdapter | ExpectTransfer | ConfirmWeights
"""A step of a policy update between its pause and its resume, which each engine performs by itself."""
