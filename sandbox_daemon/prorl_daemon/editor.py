"""`str_replace_editor` inside the sandbox: view, create, str_replace, insert, undo_edit. One history for all files."""

from __future__ import annotations

import os
import stat
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
import trio

from prorl_daemon.files import PIECE_BYTES, replace_file
from prorl_daemon.paths import open_path
from prorl_daemon.threads import run_blocking
from prorl_ipc.file_calls import FileEdited
from prorl_ipc.server import CallError

if TYPE_CHECKING:
    from prorl_ipc.file_calls import EditFile


T = TypeVar("T")

MAX_EDIT_BYTES = 10 * 1024 * 1024
"""Largest file that the editor reads or writes. Larger files need shell tools."""
MAX_UNDO_EDITS = 100
MAX_UNDO_BYTES = 64 * 1024 * 1024
"""Limit of stored earlier contents, all files together. The oldest are dropped first."""
MAX_LISTED_ENTRIES = 1000
LISTING_DEPTH = 2
MAX_OUTPUT_BYTES = 1024 * 1024
NEW_FILE_MODE = 0o644
COMMANDS = ("view", "create", "str_replace", "insert", "undo_edit")
REVIEW = "Review the changes and make sure they are as expected. Edit the file again if necessary."


# The editor's operations on text: decode, number, replace once, insert, cut. Pure.
#
# The sentences are the ones agents were trained on; their wording, backquotes included, is part of the interface.

SNIPPET_LINES = 4
"""Lines shown before and after an edit."""
MAX_LISTED_LINES = 100
"""Limit of listed lines in which a text occurs."""
CLIPPED = (
    "<response clipped><NOTE>To save on context only part of this file has been shown to you. You should retry this "
    "tool after you have searched inside the file with `grep -n` in order to find the line numbers of what you are "
    "looking for.</NOTE>"
)


class EditRefused(Exception):
    """The agent requested an impossible edit. The message is for the agent."""


class Document(msgspec.Struct, frozen=True):
    """A file's text. `crlf`: lines of the file ended in CR LF, and `text` has LF instead.

    `ends`, for a file with both, records for each line in order whether it ended in CR LF (1) or LF (0).
    """

    text: str
    encoding: Literal["utf-8", "latin-1"]
    crlf: bool
    ends: bytes = b""

    @property
    def lines(self) -> list[str]:
        """Return the lines as `cat -n` counts them: only LF ends a line, and the last LF begins none."""
        return _lines(self.text)

    @property
    def note(self) -> str:
        """Return a note to the agent about the file's form; empty for the usual form."""
        notes = ["[not valid UTF-8: read as Latin-1]"] if self.encoding == "latin-1" else []
        if self.ends:
            notes.append("[some lines end in LF and some in CR LF, which is kept; old_str matches either]")
        elif self.crlf:
            notes.append("[lines end in CR LF, which is kept]")
        return "".join(f"{note}\n" for note in notes)


def decode(content: bytes, path: str) -> Document:
    """Decode a file as UTF-8, else as Latin-1, which can represent any bytes without changes.

    Raises:
        EditRefused: it contains a NUL, so it is not text.
    """
    if b"\0" in content:
        raise EditRefused(f"The file {path} is a binary file and cannot be viewed or edited with this tool.")
    encoding: Literal["utf-8", "latin-1"] = "utf-8"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        encoding = "latin-1"
        text = content.decode("latin-1")
    crlf_count, count = text.count("\r\n"), text.count("\n")
    if not crlf_count:
        return Document(text, encoding, False)
    ends = bytes(line.endswith("\r") for line in text.split("\n")[:-1]) if crlf_count < count else b""
    return Document(text.replace("\r\n", "\n"), encoding, True, ends)


def encode(document: Document, text: str, path: str) -> bytes:
    """Return `text` in the form of `document`.

    Raises:
        EditRefused: it has characters that the file's encoding lacks.
    """
    if document.ends:
        text = _with_ends(document, text)
    elif document.crlf:
        text = text.replace("\n", "\r\n")
    try:
        return text.encode(document.encoding)
    except UnicodeEncodeError as exc:
        what = ascii(exc.object[exc.start : exc.end][:10])
        raise EditRefused(f"The file {path} is {document.encoding} text, which cannot hold {what}.") from exc


def _with_ends(document: Document, text: str) -> str:
    """Return the edited text with its original line ends; new lines get the ends of the lines they replace."""
    before, after = document.text.split("\n")[:-1], text.split("\n")
    lines, last = after[:-1], after[-1]
    shorter = min(len(before), len(lines))
    head = next((at for at in range(shorter) if before[at] != lines[at]), shorter)
    shorter -= head
    tail = next((at for at in range(shorter) if before[-1 - at] != lines[-1 - at]), shorter)
    ends = document.ends
    replaced = ends[head : len(ends) - tail]
    new_count = len(lines) - head - tail
    beside = replaced[-1:] or ends[max(head - 1, 0) :][:1]
    same = replaced[: max(0, min(len(replaced), new_count) - 1)]
    new = same + beside * (new_count - len(same))
    kept = ends[:head] + new + ends[len(ends) - tail :]
    return "".join(f"{line}\r\n" if crlf else f"{line}\n" for line, crlf in zip(lines, kept, strict=True)) + last


