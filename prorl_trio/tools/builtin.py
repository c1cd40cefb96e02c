"""The tools every handler may offer: `ipython`, `bash`, `think` and `finish`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import trio

from prorl_ipc.file_calls import EditFile
from prorl_trio.sandbox.sandbox import ShellBusy, ShellIdle
from prorl_trio.search.service import QueryRefused
from prorl_trio.tools.arguments import read_arguments
from prorl_trio.tools.base import Observation, Tool
from prorl_trio.types.errors import HandlerError, field_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from prorl_ipc.sandbox_calls import BashResult, CellResult
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.search.backend import Document
    from prorl_trio.search.service import Search
    from prorl_trio.types.models import ToolOutcome

DESCRIPTION = """\
View, create and edit text files.
* `view` shows a file with line numbers, as `cat -n` does, or lists a directory two levels deep without hidden items
* `create` makes a new file; it does not overwrite an existing one
* `str_replace` replaces `old_str` with `new_str`; `old_str` must match exactly one place of the file, whitespace \
included, so give it enough lines of context to be unique
* `insert` puts `new_str` after the line `insert_line`
* `undo_edit` takes back the last edit made to the file
Long output is clipped and marked with `<response clipped>`. Files keep their state between calls."""


class EditorTool(Tool):
    """A tool that views or edits one file with one editor command."""

    name = "str_replace_editor"
    description = DESCRIPTION
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
                "description": "The command to run.",
            },
            "path": {"type": "string", "description": "Absolute path to file or directory, e.g. `/repo/file.py`."},
            "file_text": {"type": "string", "description": "Required by `create`: the content of the file."},
            "old_str": {"type": "string", "description": "Required by `str_replace`: the text in `path` to replace."},
            "new_str": {
                "type": "string",
                "description": "The new text of `str_replace` (nothing if left out); required by `insert`.",
            },
            "insert_line": {
                "type": "integer",
                "description": "Required by `insert`: `new_str` goes AFTER this line of `path`; 0 is the beginning.",
            },
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For `view` of a file: the lines to show, e.g. [11, 12]; -1 is the last line.",
            },
        },
        "required": ["command", "path"],
    }

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Raises SandboxLost if the sandbox is gone."""
        if sandbox is None:
            raise HandlerError(f"the tool {self.name!r} needs a sandbox, but this handler opens none")
        arguments = read_arguments(arguments, self.parameters)
        known = {key: arguments[key] for key in self.parameters["properties"] if key in arguments}
        try:
            edit = msgspec.convert({**known, "type": "EditFile"}, EditFile)
        except msgspec.ValidationError as exc:
            problem, path, _ = field_error(exc)
            return Observation.refused(f"an argument is of the wrong type: {problem} - at `{path.removeprefix('$.')}`.")
        edited = None
        with trio.move_on_after(timeout_s):
            edited = await sandbox.edit_file(edit)
        if edited is None:
            return Observation.refused(
                f"not done within {timeout_s:g} s. Look at the file before you go on.", "timed_out"
            )
        return Observation(text=edited.output, outcome="ok" if edited.ok else "error")


