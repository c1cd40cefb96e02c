"""Kinds of engines: those that are built in, and those that installed packages offer by entry point."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from prorl_trio.config import BackendConfig
from prorl_trio.inference.engines.registry import BUILT_IN, EngineRegistry
from prorl_trio.inference.engines.sglang import SglangClient
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.node.parts import engine_finder
from prorl_trio.testing.fake_engine import open_fake_engine
from prorl_trio.types.errors import BackendError, ConfigError
from support.plugins import installer

MODULE = """
from prorl_trio.inference.engines.vllm import VllmClient

class OwnEngine(VllmClient):
    async def is_there(self, *, timeout_s):
        return b"fake-model" in (await self._get("/v1/models", timeout_s) or b"")

class ShyEngine(VllmClient):
    pass

def no_class(url, **options):
    return OwnEngine(url, **options)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package that offers engines: their names, and the objects that the entry points name."""
    with installer(tmp_path, monkeypatch, own_engines=MODULE) as install:
        yield partial(install, "prorl_trio.engines")


async def test_an_engine_of_an_installed_package_is_used_by_its_name(install):
    install(own="own_engines:OwnEngine")
    assert EngineRegistry.from_entry_points().names == ["auto", "prorl", "sglang", "tinker", "vllm", "own"]
    find = engine_finder(BackendConfig(engine="own", max_connections_per_backend=3), None)
    client = await find("http://127.0.0.1:1", 1)
    assert type(client).__name__ == "OwnEngine"
    assert client.http.statistics().max_connections == 3
    await client.aclose()


async def test_auto_asks_an_installed_engine_first_and_passes_over_one_that_does_not_say(install):
    install(own="own_engines:OwnEngine")
    async with open_fake_engine() as engine:
        client = await EngineRegistry.from_entry_points().finder("auto")(engine.url, 5)
        assert type(client).__name__ == "OwnEngine"
        await client.aclose()


async def test_what_is_registered_is_the_client_that_auto_found():
    async with open_fake_engine() as engine:
        backends = Backends(EngineRegistry().finder("auto"))
        await backends.add(engine.url)
        async with backends.lease("task") as lease:
            assert type(lease.client) is VllmClient
        await backends.aclose()


async def test_auto_leaves_no_client_open_that_it_does_not_use():
    made = []

    class Counted(SglangClient):
        def __init__(self, url, **options):
            super().__init__(url, **options)
            made.append(self)

    async with open_fake_engine() as engine:
        client = await EngineRegistry({"counted": Counted}).finder("auto")(engine.url, 5)
        assert type(client) is VllmClient
        assert made[0].http.statistics().idle == 0
        await client.aclose()
    with pytest.raises(BackendError, match="cannot connect"):
        await EngineRegistry({"counted": Counted}).finder("auto")(engine.url, 5)


async def test_auto_gives_up_on_a_server_that_does_not_answer():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        with pytest.raises(BackendError, match=r"answer.* within 0.05 s") as caught:
            await EngineRegistry().finder("auto")(url, 0.05)
        assert caught.value.retryable


def test_an_unknown_kind_is_refused_with_what_there_is(install):
    install(own="own_engines:OwnEngine")
    with pytest.raises(
        ConfigError, match=r"no engine is called 'other'; this node has: auto, prorl, sglang, tinker, vllm, own"
    ):
        engine_finder(BackendConfig(engine="other"), None)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("own", "own_engines:Missing", r"engines: 'own' \(own_engines:Missing\) cannot be loaded"),
        ("own", "no_such_package:Engine", r"engines: 'own' \(no_such_package:Engine\) cannot be loaded"),
        ("own", "own_engines:no_class", r"engines: 'own' \(own_engines:no_class\) is not a subclass of EngineClient"),
        ("vllm", "own_engines:OwnEngine", "offers an engine called 'vllm', as a built-in one is"),
        ("auto", "own_engines:OwnEngine", "offers an engine called 'auto', as a built-in one is"),
    ],
)
def test_an_entry_point_that_is_no_engine_is_named(install, name, value, says):
    install(**{name: value})
    with pytest.raises(ConfigError, match=says):
        EngineRegistry.from_entry_points()


def test_two_packages_with_one_name_are_refused(install):
    install(own="own_engines:OwnEngine")
    install("more_engines", own="own_engines:ShyEngine")
    with pytest.raises(ConfigError, match=r"engines: 'own' .* two installed packages declare that name"):
        EngineRegistry.from_entry_points()


def test_built_in_kinds_need_no_installed_package():
    assert EngineRegistry().names == ["auto", *sorted(BUILT_IN)]
