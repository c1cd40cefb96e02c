"""Declarations of MCP servers: wrong ones are refused with a reason, and agents get theirs in their own format."""

from __future__ import annotations

import json
import tomllib

import msgspec
import pytest

from prorl_trio.agent.mcp import prepare_servers, servers_of
from prorl_trio.agents.claude_code import PRESET as CLAUDE
from prorl_trio.agents.codex import PRESET as CODEX
from prorl_trio.agents.preset import AgentServer, Start
from prorl_trio.config import McpConfig, McpServerConfig, ModelConfig, NodeConfig, SandboxConfig, load_config
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import AgentProgram, JobSpec, McpServer, TaskInstance

SERVERS = {
    "files": McpServerConfig(command=("python3", "files.py")),
    "host": McpServerConfig(command=("host",), where="node", secrets={"KEY": "NODE_KEY"}),
    "web": McpServerConfig(url="https://tools/mcp"),
}


def spec(**fields):
    instance = TaskInstance(instance_id="q", handler="math", payload={})
    return JobSpec(job_id="j", instance=instance, **fields)


def node(*default, **sandbox):
    mcp = McpConfig(default=default, servers=SERVERS)
    return NodeConfig(model=ModelConfig(path="x"), mcp=mcp, sandbox=SandboxConfig(**sandbox))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mcp.servers.a]", r"give either command or url - at `\$\.mcp\.servers\[\.\.\.\]`"),
        ('[mcp.servers.a]\ncommand = ["x"]\nurl = "http://h/"', "give either command or url"),
        ('[mcp.servers.a]\ncommand = "x"', r"Expected `array`, got `str`.*command"),
        ('[mcp.servers.a]\ncommand = [""]', "length >= 1.*command"),
        ('[mcp.servers.a]\ncomand = ["x"]', "did you mean `command`"),
        ('[mcp.servers.a]\nurl = "tools/mcp"', "must be http://HOST/PATH"),
        ('[mcp.servers.a]\nurl = "http://me:key@h/"', "a key belongs into secrets"),
        ('[mcp.servers.a]\nurl = "http://h/"\nwhere = "node"', "env and where belong to a command"),
        ('[mcp.servers.a]\ncommand = ["x"]\nsecrets = { A = "B" }', "the policy could read them in its sandbox"),
        ('[mcp.servers.a]\ncommand = ["x"]\nenv = { "A=B" = "C" }', "'A=B' is not the name of a variable"),
        ('[mcp.servers.a]\ncommand = ["x"]\nprotocol = "2025-11-25"', "Invalid enum value '2025-11-25'"),
        ('[mcp.servers.a__b]\ncommand = ["x"]', "'a__b' is not the name of a server"),
        ('[mcp.servers."a b"]\ncommand = ["x"]', "'a b' is not the name of a server"),
        ('[mcp]\ndefault = ["b"]\n[mcp.servers.a]\ncommand = ["x"]', "there is no mcp.servers.b; there are: a"),
    ],
)
def test_a_wrong_declaration_is_refused_with_its_place(tmp_path, text, message):
    file = tmp_path / "node.toml"
    file.write_text(f'[model]\npath = "x"\n{text}\n')
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_a_job_takes_the_defaults_or_names_servers_or_brings_its_own():
    config = node("files")
    own = McpServer(name="own", command=["x"], tools=["a*"])
    assert list(servers_of(config, spec())) == ["files"]
    assert list(servers_of(config, spec(mcp=[]))) == []
    assert servers_of(config, spec(mcp=["web", own])) == {
        "web": SERVERS["web"],
        "own": McpServerConfig(command=("x",), tools=("a*",)),
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mcp": ["none"]}, "there is no mcp.servers.none; there are: files, host, web"),
        ({"mcp": ["files", "files"]}, "'files' occurs twice"),
        ({"mcp": [McpServer(name="files", command=["x"]), "files"]}, "'files' occurs twice"),
        ({"mcp": [McpServer(name="https://evil/mcp", command=["x"])]}, "is not the name of a server"),
        ({"mcp": [McpServer(name="a", command=[])]}, "give either command or url"),
        ({"mcp": ["files"], "agent": AgentProgram(command=["x"])}, "the agent 'x' is not given MCP servers; these are"),
        ({"mcp": ["files"], "agent": AgentProgram(external=True)}, "claude-code, codex. Set mcp to"),
        ({"mcp": ["files"], "agent": "aider"}, "the agent 'aider' is not given MCP servers"),
        ({"mcp": ["host"], "agent": "codex"}, "mcp.servers.host: agents in a sandbox do not reach the node"),
        ({"mcp": ["web"], "agent": "codex"}, "mcp.servers.web: an agent in a sandbox needs sandbox.network"),
    ],
)
def test_a_wrong_job_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        servers_of(node(), spec(**fields))


