from __future__ import annotations

import os
import signal

import pytest
import trio

from prorl_trio.agent.scoring import NotScored, ScorerPool, open_scorer_pool
from prorl_trio.config import ScoringConfig
from prorl_trio.types.errors import EvaluationError, HostileAnswer

MODULE = "scorers_under_test"
SOURCE = """
import os, sys, signal, time
def double(payload): return {"value": payload["value"] * 2, "pid": os.getpid()}
def busy(payload):
    end = time.process_time() + payload["cpu_s"]
    while time.process_time() < end: pass
    return {"pid": os.getpid()}
def noisy(payload):
    print("to stdout"); sys.stderr.write("to stderr\\n"); return {"ok": True}
def fail(payload): raise ValueError("no such thing")
def die(payload): os._exit(7)
def hang(payload):
    while True: pass
def nothing(payload): return None
def touchy(payload):
    # Scores every answer but one, which makes it do what `how` says.
    answer, how = payload["answer"], payload["how"]
    if answer != "hostile" and not payload.get("always"):
        return {"value": answer}
    if how == "hang": len(str(7 ** 7 ** 9))
    if how == "loop":
        while True: pass
    if how == "memory": return {"value": len(bytearray(3 * 10 ** 9))}
    if how == "crash": import ctypes; ctypes.string_at(0)
    if how == "exit": os._exit(3)
    if how == "raise": raise RecursionError("deep brackets")
    if how == "reply": return {"value": "x" * 5_000_000}
    if how == "file": open(os.environ.get("TMPDIR", "/tmp") + "/prorl-hostile", "wb").write(bytes(10 ** 8))
    if how == "descriptors": return {"value": len([open("/dev/null") for _ in range(9999)])}
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how in ("is killed", "is stopped"):
        try: os.close(os.open("killed", os.O_CREAT | os.O_EXCL))
        except FileExistsError: return {"value": answer}
        os.kill(os.getpid(), signal.SIGKILL if how == "is killed" else signal.SIGSTOP)
    if how == "is stopped again": os.kill(os.getpid(), signal.SIGSTOP)
    return {"value": 0}
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


HOSTILE = [
    "hang",
    pytest.param("loop", marks=pytest.mark.slow),
    "memory",
    "crash",
    "exit",
    "kill",
    "raise",
    "reply",
    "file",
    "descriptors",
]


async def test_what_is_scored_is_not_at_fault_for_a_process_that_was_killed_while_it_waited(scorer):
    sound = {"answer": "42", "how": ""}
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool:
            before = await pool.score(scorer("double"), {"value": 4}, timeout_s=20)
            os.kill(before["pid"], signal.SIGKILL)
            assert (await pool.score(scorer("double"), {"value": 5}, timeout_s=20, harmless=sound))["value"] == 10
            assert pool.statistics() == {"busy": 0, "idle": 1}


@pytest.mark.parametrize(("how", "timeout_s"), [("is killed", 20), ("is stopped", 2)])
async def test_what_is_scored_is_not_at_fault_for_a_process_that_was_killed_meanwhile(
    scorer, how, timeout_s, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    answer, sound = {"answer": "hostile", "how": how}, {"answer": "42", "how": ""}
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool:
            scored = await pool.score(scorer("touchy"), answer, timeout_s=timeout_s, harmless=sound)
    assert scored == {"value": "hostile"}
    assert (tmp_path / "killed").exists()


async def test_what_is_scored_is_not_at_fault_for_processes_that_are_stopped(scorer):
    answer, sound = {"answer": "hostile", "how": "is stopped again"}, {"answer": "42", "how": ""}
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool:
            with pytest.raises(NotScored, match="gave no score within 1 s"):
                await pool.score(scorer("touchy"), answer, timeout_s=1, harmless=sound)


async def test_what_is_scored_is_not_at_fault_for_processes_that_were_killed_as_they_started(tmp_path, monkeypatch):
    source = """
import os, signal
for n in range(KILLS):
    try: os.close(os.open(f"start-{n}", os.O_CREAT | os.O_EXCL))
    except FileExistsError: continue
    os.kill(os.getpid(), signal.SIGKILL)
