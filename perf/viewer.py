"""The viewer with 10,000 rollouts and with a rollout of 100,000 tokens: how long a person waits.

Of the server: to index a file, to list and filter, to search all texts. Of a page in a real Chromium, if there is one:
from asking for a view until it shows, and the longest task on the way, in which the page does not react.

    python -m perf.viewer [--quick] [--json FILE]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import trio

from perf.harness import Case, Options, Report, Series, run_benchmark, tell
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import ListenConfig
from prorl_trio.runs.book import RunBook
from prorl_trio.runs.index import OutcomeIndex, RowFilter, groups_of
from prorl_trio.runs.recording import RUN_INFO, TRAJECTORIES, OutcomeFile, RunInfo, write_json
from prorl_trio.runs.served import serve_runs
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import ChatMessage, Outcome, PolicySpan, Segment, Timing, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Callable

ROLLOUTS: Final = 10_000
TOKENS: Final = 1_000
LONG_TOKENS: Final = 100_000
CHUNK: Final = 250
"""Tokens that the page renders at once."""
GROUP: Final = 8
ROUNDS, QUICK_ROUNDS = 15, 5
LIST_MS, SEARCH_MS, PAINT_MS, TASK_MS = 200.0, 1000.0, 500.0, 50.0
WORDS: Final = ("sum", "answer", "because", "print", "result", "file", "test", "value", "error", "return", "of", "the")
SELECTIONS: Final = {
    "list": RowFilter(),
    "filter_and_sort": RowFilter(reward_min=0.5, tokens_min=100, version="1", sort="logprob", descending=True),
    "search_frequent": RowFilter(text="the answer"),
    "search_absent": RowFilter(text="a word that nobody has said"),
}
WATCH: Final = """
window.tasks = [];
new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((each) => each.duration)))
  .observe({ type: "longtask", buffered: true });
