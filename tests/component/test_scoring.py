from __future__ import annotations

import os

import pytest
import trio

from prorl_trio.errors import EvaluationError
from prorl_trio.scoring import open_scorer_pool

MODULE = "scorers_under_test"
SOURCE = """
import os, sys, time
def double(payload): return {"value": payload["value"] * 2, "pid": os.getpid()}
def noisy(payload):
    print("to stdout"); sys.stderr.write("to stderr\\n"); return {"ok": True}
def fail(payload): raise ValueError("no such thing")
def die(payload): os._exit(7)
def hang(payload):
    while True: pass
def nothing(payload): return None
def fork_and_hang(payload):
    if os.fork() == 0:
        time.sleep(1000)
    open(payload["path"], "w").write("started")
    while True: pass
"""


@pytest.fixture
def scorer(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name: f"{MODULE}:{name}"


async def test_a_process_is_kept_for_the_next_call(scorer):
    with trio.fail_after(60):
        async with open_scorer_pool(2) as pool:
            first = await pool.score(scorer("double"), {"value": 4}, timeout_s=20)
            second = await pool.score(scorer("double"), {"value": 5}, timeout_s=20)
    assert (first["value"], second["value"]) == (8, 10)
    assert first["pid"] == second["pid"]


async def test_prints_do_not_disturb_the_answer(scorer):
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool:
            assert await pool.score(scorer("noisy"), {}, timeout_s=20) == {"ok": True}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fail", "no such thing"),
        ("die", "exit status 7"),
        ("hang", "no score within 0.5 s"),
        ("nothing", "failed"),
        ("missing", "cannot be loaded"),
    ],
)
async def test_every_way_to_have_no_score_is_told_apart_and_the_pool_lives_on(scorer, name, message):
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool:
            with pytest.raises(EvaluationError, match=message):
                await pool.score(scorer(name), {}, timeout_s=0.5)
            assert (await pool.score(scorer("double"), {"value": 1}, timeout_s=20))["value"] == 2


async def test_cancel_kills_the_process_and_what_it_started(scorer, tmp_path):
    started = tmp_path / "started"
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool, trio.open_nursery() as nursery:
            call = {"path": str(started)}
            nursery.start_soon(lambda: pool.score(scorer("fork_and_hang"), call, timeout_s=50))
            while not started.exists():
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert _processes_mentioning("fork_and_hang") == []


async def test_the_limit_counts_processes_over_functions(scorer):
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool:
            await pool.prewarm(scorer("double"))
            await pool.score(scorer("noisy"), {}, timeout_s=20)
            assert pool.statistics() == {"busy": 0, "idle": 1}
            assert len(_processes_mentioning(MODULE)) == 1
    assert _processes_mentioning(MODULE) == []


def _processes_mentioning(text: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read().decode(errors="replace")
        except OSError:
            continue
        if text in line and "scoring_worker" in line:
            found.append(int(pid))
    return found
