"""Checks of task instances by their own handlers: payload and gold answer, as at submission to a node."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prorl_trio.agent.scoring import open_scorer_pool
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.tasks.handlers.base import AgentHandler
from prorl_trio.tasks.handlers.gold_checks import PAYLOAD_PATH, GoldChecks, validate_payload
from prorl_trio.tasks.handlers.registry import GROUP
from prorl_trio.tasks.sets.fields import RowError
from prorl_trio.types.errors import MalformedJob, ServiceError, unsendable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from prorl_trio.types.models import TaskInstance

T = TypeVar("T")

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 3600.0
"""Limit of the wall time for the gold answers of one set. The remaining ones are checked only by the node."""
GOLDS_PER_PROCESS: Final = 100
MAX_PROCESSES: Final = 8
BAR_FROM: Final = 200
"""Number of gold answers from which a progress bar is shown on a terminal."""
MAX_REMEMBERED: Final = 1_000
"""Limit on the sets whose verdict is cached in the cache folder."""


def check_instances(instances: Sequence[TaskInstance]) -> dict[int, RowError]:
    """Return why instances cannot be used, by index. Blocks; starts scoring processes if gold answers are checked.

    Each payload must be encodable and accepted by its handler, and the handler's `gold_check` must be able to grade its
    gold answer. A set is graded only once: the cache folder stores the verdict by the set's content and the grader's
    source. A handler that is not installed here checks nothing.
    """
    found: dict[int, RowError] = {}
    handlers = {name: _handler(name) for name in dict.fromkeys(each.handler for each in instances)}
    for name, handler in handlers.items():
        if handler is None:
            count = sum(each.handler == name for each in instances)
            known = ", ".join(sorted(entry.name for entry in entry_points(group=GROUP)))
            told = "handler %r is not installed here (installed: %s): the node alone checks its %d tasks"
            logger.warning(told, name, known, count)
    golds: list[int] = []
    for place, instance in enumerate(instances):
        handler = handlers[instance.handler]
        try:
            _check_sendable(instance)
            if handler is not None:
                validate_payload(handler, instance.payload)
        except MalformedJob as exc:
            found[place] = _row_error(exc)
        except ServiceError as exc:
            found[place] = RowError(str(exc))
        else:
            if handler is not None and handler.gold_check:
                golds.append(place)
    if golds:
        tasks = [(handlers[instances[place].handler], instances[place].payload) for place in golds]
        found |= {golds[place]: error for place, error in _check_golds(tasks).items()}
    return found


def _handler(name: str) -> AgentHandler | None:
    """Return the handler of that name; None if it is not installed here or cannot be loaded."""
    for entry in entry_points(group=GROUP, name=name):
        try:
            handler = entry.load()()
        except Exception as exc:  # a plug-in that works only on a node
            logger.warning("handler %s (%s) cannot be loaded here: %s", name, entry.value, exc)
            return None
        return handler if isinstance(handler, AgentHandler) else None
    return None


def _check_sendable(instance: TaskInstance) -> None:
    try:
        msgspec.msgpack.encode(instance)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        problem = unsendable(instance.payload, PAYLOAD_PATH)
        if problem is None:
            raise MalformedJob("it has a value that cannot be sent to a node", "$") from exc
        raise MalformedJob(problem.problem, problem.path) from exc


def _row_error(error: MalformedJob) -> RowError:
    """Return the refusal of a payload with the field's name in the row: `payload.answer`."""
    path = error.path.removeprefix("$").removeprefix(".").removeprefix("instance").removeprefix(".")
    message = str(error).removesuffix(f" - at `{error.path}`")
    return RowError(message[:1].lower() + message[1:] if message[1:2].islower() else message, path)


# ---------------------------------------------------------------- gold answers


def _check_golds(tasks: Sequence[tuple[Any, Any]]) -> dict[int, RowError]:
    """Return why gold answers cannot be graded, by index in `tasks`; from the cache folder if known."""
    verdict = cache_dir() / "checked-tasks" / f"{_digest(tasks)}.json"
    try:
        known = msgspec.json.decode(verdict.read_bytes(), type=dict[int, tuple[str, str]])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        found, is_complete = _in_thread(lambda: _examine(tasks))
        if is_complete:
            _remember(verdict, {place: (error.problem, error.field) for place, error in found.items()})
        return found
    return {place: RowError(*error) for place, error in known.items()}


async def _examine(tasks: Sequence[tuple[Any, Any]]) -> tuple[dict[int, RowError], bool]:
    """Return the refusals by index, and whether every check was carried out."""
    processes = min(MAX_PROCESSES, os.cpu_count() or 1, 1 + len(tasks) // GOLDS_PER_PROCESS)
    console = Console(file=sys.stderr)
    columns = (TextColumn("gold answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_shown = console.is_terminal and len(tasks) >= BAR_FROM
    async with open_scorer_pool(processes) as scorers:
        checks = GoldChecks(scorers)
        with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
            bar = progress.add_task("", total=len(tasks))
            await checks.examine(tasks, timeout_s=TIMEOUT_S, on_done=lambda: progress.advance(bar))
    refusals = ((place, checks.refusal(*task)) for place, task in enumerate(tasks))
    found = {place: _row_error(refusal) for place, refusal in refusals if refusal is not None}
    return found, not checks.unchecked


def _in_thread(work: Callable[[], Awaitable[T]]) -> T:
    """Run an async function in a new event loop, even from inside another one; Ctrl-C cancels it."""
    scope = trio.CancelScope()
    result: list[T] = []
    errors: list[BaseException] = []
    tokens: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        with scope:
            result.append(await work())

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as exc:  # noqa: ASYNC103 - re-raised by the waiting thread
            errors.append(exc)

    thread = threading.Thread(target=run, name="gold checks")
    thread.start()
    try:
        thread.join()
    except BaseException:
        for token in tokens:
            token.run_sync_soon(scope.cancel)
        thread.join()
        raise
    if errors:
        raise errors[0]
    return result[0]


def _digest(tasks: Sequence[tuple[Any, Any]]) -> str:
    """Return a digest of these tasks and their graders."""
    digest = hashlib.blake2b(digest_size=16)
    for check in sorted({handler.gold_check for handler, _ in tasks}):
        digest.update(check.encode())
        for line in _sources(check.partition(".")[0].partition(":")[0]):
            digest.update(line.encode())
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    for handler, payload in tasks:
        digest.update(encoder.encode((handler.gold_check, payload)))
    return digest.hexdigest()


def _sources(package: str) -> Iterator[str]:
    """Yield everything that a grader depends on: the files of its package, and the versions of its dependencies."""
    spec = find_spec(package)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    if spec is not None and spec.origin is not None:
        files.append(Path(spec.origin))
    for path in filter(Path.exists, files):
        stat = path.stat()
        yield f"{path} {stat.st_mtime_ns} {stat.st_size}"
    for name in ("mpmath", "pint", "reasoning-gym"):
        try:
            yield f"{name} {version(name)}"
        except ModuleNotFoundError:
            continue


def _remember(verdict: Path, errors: dict[int, tuple[str, str]]) -> None:
    """Write a set's verdict. If the cache folder is not writable, only the next check takes longer."""
    try:
        verdict.parent.mkdir(parents=True, exist_ok=True)
        old = sorted(verdict.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-MAX_REMEMBERED]
        for path in old:
            path.unlink(missing_ok=True)
        part = verdict.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(errors))
        part.replace(verdict)
    except OSError as exc:
        logger.info("%s is not remembered: %s", verdict, exc)