"""


async def viewer(options: Options) -> Report:
    """Index, list, filter and search; then look at it in a browser."""
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tell(f"{ROLLOUTS:,} rollouts of {TOKENS:,} tokens, and one of {LONG_TOKENS:,}")
        await trio.to_thread.run_sync(_write, root)
        series = await trio.to_thread.run_sync(_of_the_index, root / "many" / TRAJECTORIES, rounds)
        browser = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)
        if browser is None or find_spec("playwright") is None:
            return Report(title="viewer", series=series, notes=["left out: pages, for want of Chromium or Playwright"])
        tell("pages in a browser")
        with closing(RunBook(root)) as book:
            async with open_single_nursery() as nursery:
                serve = partial(serve_runs, book, ListenConfig(port=0, token="perf"))
                host, port = await nursery.start(serve)
                url = f"http://{host}:{port}/ui#token=perf"
                series += await trio.to_thread.run_sync(_of_the_pages, browser, url, rounds)
                nursery.cancel_scope.cancel("measured")
    return Report(title="viewer", series=series)


def _of_the_index(path: Path, rounds: int) -> list[Series]:
    index = OutcomeIndex(path)
    work: dict[str, tuple[Callable[[], object], float | None]] = {
        "index.open": (lambda: OutcomeIndex(path).close(), None),
        "index.groups": (lambda: groups_of(index.select(RowFilter())), LIST_MS),
    }
    for name, wanted in SELECTIONS.items():
        limit = SEARCH_MS if wanted.text else LIST_MS
        work[f"index.{name}"] = (partial(index.select, wanted), limit)
    samples: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, (do, _) in work.items():
            taken_ms = _timed_ms(do)
            if number:
                samples[name].append(taken_ms)
    index.close()
    return [Series(case=Case(name=name, max_p50=limit), samples=samples[name]) for name, (_, limit) in work.items()]


def _of_the_pages(browser: str, url: str, rounds: int) -> list[Series]:
    """Open each view in a new page, `rounds` times. Blocks."""
    from playwright.sync_api import sync_playwright  # a package of the checks'

    views = {"many": ("#/run/many", "main tbody .reward"), "tokens": ("#/run/long/rollout/long/tokens", ".chunk .k-s")}
    shown: dict[str, list[float]] = {name: [] for name in views}
    longest: dict[str, list[float]] = {name: [] for name in views}
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for number in range(rounds + 1):
            for name, (route, selector) in views.items():
                page = opened.new_page(viewport={"width": 1280, "height": 900})
                page.add_init_script(WATCH)
                page.goto(url)
                page.wait_for_selector("main[aria-busy=false]")
                page.evaluate("window.tasks.length = 0")
                taken_ms = _timed_ms(partial(_go, page, route, selector))
                if name == "tokens":
                    _scroll(page)
                if number:
                    shown[name].append(taken_ms)
                    longest[name].append(max(page.evaluate("window.tasks"), default=0.0))
                page.close()
        opened.close()
    limits = {"many": LIST_MS + PAINT_MS, "tokens": PAINT_MS}
    return [
        *(Series(case=Case(name=f"page.{name}.shown", max_p50=limits[name]), samples=shown[name]) for name in views),
        *(
            Series(case=Case(name=f"page.{name}.longest_task", max_p50=TASK_MS), samples=longest[name])
            for name in views
        ),
    ]


def _go(page: Any, route: str, selector: str) -> None:
    page.evaluate("route => { location.hash = route; }", route)
    page.wait_for_selector(selector)


def _scroll(page: Any) -> None:
    """Look at the middle and at the end."""
    for place in (LONG_TOKENS // 2, LONG_TOKENS - 1):
        page.fill("#jump", str(place))
        page.keyboard.press("Enter")
        page.wait_for_selector(f".chunk[data-start='{place // CHUNK * CHUNK}'] .k-s")


def _timed_ms(do: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    do()
    return 1e3 * (time.perf_counter() - began_s)


def _write(root: Path) -> None:
    tiny = make_tiny_model(root / "model")
    ids = np.asarray(tiny.turn("a line of thought, and then another line\n"), dtype="<i4")
    rng = np.random.default_rng(0)
    for folder, count, tokens in (("many", ROLLOUTS, TOKENS), ("long", 1, LONG_TOKENS)):
        (root / folder).mkdir()
        write_json(root / folder / RUN_INFO, RunInfo(model=str(root / "model"), tasks="made up", started=folder))
        with OutcomeFile(root / folder / TRAJECTORIES) as file:
            for number in range(count):
                file.append(
                    _outcome(folder if count == 1 else f"{folder}-{number}", number, np.resize(ids, tokens), rng)
                )


def _outcome(job_id: str, number: int, ids: Any, rng: np.random.Generator) -> Outcome:
    prompt, end = 100, len(ids)
    mask = (np.arange(end) >= prompt).astype("u1")
    spans = [PolicySpan(start=prompt, end=end, policy_version=str(number // GROUP % 4), engine="vllm 0.32.0")]
    said = [" ".join(rng.choice(WORDS, size)) for size in (40, 120, 60)]
    turn = Turn(
        segment=0,
        completion_start=prompt,
        completion_end=end,
        text=said[0],
        finish_reason="stop",
        tool_calls=[],
        observations=[said[1]],
        inference_s=1.0,
        tools_s=0.1,
        messages=[ChatMessage(role="user", content=said[2])],
    )
    segment = Segment.from_arrays(ids, -rng.exponential(0.5, end).astype("<f4"), mask, spans)
    outcome = Outcome(
        job_id=job_id,
        instance_id=f"task {number // GROUP}",
        group_id=f"group-{number // GROUP}",
        status="completed",
        reward=float(rng.integers(2)),
        cause=None,
        error="",
        trajectory=Trajectory(segments=[segment], turns=[turn], stop_reason="finished"),
        details={},
        timing=Timing(run_s=2.0),
    )
    return msgspec.structs.replace(outcome, evaluation_log=said[1])


if __name__ == "__main__":
    sys.exit(run_benchmark(viewer))
