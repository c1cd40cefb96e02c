"""The settings of a fleet in a Ray cluster: what is refused, the configurations that follow, addresses of engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from prorl_trio.config import HeadConfig, NodeConfig
from prorl_trio.config.secrets import TOKEN_VARIABLE
from prorl_trio.integrations.ray.plan import engine_url, make_plan
from prorl_trio.types.errors import ConfigError

CONFIG = {"model": {"path": "/m"}, "backends": {"urls": ["http://e:1"]}, "fleet": {"stale_after_s": 60.0}}
SETTINGS = {
    "name": "f",
    "nodes": 2,
    "dir": "/disk",
    "backends": [],
    "backend_method": "",
    "handlers": [],
    "resources": {"CPU": 1},
    "detached": True,
}
FOLDER = Path("/disk/f/f-1")


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def plan(config=CONFIG, **changes):
    return make_plan(config, **SETTINGS | changes)


def node(config=CONFIG, engines=()):
    return msgspec.convert(plan(config).node_tables("f-1", "10.0.0.7", FOLDER, [*engines]), NodeConfig)


def head(config=CONFIG, port=0):
    return msgspec.convert(plan(config).head_tables("10.0.0.7", port, FOLDER), HeadConfig)


def test_a_node_has_its_own_name_address_folders_and_engines():
    config = node(engines=["http://e:2", "http://e:1"])
    assert (config.node_id, config.listen.host, config.listen.port) == ("f-1", "10.0.0.7", 0)
    assert (config.fleet.dir, config.fleet.advertise) == ("/disk/f/f-1/fleet", "10.0.0.7")
    assert (config.ledger.dir, config.fleet.stale_after_s) == ("/disk/f/f-1/ledger", 60.0)
    assert config.backends.urls == ["http://e:1", "http://e:2"]


def test_the_head_has_the_nodes_settings_and_the_given_port():
    config = head(port=99)
    assert (config.listen.host, config.listen.port, config.fleet.stale_after_s) == ("10.0.0.7", 99, 60.0)
    assert (config.fleet.dir, config.ledger.dir) == ("/disk/f/f-1/fleet", "/disk/f/f-1/ledger")


@pytest.mark.parametrize("settings_of", [node, head])
def test_an_address_of_ones_own_is_kept_and_settings_of_one_process_are_not(settings_of):
    listen = {"host": "0.0.0.0", "unix_socket": "/x", "endpoint_file": "/y", "token": "hush" * 8}
    config = settings_of(CONFIG | {"listen": listen, "fleet": {"advertise": "n1.cluster"}})
    assert (config.listen.host, config.fleet.advertise) == ("0.0.0.0", "n1.cluster")
    assert (config.listen.endpoint_file, config.listen.token) == ("", "")
    assert config.listen.unix_socket != "/x"


def test_a_ledger_in_memory_stays_there():
    assert node(CONFIG | {"ledger": {"dir": ""}}).ledger.dir == ""


def test_the_token_is_the_users_or_a_new_one_and_is_not_shown(monkeypatch):
    assert plan().token != plan().token
    assert plan().token not in repr(plan())
    assert plan(CONFIG | {"listen": {"token": "hush" * 8}}).token == "hush" * 8
    monkeypatch.setenv(TOKEN_VARIABLE, "psst" * 8)
    assert plan().token == "psst" * 8
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        plan(CONFIG | {"listen": {"token": "hush" * 8}})


def test_a_file_is_read_as_its_tables_are(tmp_path):
    path = tmp_path / "node.toml"
    path.write_bytes(b"\xef\xbb\xbf" + msgspec.toml.encode(CONFIG))
    for config in (path, str(path)):
        assert plan(config).tables == plan().tables


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": 0}, "nodes"),
        ({"nodes": "two"}, "nodes"),
        ({"resources": {"CPU": 0}}, "resources"),
        ({"name": ""}, "name ''"),
        ({"name": "a/b"}, "name 'a/b'"),
        ({"backends": ["http://e:1"]}, "put http://e:1 into backends.urls"),
        ({"backends": "vllm"}, "backends"),
        ({"handlers": "my:Handler"}, "handlers"),
        ({"config": {"model": {"path": 3}}}, "model.path"),
        ({"config": "/no/such/node.toml"}, "/no/such/node.toml"),
    ],
)
def test_a_wrong_setting_is_named(changes, said):
    with pytest.raises(ConfigError, match=said):
        plan(**{"config": CONFIG, **changes})


@pytest.mark.parametrize(
    ("answer", "url"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1"),
        ("h:1", "http://h:1"),
        (("h", 1), "http://h:1"),
        (["h", "1"], "http://h:1"),
        (("fd00::1", 1), "http://[fd00::1]:1"),
        (SimpleNamespace(url="http://h:1"), "http://h:1"),
    ],
)
def test_an_engine_tells_its_address_in_several_forms(answer, url):
    assert engine_url(answer) == url


@pytest.mark.parametrize("answer", [None, 8000, "h", ("h",), {"h": 1}])
def test_anything_else_is_no_address(answer):
    with pytest.raises(ConfigError, match="backend_method"):
        engine_url(answer)