def replace_once(document: Document, old: str, new: str, path: str) -> tuple[str, int]:
    """Return the text with the only occurrence of `old` replaced, and the line number where it begins.

    Raises:
        EditRefused: `old` is empty, equals `new`, does not occur, or occurs more than once (overlaps count).
    """
    if document.crlf:
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    if not old:
        raise EditRefused("No replacement was performed. `old_str` must not be empty.")
    if old == new:
        raise EditRefused("No replacement was performed. `new_str` and `old_str` must be different.")
    text = document.text
    start = text.find(old)
    if start < 0:
        raise EditRefused(f"No replacement was performed, old_str `{old}` did not appear verbatim in {path}.")
    if text.find(old, start + 1) >= 0:
        lines = _lines_of_occurrences(text, old)
        raise EditRefused(
            f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines {lines}. "
            "Please ensure it is unique."
        )
    return text[:start] + new + text[start + len(old) :], text.count("\n", 0, start) + 1


def insert_lines(document: Document, after_line: int, new: str) -> str:
    """Return the text with `new` as separate lines after line `after_line`; 0 inserts at the beginning.

    A missing end of line is added to `new`, except at the end of a file that lacks one itself.

    Raises:
        EditRefused: the line does not exist.
    """
    lines = document.lines
    if not 0 <= after_line <= len(lines):
        raise EditRefused(
            f"Invalid `insert_line` parameter: {after_line}. "
            f"It should be within the range of lines of the file: {[0, len(lines)]}"
        )
    if document.crlf:
        new = new.replace("\r\n", "\n")
    before = "".join(f"{line}\n" for line in lines[:after_line])
    unended = bool(lines) and not document.text.endswith("\n")
    if unended and after_line == len(lines):
        return before + new
    rest = "\n".join(lines[after_line:])
    if after_line < len(lines) and not unended:
        rest += "\n"
    return before + (new if new.endswith("\n") else f"{new}\n") + rest


def view_lines(document: Document, view_range: list[int] | None) -> tuple[list[str], int]:
    """Return the lines to show, and the number of the first one.

    Raises:
        EditRefused: the range is outside of this file.
    """
    lines = document.lines
    if view_range is None:
        return lines, 1
    if len(view_range) != 2:
        raise EditRefused("Invalid `view_range`. It should be a list of two integers.")
    first, last = view_range
    if not 1 <= first <= max(1, len(lines)):
        raise EditRefused(
            f"Invalid `view_range`: {view_range}. Its first element `{first}` should be within the range of lines of "
            f"the file: {[1, len(lines)]}"
        )
    if last > len(lines):
        raise EditRefused(
            f"Invalid `view_range`: {view_range}. Its second element `{last}` should be smaller than the number of "
            f"lines in the file: `{len(lines)}`"
        )
    if last != -1 and last < first:
        raise EditRefused(
            f"Invalid `view_range`: {view_range}. Its second element `{last}` should be larger or equal than its first "
            f"`{first}`"
        )
    return lines[first - 1 :] if last == -1 else lines[first - 1 : last], first


def snippet(text: str, first_line: int, inserted: str) -> tuple[list[str], int]:
    """Return the lines around an edit that put `inserted` at `first_line`, and the number of the first one."""
    start = max(1, first_line - SNIPPET_LINES)
    end = first_line + inserted.count("\n") + SNIPPET_LINES
    return _lines(text)[start - 1 : end], start


def number_lines(lines: list[str], first: int, *, max_bytes: int) -> str:
    """Number lines as `cat -n` prints them.

    Text beyond `max_bytes` (of UTF-8) is replaced by a note.
    """
    shown: list[str] = []
    left_bytes = max_bytes
    for number, line in enumerate(lines, first):
        # Encode no more of a line than could be shown.
        row = f"{number:6}\t{line[:left_bytes]}\n"
        size_bytes = len(row.encode(errors="replace"))
        if size_bytes > left_bytes or len(line) > left_bytes:
            shown.append(row.encode(errors="replace")[: max(0, left_bytes)].decode(errors="ignore"))
            return "".join(shown).rstrip("\n") + "\n" + CLIPPED
        left_bytes -= size_bytes
        shown.append(row)
    return "".join(shown)


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _lines_of_occurrences(text: str, old: str) -> list[int]:
    """Return the numbers of lines where `old` begins, each once."""
    numbers: list[int] = []
    line, counted, at = 1, 0, text.find(old)
    while at >= 0 and len(numbers) < MAX_LISTED_LINES:
        line += text.count("\n", counted, at)
        counted = at
        if not numbers or numbers[-1] != line:
            numbers.append(line)
        at = text.find(old, at + 1)
    return numbers


class Editor:
    """Edits files for an agent, one call at a time. Mistakes of the agent are reported in the answer."""

    def __init__(self, *, cwd: str, limiter: trio.CapacityLimiter) -> None:
        self._cwd = cwd
        self._limiter = limiter
        self._turn = trio.Lock()
        self._earlier: deque[tuple[str, bytes]] = deque()
        self._earlier_bytes = 0

    def __repr__(self) -> str:
        return f"<Editor: {len(self._earlier)} edits can be undone, {self._earlier_bytes} bytes>"

    async def run(self, request: EditFile) -> FileEdited:
        """Carry out the request. A file is written completely or not at all.

        A cancelled call returns when its edit has ended.

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
    """Replace surrogates, which represent bytes of names that are not UTF-8 and cannot be sent."""
    return text.encode(errors="backslashreplace").decode()


def _mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def _last_index(edits: deque[tuple[str, bytes]], path: str) -> int:
    return next(index for index in range(len(edits) - 1, -1, -1) if edits[index][0] == path)


def _read(path: str) -> bytes:
    # O_NONBLOCK: opening a pipe without a writer must not block a thread indefinitely.
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
    """Add the content of `folder`, in order, without following links; return False if the limit was reached."""
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
