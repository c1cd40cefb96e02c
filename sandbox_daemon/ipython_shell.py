"""An IPython shell without a terminal: results and tracebacks are returned, not printed; nothing is kept on disk.

Imported in the IPython child only.
"""

from __future__ import annotations

import builtins
import getpass
import sys
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.text import DollarFormatter
from traitlets import Type
from traitlets.config import Config

from ipc.wire import CellError
from sandbox_daemon.child_wire import CellDone
from sandbox_daemon.output import cap_text

if TYPE_CHECKING:
    from string import Formatter

__all__ = ["CellShell"]

_FORMATTER = DollarFormatter()
_NO_INPUT = "there is no one to answer input(): pass the value in the code instead"


class ResultHook(DisplayHook):
    """Keeps the last expression's `repr` for the cell's result; `_`, `Out` and `_3` work as ever."""

    _result: str | None = None

    def take_result(self) -> str | None:
        """The result since the last call, None if there was none."""
        result, self._result = self._result, None
        return result

    def write_output_prompt(self) -> None:
        """No `Out[3]:`."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        """Keep the text instead of printing it."""
        self._result = format_dict.get("text/plain")

    def finish_displayhook(self) -> None:
        """No separator."""
        self._is_active = False


class CellShell(InteractiveShell):
    """The shell. `run` is all that the child uses."""

    displayhook_class = Type(ResultHook)
    system = InteractiveShell.system_raw  # `!cmd` writes to our descriptors, not through a pty of its own

    displayhook: ResultHook

    def __init__(self) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        config.HistoryManager.hist_file = ":memory:"
        super().__init__(config=config, colors="nocolor", color_info=False, autoindent=False, xmode="Context")  # type: ignore[no-untyped-call]
        self._traceback = ""
        self.db = {}
        formatter = self.display_formatter
        assert formatter is not None
        formatter.active_types = ["text/plain"]
        formatter.formatters["text/plain"].pprint = False
        warnings.filterwarnings("ignore", message="To exit: use 'exit'", category=UserWarning)
        builtins.input = _refuse_input
        getpass.getpass = _refuse_input

    def run(self, code: str, *, max_text_bytes: int) -> CellDone:
        """Run one cell; what it raises, `SystemExit` and `KeyboardInterrupt` too, becomes the answer's `error`."""
        self._traceback = ""
        self.displayhook.take_result()
        outcome = self.run_cell(code, store_history=True)  # type: ignore[no-untyped-call]
        result, dropped_bytes = self.displayhook.take_result(), 0
        if result is not None:
            capped = cap_text(result, max_text_bytes)
            result, dropped_bytes = capped.text, capped.dropped_bytes
        error = outcome.error_before_exec or outcome.error_in_exec
        cell_error = None
        if error is not None:
            value, traceback = cap_text(_text_of(error), max_text_bytes), cap_text(self._traceback, max_text_bytes)
            cell_error = CellError(name=type(error).__name__, value=value.text, traceback=traceback.text)
            dropped_bytes += value.dropped_bytes + traceback.dropped_bytes
        return CellDone(
            result=result, error=cell_error, execution_count=self.execution_count - 1, dropped_bytes=dropped_bytes
        )

    def interrupted(self) -> CellDone:
        """The answer for a cell whose interrupt came outside of its own code."""
        error = CellError(name=KeyboardInterrupt.__name__, value="", traceback=KeyboardInterrupt.__name__)
        return CellDone(result=None, error=error, execution_count=self.execution_count - 1, dropped_bytes=0)

    def ask_exit(self) -> NoReturn:
        """What `exit` and `quit` call. The shell lives on; the cell ends."""
        raise SystemExit

    def var_expand(self, cmd: str, depth: int = 0, formatter: Formatter = _FORMATTER) -> str:
        """The first step of every `!cmd`: what Python has written so far comes before what the command writes."""
        sys.stdout.flush()
        sys.stderr.flush()
        return str(super().var_expand(cmd, depth + 1, formatter))  # type: ignore[no-untyped-call]

    def init_ipython_dir(self, ipython_dir: str | None) -> None:
        """None: no folder is made in the user's home."""

    def init_profile_dir(self, profile_dir: Any) -> None:
        """None, for the same reason."""

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self._traceback = self.InteractiveTB.stb2text(stb)


def _refuse_input(prompt: object = "", stream: object = None) -> NoReturn:
    raise EOFError(_NO_INPUT)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as exc:  # the user's own __str__ may raise anything
        return f"<str() of it raised {type(exc).__name__}>"
