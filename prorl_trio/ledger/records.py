"""The records of the log: a header, what happened (msgpack), and payload bytes.

The header starts with the segment's salt, eight random bytes that stand in the segment's file name only: so the next
record can be found behind a damaged one, and no payload can pretend to be a record. Its checksum covers header and
meta; payloads have checksums of their own, in the meta.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

import msgspec

__all__ = [
    "HEADER_BYTES",
    "SALT_BYTES",
    "Accepted",
    "AcceptedJob",
    "Acknowledged",
    "Attempted",
    "Damaged",
    "Finished",
    "Forgotten",
    "Header",
    "Payload",
    "Record",
    "Relocated",
    "SegmentHead",
    "SessionClosed",
    "SessionCursors",
    "SessionOpened",
    "encode_header",
    "encode_meta",
    "parse_record",
    "payloads",
]

SALT_BYTES: Final = 8
_HEADER: Final = struct.Struct("<8sIIQQQ")
_CHECKED_FROM: Final = SALT_BYTES + 4
HEADER_BYTES: Final = _HEADER.size


class _Record(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of what may happen."""


class SessionCursors(msgspec.Struct, frozen=True, array_like=True):
    """A session's state: everything up to `acked` is acknowledged, `last` was given last."""

    session_id: str
    acked: int
    last: int


class SegmentHead(_Record, frozen=True):
    """First record of a segment: every session there is, so that older segments are not needed for them."""

    number: int
    sessions: list[SessionCursors]


class SessionOpened(_Record, frozen=True):
    """A new session; its first outcome gets a cursor above `first_cursor`."""

    session_id: str
    first_cursor: int


class SessionClosed(_Record, frozen=True):
    """The session and everything in it is gone."""

    session_id: str


class AcceptedJob(msgspec.Struct, frozen=True, array_like=True):
    """A job and its spec, one of the record's payloads."""

    job_id: str
    fingerprint: bytes
    length: int
    crc: int


class Accepted(_Record, frozen=True):
    """A batch of jobs. One record, so that it is stored as a whole or not at all."""

    session_id: str
    jobs: list[AcceptedJob]


class Attempted(_Record, frozen=True):
    """An attempt of an unfinished job began."""

    job_id: str
    attempt: int


class Finished(_Record, frozen=True):
    """A job's one terminal record; the payload is its outcome."""

    session_id: str
    job_id: str
    fingerprint: bytes
    attempt: int
    cursor: int
    length: int
    crc: int


class Acknowledged(_Record, frozen=True):
    """The trainer has everything up to `cursor`. `at_s` is in seconds since the epoch."""

    session_id: str
    cursor: int
    at_s: float


class Forgotten(_Record, frozen=True):
    """These jobs of the session are gone."""

    session_id: str
    job_ids: list[str]


class Relocated(_Record, frozen=True):
    """A live payload of an old segment, written again: a spec if `cursor` is None, else an outcome."""

    session_id: str
    job_id: str
    fingerprint: bytes
    attempt: int
    accepted: int
    cursor: int | None
    length: int
    crc: int


class Damaged(_Record, frozen=True):
    """Instead of `Relocated`, where the payload could not be read: the job is kept, without it."""

    session_id: str
    job_id: str
    fingerprint: bytes
    attempt: int
    accepted: int
    cursor: int | None
    length: int


Record = (
    SegmentHead
    | SessionOpened
    | SessionClosed
    | Accepted
    | Attempted
    | Finished
    | Acknowledged
    | Forgotten
    | Relocated
    | Damaged
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class Header(NamedTuple):
    """`durable`: every record up to that sequence number was on the disk when this one was written."""

    sequence: int
    durable: int
    meta_length: int
    body_length: int


class Payload(NamedTuple):
    """One payload of a record: where it begins in the body, and what it must be."""

    start: int
    length: int
    crc: int


def encode_meta(record: Record) -> bytes:
    """What `encode_header` is for."""
    return _encoder.encode(record)


def encode_header(salt: bytes, sequence: int, durable: int, meta: bytes, body_length: int) -> bytes:
    """The bytes before `meta`; the payloads follow it."""
    unchecked = _HEADER.pack(salt, 0, len(meta), sequence, durable, body_length)
    crc = zlib.crc32(meta, zlib.crc32(unchecked[_CHECKED_FROM:]))
    return _HEADER.pack(salt, crc, len(meta), sequence, durable, body_length)


def parse_record(segment: memoryview, salt: bytes, offset: int) -> tuple[Header, Record] | None:
    """The record at `offset`; None if there is none, or it is damaged or cut off. Payloads are not checked."""
    meta_start = offset + HEADER_BYTES
    if meta_start > len(segment) or segment[offset : offset + SALT_BYTES] != salt:
        return None
    _, crc, meta_length, sequence, durable, body_length = _HEADER.unpack_from(segment, offset)
    meta_end = meta_start + meta_length
    if meta_end + body_length > len(segment):
        return None
    if zlib.crc32(segment[offset + _CHECKED_FROM : meta_end]) != crc:
        return None
    try:
        record = _decoder.decode(segment[meta_start:meta_end])
    except msgspec.DecodeError:
        return None
    return Header(sequence, durable, meta_length, body_length), record


def payloads(record: Record) -> list[Payload]:
    """The payloads in a record's body, in order."""
    if isinstance(record, Finished | Relocated):
        return [Payload(0, record.length, record.crc)]
    if not isinstance(record, Accepted):
        return []
    found, start = [], 0
    for job in record.jobs:
        found.append(Payload(start, job.length, job.crc))
        start += job.length
    return found
