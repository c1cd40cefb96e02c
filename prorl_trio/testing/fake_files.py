"""The files of a `FakeSandbox`: a dictionary, and the calls that read and change it."""

from __future__ import annotations

import errno
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_ipc.file_calls import (
    DownloadBegin,
    DownloadParts,
    EditFile,
    FileData,
    FileEdited,
    FileRead,
    FileWrite,
    FileWritten,
    TransferAbort,
    TransferAborted,
    TransferBegun,
    TreeContent,
    TreeEntry,
    TreeParts,
    UploadBegin,
    UploadEnd,
    UploadEnded,
    UploadParts,
    UploadTaken,
)
from prorl_trio.testing.fake_shell import HOME

if TYPE_CHECKING:
    from prorl_ipc.file_calls import TreePart
    from prorl_ipc.sandbox_calls import SandboxCall, SandboxReply

_FOLDERS: Final = {PurePosixPath("/"), PurePosixPath("/tmp"), PurePosixPath(HOME)}
_FOLDER_MODE: Final = 0o755
_FILE_MODE: Final = 0o644


class _Upload(NamedTuple):
    """A tree on its way in: where to, and the files so far, of which the last one is still growing."""

    path: str
    files: dict[str, bytes]


class FakeFiles:
    """Keeps files by absolute path, and no folders, modes or links.

    Attributes:
        content: of each file.
    """

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self._uploads: dict[int, _Upload] = {}
        self._downloads: dict[int, list[TreePart]] = {}

    def answer(self, request: SandboxCall) -> SandboxReply:
        """Carry out a call that is about files."""
        match request:
            case FileRead():
                data = self._read(request.path)
                end = request.offset + request.max_bytes
                return FileData(data=data[request.offset : end], size_bytes=len(data), eof=end >= len(data))
            case FileWrite():
                self._check_path(request.path)
                before = self.content.get(request.path, b"") if request.append else b""
                self.content[request.path] = before + bytes(request.data)
                return FileWritten(size_bytes=len(self.content[request.path]))
            case EditFile():
                return self._edit(request)
        return self._transfer(request)

    def _read(self, path: str) -> bytes:
        self._check_path(path)
        if path not in self.content:
            raise FileNotFoundError(errno.ENOENT, path)
        return self.content[path]

    def _check_path(self, path: str) -> None:
        if not path.startswith("/"):
            raise ValueError(f"{path} is not absolute")
        folders = {parent for file in self.content for parent in PurePosixPath(file).parents}
        if PurePosixPath(path) in _FOLDERS | folders:
            raise IsADirectoryError(errno.EISDIR, path)

    def _edit(self, edit: EditFile) -> FileEdited:
        """Know `view` of a whole file, `create` and `str_replace`."""
        known = edit.path in self.content
        text = self.content.get(edit.path, b"").decode()
        match edit.command:
            case "create" if not known:
                self.content[edit.path] = (edit.file_text or "").encode()
                return FileEdited(output=f"File created successfully at: {edit.path}", ok=True)
            case "view" if known:
                lines = "".join(f"{number:6}\t{line}\n" for number, line in enumerate(text.splitlines(), 1))
                return FileEdited(output=f"Here's the result of running `cat -n` on {edit.path}:\n{lines}", ok=True)
            case "str_replace" if known and edit.old_str and text.count(edit.old_str) == 1:
                self.content[edit.path] = text.replace(edit.old_str, edit.new_str or "").encode()
                return FileEdited(output=f"The file {edit.path} has been edited.", ok=True)
        return FileEdited(output=f"{edit.command} cannot be done to {edit.path}.", ok=False)

    def _transfer(self, request: SandboxCall) -> SandboxReply:
        match request:
            case UploadBegin(transfer_id=number, path=path, overwrite=overwrite):
                if self._below(path) and not overwrite:
                    raise FileExistsError(errno.EEXIST, path)
                self._uploads[number] = _Upload(path, {})
                return TransferBegun()
            case UploadParts(transfer_id=number, parts=parts):
                for part in parts:
                    _take(self._uploads[number], part)
                return UploadTaken()
            case UploadEnd(transfer_id=number):
                upload = self._uploads.pop(number)
                for path in self._below(upload.path):
                    del self.content[path]
                self.content.update(upload.files)
                return UploadEnded()
            case DownloadBegin(transfer_id=number, path=path):
                self._downloads[number] = self._tree(path)
                return TransferBegun()
            case DownloadParts(transfer_id=number):
                return TreeParts(parts=self._downloads.pop(number), done=True)
            case TransferAbort(transfer_id=number):
                self._uploads.pop(number, None)
                self._downloads.pop(number, None)
                return TransferAborted()
        raise TypeError(f"{type(request).__name__} is not about files")

    def _below(self, path: str) -> list[str]:
        return sorted(file for file in self.content if file == path or file.startswith(f"{path}/"))

    def _tree(self, path: str) -> list[TreePart]:
        files = self._below(path)
        if not files:
            raise FileNotFoundError(errno.ENOENT, path)
        parts: dict[str, list[TreePart]] = {}
        for file in files:
            inner = file[len(path) + 1 :]
            for folder in reversed(PurePosixPath(inner).parents):
                name = "" if str(folder) == "." else str(folder)
                if inner:
                    parts.setdefault(name, [TreeEntry(name.encode(), "folder", _FOLDER_MODE)])
            content = self.content[file]
            parts[inner] = [TreeEntry(inner.encode(), "file", _FILE_MODE), *([TreeContent(content)] if content else [])]
        return [part for some in parts.values() for part in some]


def _take(upload: _Upload, part: TreePart) -> None:
    files = upload.files
    if isinstance(part, TreeContent):
        files[next(reversed(files))] += part.data
    elif part.kind == "file":
        files[f"{upload.path}/{part.path.decode()}" if part.path else upload.path] = b""
