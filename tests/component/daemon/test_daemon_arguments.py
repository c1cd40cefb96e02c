"""No value of a call's arguments ends the daemon, or meets an error that it did not expect."""

from __future__ import annotations

import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import trio

from prorl_ipc.errors import CallFailed, CallTimedOut
from prorl_ipc.file_calls import (
    DownloadBegin,
    DownloadParts,
    EditFile,
    FileRead,
    FileWrite,
    TransferAbort,
    TransferAborted,
    TreeContent,
    TreeEntry,
    UploadBegin,
    UploadEnd,
    UploadParts,
)
from prorl_ipc.sandbox_calls import (
    BashInput,
    BashRestart,
    BashRun,
    Exec,
    ExecInput,
    IpythonRestart,
    IpythonRun,
    Ping,
    Pong,
    PortOpen,
    SandboxCall,
)

CALL_TIMEOUT_S = 60
WORDS = ("", "\0", "a\0b", "x" * 100_000, "9" * 5000, "-1", "a\nb", "=", "..", "~nobody", "\u202e\u200b", "é\x1b[2J")
NAMES = ("", "a\0b", "=", "x" * 200_000)
INTEGERS = (0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -1.0, 1e-308, 1e308, math.inf, -math.inf, math.nan)
EXPECTED = (
    "bad_request", "busy", "exists", "io", "is_directory", "no_kernel", "no_ports", "no_space", "no_transfer",
    "no_user", "not_absolute", "not_found", "not_running", "permission", "too_large", "unsafe",
)  # fmt: skip
BYTES = (b"", b"\0", b"\xff" * 100_000, b"\x03\x04\x1a")


def valid_calls(folder):
    """One of each kind, that works or is refused for its state; none does harm beyond `folder`."""
    (folder / "file").write_text("one\ntwo\n")
    file, made = str(folder / "file"), str(folder / "made")
    entry = TreeEntry(path=b"", kind="folder", mode=0o755)
    limits: dict[str, Any] = {"max_bytes": 2**20, "max_entries": 10}
    return [
        Ping(),
        Exec(argv=["true"], timeout_s=20, stdin=b"x", env={"A": "b"}, cwd=str(folder), linger_s=0.1, watch=[file]),
        ExecInput(input_id=3, data=b"x", last=True),
        BashRun(command="true", timeout_s=20, quiet_timeout_s=20),
        BashInput(keys=b"x", timeout_s=20, quiet_timeout_s=20),
        BashRestart(),
        IpythonRun(code="1", timeout_s=20),
        IpythonRestart(),
        FileRead(path=file),
        FileWrite(path=made, data=b"x"),
        FileWrite(path=made, data=b"x", append=True),
        EditFile(command="view", path=file, view_range=[1, 2]),
        EditFile(command="create", path=str(folder / "created"), file_text="x"),
        EditFile(command="str_replace", path=file, old_str="one", new_str="uno"),
        EditFile(command="insert", path=file, insert_line=1, new_str="x"),
        EditFile(command="undo_edit", path=file),
        UploadBegin(transfer_id=1, path=str(folder / "up"), roots=[str(folder)], overwrite=False, **limits),
        UploadParts(transfer_id=1, parts=[entry, TreeEntry(path=b"a", kind="file", mode=0o644), TreeContent(b"x")]),
        UploadEnd(transfer_id=1),
        DownloadBegin(transfer_id=2, path=str(folder), roots=[str(folder)], **limits),
        DownloadParts(transfer_id=2),
        TransferAbort(transfer_id=2),
        PortOpen(),
    ]


def values_of(kind: Any) -> list[Any]:
    """Extreme values of a type of a field."""
    if get_origin(kind) in (Union, types.UnionType):
        return [value for each in get_args(kind) for value in values_of(each)]
    if get_origin(kind) is list:
        inner = values_of(get_args(kind)[0])
        return [[], *([each] for each in inner), inner[:1] * 3]
    if get_origin(kind) is dict:
        return [{}, *({each: "x"} for each in NAMES), *({"X": each} for each in NAMES)]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [changed for base in STRUCTS[kind] for changed in changes_of(base)]
    return {str: WORDS, int: INTEGERS, float: FLOATS, bytes: BYTES, bool: (True, False), types.NoneType: (None,)}[kind]


STRUCTS: dict[Any, tuple[msgspec.Struct, ...]] = {
    TreeEntry: tuple(
        TreeEntry(path=b"b", kind=kind, mode=0o644, target=b"file")
        for kind in ("folder", "file", "symlink", "hardlink")
    ),
    TreeContent: (TreeContent(b"x"),),
}


def changes_of(call: msgspec.Struct) -> list[msgspec.Struct]:
    """`call` with one field after the other replaced by each extreme value of its type."""
    hints = get_type_hints(type(call))
    return [
        msgspec.structs.replace(call, **{name: value})
        for name in call.__struct_fields__
        for value in values_of(hints[name])
    ]


def begin_of(call, folder):
    """The transfer that `call` is a step of."""
    which = DownloadBegin if isinstance(call, DownloadParts) else UploadBegin
    begin = next(each for each in valid_calls(folder) if isinstance(each, which))
    return msgspec.structs.replace(begin, path=str(folder / "up")) if which is UploadBegin else begin


def _patience_s(call):
    """Input waits for its program, which never comes here."""
    return 0.02 if isinstance(call, ExecInput) else CALL_TIMEOUT_S


def test_each_kind_of_call_is_here(tmp_path):
    assert {type(call) for call in valid_calls(tmp_path)} == set(get_args(SandboxCall))


@pytest.mark.timeout(120)
async def test_no_value_of_an_argument_is_an_error_of_the_daemons_own(sandbox, tmp_path):
    unexpected = []
    count = 0
    for valid in valid_calls(tmp_path):
        for call in (valid, *changes_of(valid)):
            count += 1
            if isinstance(call, UploadParts | UploadEnd | DownloadParts):
                await sandbox.call(begin_of(call, tmp_path), msgspec.Raw, timeout_s=CALL_TIMEOUT_S)
            with trio.fail_after(CALL_TIMEOUT_S + 10):  # noqa: ASYNC912 - a call waits for its answer
                try:
                    await sandbox.call(call, msgspec.Raw, timeout_s=_patience_s(call))
                except CallFailed as exc:
                    if exc.code not in EXPECTED:
                        unexpected.append((repr(call)[:300], str(exc)[:300]))
                except CallTimedOut:
                    assert isinstance(call, ExecInput)
            if isinstance(getattr(call, "transfer_id", None), int):
                for transfer_id in {call.transfer_id, 1, 2}:
                    await sandbox.call(TransferAbort(transfer_id), TransferAborted, timeout_s=CALL_TIMEOUT_S)
        assert (await sandbox.call(Ping(), Pong, timeout_s=5)).uptime_s > 0
    assert not unexpected
    assert count > 500
