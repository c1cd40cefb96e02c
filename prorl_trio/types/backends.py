"""The requests of trainers and operators to a node's pool of LLM backends, and their answers.

One request and one answer for each operation; both travel as they are through REST, and as `msgspec.Raw` through the
WebSocket (`prorl_ipc.session.CallBackends`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import msgspec

PauseMode = Literal["wait", "abort", "keep"]
"""The fate of completions in flight: `wait` for them, `abort` them (they are continued after the resume, from the
tokens that were received), or `keep` them: they go on, or stand still where the engine can do that."""
EngineAnswer = Literal["paused", "loaded", "confirmed", "resumed", "not_offered", "failed"]

_Url = Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Timeout = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_Version = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Holder = Annotated[str, msgspec.Meta(max_length=200)]
_Folder = Annotated[str, msgspec.Meta(min_length=1, max_length=4000)]


class BackendList(msgspec.Struct, frozen=True, kw_only=True):
    """The pool: urls in order of arrival, and its live state, a map."""

    urls: list[str]
    pool: Any


class UpdatedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a pause, new weights or a resume on one backend.

    Attributes:
        url: as it was added.
        in_flight: completions that run there now; after `pause`, only those that were kept.
        engine: `paused`, `loaded` or `resumed` by its own API, `confirmed` (it says that it has the weights of the
            version), `not_offered` (it has no API for that: the node alone holds completions back), `failed`.
        error: why, if it failed.
        policy_version: what its next completions are recorded under.
        model_folder: what it was started with, a folder as it sees it or a public name; empty: it does not say.
    """

    url: str
    in_flight: int
    engine: EngineAnswer
    error: str
    policy_version: str
    model_folder: str = ""


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pool after a pause, new weights or a resume. `waiting`: completions that wait for the resume."""

    paused: bool
    waiting: int
    backends: list[UpdatedBackend]


AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)


class NodeRequest(
    msgspec.Struct, Generic[AnswerT], frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Base of requests: an unknown field is an error.

    `Backends.operate` carries them out, and `RolloutClient.operate` sends them to a node. A cancel of either withdraws
    the request: it changes nothing, unless it had been carried out before.

    Attributes:
        operation: the name of what is asked for.
        answer: the type of its answer.
    """

    operation: ClassVar[str]
    answer: ClassVar[type[msgspec.Struct]]


class ListBackends(NodeRequest[BackendList], frozen=True):
    """Return the state of the pool now."""

    operation: ClassVar = "list"
    answer: ClassVar = BackendList


class AddBackend(NodeRequest[BackendList], frozen=True):
    """Probe an LLM backend and add it to the pool. A drained backend becomes active again.

    Attributes:
        url: its origin, as `http://127.0.0.1:8000`.
        weight: its share of the tasks, relative to the other backends. None: 1 for a new backend, else unchanged.
        policy_version: the version that the caller knows its weights to be of: it is added only where the pool has
            that policy, and no update is under way.
        when_up: do not probe it now: list it as `down`, and have it join as soon as it passes its probe.

    Raises:
        BackendError: it did not pass the probe; the message says why.
        BackendsBusy: there is a `policy_version`, and an update is under way.
    """

    operation: ClassVar = "add"
    answer: ClassVar = BackendList
    url: _Url
    weight: _Weight | None = None
    policy_version: _Version | None = None
    when_up: bool = False


class DrainBackend(NodeRequest[BackendList], frozen=True):
    """Give a backend no new tasks; it stays in the pool.

    Each of its tasks moves to another backend at its next completion, if another one accepts tasks.

    Raises:
        UnknownBackend: it is not in the pool.
    """

    operation: ClassVar = "drain"
    answer: ClassVar = BackendList
    url: _Url


class WeighBackend(NodeRequest[BackendList], frozen=True):
    """Set the weight of a backend: its share of the tasks that are placed from now on.

    Raises:
        UnknownBackend: it is not in the pool.
        BackendError: `weight` is not above 0.
    """

    operation: ClassVar = "weigh"
    answer: ClassVar = BackendList
    url: _Url
    weight: _Weight


