"""A trainer's rollout servers on a node: registered, held back, named by the step, and given again to a new node."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from prorl_trio.client import BlockingClient, PolicyUpdateFailed
from prorl_trio.integrations.engines import NodeEngines
from prorl_trio.types.errors import BackendError
from support.fake_node import FakeNode
from support.fake_service import TOKEN, open_service

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def open_engines(service, **options):
    client = await trio.to_thread.run_sync(BlockingClient, service.url, TOKEN)
    engines = NodeEngines(client, check_interval_s=0.02, **options)
    try:
        with trio.fail_after(30):
            yield engines
    finally:
        with trio.move_on_after(10, shield=True):
            await trio.to_thread.run_sync(engines.close)


def pool(node):
    """Each backend's url and the version that it samples under."""
    return {backend.url: backend.info.policy_version for backend in node.backends._placement.backends()}


def paused(node):
    return node.backends.admission.closed


async def call(fn, *args):
    return await trio.to_thread.run_sync(fn, *args)


async def test_the_engines_of_another_trainer_are_replaced_and_tokens_named_by_the_step():
    node = FakeNode()
    await node.backends.add("http://old:1")
    async with open_service(node) as service, open_engines(service) as engines:
        await call(engines.register, ["a:1", "[::1]:2"], 7)
        assert pool(node) == {"http://a:1": "7", "http://[::1]:2": "7"}


async def test_completions_are_held_back_from_the_beginning_of_an_update_to_its_end():
    node = FakeNode()
    async with open_service(node) as service, open_engines(service) as engines:
        await call(engines.register, ["a:1"], 0)
        await call(engines.finish_update)  # none was begun
        await call(engines.begin_update, 1)
        await call(engines.begin_update, 1)
        assert paused(node)
        assert pool(node) == {"http://a:1": "0"}
        await call(engines.finish_update)
        assert not paused(node)
        assert pool(node) == {"http://a:1": "1"}
        await call(engines.begin_update, 2)
        await call(engines.finish_update)
        assert pool(node) == {"http://a:1": "2"}


async def test_a_node_that_was_started_again_is_given_them_with_their_version():
    node, again = FakeNode(), FakeNode()
    async with open_service(node) as service, open_engines(service) as engines:
        await call(engines.register, ["a:1", "b:1"], 3)
        service.stop()
        await service.stopped.wait()
        async with open_service(again, port=service.port):
            while len(pool(again)) < 2:
                await trio.sleep(0.01)
            assert pool(again) == {"http://a:1": "3", "http://b:1": "3"}


async def test_one_that_was_started_again_within_an_update_is_given_them_at_its_end():
    node, again = FakeNode(), FakeNode()
    async with open_service(node) as service, open_engines(service) as engines:
        await call(engines.register, ["a:1"], 3)
        await call(engines.begin_update, 4)
        service.stop()
        await service.stopped.wait()
        async with open_service(again, port=service.port):
            await trio.sleep(0.1)  # several looks
            assert pool(again) == {}, "its weights are on their way"
            await call(engines.finish_update)
            assert pool(again) == {"http://a:1": "4"}


async def test_an_engine_that_the_node_cannot_use_or_pause_is_named():
    node = FakeNode()
    node.unfit_backends.add("http://bad:1")
    async with open_service(node) as service, open_engines(service) as engines:
        with pytest.raises(BackendError, match="http://bad:1 drops token ids"):
            await call(engines.register, ["bad:1"], 0)
        node.unfit_backends.clear()
        await call(engines.register, ["bad:1"], 0)
        node.engines["http://bad:1"].broken.add("pause")
        with pytest.raises(PolicyUpdateFailed):
            await call(engines.begin_update, 1)
        assert not paused(node)
