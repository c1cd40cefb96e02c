"""The fake carries out the calls that the real daemon does, also those that a verb makes several of."""

from __future__ import annotations

from prorl_trio.sandbox.sandbox import FILE_PIECE_BYTES
from prorl_trio.testing.fake_sandbox import FakeSandbox

LARGE = bytes(range(256)) * (2 * FILE_PIECE_BYTES // 256) + b"tail"


async def test_a_programs_input_comes_in_pieces():
    sandbox = FakeSandbox("fake", {})
    result = await sandbox.exec(["cat"], timeout_s=5, stdin=LARGE, max_output_bytes=100)
    assert result.stdout.endswith(LARGE[-50:])
    assert result.stdout_dropped_bytes == len(LARGE) - 100
    assert sandbox.actions == ["cat"]


async def test_a_large_file_is_one_action():
    sandbox = FakeSandbox("fake", {})
    await sandbox.write_file("/tmp/large", LARGE)
    assert await sandbox.read_file("/tmp/large") == LARGE
    assert sandbox.files == {"/tmp/large": LARGE}
    assert sandbox.actions == ["write /tmp/large", "read /tmp/large"]


async def test_a_folder_goes_in_and_comes_out_as_it_was(tmp_path):
    files = {"a": b"1", "deep/er/b": b"", "deep/c": b"3"}
    for name, content in files.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    sandbox = FakeSandbox("fake", {})
    went_in = await sandbox.upload(tmp_path / "in", "/tmp/tree")
    assert sandbox.files == {f"/tmp/tree/{name}": content for name, content in files.items()}
    came_out = await sandbox.download("/tmp/tree", tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files
    assert (went_in.entries, went_in.size_bytes) == (came_out.entries, came_out.size_bytes) == (6, 2)
