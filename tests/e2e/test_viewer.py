"""The viewer in a real Chromium: each view, hostile words, a hundred thousand tokens, an exported file, keys."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from contextlib import closing
from functools import partial

import pytest

from prorl_trio.runs.book import RunBook
from prorl_trio.runs.export import export_html
from prorl_trio.runs.recording import OutcomeFile
from support.browser import go, open_browser, open_page, settled
from support.view_rig import node_view, runs_view, served
from support.viewed_runs import Writer, sample_runs, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OUTPUT_CHARS = 50_000_000
TOKENS = 100_000
CHUNK = 250
RESPONSIVE_S = 5.0
"""Longest that the page may take to answer while it shows a lot: a bound for machines that do other things besides."""
VIEWS = {
    "#/": "evaluation",
    "#/run/main": "group-3",
    "#/run/main?by=rollout&sort=reward": "run-3-3",
    "#/run/learning": "Informative groups",
    "#/run/main/rollout/run-0-0": "What is 17 * 23?",
    "#/run/main/rollout/run-0-0/tokens": "You solve tasks",
    "#/run/main/rollout/run-0-0/time": "Attempts before this one",
    "#/run/main/rollout/run-0-0/segments": "sub agent",
    "#/run/main/rollout/run-0-0/grading": "graded run-0-0: right",
    "#/run/main/rollout/run-0-0/record": "products",
    "#/run/main/rollout/run-lost": "the sandbox was lost",
    "#/run/main/compare/run-0-0/run-0-1": "Two rollouts",
    "#/run/hostile": "",
    "#/run/hostile/rollout/second": "<script>",
    "#/run/nowhere": "there is no run",
}
QUERIES = (
    "",
    "?by=rollout&sort=logprob",
    "?by=rollout&text=THE+answer+is+381",
    "?sort=reward&descending=true",
    "?cause=sandbox",
    "?by=rollout&reward_min=0.2&reward_max=0.8&tokens_min=1",
    "?stop=-",
    "?version=8&family=products",
)
SERVER_ERRORS = ("status of 404",)
SHAPELESS = r"[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069]"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    made = sample_runs(tmp_path_factory.mktemp("viewed"))
    writer = Writer(made / "model")
    large = [
        writer.hostile("flood", output="\x1b[31m\u202e flood of words " * (OUTPUT_CHARS // 22)),
        writer.long("long", TOKENS),
    ]
    write_run(made / "large", large, writer.model)
    return made


@pytest.fixture(scope="module")
def viewer(browser, root):
    with served(partial(runs_view, root, follow=True)) as one:
        for run in ("main", "hostile", "evaluation", "large"):  # what is opened later would count as a test's own
            request = urllib.request.Request(
                f"{one.url}/v1/runs/about?run={run}", headers={"Authorization": f"Bearer {one.token}"}
            )
            urllib.request.urlopen(request).read()
        yield one


@pytest.fixture(params=["light", "dark"])
def scheme(request):
    return request.param


def violations(page):
    """What axe finds, with the rules that are good practice and no defect."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found]


def test_each_view_is_accessible_in_light_and_dark(browser, viewer, scheme):
    with open_page(
        browser, color_scheme=scheme, viewport={"width": 1280, "height": 900}, allowed=SERVER_ERRORS
    ) as page:
        page.goto(viewer.page)
        wrong = {}
        for route, text in VIEWS.items():
            go(page, route)
            page.wait_for_function("text => document.querySelector('main').innerText.includes(text)", arg=text)
            if found := violations(page):
                wrong[route] = found
        assert wrong == {}
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 24, 27)"
        )


def test_no_view_is_wider_than_its_window(browser, viewer):
    with open_page(browser, viewport={"width": 390, "height": 800}, allowed=SERVER_ERRORS) as page:
        page.goto(viewer.page)
        for route in VIEWS:
            go(page, route)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, route