def double(payload): return {"value": payload["value"] * 2}
"""
    for name, kills in (("killed_at_times", 3), ("killed_for_long", 7)):
        (tmp_path / f"{name}.py").write_text(source.replace("KILLS", str(kills)).replace("start-", f"{name}-"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    calls = {"payload": {"value": 4}, "harmless": {"value": 1}, "timeout_s": 20}
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool:
            assert await pool.score("killed_at_times:double", **calls) == {"value": 8}
            with pytest.raises(EvaluationError, match="cannot be started") as caught:
                await pool.score("killed_for_long:double", **calls)
    assert caught.value.cause == "evaluator"


@pytest.mark.parametrize("how", HOSTILE)
async def test_an_answer_at_which_the_scorer_fails_is_at_fault(scorer, how, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with trio.fail_after(60):
        async with open_scorer_pool(1, ScoringConfig(cpu_s=1)) as pool:
            harmless = {"answer": "42", "how": how}
            with pytest.raises(HostileAnswer) as caught:
                await pool.score(scorer("touchy"), {"answer": "hostile", "how": how}, timeout_s=20, harmless=harmless)
            assert await pool.score(scorer("touchy"), harmless, timeout_s=20, harmless=harmless) == {"value": "42"}
    assert (caught.value.cause, caught.value.reward) == ("agent_fault", 0.0)


@pytest.mark.parametrize("how", [pytest.param("loop", marks=pytest.mark.slow), "crash", "raise"])
async def test_a_scorer_that_fails_at_every_answer_is_at_fault_itself(scorer, how):
    with trio.fail_after(60):
        async with open_scorer_pool(1, ScoringConfig(cpu_s=1)) as pool:
            payload = {"answer": "hostile", "how": how, "always": True}
            with pytest.raises(EvaluationError) as caught:
                await pool.score(scorer("touchy"), payload, timeout_s=20, harmless={**payload, "answer": "42"})
    assert caught.value.cause == "evaluator"


async def test_a_scorer_that_cannot_be_loaded_is_nobodys_answers_fault(scorer):
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool:
            with pytest.raises(EvaluationError, match="cannot be loaded"):
                await pool.score(scorer("missing"), {}, timeout_s=5, harmless={})


async def test_cpu_time_is_counted_by_the_call(scorer):
    with trio.fail_after(60):
        async with open_scorer_pool(1, ScoringConfig(cpu_s=1)) as pool:
            pids = {(await pool.score(scorer("busy"), {"cpu_s": 0.5}, timeout_s=30))["pid"] for _ in range(4)}
    assert len(pids) == 1


async def test_half_a_surrogate_pair_reaches_the_scorer_spelled_out(scorer):
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool:
            scored = await pool.score(scorer("touchy"), {"answer": "\ud800", "how": ""}, timeout_s=20)
    assert scored == {"value": "\\ud800"}


async def test_cancel_kills_the_process_and_what_it_started(scorer, tmp_path):
    started = tmp_path / "started"
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool, trio.open_nursery() as nursery:
            call = {"path": str(started)}
            nursery.start_soon(lambda: pool.score(scorer("fork_and_hang"), call, timeout_s=50))
            while not started.exists():
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        while _processes_mentioning("fork_and_hang"):  # what was killed takes a moment to be gone
            await trio.sleep(0.01)


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


async def test_a_pool_made_smaller_when_a_call_has_its_place_does_not_fail_it(scorer, monkeypatch):
    take_idle = ScorerPool._take_idle

    def take_when_made_smaller(pool, function):
        pool.resize(1)
        return take_idle(pool, function)

    monkeypatch.setattr(ScorerPool, "_take_idle", take_when_made_smaller)
    with trio.fail_after(60):
        async with open_scorer_pool(3) as pool:
            pool._limiter.acquire_on_behalf_of_nowait("another call that goes on")
            score = await pool.score(scorer("double"), {"value": 4}, timeout_s=20)
            pool._limiter.release_on_behalf_of("another call that goes on")
    assert score["value"] == 8


async def test_a_cancel_while_room_is_made_for_another_module_leaves_no_process(scorer, monkeypatch, tmp_path):
    (tmp_path / "other_scorers.py").write_text(SOURCE)
    take_idle = ScorerPool._take_idle
    with trio.fail_after(60):
        async with open_scorer_pool(1) as pool:
            await pool.prewarm(scorer("double"))
            with trio.CancelScope() as scope:

                async def take_and_cancel(pool, module):
                    scope.cancel()
                    return await take_idle(pool, module)

                monkeypatch.setattr(ScorerPool, "_take_idle", take_and_cancel)
                await pool.score("other_scorers:double", {"value": 1}, timeout_s=20)
            assert scope.cancelled_caught
            assert pool.statistics() == {"busy": 0, "idle": 0}


async def test_functions_of_a_module_share_their_processes(scorer):
    with trio.fail_after(60):
        async with open_scorer_pool(4) as pool:
            first = await pool.score(scorer("double"), {"value": 4}, timeout_s=20)
            second = await pool.score(scorer("busy"), {"cpu_s": 0}, timeout_s=20)
    assert first["pid"] == second["pid"]
