"""Log records as text or JSON lines, each with its job.

Logging never waits for a reader: records pass through a bounded queue to a writer thread, so a full pipe or a slow
terminal does not stall an event loop. Records beyond the queue's limit are dropped, counted, and reported.
"""

from __future__ import annotations

import contextvars
import copy
import logging
import queue
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TextIO

import msgspec

from prorl_ipc.portable_text import portable, printable, printable_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.types.models import Outcome, Status, Turn

LogFormat = Literal["auto", "text", "json"]
LOG_FORMATS: Final = ("auto", "text", "json")

MAX_QUEUED_RECORDS: Final = 10_000
FLUSH_TIMEOUT_S: Final = 2.0
"""Longest wait at the end for queued records to be written."""
MAX_ERROR_CHARS: Final = 300
INDENT: Final = "    "
"""Prefix of each line of a record except the first, in text logs."""
_CHATTY: Final = ("trio-websocket", "urllib3", "markdown_it")
"""Libraries whose debug records describe each frame, and may contain its data."""
_OWN_WORDS: Final = ("sandbox", "inference", "node", "cancelled")
"""Causes whose error is this project's own text; others may quote text of a task or the policy."""


class _JobContext(NamedTuple):
    job_id: str
    session_id: str
    stage: str


_job: contextvars.ContextVar[_JobContext | None] = contextvars.ContextVar("job", default=None)


def current_job(context: contextvars.Context | None = None) -> str:
    """Return the id of the job of the running task, or of the task with the given context; empty if there is none."""
    job = _job.get() if context is None else context.get(_job)
    return "" if job is None else job.job_id


class JobLog:
    """Tags log records with the current job, and writes one line at its end. An `observer.Observer`.

    Relies on observers being called in the job's own task: the tasks it starts inherit the tag.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger("prorl_trio.jobs")

    def job_moved(self, job: JobView, status: Status, detail: str) -> None:
        if status in ("init", "run", "eval"):
            _job.set(_JobContext(job.job_id, job.session_id, status))
        elif status != "queued":
            _job.set(None)

    def turn_done(self, job: JobView, turn: Turn) -> None:
        """See `Observer`. Neither tokens nor text are logged."""
        self._logger.debug(
            "job %s: turn %d: %d tokens in %.2f s, %d tool calls in %.2f s",
            job.job_id,
            job.turns,
            turn.completion_end - turn.completion_start,
            turn.inference_s,
            len(turn.tool_calls),
            turn.tools_s,
        )

    def job_ended(self, job: JobView, outcome: Outcome) -> None:
        timing = msgspec.structs.asdict(outcome.timing)
        own_words = outcome.cause in _OWN_WORDS
        fields: dict[str, Any] = {
            "job_id": job.job_id,
            "session_id": job.session_id,
            "handler": job.handler,
            "attempt": job.attempt,
            "status": outcome.status,
            "cause": outcome.cause,
            "error": outcome.error[:MAX_ERROR_CHARS] if own_words else "",
            "reward": outcome.reward,
            "turns": job.turns,
            "age_s": round(job.age_s, 3),
            **{name: round(value, 3) for name, value in timing.items()},
        }
        why = f" ({outcome.cause})" if outcome.cause else ""
        said = f": {fields['error']}" if fields["error"] else ""
        waited_s = sum(value for name, value in timing.items() if name.startswith("queued_"))
        self._logger.info(
            "job %s %s%s after %.2f s: init %.2f, run %.2f, eval %.2f, waits %.2f; %d turns%s",
            job.job_id,
            outcome.status,
            why,
            job.age_s,
            outcome.timing.init_s,
            outcome.timing.run_s,
            outcome.timing.eval_s,
            waited_s,
            job.turns,
            said,
            extra={"fields": fields},
        )


@contextmanager
def open_logging(
    level: int = logging.INFO, log_format: LogFormat = "auto", stream: TextIO | None = None
) -> Iterator[None]:
    """Write every record of `level` and above to `stream` (default: standard error) inside the block.

    `auto` is coloured text on a terminal and plain text elsewhere; `json` is one object per line.
    """
    target = stream or sys.stderr
    handler = _QueueHandler(_sink(log_format, target))
    root = logging.getLogger()
    before = {name: logging.getLogger(name).level for name in ("", *_CHATTY)}
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.INFO))
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for name, old in before.items():
            logging.getLogger(name).setLevel(old)
        handler.close()


def _sink(log_format: LogFormat, target: TextIO) -> logging.Handler:
    if log_format == "auto" and target.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler: logging.Handler = RichHandler(console=Console(file=target), show_path=False)
        handler.setFormatter(_Text("%(message)s"))
        return handler
    handler = logging.StreamHandler(target)
    handler.setFormatter(_Json() if log_format == "json" else _Text("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


class _QueueHandler(logging.Handler):
    """Accepts records in any thread without waiting; its own thread passes them to `sink`, in order."""

    def __init__(self, sink: logging.Handler) -> None:
        super().__init__()
        self._sink = sink
        self._queue: queue.Queue[logging.LogRecord | threading.Event | None] = queue.Queue(MAX_QUEUED_RECORDS)
        self._dropped = 0
        self._writer = threading.Thread(target=self._write, name="log writer", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        record = copy.copy(record)
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        record.job = _job.get()
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Return when all records queued so far are written, after at most `FLUSH_TIMEOUT_S`."""
        mark = threading.Event()
        with suppress(queue.Full):
            self._queue.put(mark, timeout=FLUSH_TIMEOUT_S)
            mark.wait(FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Write the queued records, for at most `FLUSH_TIMEOUT_S`."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=FLUSH_TIMEOUT_S)
        self._writer.join(FLUSH_TIMEOUT_S)
        super().close()

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            if isinstance(record, threading.Event):
                record.set()
                continue
            self._sink.handle(record)
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                text = f"{dropped} log records were dropped: nobody read them fast enough"
                self._sink.handle(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))


class _Text(logging.Formatter):
    """A formatter of lines, with the job in brackets if the message does not contain it.

    Messages and tracebacks may quote untrusted text. So they are made printable, and all lines except the first are
    indented, which prevents forged records.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        job: _JobContext | None = getattr(record, "job", None)
        if job is not None and job.job_id not in record.getMessage():
            first, separator, rest = text.partition("\n")
            text = f"{first} [{job.stage} of job {job.job_id}]{separator}{rest}"
        return printable(text).replace("\n", f"\n{INDENT}")


class _Json(logging.Formatter):
    """A formatter of JSON objects, one per line, entirely printable.

    They contain time (UTC), level, logger and message, then the job's known fields and the event's own fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        time_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{time_text}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        job: _JobContext | None = getattr(record, "job", None)
        if job is not None:
            line.update(job._asdict())
        line.update(getattr(record, "fields", {}))
        if record.exc_text:
            line["exception"] = record.exc_text
        try:
            encoded = msgspec.json.encode(line)
        except UnicodeEncodeError:  # a lone surrogate, such as in a system path
            encoded = msgspec.json.encode(portable(line))
        return printable_json(encoded.decode())
