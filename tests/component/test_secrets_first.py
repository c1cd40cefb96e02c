"""Wrong tokens, keys and contradictions end a start with one sentence, before anything else is looked at or begun."""

from __future__ import annotations

import msgspec
import pytest
import trio
from click.testing import CliRunner

from prorl_trio.cli import main
from prorl_trio.client import connect
from prorl_trio.integrations.node_address import NodeAddress
from prorl_trio.types.errors import ConfigError, Unauthorized

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("signals_restored")]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files of several modes, in the folder that the commands run in."""
    monkeypatch.chdir(tmp_path)
    for name, content, mode in (
        ("token", "of the file", 0o600),
        ("open-token", "of the file", 0o644),
        ("empty-token", "\n", 0o600),
        ("odd-token", "größer", 0o600),
        ("cert", "none", 0o600),
        ("key", "none", 0o600),
        ("open-key", "none", 0o640),
    ):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    return tmp_path


NODE = {
    "listen.token_file: open-token has mode 0644, others can reach it; chmod 600 it": {"token_file": "open-token"},
    "listen.token_file: the file empty-token is empty": {"token_file": "empty-token"},
    "listen.token_file: the file odd-token is not one line of printable ASCII": {"token_file": "odd-token"},
    "listen.token_file: nowhere cannot be read: No such file": {"token_file": "nowhere"},
    "listen.token_file: . cannot be read: Is a directory": {"token_file": "."},
    "listen.token is not one line of printable ASCII": {"token": "größer"},
    "listen.token and listen.token_file are both set": {"token": "of the file", "token_file": "token"},
    "listen.tls_cert and listen.tls_key go together": {"token_file": "token", "tls_cert": "cert"},
    "listen.tls_key: open-key has mode 0640": {"token_file": "token", "tls_cert": "cert", "tls_key": "open-key"},
    "listen.tls_cert cert, tls_key key: cannot be used": {"token_file": "token", "tls_cert": "cert", "tls_key": "key"},
}
CONFLICTS = {
    "PRORL_TOKEN and listen.token_file token hold two different tokens": {"token_file": "token"},
    "PRORL_TOKEN and listen.token hold two different tokens": {"token": "of the config"},
}
REST = {
    "rest.prorl_compat_token = false is for a loopback listen.host only": {
        "rest": {"prorl_compat": True, "prorl_compat_token": False}, "listen": {"token": "t", "host": "0.0.0.0"},
    },
    "rest.prorl_compat_token = false is not for listen.descriptors": {
        "rest": {"prorl_compat": True, "prorl_compat_token": False}, "listen": {"token": "t", "descriptors": [3]},
    },
    "rest.data_sources: no such handler: a = 'nope'; this node has: ": {
        "rest": {"prorl_compat": True, "data_sources": {"a": "nope"}},
    },
    "Expected `bool`, got `str` - at `$.rest.prorl_compat_token`": {"rest": {"prorl_compat_token": "auto"}},
    **{f"unknown field `{field}` - at `$.rest`; {advice}": {"rest": {field: value}} for field, value, advice in (
        ("enabled", True, "REST is always served, at the port of [listen]"),
        ("port", 8701, "REST is served at the port of [listen]; remove this field, and set listen.port"),
        ("host", "0.0.0.0", "REST is served at the host of [listen]"),
        ("tls", False, "REST speaks TLS where [listen] does"),
        ("max_connections", 9, "one server has one limit; set listen.max_connections"),
        ("idle_timeout_s", 9.0, "one server has one limit; set listen.idle_timeout_s"),
    )},
}  # fmt: skip


def config_with(**tables):
    """A node.toml that has nothing else that could be used."""
    tables = {
        "listen": {"token": "t"},
        **tables,
        "model": {"path": "no/such/model"},
        "backends": {"urls": ["http://127.0.0.1:1"]},
    }
    return msgspec.toml.encode(tables)


def refusal(*arguments, **env):
    result = CliRunner().invoke(main, [*arguments], env={"PRORL_TOKEN": "", **env})
    assert result.exit_code == 1, result.output
    lines = [line for line in result.output.splitlines() if line.lower().startswith("error:")]
    assert len(lines) == 1, result.output
    assert "probing" not in result.output
    return lines[0]


@pytest.mark.parametrize(
    "command", [["serve"], ["local", "up", "--fleet", "fleet", "--nodes", "1"]], ids=["serve", "local"]
)
@pytest.mark.parametrize("why", NODE)
def test_secrets_of_a_node(files, command, why):
    (files / "node.toml").write_bytes(config_with(listen=NODE[why]))
    assert why in refusal(*command, "--config", "node.toml")
    assert not (files / "fleet").exists(), "nothing was begun"


@pytest.mark.parametrize("why", REST)
def test_edges_of_a_node(files, why):
    (files / "node.toml").write_bytes(config_with(**REST[why]))
    assert why in refusal("serve", "--config", "node.toml")


def test_a_configuration_that_others_can_read_and_that_has_the_token_is_told(files):
    for mode, told in ((0o644, True), (0o600, False)):
        (files / "node.toml").write_bytes(config_with())
        (files / "node.toml").chmod(mode)
        result = CliRunner().invoke(main, ["serve", "--config", "node.toml"], env={"PRORL_TOKEN": ""})
        assert ("node.toml has the token, and others can read it" in result.output) is told


@pytest.mark.parametrize(
    "command",
    [["serve"], ["local", "up", "--fleet", "fleet"], ["slurm", "up", "--fleet", "fleet", "--nodes", "1", "--print"]],
    ids=["serve", "local", "slurm"],
)
@pytest.mark.parametrize("why", CONFLICTS)
def test_two_tokens_are_told_and_none_wins_in_silence(files, command, why):
    (files / "node.toml").write_bytes(config_with(listen=CONFLICTS[why]))
    assert why in refusal(*command, "--config", "node.toml", PRORL_TOKEN="of the environment")
    assert not (files / "fleet").exists()


@pytest.mark.parametrize("listen", [{"token_file": "open-token"}, {"token_file": "odd-token"}, {"token": "größer"}])
def test_secrets_of_a_fleet_by_slurm(files, listen):
    (files / "node.toml").write_bytes(config_with(listen=listen))
    up = ("slurm", "up", "--fleet", "fleet", "--nodes", "1", "--print")
    assert "listen.token" in refusal(*up, "--config", "node.toml")


def test_the_token_of_the_command_line_is_an_order(files):
    (files / "node.toml").write_bytes(config_with(listen={"token_file": "token"}))
    why = refusal("serve", "--config", "node.toml", "--token", "mine", PRORL_TOKEN="of the environment")
    assert "no/such/model" in why, "it gets as far as the model"


@pytest.mark.parametrize(
    ("token", "why"),
    [("", "is empty"), ("grö", "printable ASCII"), ("a\nb", "printable ASCII"), ("x" * 5000, "more than")],
)
async def test_a_client_does_not_even_connect_with_what_cannot_be_a_token(token, why):
    with pytest.raises(Unauthorized, match=f"the token given to the client.*{why}"):
        async with connect("ws://192.0.2.1:1", token, connect_timeout_s=99):
            pass
    await trio.lowlevel.checkpoint()


def test_commands_say_what_is_wrong_with_the_token(files):
    why = refusal("status", "--url", "ws://127.0.0.1:1", PRORL_TOKEN="grö")
    assert "the token given to the client is not one line of printable ASCII" in why


def test_a_verl_trainers_node(files, monkeypatch):
    def refused(**fields):
        with pytest.raises(ConfigError) as caught:
            NodeAddress(url="ws://127.0.0.1:1", **fields).connect()
        return str(caught.value)

    monkeypatch.delenv("PRORL_TOKEN", raising=False)
    assert "no token for the node" in refused()
    assert "node.token_file: open-token has mode 0644" in refused(token_file="open-token")
    NodeAddress(url="ws://127.0.0.1:1", token_file="token").connect()
    monkeypatch.setenv("PRORL_TOKEN", "another")
    assert "PRORL_TOKEN and node.token_file token hold two different tokens" in refused(token_file="token")
    monkeypatch.setenv("PRORL_TOKEN", "of the file\n")
    NodeAddress(url="ws://127.0.0.1:1", token_file="token").connect()
    NodeAddress(url="ws://127.0.0.1:1").connect()
