"""A real Chromium for tests of the viewer: Debian's, driven by Playwright, which brings none of its own."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.skips import because

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), "")
WAIT_MS = 30_000
"""Longest that a test waits for anything in a page."""
WATCH = """
window.problems = [];
window.longTasks = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.problems.push(`CSP: ${event.violatedDirective} ${event.blockedURI}`));
new PerformanceObserver((list) => window.longTasks.push(...list.getEntries().map((each) => each.duration)))
  .observe({ type: "longtask", buffered: true });
"""


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yield a browser; skip where there is none."""
    if not BROWSER:
        pytest.skip(because("there is no Chromium", "as root: launch/prorl_launch/chromium.sh"))
    playwright = pytest.importorskip(
        "playwright.sync_api", reason=because("Playwright is not installed", "make setup-dev")
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Any, *, allowed: Sequence[str] = (), **options: Any) -> Iterator[Any]:
    """Yield a page of a context of its own. At its end nothing has gone wrong in it, and no other site was asked.

    `allowed`: parts of messages on the console that are expected.
    """
    context = browser.new_context(**options)
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    wrong, asked = list[str](), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(f"{error}"))
    page.on("dialog", lambda dialog: wrong.append(f"dialog {dialog.message}"))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    wrong += page.evaluate("window.problems")
    home = page.url.split("/ui")[0].split("#")[0]
    context.close()
    assert [each for each in wrong if not any(part in each for part in allowed)] == []
    assert [url for url in asked if not url.startswith((home, "blob:"))] == []


def settled(page: Any) -> None:
    """Wait until the page shows what its address asks for."""
    page.wait_for_selector("main[aria-busy=false]")
    page.wait_for_function("() => !document.querySelector('main .list[aria-busy=true]')")


def go(page: Any, route: str) -> None:
    """Go to another view of the same page."""
    page.evaluate("route => { location.hash = route; }", route)
    page.wait_for_function("route => location.hash === route", arg=route)
    settled(page)
