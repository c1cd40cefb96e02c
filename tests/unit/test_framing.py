from __future__ import annotations

import socket
import threading
import time

import pytest

from prorl_ipc.errors import FrameTooLarge
from prorl_ipc.framing import HEADER_BYTES, FrameDecoder, encode_frame


def test_a_frame_is_its_little_endian_length_and_its_payload():
    assert encode_frame(b"abc", max_frame_bytes=3) == b"\x03\x00\x00\x00abc"
    assert encode_frame(b"", max_frame_bytes=0) == b"\x00\x00\x00\x00"
    assert encode_frame(bytes(0x1234), max_frame_bytes=0x1234)[:HEADER_BYTES] == b"\x34\x12\x00\x00"


def test_encoding_more_than_the_maximum_is_refused():
    with pytest.raises(FrameTooLarge, match="frame of 4 bytes exceeds the maximum of 3") as caught:
        encode_frame(b"abcd", max_frame_bytes=3)
    assert (caught.value.size_bytes, caught.value.max_frame_bytes) == (4, 3)


def test_frames_come_out_one_by_one_and_then_none():
    decoder = FrameDecoder(8)
    decoder.feed(b"\x01\x00\x00\x00a\x00\x00\x00\x00\x02\x00\x00\x00bc")
    assert [decoder.next_frame() for _ in range(4)] == [b"a", b"", b"bc", None]
    assert decoder.partial_bytes == 0


def test_a_decoder_knows_that_it_is_in_the_middle_of_a_frame():
    decoder = FrameDecoder(8)
    decoder.feed(b"\x03\x00")
    assert decoder.next_frame() is None
    assert decoder.partial_bytes == 2
    decoder.feed(b"\x00\x00ab")
    assert decoder.next_frame() is None
    assert decoder.partial_bytes == 6
    assert repr(decoder) == "<FrameDecoder: 6 of the next 7 bytes>"
    decoder.feed(b"c")
    assert list(decoder) == [b"abc"]
    assert decoder.partial_bytes == 0


def test_an_announced_length_over_the_maximum_is_refused_before_its_payload_comes():
    decoder = FrameDecoder(8)
    decoder.feed(b"\x01\x00\x00\x00a\xff\xff\xff\xff")
    assert decoder.next_frame() == b"a"
    for _ in range(2):
        with pytest.raises(FrameTooLarge) as caught:
            decoder.next_frame()
        assert (caught.value.size_bytes, caught.value.max_frame_bytes) == (0xFFFFFFFF, 8)
    decoder.feed(b"more")
    with pytest.raises(FrameTooLarge):
        decoder.next_frame()


def test_payloads_do_not_alias_what_was_fed():
    chunk = bytearray(b"\x01\x00\x00\x00a")
    decoder = FrameDecoder(8)
    decoder.feed(memoryview(chunk))
    chunk[-1] = 0
    assert decoder.next_frame() == b"a"


@pytest.mark.parametrize("read_bytes", [1, 4096])
def test_decoding_is_linear(read_bytes: int):
    def decode_s(frames: int) -> float:
        blob = encode_frame(b"x" * 60, max_frame_bytes=60) * frames
        decoder = FrameDecoder(60)
        started = time.process_time()
        found = 0
        for start in range(0, len(blob), read_bytes):
            decoder.feed(blob[start : start + read_bytes])
            found += sum(1 for _ in decoder)
        assert found == frames
        return time.process_time() - started

    frames = 1_500 if read_bytes == 1 else 30_000
    once = min(decode_s(frames) for _ in range(3))
    eight_times = min(decode_s(8 * frames) for _ in range(2))
    assert eight_times < 8 * once * 4  # quadratic would be 64 times


def test_one_large_feed_of_small_frames_is_linear():
    blob = encode_frame(b"x", max_frame_bytes=1) * 400_000
    decoder = FrameDecoder(1)
    started = time.process_time()
    decoder.feed(blob)
    assert sum(1 for _ in decoder) == 400_000
    assert time.process_time() - started < 10  # shifting 2 MB for each of 400,000 frames would take minutes


def test_it_serves_a_blocking_socket_too():
    ours, theirs = socket.socketpair()
    sent = [b"first", b"", b"x" * 300_000]

    def send() -> None:
        for payload in sent:
            theirs.sendall(encode_frame(payload, max_frame_bytes=1 << 20))
        theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    decoder = FrameDecoder(1 << 20)
    received: list[bytes] = []
    with ours:
        while chunk := ours.recv(65536):
            decoder.feed(chunk)
            received += decoder
    sender.join()
    assert received == sent
    assert decoder.partial_bytes == 0