class SearchTool(Tool):
    """Searches documents. Each rollout has its own, which counts the calls; results are text, and nothing is fetched.

    Args:
        search: the search service of the node.
        asking: a context manager around each search, which charges the search's time (`agent.loop.asking_service`).
    """

    name = "search"
    description = "Search documents for words and see the best excerpts. It finds text: it opens no address."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for: words that the text will have."},
            "max_results": {"type": "integer", "description": "The number of excerpts. Give it for fewer than usual."},
        },
        "required": ["query"],
    }

    def __init__(self, search: Search, asking: Callable[[], AbstractContextManager[None]]) -> None:
        self._search = search
        self._asking = asking
        self.calls = 0
        """Number of searches made, without malformed calls."""

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Raises SearchUnavailable if the backend does not answer. Its timeout is `search.search_timeout_s`."""
        del sandbox, timeout_s
        config = self._search.config
        query, max_results = arguments["query"], arguments.get("max_results", config.max_results)
        if not isinstance(query, str):
            return Observation.refused("the argument 'query' must be a string.")
        if isinstance(max_results, bool) or not isinstance(max_results, int) or max_results < 1:
            return Observation.refused("the argument 'max_results' must be a positive whole number.")
        if self.calls >= config.max_calls_per_rollout:
            return Observation.refused(
                f"no more searches: a task may make {config.max_calls_per_rollout}. Answer with what you know."
            )
        try:
            self._search.check(query)
            self.calls += 1
            with self._asking():
                documents = await self._search.find(query, max_results=max_results)
        except QueryRefused as exc:
            return Observation.refused(str(exc))
        return Observation(text=render_documents(documents, config.max_result_chars))


def render_documents(documents: list[Document], max_chars: int) -> str:
    """Return the text of documents for the policy: number, title, source and text of each, cut at `max_chars`."""
    return (
        "\n\n".join(_render(number, each, max_chars) for number, each in enumerate(documents, 1)) or "[nothing found]"
    )


def _render(number: int, document: Document, max_chars: int) -> str:
    source = document.url or document.document_id
    title = f"{document.title} ({source})" if document.title else source
    left_out = len(document.text) - max_chars
    cut = f"\n[... {left_out} characters left out ...]" if left_out > 0 else ""
    return f"[{number}] {title[:max_chars]}\n{document.text[:max_chars].strip()}{cut}"


QUIET_TIMEOUT_S: Final = 30.0
CONTROL_KEYS: Final = {"C-c": b"\x03", "C-d": b"\x04", "C-z": b"\x1a"}
RESTARTED: Final = "[the shell was restarted; its variables are gone]"
GO_ON: Final = (
    "Call bash with is_input true: an empty command waits for more output, text is typed into the program with Enter, "
    "C-c interrupts it, C-d ends its input, C-z stops it; with a timeout it is killed after that"
)


def _text_argument(arguments: Mapping[str, Any], key: str) -> str | None:
    value = arguments.get(key)
    return value if isinstance(value, str) else None


def _need(sandbox: Sandbox | None, tool: str) -> Sandbox:
    if sandbox is None:
        raise HandlerError(f"the tool {tool!r} needs a sandbox, but this handler opens none")
    return sandbox


def render_cell(result: CellResult, timeout_s: float) -> str:
    """Return the text of a cell's result: output, last value, names of images, traceback, and lost state."""
    parts = [part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip()]
    if result.result is not None:
        parts.append(result.result)
    images = [display for display in result.displays if display.mime.startswith("image/")]
    parts += [f"[{image.mime}, {image.size_bytes} bytes]" for image in images]
    if result.dropped_displays:
        parts.append(f"[{result.dropped_displays} more were not kept]")
    if result.error is not None:
        parts.append(result.error.traceback.rstrip("\n") or f"{result.error.name}: {result.error.value}")
    if result.breach_text:
        parts.append(f"[{result.breach_text}]")
    if result.timed_out:
        parts.append(f"[stopped after {timeout_s:g} s]")
    if result.restarted:
        parts.append(RESTARTED)
    return "\n".join(parts) or "[no output]"


