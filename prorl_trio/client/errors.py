"""The errors that only a client raises. All others are in `prorl_trio.types.errors`."""

from __future__ import annotations

from prorl_trio.types.errors import ServiceError


class ConnectionLost(ServiceError):
    """The node could not be reached within the client's time limits, or the client is closed.

    The session is not over: `connect` with its `session_id` finds the jobs and their outcomes.
    """

    code = "connection_lost"


class SessionReplaced(ServiceError):
    """Another client has connected with this session id. The newest client keeps it; this one does not reconnect."""

    code = "replaced"


class SessionLost(ServiceError):
    """The node no longer knows the session, because it was restarted. Submit the jobs in `job_ids` again.

    Attributes:
        job_ids: the accepted jobs whose outcome has not reached this client.
    """

    code = "session_lost"

    def __init__(self, message: str, job_ids: list[str]) -> None:
        super().__init__(message)
        self.job_ids = job_ids


class PolicyUpdateFailed(ServiceError):
    """An engine could not be paused or did not load its weights: the old version stays everywhere.

    Attributes:
        failed: the reason, by the engine's URL.
    """

    code = "policy_update_failed"

    def __init__(self, version: str, failed: dict[str, str]) -> None:
        reasons = "; ".join(why if why.startswith(url) else f"{url}: {why}" for url, why in failed.items())
        super().__init__(
            f"the policy is not updated to version {version}, and the old one stays everywhere: {reasons}. Repair what "
            "failed, or take it out (remove_backend), and update again"
        )
        self.failed = failed
