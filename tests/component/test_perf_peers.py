"""Peers, with packages that stand in for them: the worker, its process and the environments are ours."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import trio

from perf.peers import __main__ as command_line
from perf.peers import environments, process
from perf.peers.environments import PEERS, Peer, PeerUnavailable, install, peer_python
from perf.peers.process import PeerAnswer, open_peer
from prorl_launch.progress import SetupError

SWEREX = {
    "swerex/__init__.py": "",
    "swerex/exceptions.py": "class SwerexException(Exception):\n    pass\n",
    "swerex/runtime/__init__.py": "",
    "swerex/runtime/abstract.py": "class CreateBashSessionRequest:\n    pass\n\n\nclass BashAction:\n"
    "    def __init__(self, command, check, timeout):\n        self.command = command\n",
    "swerex/runtime/local.py": """
import asyncio, os, sys, time
from types import SimpleNamespace
from swerex.exceptions import SwerexException
class LocalRuntime:
    async def create_session(self, request):
        print("a line that is no answer")
    async def run_in_session(self, action):
        if action.command == "refuse":
            raise SwerexException("no")
        if action.command == "crash":
            raise KeyError("broken inside")
        if action.command == "hang":
            time.sleep(3600)
        await asyncio.sleep(0.01)
        return SimpleNamespace(output=f"{action.command} in {os.getcwd()} {os.environ.get('SECRET')}", exit_code=3)
    async def close(self):
        with open("closed", "w"):
            pass
""",
}


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """SWE-ReX's name, this Python, and a package that stands in for it."""
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SECRET", "of the host")
    peer = PEERS["swerex"]
    (peer.folder() / "bin").mkdir(parents=True)
    (peer.folder() / "bin" / "python").symlink_to(sys.executable)
    (peer.folder() / ".complete").touch()
    for name, text in SWEREX.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return peer


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.defpath, "PYTHONPATH": str(tmp_path / "packages")}


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


def children() -> set[str]:
    """Of all threads: trio starts processes in one that is not this."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


async def test_a_peer_answers_and_is_closed(peer: Peer, env: dict[str, str], cwd: Path):
    before, fds_before = children(), len(os.listdir("/proc/self/fd"))
    with trio.fail_after(60):
        async with open_peer(peer, env=env, cwd=cwd, log=cwd / "log") as talk:
            answer = await talk.run("pwd")
            assert answer == PeerAnswer(f"pwd in {cwd} None", 3, answer.elapsed_s)
            assert 0.01 <= answer.elapsed_s < 10
            refused = await talk.run("refuse")
            assert (refused.output, refused.exit_code) == ("SwerexException: no", None)
    assert (cwd / "closed").exists()
    assert "a line that is no answer" in (cwd / "log").read_text()
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == fds_before


async def test_a_peer_that_ends_says_what_it_said_last(peer: Peer, env: dict[str, str], cwd: Path):
    with trio.fail_after(60):
        with pytest.raises(PeerUnavailable, match=r"ended at 'crash'; it said: (?s:.*)broken inside"):
            async with open_peer(peer, env=env, cwd=cwd, log=cwd / "log") as talk:
                await talk.run("crash")


async def test_a_peer_that_hangs_is_killed(peer: Peer, env: dict[str, str], cwd: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "COMMAND_TIMEOUT_S", 0.2)
    monkeypatch.setattr(process, "END_TIMEOUT_S", 0.2)
    before = children()
    with trio.fail_after(60):
        with pytest.raises(PeerUnavailable, match=r"did not finish 'hang' within 0\.2 s"):
            async with open_peer(peer, env=env, cwd=cwd, log=cwd / "log") as talk:
                await talk.run("hang")
    assert children() == before


async def test_a_cancelled_peer_leaves_nothing(
    peer: Peer, env: dict[str, str], cwd: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process, "END_TIMEOUT_S", 0.2)
    before = children()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            async def use() -> None:
                async with open_peer(peer, env=env, cwd=cwd, log=cwd / "log") as talk:
                    nursery.cancel_scope.cancel()
                    await talk.run("hang")

            nursery.start_soon(use)
    assert children() == before


async def test_a_peer_killed_from_outside_is_told(peer: Peer, env: dict[str, str], cwd: Path):
    before = children()
    with trio.fail_after(60):
        async with open_peer(peer, env=env, cwd=cwd, log=cwd / "log") as talk:
            (pid,) = children() - before
            os.kill(int(pid), signal.SIGKILL)
            with pytest.raises(PeerUnavailable, match="ended"):
                await talk.run("true")


async def test_a_peer_that_does_not_start_says_why(peer: Peer, env: dict[str, str], cwd: Path):
    with trio.fail_after(60):
        with pytest.raises(PeerUnavailable, match=r"ended at 'its start'; it said: (?s:.*)No module named 'swerex'"):
            async with open_peer(peer, env={"PATH": os.defpath}, cwd=cwd, log=cwd / "log"):
                pytest.fail("it did start")


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    with pytest.raises(PeerUnavailable, match=r"is not installed; run: python -m perf\.peers setup swerex"):
        peer_python(PEERS["swerex"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerUnavailable, match="needs the program tmux"):
        peer_python(PEERS["tmux"])


def test_a_peer_without_a_python_names_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    with pytest.raises(PeerUnavailable, match=r"needs Python 3\.99 or later"):
        install(Peer(name="new", title="New", requirements=(), python=(3, 99)))


def test_install_is_done_once_and_leaves_nothing_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    ran: list[str] = []

    def run(title: str, argv: list[str], *, log_file: Path) -> None:
        ran.append(argv[2])
        Path(argv[-1]).mkdir()

    def run_pip(title: str, python: str, arguments: list[str], *, log_file: Path) -> None:
        ran.append("pip")
        if "broken" in arguments:
            raise SetupError("pip failed")

    monkeypatch.setattr(environments, "run_step", run)
    monkeypatch.setattr(environments, "run_pip", run_pip)
    good = Peer(name="good", title="Good", requirements=("good",))
    for _ in range(2):
        install(good)
    assert ran == ["venv", "pip"]
    broken = Peer(name="bad", title="Bad", requirements=("broken",))
    with pytest.raises(PeerUnavailable, match="Bad: pip failed"):
        install(broken)
    assert not broken.folder().exists()
    assert good.folder().exists()


def test_the_command_line_tells_the_state_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peer: Peer
):
    assert command_line.main(["status", "swerex"]) == 0
    assert f"swerex: ready in {peer.folder()}" in capsys.readouterr().out
    assert command_line.main(["status", "jupyter", "swerex"]) == 1
    assert "jupyter: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main(["setup", "nobody"])
    assert "no such peer: nobody" in capsys.readouterr().err
