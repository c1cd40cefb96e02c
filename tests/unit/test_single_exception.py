from __future__ import annotations

import pytest
import trio

from prorl_ipc.nursery import single_exception


async def fail(error: BaseException) -> None:
    await trio.lowlevel.checkpoint()
    raise error


async def test_an_error_of_the_body_or_of_a_task_comes_out_alone_with_its_own_context():
    for in_task in (False, True):
        error = ValueError("mine")
        error.__cause__ = cause = KeyError("why")
        with pytest.raises(ValueError, match="mine") as caught, single_exception():  # noqa: PT012
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                if in_task:
                    nursery.start_soon(fail, error)
                    await trio.sleep_forever()
                raise error
        assert caught.value is error
        assert caught.value.__cause__ is cause
        assert not isinstance(caught.value.__context__, BaseExceptionGroup)


async def test_several_errors_stay_together():
    with pytest.RaisesGroup(KeyError, ValueError), single_exception():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, KeyError("task"))
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("body")


async def test_cancellation_passes_as_cancellation():
    with trio.CancelScope() as scope, single_exception():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_nothing_raised_is_nothing_changed():
    with single_exception():
        async with trio.open_nursery():
            await trio.lowlevel.checkpoint()