def test_hostile_words_stay_words(browser, viewer):
    with open_page(browser) as page:
        page.goto(viewer.page)
        for tab in ("", "/tokens", "/segments", "/grading", "/record"):
            go(page, f"#/run/hostile/rollout/second{tab}")
            page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            page.wait_for_function("() => document.querySelector('main').innerText.includes('onerror')")
            shown = page.evaluate(
                "document.body.textContent + [...document.querySelectorAll('[title]')].map((each) => each.title)"
            )
            assert not re.search(SHAPELESS, shown)
            assert "\\x1b[31mred" in shown
            assert "\\u202egnp" in shown
            assert "owned" not in page.title()
            assert page.locator("main script, main img, main iframe, main a[href^=javascript]").count() == 0


def test_fifty_megabytes_of_output_leave_the_page_responsive(browser, viewer):
    with open_page(browser) as page:
        page.goto(viewer.page)
        go(page, "#/run/large/rollout/flood")
        page.click("details.call > summary")
        page.wait_for_selector("text=M characters are left")
        for shown in (2, 3):
            began = time.monotonic()
            page.locator("details.call .more button", has_text="Show more").last.click()
            page.wait_for_function(
                f"() => document.querySelectorAll('details.call .text:last-child pre').length === {shown}"
            )
            assert time.monotonic() - began < RESPONSIVE_S


def test_a_hundred_thousand_tokens_are_shown_where_one_looks(browser, viewer):
    with open_page(browser, viewport={"width": 1280, "height": 900}) as page:
        page.goto(viewer.page)
        go(page, "#/run/large/rollout/long/tokens")
        page.wait_for_selector(".chunk .k-s")
        page.fill("#jump", str(TOKENS - 1))
        page.keyboard.press("Enter")
        page.wait_for_selector(f".chunk[data-start='{(TOKENS - 1) // CHUNK * CHUNK}'] .k-s")
        page.wait_for_function("() => document.querySelectorAll('.chunk > span').length < 8000")
        page.locator(".chunk:last-child .k-s").last.click()
        facts = page.locator(".facts").inner_text()
        assert f"place {TOKENS - 1:,}" in facts
        assert re.search(r"log-probability -\d\.\d{4} · p 0\.\d+ · version 1 · vllm 0\.32\.0", facts)
        for colour in ("logprob", "version", "mask"):
            page.select_option("#colour", colour)
            assert page.locator(f".tokens.by-{colour}").count() == 1
        assert max(page.evaluate("window.longTasks"), default=0) < 1000 * RESPONSIVE_S


def rows(page):
    return page.locator("main tbody tr").all_inner_texts()


def test_filters_are_in_the_address(browser, viewer):
    with open_page(browser) as page:
        page.goto(viewer.page)
        go(page, "#/run/main")
        page.fill("#search", "SORT the lines")
        page.wait_for_function("() => location.hash.includes('text=SORT')")
        page.get_by_role("button", name="Rollouts").click()
        page.wait_for_function("() => document.querySelectorAll('main tbody tr').length === 4")
        page.get_by_role("button", name="Reward", exact=True).click()
        page.wait_for_function("() => location.hash.includes('descending')")
        page.wait_for_selector("[aria-sort=descending]")
        found = rows(page)
        assert found[0].startswith("run-1-3")
        page.reload()
        settled(page)
        assert rows(page) == found
        page.click("text=run-1-3")
        page.wait_for_selector("h1:has-text('run-1-3')")
        page.keyboard.press("Escape")
        page.wait_for_selector("h1:has-text('main')")
        settled(page)
        assert rows(page) == found