class RemoveBackends(NodeRequest[BackendList], frozen=True):
    """Remove one backend (`url`), or `all` of them. Running calls finish; jobs wait until a backend is added.

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

    Answered when the completions in flight have ended, were aborted or are kept, as `mode` says. Jobs go on up to their
    next completion and wait there. Engines that can be paused are paused too; one that failed to is in the report. A
    paused pool may be paused again, in another mode. `RolloutClient.policy_update` pauses and resumes by itself.

    A pause without a `holder`, before an update or while it runs, outlasts it.

    Attributes:
        mode: the fate of completions in flight.
        timeout_s: limit for all of it.
        holder: a name of the caller's own, new for each update of the policy: only steps with that name then change the
            weights, until its resume.
        lease_s: the update is given up, and the former weights are put back, if none of the holder's steps, nor a
            `RenewUpdate`, comes for so long.

    Raises:
        PauseTimeout: it took longer than `timeout_s`; the pause is undone, and so it is by a cancel.
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
    """Let the lease of a holder's update begin anew.

    Raises:
        UpdateRefused: the update is over; the former version is back.
        BackendsBusy: another holder's update is running.
    """

    operation: ClassVar = "renew_update"
    answer: ClassVar = UpdateReport
    holder: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class LoadWeights(NodeRequest[UpdateReport], frozen=True):
    """Have the engines of a paused pool load the weights in `folder`, a path as the engines see it.

    They are on trial: a resume with a version keeps them, a resume without one puts the former weights back. An engine
    that failed to load is in the report. `timeout_s` is for each engine. After a cancel, each may have them or not.

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

    It is on trial as weights are: from a resume with a version on, completions are sampled with it, and the one before
    is unloaded. Its `name` is another one for each version. Whole weights that are loaded later are used without an
    adapter. An engine that failed to load is in the report.

    Raises:
        UpdateRefused: the pool is not paused, or completions were kept in engines, which would go on with the former
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
    """Note, in a pause, that the trainer moves new weights to the engines by means of its own.

    They are on trial as those of `LoadWeights`: a resume without a version loads the former ones from their folder; an
    engine whose folder is not known takes no tasks then. `timeout_s` is for that load.

    Raises:
        UpdateRefused: the pool is not paused, or the holder's update is over.
        BackendsBusy: another step is running, or another holder's update; nothing has changed.
    """

    operation: ClassVar = "expect_transfer"
    answer: ClassVar = UpdateReport
    timeout_s: _Timeout = 600.0
    holder: _Holder = ""


class ConfirmWeights(NodeRequest[UpdateReport], frozen=True):
    """Have every engine of a paused pool say which weights it has; with `tell`, after it was told their version.

    An engine that says otherwise, or fails to answer, is `failed` in the report; some say nothing (`not_offered`). What
    they were told is taken back by a resume without a version.

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
    """Let completions begin again, recorded under `policy_version` if that is given. A pool need not be paused.

    Engines are told the version, and asked for it, and those that were paused are resumed, before; one that fails to is
    in the report, and takes no tasks until it is resumed. Without a version, engines with weights on trial get their
    former ones back before. The pool stays paused if this is cancelled, and after a holder's update if somebody else
    asked for a pause.

    Raises:
        UpdateRefused: an engine failed to load the weights of that version, or says that it has others: the pool
            stays paused; or the holder's update is over, and a version is given.
        BackendsBusy: another pause or resume is running, or another holder's update; nothing has changed.
    """

    operation: ClassVar = "resume"
    answer: ClassVar = UpdateReport
    policy_version: _Version | None = None
    holder: _Holder = ""


WeightsStep: TypeAlias = LoadWeights | LoadAdapter | ExpectTransfer | ConfirmWeights
"""A step of a policy update between its pause and its resume, which each engine takes by itself."""
