"""`str_replace_editor` inside the sandbox: view, create, str_replace, insert, undo_edit. One history for all files."""

from __future__ import annotations

import os
import stat
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from prorl_daemon.editor_text import (
    EditRefused,
    decode,
    encode,
    insert_lines,
    number_lines,
    replace_once,
    snippet,
    view_lines,
)
from prorl_daemon.files import PIECE_BYTES, replace_file
from prorl_daemon.paths import open_path
from prorl_daemon.threads import run_blocking
from prorl_ipc.file_calls import FileEdited
from prorl_ipc.server import CallError

if TYPE_CHECKING:
    from prorl_ipc.file_calls import EditFile

T = TypeVar("T")

MAX_EDIT_BYTES = 10 * 1024 * 1024
"""Largest file the editor reads or writes. Beyond it, shell tools are the right ones."""
MAX_UNDO_EDITS = 100
MAX_UNDO_BYTES = 64 * 1024 * 1024
"""Bytes of earlier contents, all files together. The oldest are forgotten first."""
MAX_LISTED_ENTRIES = 1000
LISTING_DEPTH = 2
MAX_OUTPUT_BYTES = 1024 * 1024
NEW_FILE_MODE = 0o644
COMMANDS = ("view", "create", "str_replace", "insert", "undo_edit")
REVIEW = "Review the changes and make sure they are as expected. Edit the file again if necessary."


class Editor:
    """Edits files for an agent, one call at a time. What the agent did wrong is an answer that says so."""

    def __init__(self, *, cwd: str, limiter: trio.CapacityLimiter) -> None:
        self._cwd = cwd
        self._limiter = limiter
        self._turn = trio.Lock()
        self._earlier: deque[tuple[str, bytes]] = deque()
        self._earlier_bytes = 0

    def __repr__(self) -> str:
        return f"<Editor: {len(self._earlier)} edits can be undone, {self._earlier_bytes} bytes>"

    async def run(self, request: EditFile) -> FileEdited:
        """Do what is asked. A file is written whole or not at all. A cancelled call returns when its edit has ended.

        Raises:
            CallError: `bad_request`: `max_output_bytes` is out of range.
        """
        if not 0 < request.max_output_bytes <= MAX_OUTPUT_BYTES:
            raise CallError("bad_request", f"max_output_bytes must be in 1 to {MAX_OUTPUT_BYTES}")
        async with self._turn:
            try:
                return await run_blocking(partial(self._answer, request), limiter=self._limiter)
            except BlockingIOError as exc:
                return FileEdited(output=str(exc.strerror), ok=False)

    def _answer(self, request: EditFile) -> FileEdited:
        try:
            return FileEdited(output=_printable(self._do(request)), ok=True)
        except EditRefused as exc:
            return FileEdited(output=_printable(str(exc)), ok=False)
        except OSError as exc:
            doing = "read" if request.command == "view" else "write to"
            refusal = f"Ran into {exc.strerror or exc} while trying to {doing} {request.path}"
            return FileEdited(output=_printable(refusal), ok=False)

    def _do(self, request: EditFile) -> str:
        path = request.path
        if request.command not in COMMANDS:
            allowed = ", ".join(COMMANDS)
            raise EditRefused(
                f"Unrecognized command {request.command}. The allowed commands for the str_replace_editor tool are: "
                f"{allowed}"
            )
        self._check_path(request)
        match request.command:
            case "view":
                return _list(path) if os.path.isdir(path) else self._view(request)
            case "create":
                return self._create(path, _required(request.file_text, "file_text", request))
            case "str_replace":
                return self._str_replace(request, _required(request.old_str, "old_str", request))
            case "insert":
                after_line = _required(request.insert_line, "insert_line", request)
                return self._insert(request, after_line, _required(request.new_str, "new_str", request))
            case _:
                return self._undo(request)

    def _check_path(self, request: EditFile) -> None:
        path = request.path
        if "\0" in path:
            raise EditRefused("The path holds a NUL. Please provide a valid path.")
        if not os.path.isabs(path):
            beside = os.path.join(self._cwd, path)
            suggestion = beside if os.path.exists(beside) else f"/{path}"
            raise EditRefused(
                f"The path {path} is not an absolute path, it should start with `/`. Maybe you meant {suggestion}?"
            )
        if request.command == "create":
            if os.path.lexists(path) and not os.path.isdir(path):
                raise EditRefused(f"File already exists at: {path}. Cannot overwrite files using command `create`.")
        elif not os.path.exists(path):
            raise EditRefused(f"The path {path} does not exist. Please provide a valid path.")
        if os.path.isdir(path):
            if request.command != "view":
                raise EditRefused(
                    f"The path {path} is a directory and only the `view` command can be used on directories"
                )
            if request.view_range is not None:
                raise EditRefused("The `view_range` parameter is not allowed when `path` points to a directory.")

    def _view(self, request: EditFile) -> str:
        document = decode(_read(request.path), request.path)
        lines, first = view_lines(document, request.view_range)
        return document.note + _numbered(lines, first, request.path, request.max_output_bytes)

    def _create(self, path: str, text: str) -> str:
        content = text.encode(errors="replace")
        _check_size(path, len(content))
        real = os.path.realpath(path)
        replace_file(real, content, mode=NEW_FILE_MODE)
        self._forget(real)
        return f"File created successfully at: {path}"

    def _str_replace(self, request: EditFile, old: str) -> str:
        path = request.path
        content = _read(path)
        document = decode(content, path)
        new = request.new_str or ""
        text, line = replace_once(document, old, new, path)
        self._write(path, content, encode(document, text, path))
        lines, first = snippet(text, line, new)
        shown = _numbered(lines, first, f"a snippet of {path}", request.max_output_bytes)
        return f"The file {path} has been edited. {document.note}{shown}{REVIEW}"

    def _insert(self, request: EditFile, after_line: int, new: str) -> str:
        path = request.path
        content = _read(path)
        document = decode(content, path)
        text = insert_lines(document, after_line, new)
        self._write(path, content, encode(document, text, path))
        lines, first = snippet(text, after_line + 1, new.removesuffix("\n"))
        shown = _numbered(lines, first, "a snippet of the edited file", request.max_output_bytes)
        return (
            f"The file {path} has been edited. {document.note}{shown}Review the changes and make sure they are as "
            "expected (correct indentation, no duplicate lines, etc). Edit the file again if necessary."
        )

    def _undo(self, request: EditFile) -> str:
        path = request.path
        real = os.path.realpath(path)
        content = next((content for edited, content in reversed(self._earlier) if edited == real), None)
        if content is None:
            raise EditRefused(f"No edit history found for {path}.")
        replace_file(real, content, mode=_mode(real))
        del self._earlier[_last_index(self._earlier, real)]
        self._earlier_bytes -= len(content)
        document = decode(content, path)
        shown = _numbered(document.lines, 1, path, request.max_output_bytes)
        return f"Last edit to {path} undone successfully. {shown}"

    def _write(self, path: str, before: bytes, after: bytes) -> None:
        _check_size(path, len(after))
        real = os.path.realpath(path)
        replace_file(real, after, mode=_mode(real))
        self._earlier.append((real, before))
        self._earlier_bytes += len(before)
        while len(self._earlier) > MAX_UNDO_EDITS or self._earlier_bytes > MAX_UNDO_BYTES:
            self._earlier_bytes -= len(self._earlier.popleft()[1])

    def _forget(self, path: str) -> None:
        self._earlier = deque(edit for edit in self._earlier if edit[0] != path)
        self._earlier_bytes = sum(len(content) for _, content in self._earlier)


