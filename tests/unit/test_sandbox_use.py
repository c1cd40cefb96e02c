"""The use that a policy has made of a sandbox: from which call on an error is its doing, and which errors are."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from prorl_ipc.errors import CallFailed
from prorl_ipc.sandbox_calls import BashRun, Exec, Ping
from prorl_trio.sandbox.use import Use, is_spoilt
from prorl_trio.types.errors import BackendError, SandboxCallFailed, SandboxLost


class Account:
    """Whoever acts in a sandbox: a tool of the policy (`is_acting`), or a program that may be its answer."""

    is_acting = False
    may_run_answers = False

    def on_agents_time(self, what):
        return nullcontext()


READ = Ping()
"""A call that runs no program."""
PROGRAM = Exec(argv=["prog"], timeout_s=1.0)


@pytest.fixture
def account():
    return Account()


@pytest.fixture
def use(account):
    return Use(account)


def act(account, use):
    account.is_acting = True
    with use.calling(READ):
        pass
    account.is_acting = False


def refusal(error, code="os_error"):
    error.__cause__ = CallFailed(code, str(error))
    return error


def raised(use, error, request=READ):
    with pytest.raises(type(error)) as caught, use.calling(request):
        raise error
    return caught.value


def test_a_sandbox_is_used_from_the_call_of_a_tool_on(account, use):
    assert not is_spoilt(raised(use, refusal(FileNotFoundError("x"))))
    assert not use
    act(account, use)
    assert use
    assert is_spoilt(raised(use, refusal(FileNotFoundError("x"))))
    assert is_spoilt(raised(use, refusal(IsADirectoryError("x"))))
    assert is_spoilt(raised(use, SandboxCallFailed("no thread")))


@pytest.mark.parametrize("code", ["not_absolute", "bad_request"])
def test_arguments_that_no_sandbox_takes_are_the_callers(account, use, code):
    act(account, use)
    assert not is_spoilt(raised(use, refusal(ValueError("x"), code)))
    assert not is_spoilt(raised(use, ValueError("not of the sandbox at all")))


def test_a_program_that_was_never_there_is_the_images(account, use):
    account.may_run_answers = True
    assert not is_spoilt(raised(use, refusal(FileNotFoundError("prog")), PROGRAM))
    with use.calling(PROGRAM):
        pass
    assert is_spoilt(raised(use, refusal(FileNotFoundError("prog")), PROGRAM))


def test_only_programs_that_may_be_the_policys_use_an_evaluators_sandbox(account, use):
    with use.calling(PROGRAM):
        pass
    assert not use
    account.may_run_answers = True
    with use.calling(READ):
        pass
    assert not use
    with use.calling(PROGRAM):
        pass
    assert use


def test_a_loss_from_inside_is_the_policys_only_if_the_policy_was_there(account, use):
    assert not raised(use, SandboxLost("x", from_inside=True)).from_inside
    act(account, use)
    assert raised(use, SandboxLost("x", from_inside=True)).from_inside
    assert not raised(use, SandboxLost("x")).from_inside


def test_what_was_lost_before_the_policy_came_stays_nobodys(account, use):
    account.is_acting = True
    assert not raised(use, SandboxLost("x", from_inside=True, before_the_call=True)).from_inside
    assert not raised(use, SandboxLost("x", from_inside=True, before_the_call=True)).from_inside


def test_an_error_that_names_its_cause_is_not_judged_by_what_it_came_from(account, use):
    act(account, use)
    spoilt = raised(use, SandboxCallFailed("no thread"))
    wrapped = RuntimeError("of the handler")
    wrapped.__cause__ = spoilt
    assert is_spoilt(wrapped)
    named = BackendError("of the engine", retryable=True)
    named.__cause__ = spoilt
    assert not is_spoilt(named)


def test_a_shell_of_the_policys_uses_it(account, use):
    account.may_run_answers = True
    with use.calling(BashRun(command="true", timeout_s=1.0)):
        pass
    assert use
