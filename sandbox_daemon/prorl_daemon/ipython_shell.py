"""An IPython shell without a terminal: results and tracebacks are returned, not printed; nothing is stored on disk.

Imported only in the IPython child.
"""

from __future__ import annotations

import builtins
import errno
import getpass
import linecache
import re
import resource
import sys
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.history import HistoryManager
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.text import DollarFormatter
from traitlets import Type
from traitlets.config import Config

from prorl_daemon.child_wire import CellDone
from prorl_daemon.displays import CARRIED_TYPES, NAMED_TYPES, Displays
from prorl_daemon.output import cap_text
from prorl_ipc.sandbox_calls import CellError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from string import Formatter
    from types import TracebackType


_FORMATTER = DollarFormatter()
_ERRNO: Final[Any] = OSError.__dict__["errno"]
REHEARSALS = 20
_REHEARSAL = "def fail(value):\n    return value / 0\nfail(1)\n"
_NO_INPUT = "there is no one to answer input(): pass the value in the code instead"

_ESCAPE = re.compile(r"[%!?]|^\s*[,;/]")
"""Signs of IPython's own syntax: `%`, `!` or `?` anywhere in a line, or one of the others at its beginning."""


class CellSyntax(TransformerManager):
    """A faster IPython transformer: cells without IPython's syntax, which are most, are left unchanged.

    IPython's own splits every cell into tokens to find that syntax. This takes a seventh of the time of a short cell,
    and more for longer cells.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own_transformers = list(self.token_transformers)

    def do_token_transforms(self, lines: list[str]) -> list[str]:
        """Convert IPython syntax in `lines` to Python. Transformers that an extension added see every cell."""
        if self.token_transformers == self._own_transformers and not any(map(_ESCAPE.search, lines)):
            return lines
        transformed: list[str] = super().do_token_transforms(lines)  # type: ignore[no-untyped-call]
        return transformed


class ResultHook(DisplayHook):
    """Stores the last expression's `repr` for the cell's result; `_`, `Out` and `_3` work as usual."""

    shell: Any
    exec_result: Any = None  # plain, see `CellShell`
    _result: str | None = None

    def take_result(self) -> str | None:
        result, self._result = self._result, None
        return result

    def write_output_prompt(self) -> None:
        """Do nothing: no `Out[3]:`."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        """Store the text and the other forms instead of printing."""
        self._result = format_dict.get("text/plain")
        if len(format_dict) > 1:
            self.shell.displays.add(format_dict)

    def log_output(self, format_dict: dict[str, Any]) -> None:
        """Do nothing: IPython would permanently store the forms of every result."""

    def finish_displayhook(self) -> None:
        """Do nothing: no separator."""
        self._is_active = False


class Publisher(DisplayPublisher):
    """`display()`: text goes to standard output, and images to the cell's displays."""

    def publish(self, data: dict[str, Any], *_: object, **__: object) -> None:
        """Publish one object with its forms by MIME type. Updates of an earlier display are separate displays."""
        if "text/plain" in data:
            print(data["text/plain"])  # noqa: T201
        self.shell.displays.add(data)

    def clear_output(self, wait: bool = False) -> None:
        """Do nothing: output cannot be withdrawn."""


class History(HistoryManager):
    """The history behind `In`, `_i` and `%history`, in memory."""

    _i = _ii = _iii = _i00 = ""  # plain, see `CellShell`


