"""The requests of trainers and operators to a node's pool of LLM backends, and their answers.

One request and one answer for each operation; both travel as they are through REST, and as `msgspec.Raw` through the
WebSocket (`ipc.session.CallBackends`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec

__all__ = [
    "ADD",
    "DRAIN",
    "LIST",
    "LOAD_WEIGHTS",
    "PAUSE",
    "REMOVE",
    "RESUME",
    "WEIGH",
    "AddBackend",
    "BackendList",
    "DrainBackend",
    "EngineAnswer",
    "ListBackends",
    "LoadWeights",
    "Operation",
    "PauseBackends",
    "PauseMode",
    "RemoveBackends",
    "ResumeBackends",
    "UpdateReport",
    "UpdatedBackend",
    "WeighBackend",
]

PauseMode = Literal["wait", "abort", "keep"]
"""The fate of completions in flight: `wait` for them, `abort` them (they are continued after the resume, from the
tokens that were received), or `keep` them: they go on, or stand still where the engine can do that."""
EngineAnswer = Literal["paused", "loaded", "resumed", "not_offered", "failed"]

_Url = Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Timeout = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_Version = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Folder = Annotated[str, msgspec.Meta(min_length=1, max_length=4000)]


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of requests: an unknown field is an error."""


class ListBackends(_Request, frozen=True):
    """The pool as it is."""


class AddBackend(_Request, frozen=True):
    """The origin of a server, as `http://127.0.0.1:8000`, and its share of the rollouts beside others.

    Without a `weight` that is 1 for a new one, and what it was for one that is there.
    """

    url: _Url
    weight: _Weight | None = None


class DrainBackend(_Request, frozen=True):
    """The backend that is to be given no new rollouts."""

    url: _Url


class WeighBackend(_Request, frozen=True):
    """The share of the rollouts that it gets from now on, beside others."""

    url: _Url
    weight: _Weight


class RemoveBackends(_Request, frozen=True):
    """The backends to take out: one `url`, or `all`."""

    url: _Url | None = None
    all: bool = False

    def __post_init__(self) -> None:
        if (self.url is None) == (not self.all):
            raise ValueError("give either url or all=true")


class PauseBackends(_Request, frozen=True):
    """`mode` says what becomes of completions in flight; `timeout_s` is for all of it."""

    mode: PauseMode = "wait"
    timeout_s: _Timeout = 60.0


class LoadWeights(_Request, frozen=True):
    """The folder of the policy's new weights, as the engines see it, and the time that each of them has for it."""

    folder: _Folder
    timeout_s: _Timeout = 600.0


class ResumeBackends(_Request, frozen=True):
    """`policy_version` is what completions are recorded under from now on; without, it stays, and so do its weights."""

    policy_version: _Version | None = None


class BackendList(msgspec.Struct, frozen=True, kw_only=True):
    """The pool: urls in order of arrival, and its live state."""

    urls: list[str]
    pool: Any


class UpdatedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a pause, new weights or a resume on one backend.

    Attributes:
        in_flight: completions that run there now; after `pause`, only those that were kept.
        engine: `paused`, `loaded` or `resumed` by its own API, `not_offered` (it has none: the node alone holds
            completions back), `failed`.
        error: why, if it failed.
        policy_version: what its next completions are recorded under.
    """

    url: str
    in_flight: int
    engine: EngineAnswer
    error: str
    policy_version: str


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pool after a pause, new weights or a resume. `waiting`: completions that wait for the resume."""

    paused: bool
    waiting: int
    backends: list[UpdatedBackend]


RequestT = TypeVar("RequestT", bound=msgspec.Struct)
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


class Operation(msgspec.Struct, Generic[RequestT, ReplyT], frozen=True):
    """An operation by its `name`, its request and its answer."""

    name: str
    request: type[RequestT]
    answer: type[ReplyT]


LIST: Final = Operation("list", ListBackends, BackendList)
ADD: Final = Operation("add", AddBackend, BackendList)
DRAIN: Final = Operation("drain", DrainBackend, BackendList)
WEIGH: Final = Operation("weigh", WeighBackend, BackendList)
REMOVE: Final = Operation("remove", RemoveBackends, BackendList)
PAUSE: Final = Operation("pause", PauseBackends, UpdateReport)
LOAD_WEIGHTS: Final = Operation("load_weights", LoadWeights, UpdateReport)
RESUME: Final = Operation("resume", ResumeBackends, UpdateReport)
