"""PROTOCOL.md has a table for all that travels; its prose must not fall behind the code."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec
import pytest

import prorl_ipc
from prorl_ipc import (
    arena_memory,
    arena_socket,
    client,
    file_calls,
    handshake,
    outbox,
    sandbox_calls,
    server,
    session,
    wire,
)
from prorl_ipc.channel import MAX_SOCKET_PATH_BYTES
from prorl_ipc.framing import encode_frame
from prorl_ipc.websocket import CloseCode
from prorl_ipc.wire import encode_envelope
from prorl_trio.client import BlockingClient, RolloutClient, backend_calls
from prorl_trio.edges.operations import TABLE
from prorl_trio.edges.websocket import server as connection
from prorl_trio.node import edges
from prorl_trio.sessions import feed, observation
from prorl_trio.types import backends, errors
from prorl_trio.types import models as trajectory
from prorl_trio.types.errors import ErrorCode, FailureCause, ServiceError
from prorl_trio.types.models import Outcome, PolicySpan, Segment
from prorl_trio.types.programs import FinishAgent, OpenAgent

if TYPE_CHECKING:
    from types import ModuleType

    from prorl_trio.edges.operations import Row

VERBS = [name for name, verb in vars(backend_calls._BackendVerbs).items() if isinstance(verb, backend_calls._Verb)]
TEXT = (Path(prorl_ipc.__file__).parents[1] / "PROTOCOL.md").read_text()


def structs(module: ModuleType) -> list[type[msgspec.Struct]]:
    return [
        struct
        for name, struct in inspect.getmembers(module, inspect.isclass)
        if issubclass(struct, msgspec.Struct) and not name.startswith("_") and struct.__module__ == module.__name__
    ]


WIRE = [struct for module in (wire, sandbox_calls, file_calls, session, arena_memory) for struct in structs(module)]


def tables(kind: str) -> set[object]:
    """What the tables of a kind are about."""
    found = re.findall(rf"<!-- {kind} (\S+) (.*) -->", TEXT)
    return {getattr(import_module(module), name) for module, names in found for name in names.split()}


def test_every_struct_of_the_wire_has_a_table():
    domain = [struct for struct in structs(trajectory) if struct.__struct_config__.forbid_unknown_fields]
    assert {Outcome, Segment} <= {*domain}
    answers = {row.request.answer for row in TABLE}
    assert {*WIRE, *domain, *answers} <= tables("frames") | tables("fields")


def test_every_closed_set_of_what_a_rollout_records_has_a_table():
    record = ("StopReason", "FinishReason", "SegmentReason", "LogprobKind", "ToolOutcome", "Status", "TerminalStatus")
    assert {getattr(trajectory, name) for name in record} | {ErrorCode, FailureCause} <= tables("values")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.request.operation)
def test_each_operation_returns_what_its_type_says(row: Row[Any]):
    (base,) = row.request.__orig_bases__
    assert get_args(base) == (row.request.answer,)
    assert not [code for code in row.codes if f"`{code}`" not in TEXT]


def test_every_request_has_a_row_and_every_client_a_method_of_its_own():
    requests = {struct for struct in structs(backends) if hasattr(struct, "operation")}
    assert {row.request for row in TABLE} == requests | {OpenAgent, FinishAgent}  # which `open_agent` sends
    for each in (RolloutClient, BlockingClient):
        assert {vars(backend_calls._BackendVerbs)[name].__doc__ for name in VERBS} == {r.__doc__ for r in requests}
        assert all(getattr(each, name) is vars(backend_calls._BackendVerbs)[name] for name in VERBS)


def test_the_answers_of_engines_are_on_the_page():
    assert not [answer for answer in get_args(backends.EngineAnswer) if f"`{answer}`" not in TEXT]


def stated_values(heading: str) -> set[str]:
    """The values in the first column of the tables whose head begins with this."""
    tables = re.findall(rf"^\| {re.escape(heading)}[^\n]*\n\|---[^\n]*\n((?:\|[^\n]*\n)+)", TEXT, re.MULTILINE)
    assert tables, f"the page has no table headed {heading}"
    return {value for table in tables for value in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)}


SETS = {
    "close code": {str(code.value) for code in CloseCode},
    "refusal": set(get_args(connection.RefusalCode)),
    "rejection": {
        error.code
        for error in (
            errors.MalformedJob,
            errors.UnknownHandler,
            errors.DuplicateJob,
            errors.AlreadyDelivered,
            errors.AdmissionRejected,
            errors.Draining,
        )
    },
}


@pytest.mark.parametrize("heading", sorted(SETS))
def test_the_closed_sets_are_on_the_page_all_of_each_and_no_more(heading: str):
    assert stated_values(heading) == SETS[heading]


def test_the_literals_of_frames_are_on_the_page():
    literals = {
        value
        for struct in WIRE
        for hint in get_type_hints(struct).values()
        for value in get_args(hint)
        if isinstance(value, str) and value
    }
    assert {"hardlink", "replaced", "file_size", "token"} <= literals
    assert not [value for value in literals if f"`{value}`" not in TEXT]


def test_every_error_that_travels_has_its_code_on_the_page():
    codes = {error.code for error in ServiceError.__subclasses__() if error.__module__ == errors.__name__}
    assert "backends_busy" in codes
    assert not [code for code in codes if f"`{code}`" not in TEXT]


def test_the_endpoint_files_keys_are_described():
    keys = set(re.findall(r'endpoints(?: = {|\[)"(\w+)"', inspect.getsource(edges)))
    assert {"url", "unix_url", "rest_url"} <= keys
    assert not [key for key in keys if f"`{key}`" not in TEXT]


def test_defaults_of_spans_are_left_out_whatever_object_they_are():
    fields: dict[str, object] = {"start": 0, "end": 1, "policy_version": "1", "engine": "e"}
    apart = {"temperature": float("1"), "top_p": int("1"), "top_k": int("0"), "logprob_kind": "".join(["r", "aw"])}
    span = msgspec.convert({**fields, **apart}, PolicySpan)
    assert msgspec.to_builtins(span) == fields
    span = PolicySpan(start=0, end=1, policy_version="1", engine="e", temperature=float("1"), top_p=float("1"))
    assert msgspec.to_builtins(span) == fields
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(span)) == fields
    other = msgspec.structs.replace(span, temperature=0.5, logprob_kind="processed")
    assert msgspec.to_builtins(other) == {**fields, "temperature": 0.5, "logprob_kind": "processed"}


@pytest.mark.parametrize("struct", WIRE, ids=lambda s: s.__name__)
def test_the_tag_is_the_name_under_the_key_type(struct: type[msgspec.Struct]):
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    assert (info.tag_field, info.tag) == ("type", struct.__name__)
    assert info.forbid_unknown_fields


def test_the_example_frame_is_what_we_send():
    hexadecimal = re.search(r"^(11 00 00 00 .*)$", TEXT, re.MULTILINE)
    assert hexadecimal is not None
    example = bytes.fromhex(hexadecimal[1])
    assert encode_frame(encode_envelope(wire.Cancel(id=7)), max_frame_bytes=100) == example
    assert len(example) == 21


@pytest.mark.parametrize(
    "stated",
    [
        f"Sandbox RPC**, version {wire.PROTOCOL_VERSION}:",
        f"Trainer session**, version {session.SESSION_PROTOCOL_VERSION}:",
        f"**Arena**, version {arena_memory.ARENA_PROTOCOL_VERSION}:",
        f"layout version u32 = {arena_memory.ARENA_LAYOUT_VERSION}",
        f"frames of at most {arena_socket.MAX_FRAME_BYTES} bytes",
        f"{arena_socket.MAX_ARENA_READERS} readers (default)",
        f"{wire.MAX_FRAME_BYTES:,} bytes of payload",
        f"{session.MAX_MESSAGE_BYTES:,} bytes",
        f"at most {session.MAX_FRAME_JOBS:,} jobs (in",
        f"at most {session.MAX_CANCEL_TARGETS} `targets`",
        f"is 0 to {session.MAX_ATTEMPTS:,}.",
        f"at most {MAX_SOCKET_PATH_BYTES} bytes",
        f"At most {server.MAX_CONCURRENT_CALLS} (default)",
        f"waits {handshake.HANDSHAKE_TIMEOUT_S:g} s (default)",
        f"to {client.CANCEL_GRACE_S:g} s for the answer",
        f"at most {outbox.MAX_OUTBOX_BYTES // 2**20} MiB and one frame",
        f"{observation.MAX_OBSERVED_FRAMES:,} frames or {observation.MAX_OBSERVED_BYTES // 2**20} MiB",
        f"at most {feed.MAX_UNACKED_OUTCOMES} outcomes or {feed.MAX_UNACKED_BYTES // 2**20} MiB",
    ],
)
def test_the_numbers_are_ours(stated: str):
    assert stated in TEXT


def test_a_segment_takes_nine_bytes_a_token():
    segment = Segment.from_arrays([1, -2, 3], [0.0, -0.5, 0.0], [0, 1, 0], [])
    encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(segment))
    assert encoded["token_ids"] == b"\x01\0\0\0\xfe\xff\xff\xff\x03\0\0\0"
    assert encoded["loss_mask"] == b"\0\x01\0"
    assert sum(len(encoded[key]) for key in ("token_ids", "logprobs", "loss_mask")) == 9 * len(segment)
