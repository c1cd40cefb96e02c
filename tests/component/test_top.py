from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from functools import partial

import msgspec
import pytest
import trio
from rich.console import Console

from prorl_trio.cli.top import Rates, TopOptions, render_top, run_top
from prorl_trio.client import connect
from support.fake_node import FakeNode
from support.fake_service import TOKEN, open_service


def job(job_id, **fields):
    return {
        "job_id": job_id,
        "session_id": "trainer",
        "status": "run",
        "age_s": 10.0,
        "last_progress_s": 1.0,
        "turns": 2,
        "waiting_on": "tool bash",
        "stuck": False,
        **fields,
    }


def report(*jobs, **fields):
    return {
        "node_id": "n1",
        "draining": False,
        "uptime_s": 100.0,
        "jobs": list(jobs),
        "totals": {"jobs_ended": 50, "turns": 200, "tokens_sampled": 5000},
        "loop": {"p99_ms": 3.0, "max_ms": 20.0},
        "pipeline": {
            "stages": {"init": {"busy": 2, "workers": 4, "queued": 7}, "run": {"busy": 0, "workers": 32, "queued": 0}},
            "outcomes": {"completed": 48, "failed": 2, "cancelled": 0},
        },
        "sandboxes": {"provider": "apptainer", "live": 5, "warm": 2, "starting": 1, "started_total": 9},
        "backends": {"backends": [{"url": "http://gpu0:8000", "state": "draining", "in_flight": 3}]},
        "sessions": {"trainer": {"connected": True, "running": 5, "undelivered": 2, "undelivered_bytes": 3_000_000}},
        **fields,
    }


def drawn(rep, options=None, *, width=120, height=None):
    console = Console(file=io.StringIO(), width=width)
    console.print(render_top(rep, Rates().update(rep), options or TopOptions(), width, height))
    return console.file.getvalue()


def order(text, *names):
    return sorted(names, key=text.index)


def test_everything_is_there():
    text = drawn(report(job("job-a"), draining=True))
    for wanted in (
        *("n1", "up 1m40", "DRAINING", "30.0 jobs/min", "2.0 turns/s", "50 tokens/s", "loop p99 3.0 ms"),
        *("2/4 busy", "7 queued", "48 completed, 2 failed", "5 live, 2 warm, 1 starting", "9 started"),
        *("http://gpu0:8000", "draining", "trainer", "connected", "3.0", "job-a", "tool bash", "1 jobs, 0 stuck"),
    ):
        assert wanted in text, text


def test_what_is_known_of_backends():
    backends = [
        {"url": "http://a", "state": "active", "in_flight": 3, "max_tasks": 8, "engine_running": 7, "kv_usage": 0.914},
        {"url": "http://b", "state": "active", "suspended": True, "engine_waiting": 12},
        {"url": "http://c", "state": "down", "error": "cannot \x1b[2Jconnect", "engine_running": None},
    ]
    text = drawn(report(backends={"backends": backends}))
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert lines["http://a"].split()[1:] == ["active", "3/8", "0", "7", "91%"]
    assert lines["http://b"].split()[1:] == ["suspended", "0", "0", "12"]
    assert lines["http://c"].split()[1] == "down"
    assert r"http://c: cannot \x1b[2Jconnect" in text


def test_an_error_of_a_backend_squeezes_neither_its_address_nor_its_state_and_a_fleet_names_its_node():
    url = "http://127.0.0.1:18003"
    backends = [
        {"url": url, "node_id": "local-1", "state": "down", "error": f"{url}: cannot connect to it" + " x" * 90}
    ]
    lines = drawn(report(backends={"backends": backends}), width=100).splitlines()
    assert [line.split()[:3] for line in lines if "local-1" in line] == [[url, "local-1", "down"]]
    assert any(line.startswith(f"{url}: cannot connect to it") for line in lines)


def test_a_stuck_job_comes_first_and_is_marked():
    jobs = [job("job-q", last_progress_s=50.0), job("stuck-one", stuck=True, age_s=1.0), job("job-b", waiting_on="")]
    for sort in ("progress", "age", "stage", "turns"):
        text = drawn(report(*jobs), TopOptions(sort=sort))
        assert order(text, "job-q", "stuck-one", "job-b")[0] == "stuck-one"
    line = next(line for line in text.splitlines() if "stuck-one" in line)
    assert line.strip().startswith("!")
    assert "(computing)" in text
    assert "3 jobs, 1 stuck" in text
    only = drawn(report(*jobs), TopOptions(only_stuck=True))
    assert "stuck-one" in only
    assert "job-q" not in only
    assert "job-b" not in only


def test_orders():
    jobs = [job("aa", age_s=5, last_progress_s=9, turns=3), job("bb", age_s=9, status="eval", last_progress_s=5)]
    assert order(drawn(report(*jobs), TopOptions(sort="age")), "aa", "bb") == ["bb", "aa"]
    assert order(drawn(report(*jobs), TopOptions(sort="progress")), "aa", "bb") == ["aa", "bb"]
    assert order(drawn(report(*jobs), TopOptions(sort="turns")), "aa", "bb") == ["aa", "bb"]
    assert order(drawn(report(*jobs), TopOptions(sort="stage")), "aa", "bb") == ["bb", "aa"]


@pytest.mark.parametrize("sort", ["progress", "age", "stage", "turns"])
def test_jobs_at_work_come_before_the_queue_however_quiet_that_is(sort):
    queue = [job(f"queued-{n}", status="queued", age_s=900.0, last_progress_s=900.0, turns=0) for n in range(100)]
    at_work = [job(f"{status}-job", status=status, age_s=5.0) for status in ("init", "ready", "run", "ran", "eval")]
    stuck = job("stuck-queued", status="queued", stuck=True)
    text = drawn(report(*queue, *at_work, stuck), TopOptions(sort=sort), height=30)
    for shown in at_work:
        assert shown["job_id"] in text
    assert order(text, "stuck-queued", "run-job", "queued-0")[0] == "stuck-queued"
    assert text.index("queued-0") > max(text.index(shown["job_id"]) for shown in at_work)
    assert "106 jobs, 1 stuck; 5 at work, 101 queued" in text