def test_a_job_cannot_bring_a_url_or_a_command_for_the_node():
    for field in ({"url": "http://h/"}, {"where": "node"}, {"secrets": {"A": "B"}}):
        encoded = msgspec.json.encode({"name": "a", "command": ["x"], **field})
        with pytest.raises(msgspec.ValidationError, match="unknown field"):
            msgspec.json.decode(encoded, type=McpServer)


async def test_a_node_without_a_secret_of_a_server_does_not_start(monkeypatch):
    monkeypatch.delenv("NODE_KEY", raising=False)
    why = "mcp.servers.host.secrets: the environment variable NODE_KEY is missing or empty"
    with pytest.raises(ConfigError, match=why):
        await prepare_servers(node().mcp)
    monkeypatch.setenv("NODE_KEY", " key\n")
    await prepare_servers(node().mcp)
    assert SERVERS["host"].read_secrets() == {"KEY": "key"}


def test_a_node_without_the_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("prorl_trio.agent.mcp.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'prorl-trio\[mcp\]'"):
        servers_of(node(), spec(mcp=["files"]))


def start(*mcp):
    return Start("/opt/a", "/tmp/h", "http://g", "k", "policy", "Do it.", 1000, 100, mcp)


STDIO = AgentServer(
    "files", McpServerConfig(command=("run", "-x"), env={"A": 'é"'}, call_timeout_s=7), ["read"], ["rm"]
)
HTTP = AgentServer("web", SERVERS["web"], ["find"], [])


def test_claude_gets_a_file_and_is_denied_the_other_tools():
    started = CLAUDE.start(start(STDIO, HTTP))
    assert started.argv[-5:] == (
        *("--mcp-config", "/tmp/h/mcp.json", "--strict-mcp-config", "--disallowedTools", "mcp__files__rm"),
    )
    assert started.env["MCP_TOOL_TIMEOUT"] == "30000"
    assert json.loads(started.files["mcp.json"]) == {
        "mcpServers": {
            "files": {"type": "stdio", "command": "run", "args": ["-x"], "env": {"A": 'é"'}},
            "web": {"type": "http", "url": "https://tools/mcp"},
        }
    }
    assert CLAUDE.start(start()).files == {}
    assert "--mcp-config" not in CLAUDE.start(start()).argv


def test_codex_gets_tables_with_the_tools():
    config = tomllib.loads(CODEX.start(start(STDIO, HTTP)).files["config.toml"])
    assert config["model_providers"]["gateway"]["base_url"] == "http://g/v1"
    limits = {"startup_timeout_sec": 30.0}
    assert config["mcp_servers"] == {
        "files": {
            "command": "run", "args": ["-x"], "env": {"A": 'é"'}, "enabled_tools": ["read"], "tool_timeout_sec": 7.0
        } | limits,
        "web": {"url": "https://tools/mcp", "enabled_tools": ["find"], "tool_timeout_sec": 30.0} | limits,
    }  # fmt: skip
    assert tomllib.loads(CODEX.start(start()).files["config.toml"])["mcp_servers"] == {}