def render_bash(result: BashResult, timeout_s: float) -> str:
    """Return the text of a command's result: output, whether the command still runs, and whether state was lost."""
    parts = [result.output.rstrip("\n")] if result.output.strip() else []
    if result.breach_text:
        parts.append(f"[{result.breach_text}]")
    if result.running:
        parts.append(f"[still running, and silent for a while. {GO_ON}]")
    elif result.timed_out:
        parts.append(f"[stopped after {timeout_s:g} s]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    if result.restarted:
        parts.append(RESTARTED)
    return "\n".join(parts) or "[no output]"


class IpythonTool(Tool):
    """Runs a cell in the sandbox's persistent IPython shell.

    Args:
        kernel: the Jupyter kernelspec of the shell, installed in the sandbox; empty for the IPython of every sandbox.
            For another language, subclass the tool with its own `name` and `description`.
    """

    name = "ipython"
    description = "Run Python code in a persistent IPython shell and see its output and the value of its last line."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The Python code to run."}},
        "required": ["code"],
    }

    def __init__(self, *, kernel: str = "") -> None:
        self._kernel = kernel

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Raises SandboxLost if the sandbox is gone, SandboxUnavailable if it lacks the kernel."""
        code = _text_argument(arguments, "code")
        if code is None:
            return Observation.refused("the argument 'code' must be a string.")
        result = await _need(sandbox, self.name).ipython(code, timeout_s=timeout_s, kernel=self._kernel)
        outcome: ToolOutcome = "timed_out" if result.timed_out else "ok" if result.error is None else "error"
        return Observation(text=render_cell(result, timeout_s), outcome=outcome)


class BashTool(Tool):
    """Runs commands in the sandbox's persistent bash, and continues commands that still run.

    Args:
        quiet_timeout_s: return to the policy if a running command prints nothing for this many seconds.
    """

    name = "bash"
    description = (
        "Run a command in a persistent bash shell and see its output. Variables and the directory are kept. "
        "A command that waits for input or is silent for long is handed back still running: "
        "go on with is_input."
    )
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "description": "The command to run. With is_input: a line of text for the running program, "
                "C-c, C-d or C-z, or empty to wait for more output.",
            },
            "is_input": {
                "type": "boolean",
                "description": "Whether the text is input for the command that is still running. Default: false.",
            },
            "timeout": {
                "type": "number",
                "description": "Seconds after which the command is stopped. Give it for commands that are silent for "
                "long.",
            },
            "restart": {
                "type": "boolean",
                "description": "true, without a command: end the shell with everything that runs in it, and start a "
                "new one.",
            },
        },
        "required": [],
    }

    def __init__(self, *, quiet_timeout_s: float = QUIET_TIMEOUT_S) -> None:
        self._quiet_timeout_s = quiet_timeout_s

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Raises SandboxLost if the sandbox is gone."""
        arguments = read_arguments(arguments, self.parameters)
        command = _text_argument(arguments, "command")
        is_input = arguments.get("is_input", False)
        restart = arguments.get("restart", False)
        wanted_s = arguments.get("timeout")
        for key, value in (("is_input", is_input), ("restart", restart)):
            if not isinstance(value, bool):
                return Observation.refused(f"the argument '{key}' must be true or false.")
        if restart and command:
            return Observation.refused("nothing was done: give 'restart' without 'command', and the command then.")
        if restart:
            await _need(sandbox, self.name).restart_bash()
            return Observation(text=RESTARTED)
        if command is None:
            return Observation.refused("the argument 'command' must be a string.")
        if wanted_s is not None and not _is_positive_number(wanted_s):
            return Observation.refused("the argument 'timeout' must be a positive number of seconds.")
        quiet_timeout_s = self._quiet_timeout_s if wanted_s is None else None
        timeout_s = timeout_s if wanted_s is None else float(min(timeout_s, wanted_s))
        shell = _need(sandbox, self.name)
        try:
            if is_input:
                keys = _keys(command)
                result = await shell.bash_input(keys, timeout_s=timeout_s, quiet_timeout_s=quiet_timeout_s)
            else:
                result = await shell.bash(command, timeout_s=timeout_s, quiet_timeout_s=quiet_timeout_s)
        except ShellBusy:
            return Observation.refused(f"not run, because the command before is still running. {GO_ON}.")
        except ShellIdle:
            return Observation.refused("no command is running that could take input. Run it without is_input.")
        except ValueError as exc:
            return Observation.refused(str(exc))
        return Observation(text=render_bash(result, timeout_s), outcome=_outcome_of(result), exit_code=result.exit_code)


def _outcome_of(result: BashResult) -> ToolOutcome:
    if result.running:
        return "running"
    if result.timed_out:
        return "timed_out"
    return "ok" if result.exit_code == 0 else "error"


def _is_positive_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _keys(text: str) -> bytes:
    """Return the keys to type for `text`: a control key by its name, or a line."""
    if text in CONTROL_KEYS:
        return CONTROL_KEYS[text]
    return text.encode(errors="replace") if not text or text.endswith("\n") else f"{text}\n".encode(errors="replace")


class ThinkTool(Tool):
    """Records a thought and does nothing else. The thought is recorded with the turn's calls."""

    name = "think"
    description = "Write a thought down: a plan, or a check of what you have. It changes nothing and tells nothing new."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"thought": {"type": "string", "description": "The thought."}},
        "required": ["thought"],
    }

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Never fails; any JSON value is a thought."""
        del arguments, sandbox, timeout_s
        return Observation(text="Your thought has been recorded.")


class FinishTool(Tool):
    """Ends the episode with an answer."""

    name = "finish"
    description = "Give the final answer and end the task."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The final answer, without explanation."}},
        "required": ["answer"],
    }

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Never fails; any JSON value is taken as its text."""
        del sandbox, timeout_s
        return Observation(text="Your answer was received.", answer=str(arguments["answer"]))
