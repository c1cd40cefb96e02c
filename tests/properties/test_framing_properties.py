from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_ipc.errors import FrameTooLarge
from prorl_ipc.framing import HEADER_BYTES, FrameDecoder, encode_frame

MAX_FRAME_BYTES = 300
payloads = st.lists(st.binary(max_size=MAX_FRAME_BYTES), max_size=12)


def encode_all(frames: list[bytes]) -> bytes:
    return b"".join(encode_frame(frame, max_frame_bytes=MAX_FRAME_BYTES) for frame in frames)


@st.composite
def split(draw: st.DrawFn, blob: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(blob)), max_size=20)))
    return [blob[start:end] for start, end in zip([0, *cuts], [*cuts, len(blob)], strict=True)]


@given(payloads, st.data())
def test_any_split_of_any_frames_round_trips(frames: list[bytes], data: st.DataObject):
    blob = encode_all(frames)
    decoder = FrameDecoder(MAX_FRAME_BYTES)
    received: list[bytes] = []
    for chunk in data.draw(split(blob)):
        decoder.feed(chunk)
        received += decoder
        assert decoder.partial_bytes <= HEADER_BYTES + MAX_FRAME_BYTES
    assert received == frames
    assert decoder.partial_bytes == 0


@given(payloads, st.data())
def test_feeding_and_taking_in_any_order_gives_the_same_frames(frames: list[bytes], data: st.DataObject):
    chunks = data.draw(split(encode_all(frames)))
    decoder = FrameDecoder(MAX_FRAME_BYTES)
    received: list[bytes] = []
    for chunk in chunks:
        decoder.feed(chunk)
        taken = [decoder.next_frame() for _ in range(data.draw(st.integers(0, 3)))]
        received += [frame for frame in taken if frame is not None]
    received += decoder
    assert received == frames


@given(payloads, st.binary(min_size=1, max_size=MAX_FRAME_BYTES), st.data())
def test_a_truncated_stream_is_never_mistaken_for_a_whole_one(frames: list[bytes], last: bytes, data: st.DataObject):
    whole = encode_all(frames)
    last_frame = encode_all([last])
    kept = data.draw(st.integers(1, len(last_frame) - 1))
    decoder = FrameDecoder(MAX_FRAME_BYTES)
    decoder.feed(whole + last_frame[:kept])
    assert list(decoder) == frames
    assert decoder.partial_bytes == kept


@given(payloads, st.integers(MAX_FRAME_BYTES + 1, 2**32 - 1), st.binary(max_size=50), st.data())
def test_frames_before_one_that_is_too_large_are_delivered_and_it_is_refused_from_its_header(
    frames: list[bytes], announced_bytes: int, rest: bytes, data: st.DataObject
):
    blob = encode_all(frames) + announced_bytes.to_bytes(HEADER_BYTES, "little") + rest
    decoder = FrameDecoder(MAX_FRAME_BYTES)
    received: list[bytes] = []

    def decode() -> None:
        for chunk in data.draw(split(blob)):
            decoder.feed(chunk)
            while (frame := decoder.next_frame()) is not None:
                received.append(frame)

    with pytest.raises(FrameTooLarge) as caught:
        decode()
    assert caught.value.size_bytes == announced_bytes
    assert received == frames


@given(st.binary(max_size=2_000))
def test_garbage_gives_frames_or_a_refusal_and_nothing_else(garbage: bytes):
    decoder = FrameDecoder(MAX_FRAME_BYTES)
    decoder.feed(garbage)
    received: list[bytes] = []
    with suppress(FrameTooLarge):
        while (frame := decoder.next_frame()) is not None:
            received.append(frame)
    prefix = encode_all(received)
    assert garbage.startswith(prefix)
    assert decoder.partial_bytes == len(garbage) - len(prefix)
