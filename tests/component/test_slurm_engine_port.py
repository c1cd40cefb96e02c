"""An engine has a port that no other engine or program of its machine has, and nodes hear which."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys

import pytest

from prorl_launch.slurm.engine_port import EnginePort, find_ports, take_port, tell_port
from prorl_trio.types.errors import ConfigError

RUN = [sys.executable, "-m", "prorl_trio.cli", "slurm", "engine"]


@pytest.fixture
def listener():
    with socket.socket() as one:
        one.bind(("0.0.0.0", 0))
        one.listen()
        yield one.getsockname()[1]


def test_a_port_at_which_another_program_serves_is_refused(listener):
    with pytest.raises(ConfigError, match=rf"port {listener} of .* is in use"):
        take_port(listener)


def test_an_engine_that_does_not_serve_yet_has_its_port_all_the_same():
    port, holder = take_port(0)
    with holder:
        with pytest.raises(ConfigError, match="is in use"):
            take_port(port)
        other, second = take_port(0)
        second.close()
        assert other != port
    again, holder = take_port(port)
    holder.close()
    assert again == port


def engine(folder, port, *command):
    env = {**os.environ, "SLURMD_NODENAME": "n7"}
    words = [*RUN, f"--folder={folder}", f"--port={port}", "--", *command]
    return subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_engine_hears_its_port_the_nodes_too_and_it_holds_it_until_it_ends(tmp_path):
    with engine(tmp_path, 0, "sh", "-c", "echo $PRORL_ENGINE_PORT; read end") as process:
        port = int(process.stdout.readline())
        assert find_ports(tmp_path, ["n7"], 0) == {"n7": EnginePort(port=port)}
        with pytest.raises(ConfigError, match="is in use"):
            take_port(port)
        process.stdin.close()
        assert process.wait(timeout=60) == 1
    take_port(port)[1].close()


def test_nodes_hear_why_there_is_no_engine(tmp_path, listener):
    with engine(tmp_path, listener, "true") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    told = find_ports(tmp_path, ["n7"], 0)["n7"]
    assert told.port == 0
    assert f"port {listener} of" in told.problem
    assert told.problem in said.decode().replace("Error: ", "")


def test_an_engine_that_does_not_begin_is_named(tmp_path):
    machine = secrets.token_hex(3)
    tell_port(tmp_path, "n1", EnginePort(port=7))
    with pytest.raises(ConfigError, match=f"no engine has begun on {machine}"):
        find_ports(tmp_path, ["n1", machine], 0.1)
