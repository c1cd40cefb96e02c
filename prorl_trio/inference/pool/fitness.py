"""Reasons for which an engine that is well must not join the pool: its weights are not the policy's. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_trio.inference.engines.answers import UNNAMED
from prorl_trio.inference.pool.versions import UNKNOWN_VERSION
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from prorl_trio.inference.engines.protocol import EngineInfo


def require_named(info: EngineInfo, current: str) -> None:
    """Raise BackendError if it could be told what its weights are called, and was not, and the policy's have a name."""
    if info.pausable and info.label == UNNAMED and current != UNKNOWN_VERSION:
        raise BackendError(
            f"{info.url}: it is up, but its weights have no name, and the policy's are {current}: "
            "move these there, then add it",
            retryable=True,
        )


def require_version(info: EngineInfo, current: str, wanted: str) -> None:
    """Raise BackendError if its weights are not of the version `wanted`, as far as anybody can tell.

    Of weights that the engine has no name for, the caller knows the version. They would be recorded under `current`,
    that of the node's policy: so that must be the same.
    """
    require_named(info, current)
    if info.policy_version == UNKNOWN_VERSION:
        found, whose = current, "the policy of this node is"
    else:
        found, whose = info.policy_version, "it says that its weights are"
    if found != wanted:
        raise BackendError(f"{info.url}: {whose} of version {found}, and not {wanted}", retryable=False)
