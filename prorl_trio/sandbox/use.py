"""The one place of the rule that what a policy has used, the policy has spoilt.

A sandbox is used from the moment a tool's call of the policy is sent to it, whether or not it is answered. From then
on, whatever the sandbox cannot do is the policy's doing: a file that is a folder, a missing program, a shell or kernel
that does not start any more. Only arguments that no sandbox takes remain the caller's fault.

An evaluator's sandbox is used from the moment a program is sent to it after the policy's first turn: the program may
be the policy's. The exception is a program that the handler waits for on another account than the policy's
(`RolloutContext.waiting`). In such a sandbox, a program that has never run and is missing, or may not be run, remains
the image's fault.

Text that no sandbox takes (a NUL, half a surrogate pair, too many bytes) is the policy's wherever a program is, because
a handler that passes an answer on has not made it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from prorl_ipc.errors import CallFailed, IpcError
from prorl_ipc.sandbox_calls import BashInput, BashRun, Exec, IpythonRun
from prorl_trio.types.errors import HandlerError, RolloutError, SandboxCallFailed, SandboxLost, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from prorl_ipc.sandbox_calls import SandboxCall

_ARGUMENTS: Final = frozenset({"not_absolute", "bad_request"})
"""Codes of calls that no sandbox takes, whatever was done in it."""
_MARK: Final = "spoilt_by_use"

E = TypeVar("E", bound=Exception)


def spoilt(error: E) -> E:
    """Mark `error` as brought about by what a policy has done in a sandbox, and return it."""
    vars(error)[_MARK] = True
    return error


def is_spoilt(error: BaseException) -> bool:
    """Return whether `error` was marked by `spoilt`, or was raised from an error that was.

    A `RolloutError` names its cause itself: what it was raised from does not count.
    """
    at: BaseException | None = error
    while at is not None:
        if _MARK in getattr(at, "__dict__", ()):
            return True
        at = None if isinstance(at, RolloutError) else at.__cause__
    return False


class Account(Protocol):
    """The rollout that a sandbox belongs to: who acts in it now, and whose time that takes."""

    @property
    def is_acting(self) -> bool:
        """Return True while a tool of the policy is at work."""

    @property
    def may_run_answers(self) -> bool:
        """Return True if a program that is run now may be the policy's, as far as its handler does not deny it."""

    def on_agents_time(self, what: str) -> AbstractContextManager[None]:
        """Charge the block to the policy, within a limit.

        Raises:
            BudgetExceeded: the limit was met. The block was cancelled.
        """


class Use:
    """The use that a policy has made of a sandbox, for the rollout `account`."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._by_agent = False
        self._by_program = False
        self._was_lost_before = False
        self._has_run: set[tuple[str, str]] = set()

    def __bool__(self) -> bool:
        """Return True if the policy has acted in it, or may have."""
        return self._by_agent or self._by_program

    @contextmanager
    def timing(self, *, runs: bool) -> Iterator[None]:
        """Charge an action to the policy if it may make the action slow. `runs`: the action runs a program."""
        account = self._account
        if self or (runs and account.may_run_answers):
            with account.on_agents_time("a sandbox that the policy has used"):
                yield
        else:
            yield

    @contextmanager
    def calling(self, request: SandboxCall) -> Iterator[None]:
        """Note the call that is sent in the block, and mark the error that it raises if the policy is to blame."""
        was_used, was_agents = bool(self), self._by_agent
        may_run_answers = self._account.may_run_answers
        self._by_agent |= self._account.is_acting
        self._by_program |= may_run_answers and isinstance(request, Exec | BashRun | BashInput | IpythonRun)
        try:
            yield
        except SandboxLost as exc:
            self._was_lost_before |= exc.before_the_call and not was_used
            exc.from_inside = exc.from_inside and bool(self) and not self._was_lost_before
            raise
        except SandboxUnavailable as exc:
            if not was_used:
                raise
            raise spoilt(SandboxCallFailed(str(exc))) from exc
        except (SandboxCallFailed, HandlerError) as exc:  # without a cause, it is of a program that was running
            if was_used or (self and exc.__cause__ is None):
                spoilt(exc)
            raise
        except (OSError, ValueError) as exc:
            is_answer = may_run_answers and _is_of_text(exc, request)
            if is_answer or (was_used and self._is_refusal(exc, request, was_agents=was_agents)):
                spoilt(exc)
            raise
        if isinstance(request, Exec):
            self._has_run.add((request.argv[0], request.cwd))

    def _is_refusal(self, error: Exception, request: SandboxCall, *, was_agents: bool) -> bool:
        cause = error.__cause__
        if not isinstance(cause, CallFailed) or cause.code in _ARGUMENTS:
            return False
        is_start = isinstance(request, Exec) and isinstance(error, FileNotFoundError | PermissionError)
        if was_agents or not (is_start and isinstance(request, Exec)):
            return True
        return (request.argv[0], request.cwd) in self._has_run


def _is_of_text(error: Exception, request: SandboxCall) -> bool:
    """Return whether a call was refused for the text in it, which is not the handler's own."""
    cause = error.__cause__
    if isinstance(cause, CallFailed):
        if cause.code == "too_large":
            return isinstance(request, Exec)  # its arguments
        return cause.code == "bad_request" and any("\0" in text for text in _texts(msgspec.structs.astuple(request)))
    return isinstance(cause, IpcError | UnicodeEncodeError)


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a value of lists, tuples and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