class CellShell(InteractiveShell):
    """The shell. `run` is all that the child uses.

    Values that change with each cell are plain attributes here and in the classes above. In IPython these are traits,
    which are validated and announced at each change without any observer. This takes a quarter of a short cell's time.
    """

    displayhook_class = Type(ResultHook)
    display_pub_class = Type(Publisher)
    system = InteractiveShell.system_raw  # `!cmd` writes to our descriptors, not through its own pty

    displayhook: ResultHook
    execution_count = 1
    last_execution_succeeded = True
    last_execution_result = None
    last_error: BaseException | None = None
    """The exception that the last cell raised."""
    last_traceback = ""

    def __init__(self) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        config.HistoryManager.hist_file = ":memory:"
        super().__init__(config=config, colors="nocolor", color_info=False, autoindent=False, xmode="Context")  # type: ignore[no-untyped-call]
        self.input_transformer_manager = CellSyntax()
        self.displays = Displays()
        self.db = {}
        formatter = self.display_formatter
        assert formatter is not None
        formatter.active_types = ["text/plain", *CARRIED_TYPES, *NAMED_TYPES]
        formatter.formatters["text/plain"].pprint = False
        formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _figure_png)
        warnings.filterwarnings("ignore", message="To exit: use 'exit'", category=UserWarning)
        warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive", category=UserWarning)
        builtins.input = _refuse_input
        getpass.getpass = _refuse_input

    def rehearse(self) -> None:
        """Run cells, and drop the traceback of a failing one, so that the first real cell finds everything imported.

        It leaves no trace, and counts as no cell. It is repeated, because the interpreter specialises repeated code.
        """
        known = set(linecache.cache)
        for _ in range(REHEARSALS):
            self.run_cell("pass", store_history=False, shell_futures=False)  # type: ignore[no-untyped-call]
        for name in set(linecache.cache) - known:
            del linecache.cache[name]
        name = "<rehearsal>"
        linecache.cache[name] = (len(_REHEARSAL), None, _REHEARSAL.splitlines(keepends=True), name)
        try:
            exec(compile(_REHEARSAL, name, "exec"), {})
        except ZeroDivisionError as exc:
            own = cast("TracebackType", exc.__traceback__)
            self.InteractiveTB.structured_traceback(type(exc), exc, own.tb_next, tb_offset=0)
        self.InteractiveTB.tb = None
        del linecache.cache[name]

    def run(self, code: str, *, number: int, max_text_bytes: int) -> CellDone:
        """Run one cell; every exception, including `SystemExit` and `KeyboardInterrupt`, becomes the answer's `error`.

        A copy of this process that the cell has forked also returns from here: see `forks`.
        """
        self.last_error, self.last_traceback = None, ""
        self.displayhook.take_result()
        outcome = self.run_cell(code, store_history=True)  # type: ignore[no-untyped-call]
        self._show_figures()
        result, dropped_bytes = self.displayhook.take_result(), 0
        if result is not None:
            capped = cap_text(result, max_text_bytes)
            result, dropped_bytes = capped.text, capped.dropped_bytes
        error = self.last_error = outcome.error_before_exec or outcome.error_in_exec
        cell_error = None
        if error is not None:
            name, text = type(error).__name__, _text_of(error)
            if isinstance(error, MemoryError):
                name, note = MemoryError.__name__, _memory_note()
                text, self.last_traceback = f"{text} {note}".lstrip(), f"{self.last_traceback.rstrip()}\n{note}"
            value, traceback = cap_text(text, max_text_bytes), cap_text(self.last_traceback, max_text_bytes)
            cell_error = CellError(name=name, value=value.text, traceback=traceback.text, errno=_errno_of(error))
            dropped_bytes += value.dropped_bytes + traceback.dropped_bytes
        elif self.last_traceback:  # of a failed `__repr__` or a script of `%run`: shown, but the cell did not fail
            with suppress(OSError, ValueError, AttributeError):  # a cell may close or replace it
                sys.stderr.write(self.last_traceback.rstrip("\n") + "\n")
        displays, self.displays = self.displays, Displays()
        return CellDone(
            result=result,
            error=cell_error,
            execution_count=self.execution_count - 1,
            dropped_bytes=dropped_bytes,
            displays=displays.kept,
            dropped_displays=displays.dropped,
            number=number,
        )

    def interrupted(self, number: int) -> CellDone:
        """Return the answer for a cell that was interrupted outside of its own code."""
        self.displays = Displays()
        self.last_error, self.last_traceback = KeyboardInterrupt(), KeyboardInterrupt.__name__
        error = CellError(name=KeyboardInterrupt.__name__, value="", traceback=self.last_traceback)
        return CellDone(
            result=None, error=error, execution_count=self.execution_count - 1, dropped_bytes=0, number=number
        )

    def ask_exit(self) -> NoReturn:
        """End the cell, as `exit` and `quit` do. The shell lives on."""
        raise SystemExit

    def var_expand(self, cmd: str, depth: int = 0, formatter: Formatter = _FORMATTER) -> str:
        """Flush Python's output before every `!cmd`, so that it precedes the command's output."""
        sys.stdout.flush()
        sys.stderr.flush()
        return str(super().var_expand(cmd, depth + 1, formatter))  # type: ignore[no-untyped-call]

    def init_history(self) -> None:
        """Make the history, as IPython does, but with our class."""
        self.history_manager = History(shell=self, parent=self)
        self.configurables.append(self.history_manager)  # type: ignore[arg-type]

    def init_ipython_dir(self, ipython_dir: str | None) -> None:
        """Do nothing: IPython would look for, and make, a folder in the user's home."""

    def init_profile_dir(self, profile_dir: Any) -> None:
        """Do nothing, for the same reason."""

    def should_run_async(self, raw_cell: str, *, transformed_cell: str | None = None, **options: Any) -> bool:
        """Return the result of IPython's own method.

        That compiles the cell again, so it is only called if a keyword suggests it.
        """
        cell = raw_cell if transformed_cell is None else transformed_cell
        if "await" not in cell and "async" not in cell:
            return False
        return bool(super().should_run_async(raw_cell, transformed_cell=transformed_cell, **options))

    def enable_gui(self, gui: str | None = None) -> None:
        """Do nothing, for lack of a window. `%matplotlib inline` calls this."""

    def _format_exception_for_storage(self, exception: BaseException, *_: object, **__: object) -> dict[str, Any]:
        """Return the displayed traceback, for `%notebook`. IPython's own makes it again, which is the slowest part."""
        return {
            "ename": type(exception).__name__,
            "evalue": _text_of(exception),
            "traceback": self.last_traceback.splitlines(),
        }

    @contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        """Do nothing: IPython's history would permanently store a copy of all output."""
        yield

    def _show_figures(self) -> None:
        """Display and close matplotlib's open figures, as notebooks do at the end of a cell."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None or not pyplot.get_fignums():
            return
        formatter = self.display_formatter
        assert formatter is not None
        try:
            for number in pyplot.get_fignums():
                forms, _ = formatter.format(pyplot.figure(number), include={"image/png"})  # type: ignore[no-untyped-call]
                self.displays.add(forms)
        finally:
            pyplot.close("all")

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self.last_traceback = self.InteractiveTB.stb2text(stb)


def _memory_note() -> str:
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit_bytes == resource.RLIM_INFINITY:
        return "[the machine has no more memory]"
    return f"[a process may use {limit_bytes} bytes of memory here]"


def _figure_png(figure: Any) -> Any:
    from IPython.core.pylabtools import print_figure  # its import takes long, and matplotlib is rare

    return print_figure(figure, fmt="png")  # type: ignore[no-untyped-call]


def _refuse_input(prompt: object = "", stream: object = None) -> NoReturn:
    raise EOFError(_NO_INPUT)


def _errno_of(error: BaseException) -> int | None:
    """Return the system's own number, even if the error's class has changed the attribute."""
    number = _ERRNO.__get__(error) if isinstance(error, OSError) else None
    return number if type(number) is int and number in errno.errorcode else None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as exc:  # the user's own __str__ may raise anything
        return f"<str() of it raised {type(exc).__name__}>"
