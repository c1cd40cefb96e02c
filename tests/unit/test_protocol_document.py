"""PROTOCOL.md must not fall behind the structs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

import msgspec
import pytest

import ipc
from ipc import arena_memory, arena_socket, arena_wire, file_calls, rpc, sandbox_calls, session, wire
from ipc.channel import MAX_SOCKET_PATH_BYTES
from ipc.envelope import encode_envelope
from ipc.framing import encode_frame
from prorl_trio.models import JobSpec, Outcome, Segment
from prorl_trio.service import feed, observation

if TYPE_CHECKING:
    from types import ModuleType

TEXT = (Path(ipc.__file__).parent / "PROTOCOL.md").read_text()


def structs(module: ModuleType) -> list[type[msgspec.Struct]]:
    return [
        struct
        for name, struct in inspect.getmembers(module, inspect.isclass)
        if issubclass(struct, msgspec.Struct) and not name.startswith("_") and struct.__module__ == module.__name__
    ]


WIRE = [struct for module in (wire, sandbox_calls, file_calls, session, arena_wire) for struct in structs(module)]


@pytest.mark.parametrize("struct", [*WIRE, JobSpec, Outcome], ids=lambda s: s.__name__)
def test_every_struct_and_every_field_is_described(struct: type[msgspec.Struct]):
    assert f"`{struct.__name__}`" in TEXT
    missing = [field for field in struct.__struct_encode_fields__ if f"`{field}`" not in TEXT]
    assert not missing


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


def test_the_codes_are_described():
    codes = [
        code
        for struct in (wire.Refused, session.SessionRefused, arena_wire.ArenaRefused)
        for code in get_args(get_type_hints(struct)["code"])
    ]
    assert {"token", "replaced"} <= set(codes)
    assert not [code for code in codes if f"`{code}`" not in TEXT]


@pytest.mark.parametrize(
    "stated",
    [
        f"Sandbox RPC**, version {wire.PROTOCOL_VERSION}:",
        f"Trainer session**, version {session.SESSION_PROTOCOL_VERSION}:",
        f"**Arena**, version {arena_wire.ARENA_PROTOCOL_VERSION}:",
        f"layout version u32 = {arena_memory.ARENA_LAYOUT_VERSION}",
        f"frames of at most {arena_socket.MAX_FRAME_BYTES} bytes",
        f"{arena_socket.MAX_ARENA_READERS} readers (default)",
        f"{wire.MAX_FRAME_BYTES:,} bytes of payload",
        f"{session.MAX_MESSAGE_BYTES:,} bytes",
        f"at most {MAX_SOCKET_PATH_BYTES} bytes",
        f"At most {rpc.MAX_CONCURRENT_CALLS} (default)",
        f"waits {rpc.HANDSHAKE_TIMEOUT_S:g} s (default)",
        f"to {rpc.CANCEL_GRACE_S:g} s for the answer",
        f"at most {rpc.MAX_OUTBOX_BYTES // 2**20} MiB and one frame",
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
