"""Whatever bytes a sandbox has for a name or a path: its answers reach the node as text."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_ipc.file_calls import FileEdited
from prorl_ipc.portable_text import portable_text
from prorl_ipc.sandbox_calls import BashResult, CellError, CellResult, Display, ExecResult
from prorl_ipc.wire import encode_reply


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é", "plain é"), ("/tmp/\udce9", r"/tmp/\udce9"), ("\ud800 é", r"\ud800 é"), ("", "")],
)
def test_what_utf_8_has_no_form_for_is_spelled_out(text, shown):
    assert portable_text(text) == shown


ANY_TEXT = st.text(st.characters(), max_size=8)  # surrogates too


@given(ANY_TEXT, st.binary(max_size=8))
def test_every_reply_of_a_daemon_can_travel(text, raw):
    replies = [
        BashResult(
            output=text, exit_code=0, cwd=text, duration_s=1.0, timed_out=False, restarted=False, dropped_bytes=0
        ),
        CellResult(
            stdout=text,
            stderr=text,
            result=text,
            error=CellError(name=text, value=text, traceback=text),
            execution_count=1,
            duration_s=0.0,
            dropped_bytes=0,
            displays=[Display(mime=text, data=raw, size_bytes=0)],
        ),
        ExecResult(exit_code=1, stdout=raw, stderr=raw, duration_s=0.0, timed_out=False),
        FileEdited(ok=True, output=text),
    ]
    for reply in replies:
        received = msgspec.msgpack.decode(encode_reply(reply), type=type(reply))
        if not any("\ud800" <= c <= "\udfff" for c in text):
            assert received == reply
        if isinstance(received, ExecResult):
            assert received.stdout == raw
