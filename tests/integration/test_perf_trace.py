"""The trace, with real shells: what is timed must also be right."""

from __future__ import annotations

import os
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from perf import trace
from perf.harness import Options
from perf.peers.environments import PEERS, PeerUnavailable, peer_python
from perf.trace import FLOOR, OURS, PEER_SYSTEMS, figures_of, load_trace, make_workspace, open_system, run_round
from support.skips import because

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perf.peers.process import PeerAnswer

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(shutil.which("git") is None, reason=because("the trace runs git", "apt-get install git")),
]


def children() -> set[str]:
    """Of all threads: trio starts processes in one that is not this."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


async def test_every_command_of_the_trace_answers_alike_through_ours_and_a_bare_pty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    steps = load_trace()
    before, fds_before = children(), len(os.listdir("/proc/self/fd"))
    with trio.fail_after(300):
        answers = await run_round(steps, [FLOOR, OURS], {})
    for name in (FLOOR, OURS):
        figures = figures_of(steps, [answers[name]], [answers[FLOOR]])
        assert [step.command for index, step in enumerate(steps) if index not in figures] == []
    assert sum(bool(answer.words) for answer in answers[OURS]) > len(steps) / 2
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) <= fds_before
    assert not list(tmp_path.iterdir())


async def test_a_peer_that_fails_half_way_is_left_out_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    @asynccontextmanager
    async def with_failing_peer(name: str, workspace: trace.Workspace) -> AsyncIterator[trace.Run]:
        if name == "absent":
            raise PeerUnavailable("absent is not installed")
        async with open_system(FLOOR, workspace) as run:

            async def fail_at_third(command: str) -> PeerAnswer:
                if name == "failing" and command == steps[2].command:
                    raise PeerUnavailable("failing ended")
                return await run(command)

            yield fail_at_third

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(trace, "open_system", with_failing_peer)
    steps = load_trace()[:6]
    failures: dict[str, str] = {}
    with trio.fail_after(60):
        answers = await run_round(steps, [FLOOR, "absent", "failing"], failures)
    assert {name: len(answered) for name, answered in answers.items()} == {FLOOR: 6, "failing": 2}
    assert failures == {"absent": "absent is not installed", "failing": "failing ended"}


async def test_git_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="install git"):
        await trace.benchmark(Options(quick=True, json_path=None))


@pytest.mark.slow
@pytest.mark.parametrize("name", PEER_SYSTEMS)
async def test_a_real_peer_answers_the_quick_part_right(name: str, tmp_path: Path):
    try:
        peer_python(PEERS[name])
    except PeerUnavailable as exc:
        pytest.skip(because(f"the peer {name} is not there: {exc}", f"python -m perf.peers setup {name}"))
    steps = load_trace()[: trace.QUICK_STEPS]
    before = children()
    workspace = make_workspace(tmp_path / "peer")
    with trio.fail_after(240):
        answers = await run_round(steps, [FLOOR, name], failures := {})
        assert failures == {}
        figures = figures_of(steps, [answers[name]], [answers[FLOOR]])
        wrong = [step.command for index, step in enumerate(steps) if index not in figures]
        assert len(wrong) <= 2, wrong
        async with open_system(name, workspace) as run:
            assert "project" in (await run("ls")).output
    assert children() == before
    assert not [path for path in workspace.run.rglob("*") if path.is_socket() and "openhands" not in path.name]
