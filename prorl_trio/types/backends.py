"""The requests of trainers and operators to a node's pool of LLM backends, and their answers.

One request and one answer for each operation; both travel as they are through REST, and as `msgspec.Raw` through the
WebSocket (`ipc.session.CallBackends`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec

__all__ = [
    "AddBackend",
    "AnswerT",
    "BackendList",
    "BackendRequest",
    "ConfirmWeights",
    "DrainBackend",
    "EngineAnswer",
    "ExpectTransfer",
    "ListBackends",
    "LoadAdapter",
    "LoadWeights",
    "PauseBackends",
    "PauseMode",
    "RemoveBackends",
    "RenewUpdate",
    "ResumeBackends",
    "UpdateReport",
    "UpdatedBackend",
    "WeighBackend",
]

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
    """The pool: urls in order of arrival, and its live state."""

    urls: list[str]
    pool: Any


class UpdatedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a pause, new weights or a resume on one backend.

    Attributes:
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


class BackendRequest(msgspec.Struct, Generic[AnswerT], frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of requests: an unknown field is an error.

    Attributes:
        operation: the name of what is asked for.
        answer: the type of its answer.
    """

    operation: ClassVar[str]
    answer: ClassVar[type[msgspec.Struct]]


class ListBackends(BackendRequest[BackendList], frozen=True):
    """The pool as it is."""

    operation: ClassVar = "list"
    answer: ClassVar = BackendList


class AddBackend(BackendRequest[BackendList], frozen=True):
    """The origin of a server, as `http://127.0.0.1:8000`, and its share of the rollouts beside others.

    Without a `weight` that is 1 for a new one, and what it was for one that is there. With a `policy_version`, which
    the caller knows its weights to be of, it is added only where the node has that policy, and no update is under way.
    """

    operation: ClassVar = "add"
    answer: ClassVar = BackendList
    url: _Url
    weight: _Weight | None = None
    policy_version: _Version | None = None


class DrainBackend(BackendRequest[BackendList], frozen=True):
    """The backend that is to be given no new rollouts."""

    operation: ClassVar = "drain"
    answer: ClassVar = BackendList
    url: _Url


class WeighBackend(BackendRequest[BackendList], frozen=True):
    """The share of the rollouts that it gets from now on, beside others."""

    operation: ClassVar = "weigh"
    answer: ClassVar = BackendList
    url: _Url
    weight: _Weight


class RemoveBackends(BackendRequest[BackendList], frozen=True):
    """The backends to take out: one `url`, or `all`."""

    operation: ClassVar = "remove"
    answer: ClassVar = BackendList
    url: _Url | None = None
    all: bool = False

    def __post_init__(self) -> None:
        if (self.url is None) == (not self.all):
            raise ValueError("give either url or all=true")


class PauseBackends(BackendRequest[UpdateReport], frozen=True):
    """`mode` says what becomes of completions in flight; `timeout_s` is for all of it.

    With a `holder`, a name of the caller's own, the pause is for one update of the policy, and nobody else's steps come
    between. With `lease_s`, the update is given up when none of its steps comes for so long.
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


class RenewUpdate(BackendRequest[UpdateReport], frozen=True):
    """The holder whose lease is to begin anew."""

    operation: ClassVar = "renew_update"
    answer: ClassVar = UpdateReport
    holder: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class LoadWeights(BackendRequest[UpdateReport], frozen=True):
    """The folder of the policy's new weights, as the engines see it, and the time that each of them has for it."""

    operation: ClassVar = "load_weights"
    answer: ClassVar = UpdateReport
    folder: _Folder
    timeout_s: _Timeout = 600.0
    holder: _Holder = ""


class LoadAdapter(BackendRequest[UpdateReport], frozen=True):
    """A LoRA adapter: its name in the engines, another one for each version, and its folder, as they see it."""

    operation: ClassVar = "load_adapter"
    answer: ClassVar = UpdateReport
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=400)]
    folder: _Folder
    timeout_s: _Timeout = 600.0
    holder: _Holder = ""


class ExpectTransfer(BackendRequest[UpdateReport], frozen=True):
    """The time that each engine has to load its former weights, if those that the trainer moves there do not last."""

    operation: ClassVar = "expect_transfer"
    answer: ClassVar = UpdateReport
    timeout_s: _Timeout = 600.0
    holder: _Holder = ""


class ConfirmWeights(BackendRequest[UpdateReport], frozen=True):
    """The version that every engine is to say it has; with `tell`, after it was told so."""

    operation: ClassVar = "confirm_weights"
    answer: ClassVar = UpdateReport
    policy_version: _Version
    tell: bool = True
    timeout_s: _Timeout = 60.0
    holder: _Holder = ""


class ResumeBackends(BackendRequest[UpdateReport], frozen=True):
    """`policy_version` is what completions are recorded under from now on; without, it stays, and so do its weights."""

    operation: ClassVar = "resume"
    answer: ClassVar = UpdateReport
    policy_version: _Version | None = None
    holder: _Holder = ""
