"""A node's pulls: once for all who wait, in a process that ends with the node, and told to whoever waited."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.images.pull import PullRules
from prorl_trio.sandbox.images.puller import ImagePuller, PullLimits
from prorl_trio.sandbox.images.store import find_image, list_images
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.reaper import descendants
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.types.errors import SandboxUnavailable
from support.registry import digest_of, open_registry, tar_of

TIMEOUT_S = 120


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def registry():
    with open_registry() as server:
        yield server


def limits_of(registry, **changes):
    return PullLimits(rules=PullRules(plain_http=(registry.host,), patience_s=20, min_free_bytes=1), **changes)


async def wait_all(puller, images):
    async with trio.open_nursery() as nursery:
        for image in images:
            nursery.start_soon(puller.wait_image, image)


async def test_whoever_waits_for_an_image_it_is_pulled_once(registry):
    reference = registry.push("a:1", [tar_of({"a": b"1"})])
    with trio.fail_after(TIMEOUT_S):
        async with open_single_nursery() as nursery:
            puller = ImagePuller(limits_of(registry), nursery)
            await wait_all(puller, [reference] * 64)
            assert find_image(reference) is not None
            assert puller.statistics() == {"image_pulls": 0, "images_pulled_total": 1, "image_pulls_failed_total": 0}
            registry.requests.clear()
            await wait_all(puller, [reference, "host", "mine", "/a/folder"])
            assert registry.requests == []
    assert len(list_images()) == 1


WAIT = """
import sys, msgspec, trio
from prorl_trio.sandbox.images.puller import ImagePuller, PullLimits

async def main():
    async with trio.open_nursery() as nursery:
        puller = ImagePuller(msgspec.json.decode(sys.argv[2], type=PullLimits), nursery)
        async with trio.open_nursery() as waiting:
            for _ in range(32):
                waiting.start_soon(puller.wait_image, sys.argv[1])

trio.run(main)
"""


def test_also_by_the_jobs_of_two_nodes(registry):
    layer = tar_of({"a": b"1" * 10**6})
    reference = registry.push("a:1", [layer])
    argv = [sys.executable, "-c", WAIT, reference, msgspec.json.encode(limits_of(registry)).decode()]
    nodes = [subprocess.Popen(argv) for _ in range(2)]
    assert [node.wait(TIMEOUT_S) for node in nodes] == [0, 0]
    assert len([path for path in registry.blob_requests() if path.endswith(digest_of(layer))]) == 1


async def test_a_failure_is_told_to_all_and_tried_again_by_the_next(registry):
    reference = registry.reference("late:1")
    with trio.fail_after(TIMEOUT_S):
        async with open_sandbox_host(FakeProvider(), pulls=limits_of(registry)) as host:
            told = []

            async def wait():
                try:
                    await host.wait_image(reference)
                except SandboxUnavailable as exc:
                    told.append(str(exc))

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(wait)
            assert told == [told[0]] * 3
            assert "there is no such image" in told[0]
            with pytest.raises(SandboxUnavailable, match="there is no such image"):
                await host.open(SandboxSpec(image=reference))
            registry.push("late:1", [tar_of({"a": b"1"})])
            await host.wait_image(reference)
            assert host.statistics()["images_pulled_total"] == 1


async def test_a_pull_goes_on_when_nobody_waits_and_ends_with_the_node(registry):
    held = trio.Event()
    token, asked = trio.lowlevel.current_trio_token(), trio.Event()
    layer = tar_of({"a": b"1"})
    reference = registry.push("a:1", [layer])

    def before_blob(digest):
        if digest == digest_of(layer):
            token.run_sync_soon(asked.set)
            trio.from_thread.run(held.wait, trio_token=token)

    registry.before_blob = before_blob
    before = descendants(os.getpid())
    with trio.fail_after(TIMEOUT_S):
        async with open_sandbox_host(FakeProvider(), pulls=limits_of(registry, timeout_s=0.01)) as host:
            with pytest.raises(SandboxUnavailable, match=r"not pulled within 0.01 s; the pull goes on") as late:
                await host.wait_image(reference)
            assert late.value.retryable
            await asked.wait()
            assert descendants(os.getpid()) > before
        assert descendants(os.getpid()) <= before
        held.set()
        assert find_image(reference) is None
        registry.before_blob = lambda digest: None
        async with open_sandbox_host(FakeProvider(), pulls=limits_of(registry)) as host:
            await host.wait_image(reference)
    assert find_image(reference) is not None