def _required(value: T | None, name: str, request: EditFile) -> T:
    if value is None:
        raise EditRefused(f"Parameter `{name}` is required for command: {request.command}")
    return value


def _numbered(lines: list[str], first: int, what: str, max_bytes: int) -> str:
    return f"Here's the result of running `cat -n` on {what}:\n{number_lines(lines, first, max_bytes=max_bytes)}"


def _printable(text: str) -> str:
    """Names that are not UTF-8 reach us with surrogates, which do not go on the wire."""
    return text.encode(errors="backslashreplace").decode()


def _mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def _last_index(edits: deque[tuple[str, bytes]], path: str) -> int:
    return next(index for index in range(len(edits) - 1, -1, -1) if edits[index][0] == path)


def _read(path: str) -> bytes:
    # O_NONBLOCK: opening a pipe nobody writes to must not take a thread away for ever.
    fd = open_path(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise EditRefused(f"The path {path} is not a regular file and cannot be viewed or edited with this tool.")
        content = b""
        while len(content) <= MAX_EDIT_BYTES and (piece := file.read(PIECE_BYTES)):
            content += piece
        _check_size(path, max(len(content), os.fstat(fd).st_size))
        return content


def _check_size(path: str, size_bytes: int) -> None:
    if size_bytes > MAX_EDIT_BYTES:
        raise EditRefused(
            f"The file {path} is too large for this tool: {size_bytes} bytes, the limit is {MAX_EDIT_BYTES}. "
            "Use shell tools such as `sed -n`, `head`, `tail` and `grep -n`."
        )


def _list(path: str) -> str:
    entries: list[str] = []
    whole = _walk(path, LISTING_DEPTH, entries)
    more = "" if whole else f"[more than {MAX_LISTED_ENTRIES} entries; the rest is left out]\n"
    listing = "".join(f"{entry}\n" for entry in [path, *entries])
    return f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n{listing}{more}"


def _walk(folder: str, depth: int, entries: list[str]) -> bool:
    """Add what is in `folder`, in order, links not followed; False if the limit cut it short."""
    try:
        fd = open_path(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return True
    try:
        with os.scandir(fd) as found:
            visible = ((entry.name, entry.is_dir(follow_symlinks=False)) for entry in found if entry.name[0] != ".")
            children = sorted(visible)
    finally:
        os.close(fd)
    for name, is_folder in children:
        if len(entries) == MAX_LISTED_ENTRIES:
            return False
        path = os.path.join(folder, name)
        entries.append(f"{path}/" if is_folder else path)
        if is_folder and depth > 1 and not _walk(path, depth - 1, entries):
            return False
    return True