@pytest.mark.parametrize("width", [20, 40, 60, 89, 200])
def test_no_line_is_wider_than_the_terminal(width):
    jobs = [job("a-very-long-job-id-" * 5, waiting_on="backend http://a-long-name.example:8000: completion")]
    text = drawn(report(*jobs), width=width)
    assert max(len(line) for line in text.splitlines()) <= width


def test_as_many_jobs_as_fit():
    jobs = [job(f"job-{n:03}") for n in range(200)]
    text = drawn(report(*jobs), height=24)
    assert len(text.splitlines()) <= 24
    assert "more not shown" in text


def test_all_that_a_program_waits_for_is_below_its_job():
    waits = [f"dialogue {number}, turn {number}: backend http://gpu0:8000: completion" for number in range(3)]
    jobs = [
        job("first", agent="codex", waiting_on=waits[0], other_waits=waits[1:]),
        *(job(f"later-{n}") for n in range(40)),
    ]
    lines = drawn(report(*jobs)).splitlines()
    at = next(number for number, line in enumerate(lines) if "first" in line)
    assert lines[at].split()[:4] == ["first", "trainer", "codex", "run"]
    assert [line.strip() for line in lines[at + 1 : at + 3]] == waits[1:]
    assert len(drawn(report(*jobs), height=24).splitlines()) <= 24


def test_ids_cannot_speak_to_the_terminal():
    text = drawn(report(job("\x1b[2Jevil\r\n[bold]x[/bold]", waiting_on="tool \x1b]0;t\x07")))
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text


def test_a_node_that_says_little_is_shown_all_the_same():
    assert "0 jobs, 0 stuck" in drawn({})


def test_rates_are_between_reports_and_begin_anew_with_another_node():
    rates = Rates()
    assert rates.update(report())["turns"] == 2.0
    later = report(uptime_s=110.0, totals={"turns": 300})
    assert rates.update(later)["turns"] == 10.0
    assert rates.update(report(uptime_s=10.0, totals={"turns": 50}))["turns"] == 5.0


async def test_once_over_a_session_and_as_json():
    with trio.fail_after(30):
        async with open_service(FakeNode()) as service, connect(service.url, TOKEN) as client:
            text, lines = io.StringIO(), io.StringIO()
            await run_top(client.status, Console(file=text, width=80), TopOptions(once=True))
            await run_top(client.status, Console(file=lines, width=80), TopOptions(once=True, as_json=True))
    assert "fake-node" in text.getvalue()
    assert msgspec.json.decode(lines.getvalue())["node_id"] == "fake-node"


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
async def test_it_follows_the_node_until_it_is_cancelled(terminal, autojump_clock):
    asked = []
    enough = trio.Event()

    async def status():
        asked.append(trio.current_time())
        if len(asked) == 3:
            enough.set()
        return report(job("j"))

    stream = io.StringIO()
    console = Console(
        file=stream, width=80, height=24, force_terminal=True, _environ={"TERM": terminal}, color_system=None
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_top, status, console, TopOptions(interval_s=2.0))
        await enough.wait()
        nursery.cancel_scope.cancel()
    assert asked == pytest.approx([asked[0], asked[0] + 2.0, asked[0] + 4.0])
    drawn_text = stream.getvalue()
    if terminal == "dumb":
        assert "\x1b" not in drawn_text
        assert drawn_text.count("1 jobs, 0 stuck") == 3
    else:
        assert "\x1b[?1049l" in drawn_text, "the screen is given back"


async def test_ctrl_c_ends_the_command_cleanly():
    env = {**os.environ, "PRORL_TOKEN": TOKEN, "TERM": "dumb"}
    with trio.fail_after(60):
        async with open_service(FakeNode()) as service, trio.open_nursery() as nursery:
            command = [sys.executable, "-m", "prorl_trio.cli", "top", "--url", service.url, "--interval", "60"]
            run = partial(
                trio.run_process, command, env=env, check=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            process = await nursery.start(run)
            async with process.stdout, process.stderr:
                text = b""
                while b"0 jobs, 0 stuck" not in text:
                    text += await process.stdout.receive_some()
                process.send_signal(signal.SIGINT)
                code = await process.wait()
                errors = await process.stderr.receive_some()
    assert (code, errors) == (0, b"")


def test_sessions_that_are_away_and_have_nothing_are_not_shown():
    nothing = {"connected": False, "running": 0, "undelivered": 0, "undelivered_bytes": 0}
    sessions = {
        "looked-once": nothing,
        "here": {**nothing, "connected": True},
        "works": {**nothing, "running": 1},
        "fetches": {**nothing, "undelivered": 1},
    }
    text = drawn(report(sessions=sessions))
    assert "looked-once" not in text
    assert order(text, "here", "works", "fetches") == ["here", "works", "fetches"]
    assert "undelivered" not in drawn(report(sessions={"looked-once": nothing}))


def test_queued_jobs_that_a_report_leaves_out_are_counted():
    full = report(job("a"), job("b", status="queued"))
    full["pipeline"] = {**full["pipeline"], "jobs": 30_000}
    text = drawn(full)
    assert "30000 jobs, 0 stuck; 1 at work, 29999 queued; 29998 more not shown" in text
    assert "more not shown" not in drawn(full, TopOptions(only_stuck=True))
