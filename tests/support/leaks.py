"""Leaks of tests in their process: descriptors, threads, children, muted loggers, ignored signals. The test is blamed.

Each test is looked at when its own fixtures have gone, and each module when those of the module have. What fixtures of
a longer life hold is no leak. Garbage is collected as well, so that a warning of it ("unclosed socket", "coroutine was
never awaited") comes in the test that made it, not in whichever runs when the collector does. A collection looks only
at what was made since the last one, so it takes some milliseconds.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from trio._core._thread_cache import THREAD_CACHE

SETTLE_S = 5.0
"""How long what ends by itself may take for it: a thread whose result nobody waits for, a process that was killed."""
_POLL_S = 0.01

ALLOWED = (
    "descriptor /dev/urandom",  # Python's own, kept for the life of the process
    "descriptor /memfd:prorl-trio-arena",  # memory: a view of it may be in a traceback, and that in a log record
    "thread tqdm_monitor",  # transformers' progress bars share one for good
)
"""Beginnings of what a process has for good, whichever test is the first to need it."""
ALLOWED_PARTS = ("/mpl-data/fonts/",)
"""Parts of the names of such things."""

_FAILED = pytest.StashKey[bool]()


class Leaks:
    """A plugin of pytest's."""

    def __init__(self):
        self._owned: dict[str, dict[object, object]] = {"module": {}, "session": {}}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed:
            item.stash[_FAILED] = True
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """Note what a fixture that outlives the test opens, whenever it is asked for first."""
        before = holdings()
        result = yield
        if fixturedef.scope != "function":
            scope = "module" if fixturedef.scope in {"class", "module"} else "session"
            self._owned[scope].update(new(holdings(), before))
        return result

    def fail_if_any(self, who, before, *, owners=("module", "session")):
        """Fail in the name of `who` if there is more than there was `before`, and than longer-lived fixtures hold."""
        leaks = find_leaks(before, [self._owned[scope] for scope in owners])
        self.forget(before)
        if leaks:
            pytest.fail(f"{who} left behind:\n" + "\n".join(leaks), pytrace=False)

    def forget(self, before):
        """Blame nobody else for what there is now."""
        self._owned["session"].update(new(holdings(), before))

    def fail_if_module_left_any(self, before):
        """The same for the fixtures of a module, when they have ended."""
        self._owned["module"].clear()
        self.fail_if_any("the fixtures of this module", before, owners=("session",))


LEAKS = Leaks()


def has_failed(item):
    return item.stash.get(_FAILED, False)


def find_leaks(before, owned=()):
    """What is there and was not before, a line each, but for what is owned. Collects garbage; waits for `SETTLE_S`."""
    known = {**before}
    for more in owned:
        known.update(more)
    held_by_garbage = new(descriptors(), known)
    gc.collect()
    gc.freeze()
    deadline = time.monotonic() + SETTLE_S
    others = threading.active_count() > 1  # a server of the module's, say, who closes its side of a connection later
    while new(threads(), known) or new_children(known) or (others and new(descriptors(), known)):
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    left = new({**descriptors(), **muted_loggers(), **ignored_signals()}, known)
    closed = [] if others else [name for key, name in held_by_garbage.items() if key not in left]
    garbage = [f"{name}, which only the garbage collector closed" for name in closed]
    return [*left.values(), *new(threads(), known).values(), *new_children(known), *garbage]


def holdings():
    """What this process has, by a key that nothing else gets; and all processes, to look at later ones only."""
    others = {("process", pid): "" for pid in processes()}
    return {**descriptors(), **threads(), **muted_loggers(), **ignored_signals(), **others}


def new(now, before):
    return {
        key: name
        for key, name in now.items()
        if key not in before and not name.startswith(ALLOWED) and not any(part in name for part in ALLOWED_PARTS)
    }


def descriptors():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # that of listdir
            continue
        found["descriptor", number, target] = f"descriptor {target}"
    return found


def threads():
    """All but those of trio's cache that wait for work: they end after 10 s without."""
    idle = {worker._thread for worker in list(THREAD_CACHE._idle_workers)}
    return {("thread", thread.ident): f"thread {thread.name}" for thread in threading.enumerate() if thread not in idle}


def muted_loggers():
    """Those that a `logging.config` disabled because they existed: later tests would miss their words."""
    loggers = logging.root.manager.loggerDict.items()
    return {("logger", name): f"muted logger {name}" for name, logger in loggers if getattr(logger, "disabled", False)}


def ignored_signals():
    """What this process ignores: so would the processes that later tests start."""
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    return {("signal", number): f"signal {int(number)} is ignored" for number in ignored}


def processes():
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def new_children(before):
    found = []
    for pid in processes():
        if ("process", pid) in before:
            continue
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]
            if int(parent) == os.getpid():
                argv = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"child {pid} in state {state}, not waited for: {argv or '(ended)'}")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
