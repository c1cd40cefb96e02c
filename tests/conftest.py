"""What tests everywhere share: one real vLLM for all slow ones."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
from collections import Counter
from itertools import chain, combinations
from pathlib import Path

import pytest
import trio
from _pytest.mark.expression import Expression
from xdist.scheduler import LoadFileScheduling

from prorl_launch.paths import engine_python, model_dir
from prorl_launch.vllm import open_vllm
from support.leaks import LEAKS, has_failed, holdings
from support.skips import Skips, because, read_allowed

VLLM_TIMEOUT_S = 400
LONG_TEST_TIMEOUT_S = 3600
LONGEST = {"test_policy_text.py", "test_trl.py", "test_sandbox_kill_sweep.py"}
SLURM = "tests/e2e/test_slurm_"
"""Tests of clusters wait more than they compute, and one cluster at a time is enough for a machine."""
MARKS = {"slow": ["slow"], "soak": ["soak"], "alone": ["alone", "vllm_url"]}
"""The marks by which runs choose, and what stands in a file that has tests so marked."""
MEMORY = Path("/dev/shm")

# A job that a shell put into the background ignores SIGINT, and one of nohup SIGHUP; so would what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config):
    config.pluginmanager.register(Skips(read_allowed()))
    config.pluginmanager.register(LEAKS)
    config.pluginmanager.register(Failures(config))


def pytest_ignore_collect(collection_path, config):
    """A file whose text mentions no mark that `-m` asks for is not even imported: that takes half a minute for all."""
    if not config.option.markexpr or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    mentioned = [mark for mark, words in MARKS.items() if any(word in text for word in words)]
    some = chain.from_iterable(combinations(mentioned, n) for n in range(len(mentioned) + 1))
    asked = Expression.compile(config.option.markexpr)
    return None if any(asked.evaluate(lambda name, marks=marks: name in marks) for marks in some) else True


def pytest_collection_modifyitems(items):
    """What is marked as slow may take longer than pyproject.toml allows, but not for ever.

    Alone is also what needs a vLLM, which takes all cores; what shares its name has to be: xdist would run one of them.
    Files that take minutes come first, so that no worker has one left when all the others are done.
    """
    items.sort(key=lambda item: (SLURM not in item.nodeid, item.path.name not in LONGEST))
    names = Counter(item.nodeid for item in items)
    for item in items:
        if "vllm_url" in item.fixturenames:
            item.add_marker(pytest.mark.alone)
        if names[item.nodeid] > 1 and not item.get_closest_marker("alone"):
            raise pytest.UsageError(f"{item.nodeid} is there {names[item.nodeid]} times: mark it as alone")
        if not item.get_closest_marker("timeout") and any(map(item.get_closest_marker, ("slow", "soak"))):
            item.add_marker(pytest.mark.timeout(LONG_TEST_TIMEOUT_S))


class ByFile(LoadFileScheduling):
    """A file at a time for each worker; all files of Slurm for one of them, beside which the others compute."""

    def _split_scope(self, nodeid):
        return SLURM if nodeid.startswith(SLURM) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log) if config.option.dist == "loadfile" else None


class Failures:
    """Says at once why a test failed: a run that is cut off has no summary."""

    def __init__(self, config):
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report):
        terminal = self._plugins.getplugin("terminalreporter")  # none in a worker
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} failed in its {report.when} after {report.duration:.0f} s:")
            terminal.write_line(report.longreprtext[-3000:])


@pytest.fixture
def memory_path(tmp_path):
    """As `tmp_path`, in memory where that is a file system: syncs cost nothing there."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="prorl-test-", dir=MEMORY) as path:
        yield Path(path)


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing():
    """Fail the last test of a module whose fixtures leave something."""
    before = holdings()
    yield
    LEAKS.fail_if_module_left_any(before)


@pytest.fixture(autouse=True)
def _leaves_nothing(request):
    """Fail the test that leaves a descriptor, a thread or a child. One that failed already is told nothing more."""
    before = holdings()
    yield
    request.node.funcargs.clear()  # all other fixtures of the test are done, and their values not to be kept alive
    if has_failed(request.node):
        LEAKS.forget(before)
    else:
        LEAKS.fail_if_any("this test", before)


@pytest.fixture
def signals_restored():
    """For what ends as a process does, with the signals ignored that would change its exit code."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    former = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, former, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def quick_gc():
    """`gc.collect()` looks at what is made from here on, and no more at all that pytest holds: 0.2 s each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory):
    """A real vLLM that serves the default policy on the CPU; or the server that PRORL_VLLM_URL names."""
    if url := os.environ.get("PRORL_VLLM_URL"):
        yield url
        return
    if not engine_python().exists():
        pytest.skip(because("the CPU engine is not set up", "make engine"))
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    ready, stop, found = threading.Event(), threading.Event(), []

    async def serve():
        async with open_vllm(engine_python(), model_dir(), log_file=log) as server:
            found.append(server.url)
            await trio.to_thread.run_sync(wait, abandon_on_cancel=True)

    def wait():
        ready.set()  # the thread that waits is there by now: it is the fixture's, and not a test's
        stop.wait()

    def run():
        try:
            trio.run(serve)
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(timeout=VLLM_TIMEOUT_S)
    assert found, f"vLLM did not start: {log.read_text()[-3000:]}"
    yield found[0]
    stop.set()
    thread.join(timeout=30)
    assert not thread.is_alive()
