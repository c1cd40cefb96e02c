"""The one place of the rule that a sandbox that a policy has used is the policy's responsibility.

A sandbox is used from the moment a tool's call of the policy is sent to it, whether or not it is answered. From then
on, the policy is blamed for every failure of the sandbox: a file that is a folder, a missing program, a shell or kernel
that no longer starts. Only arguments that are never valid remain the caller's fault.

An evaluator's sandbox is used from the moment a program is sent to it after the policy's first turn, because the
program may be the policy's. The exception is a program for which the handler waits on another account than the policy's
(`RolloutContext.waiting`). In such a sandbox, a program that has never run and is missing, or may not be run, remains
the image's fault.

Text that is never valid (a NUL, a lone surrogate, too many bytes) is always the policy's if it belongs to a program.
A handler that passes an answer on did not write it.
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
"""Codes of calls that are never valid, whatever was done in the sandbox."""
_MARK: Final = "spoilt_by_use"

E = TypeVar("E", bound=Exception)


def spoilt(error: E) -> E:
    """Mark `error` as caused by a policy's acts in a sandbox, and return it."""
    vars(error)[_MARK] = True
    return error


def is_spoilt(error: BaseException) -> bool:
    """Return whether `error` was marked by `spoilt`, or was raised from a marked error.

    A `RolloutError` names its own cause, so the error it was raised from does not count.
    """
    at: BaseException | None = error
    while at is not None:
        if _MARK in getattr(at, "__dict__", ()):
            return True
        at = None if isinstance(at, RolloutError) else at.__cause__
    return False


class Account(Protocol):
    """The rollout that a sandbox belongs to: who acts in it now, and whose time is charged."""

    @property
    def is_acting(self) -> bool:
        """Return True while a tool of the policy runs."""

    @property
    def may_run_answers(self) -> bool:
        """Return True if a program that is run now may be the policy's, unless its handler denies it."""

    def on_agents_time(self, what: str) -> AbstractContextManager[None]:
        """Charge the block to the policy, within a limit.

        Raises:
            BudgetExceeded: the limit was reached, and the block was cancelled.
        """


class Use:
    """A policy's use of a sandbox, for the rollout `account`."""

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
        """Note the call that is sent in the block, and mark its error if the policy is to blame."""
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
        except (SandboxCallFailed, HandlerError) as exc:  # without a cause, it belongs to a program that was running
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
    """Return whether a call was refused because of its text, which does not come from the handler."""
    cause = error.__cause__
    if isinstance(cause, CallFailed):
        if cause.code == "too_large":
            return isinstance(request, Exec)  # its arguments
        return cause.code == "bad_request" and any("\0" in text for text in _texts(msgspec.structs.astuple(request)))
    return isinstance(cause, IpcError | UnicodeEncodeError)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