def test_keys_are_enough(browser, viewer):
    with open_page(browser) as page:
        page.goto(viewer.page)
        go(page, "#/run/main")
        for key in ("/", "Escape", "j", "j", "k", "j", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector("h1:has-text('run-1-0')")
        settled(page)
        page.keyboard.press("]")
        page.wait_for_selector("h1:has-text('run-1-1')")
        page.keyboard.press("?")
        page.wait_for_selector("dialog[open] kbd")
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        page.wait_for_function("() => location.hash === '#/run/main'")
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_what_is_copied_is_the_outcome_and_a_command_without_the_token(browser, viewer):
    with open_page(browser, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.goto(viewer.page)
        go(page, "#/run/main/rollout/run-0-0")
        page.click("text=Copy JSON")
        page.wait_for_selector("#note:has-text('outcome')")
        assert json.loads(page.evaluate("navigator.clipboard.readText()"))["job_id"] == "run-0-0"
        page.click("text=Copy curl")
        page.wait_for_selector("#note:has-text('command')")
        command = page.evaluate("navigator.clipboard.readText()")
        assert f"{viewer.url}/v1/runs/outcome?run=main&job=run-0-0" in command
        assert viewer.token not in command


def test_the_page_asks_for_the_token_and_forgets_a_wrong_one(browser, viewer):
    with open_page(browser, allowed=["401"]) as page:
        page.goto(f"{viewer.url}/ui#token=wrong")
        page.fill("#token", viewer.token)
        page.keyboard.press("Enter")
        page.wait_for_selector("text=evaluation")
        assert "token" not in page.url


def test_new_outcomes_appear(browser, viewer, root):
    with open_page(browser) as page:
        page.goto(viewer.page)
        go(page, "#/run/evaluation")
        assert len(rows(page)) == 1
        with OutcomeFile(root / "evaluation" / "trajectories.msgpack", go_on=True) as file:
            file.append(Writer(root / "model").rollout("later", "a later group", 1.0))
        page.wait_for_selector("text=a later group")


def test_an_exported_file_shows_the_same_without_a_network(browser, viewer, root, tmp_path):
    target = tmp_path / "exported.html"
    with closing(RunBook(root)) as book:
        target.write_bytes(
            export_html(book, [row.job_id for run in ("main", "hostile") for row in book.index(run).rows])
        )
    routes = [f"#/run/main{query}" for query in QUERIES]
    routes += [route for route in VIEWS if "/rollout/" in route or "compare" in route]
    found = {}
    for where in (viewer.page, target.as_uri()):
        with open_page(browser, offline=where.startswith("file:"), viewport={"width": 1280, "height": 900}) as page:
            page.goto(where)
            settled(page)
            shown = []
            for route in routes:
                go(page, route)
                page.wait_for_function(
                    "() => !document.querySelector('.chunk') || document.querySelector('.chunk > span')"
                )
                text = page.locator("main").inner_text()
                shown.append(re.sub(r"found in \d+ ms|Copy curl", "", text).split())
            found[where] = shown
    served_text, exported_text = found.values()
    for route, ours, theirs in zip(routes, served_text, exported_text, strict=True):
        assert ours == theirs, route


def test_a_node_is_shown_live_and_what_was_missed_is_a_gap(browser):
    with served(node_view) as live, open_page(browser, allowed=["net::ERR_FAILED"]) as page:
        page.goto(live.page)
        page.wait_for_selector(".live-stages meter")
        assert "no \\x1b[2Janswer" in page.locator(".live-backends").inner_text()
        body = json.dumps(
            {"job_id": "shown", "instance": {"instance_id": "i", "handler": "fake", "payload": {}}}
        ).encode()
        headers = {"Authorization": f"Bearer {live.token}", "Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{live.url}/v1/rollouts", body, headers)).read()
        page.wait_for_selector(".live-jobs td:has-text('tool bash')")
        members = page.locator(".live-members").inner_text()
        assert re.search(r"member-1\s+h1[\s\S]*lost\s+b[\s\S]*left out: x", members), members
        assert violations(page) == []
        page.route("**/v1/status?", lambda route: route.abort())
        page.wait_for_selector("[role=alert]")
        page.unroute("**/v1/status?")
        page.wait_for_selector(".live-head h1:has-text('n1')")
        page.wait_for_function(
            "() => document.querySelector('.live-charts path').getAttribute('d').split('M').length > 2"
        )
        live.call(live.node.finish, "shown")
        page.wait_for_selector(".log:has-text('shown completed, reward 1')")
