"""A trainer that updates the policy of a node, whose engines look like vLLM, or do as a test says."""

from __future__ import annotations

from contextlib import asynccontextmanager

import numpy as np
import trio

from prorl_trio.client import (
    connect,
)
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from support.fake_node import FakeNode
from support.fake_service import TOKEN, open_service
from support.pausable_engine import complete, versions
from support.tiny_weights import tensors

DEADLINE_S = 30


@asynccontextmanager
async def open_trainer(node):
    with trio.fail_after(DEADLINE_S):
        async with open_service(node) as service, connect(service.url, TOKEN) as client:
            yield client


@asynccontextmanager
async def open_look_alikes(*, development=(True, True), model="fake-model", adapters=(False, False)):
    """Two servers behind the pool of a node, and a trainer."""
    one, other = (
        FakeEngineConfig(development=each, model=model, adapters=takes)
        for each, takes in zip(development, adapters, strict=True)
    )
    async with open_fake_engine(config=one) as first, open_fake_engine(config=other) as second:
        node = FakeNode()
        node.backends = Backends(made_by(VllmClient))
        for engine in (first, second):
            await node.backends.add(engine.url)
        try:
            async with open_trainer(node) as client:
                yield node, client, (first, second)
        finally:
            await node.backends.aclose()


async def update_to(client, version, folder, *, check="none", **options):
    async with client.policy_update(version, **options) as update:
        await update.load_folder(folder, check=check)


async def update_state(client, version, folder, *, value=1.0, **options):
    state = {**tensors(), "model.norm.weight": np.full(4, value, np.float32)}
    async with client.policy_update(version) as update:
        await update.load_state_dict(state, folder, **options)


class AllBut:
    """The folders that an engine loads nothing of: every one but one."""

    def __init__(self, good):
        self.good = str(good)

    def __contains__(self, folder):
        return folder != self.good


async def update_and_fail(client, look=None):
    async with client.policy_update("1") as update:
        await update.load_folder("/w/1", check="none")
        if look is not None:
            look()
        raise ZeroDivisionError


async def sampled_as(backends):
    """The version that a completion is recorded under now."""
    async with backends.lease("a task") as lease:
        return versions(await complete(lease))[0][0]


@asynccontextmanager
async def open_updated_node(*urls):
    """A node with engines that do as the test says."""
    node = FakeNode()
    for url in urls:
        await node.backends.add(url)
        node.engines[url].call_s = 0.0
    try:
        yield node
    finally:
        await node.backends.aclose()


def assert_old(node):
    assert not node.backends.admission.closed
    assert {each.policy_version for each in node.backends.list()} == {"0"}
    assert [engine.weights for engine in node.engines.values()] == ["first", "first"]
    assert all(engine.running.is_set() for engine in node.engines.values())
