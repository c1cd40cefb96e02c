"""Uploads and downloads through a real daemon: what they do, how they end, what a hostile sandbox cannot do."""

from __future__ import annotations

import os
import threading
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from prorl_ipc.client import open_rpc_client
from prorl_ipc.file_calls import TransferAborted, TransferBegun, TreeContent, TreeEntry, TreeParts
from prorl_ipc.server import serve_rpc
from prorl_trio.sandbox.client import DaemonSandbox
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import ProcessProvider
from prorl_trio.sandbox.transfer import TransferOptions

MIB = 1024 * 1024
BLOCKS = 200


@pytest.fixture
async def sandbox(tmp_path):
    """A daemon of its own, which may use `inside`."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "run").mkdir()
    with trio.fail_after(100):
        async with ProcessProvider(tmp_path / "run").open_sandbox(SandboxSpec()) as sandbox:
            yield sandbox


@pytest.fixture
def options(tmp_path):
    def options(**fields):
        return TransferOptions(remote_roots=(str(tmp_path / "inside"),), **fields)

    return options


async def open_fds(sandbox):
    return (await sandbox.ping()).open_fds


async def test_a_large_file_goes_in_and_out_in_bounded_memory(sandbox, tmp_path, options):
    block = os.urandom(MIB)
    _write_blocks(tmp_path / "large", block)
    told = []
    before_kib = _peak_rss_kib()
    await sandbox.upload(
        tmp_path / "large", f"{tmp_path}/inside/large", options=options(), on_progress=lambda *seen: told.append(seen)
    )
    report = await sandbox.download(f"{tmp_path}/inside/large", tmp_path / "back", options=options())
    assert _peak_rss_kib() - before_kib < 60 * 1024
    assert report.size_bytes == BLOCKS * MIB
    assert told[-1] == (1, BLOCKS * MIB)
    assert len(told) >= BLOCKS
    assert _has_blocks(tmp_path / "back", block)


def _write_blocks(path, block):
    with open(path, "wb") as file:
        for _ in range(BLOCKS):
            file.write(block)


def _has_blocks(path, block):
    with open(path, "rb") as file:
        return all(file.read(MIB) == block for _ in range(BLOCKS)) and not file.read(1)


def _peak_rss_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


@pytest.mark.parametrize(
    ("remote", "error"),
    [
        ("/etc/passwd", PermissionError),
        ("{inside}/../secret", PermissionError),
        ("{inside}/link", PermissionError),
        ("{inside}/link-to-folder/secret", PermissionError),
        ("{inside}/none", FileNotFoundError),
        ("inside/file", ValueError),
        ("{inside}/a\0b", ValueError),
    ],
)
async def test_nothing_is_read_outside_of_the_roots(sandbox, tmp_path, options, remote, error):
    inside = tmp_path / "inside"
    (tmp_path / "secret").write_text("secret")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "link-to-folder").symlink_to(tmp_path)
    with pytest.raises(error):
        await sandbox.download(remote.format(inside=inside), tmp_path / "out", options=options())
    assert not (tmp_path / "out").exists()
    assert (await sandbox.bash("echo alive", timeout_s=20)).output == "alive\n"


@pytest.mark.parametrize("remote", ["/etc/evil", "{inside}/../evil", "{inside}/link/evil", "{inside}"])
async def test_nothing_is_written_outside_of_the_roots(sandbox, tmp_path, options, remote):
    inside = tmp_path / "inside"
    (tmp_path / "outside").mkdir()
    (inside / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "file").write_text("content")
    with pytest.raises(PermissionError, match="not below any of the allowed roots"):
        await sandbox.upload(tmp_path / "file", remote.format(inside=inside), options=options())
    assert os.listdir(tmp_path / "outside") == []
    assert os.listdir(inside) == ["link"]


async def test_a_secret_of_the_host_does_not_come_in_through_a_downloaded_link(sandbox, tmp_path, options):
    tree = tmp_path / "inside" / "tree"
    tree.mkdir()
    (tree / "shadow").symlink_to("/etc/shadow")
    (tree / "root").symlink_to("/")
    (tree / "real").write_text("content")
    report = await sandbox.download(str(tree), tmp_path / "out", options=options())
    assert os.listdir(tmp_path / "out") == ["real"]
    assert (sorted(report.left_out), report.left_out_total) == (["root", "shadow"], 2)


async def test_a_tree_that_is_swapped_all_the_time_never_yields_what_is_outside(sandbox, tmp_path, options):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("secret")
    folder = tmp_path / "inside" / "tree" / "folder"
    folder.mkdir(parents=True)
    (folder / "file").write_text("harmless")
    aside, link = folder.parent / "aside", folder.parent / "link"
    link.symlink_to(tmp_path / "outside")
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            folder.rename(aside)
            link.rename(folder)
            folder.rename(link)
            aside.rename(folder)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for number in range(40):
            out = tmp_path / f"out-{number}"
            await sandbox.download(str(folder.parent), out, options=options())
            texts = {path.read_text() for path in out.rglob("file")}
            assert texts <= {"harmless"}
            assert not [path for path in out.rglob("*") if path.is_symlink()]
    finally:
        stop.set()
        swapper.join()


async def test_cancelled_at_any_moment_nothing_is_left_on_either_side(sandbox, tmp_path, options):
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(30):
        (folder / str(number)).write_bytes(os.urandom(200_000))
    remote = f"{tmp_path}/inside/tree"
    await sandbox.upload(folder, f"{tmp_path}/inside/source", options=options())
    before = await open_fds(sandbox)
    here = len(os.listdir("/proc/self/fd"))
    for exponent in range(12):
        with trio.move_on_after(0.001 * 1.6**exponent) as scope:
            await sandbox.upload(folder, remote, options=options(overwrite=True))
        assert sorted(os.listdir(tmp_path / "inside")) in (["source"], ["source", "tree"])
        if scope.cancelled_caught and (tmp_path / "inside" / "tree").exists():
            assert len(os.listdir(tmp_path / "inside" / "tree")) == 30
        with trio.move_on_after(0.001 * 1.6**exponent):
            await sandbox.download(f"{tmp_path}/inside/source", tmp_path / "out", options=options(overwrite=True))
        assert not list(tmp_path.glob(".*"))
    assert await open_fds(sandbox) <= before + 4
    assert len(os.listdir("/proc/self/fd")) <= here
    await sandbox.upload(folder, remote, options=options(overwrite=True))


@asynccontextmanager
async def _hostile(*pieces):
    """A sandbox whose daemon answers downloads with these pieces, the last one again and again."""
    answers = list(pieces)

    async def handle(body, context):
        call = body_type(body)
        if call == "DownloadParts":
            return answers.pop(0) if len(answers) > 1 else answers[0]
        return TransferAborted() if call == "TransferAbort" else TransferBegun()

    def body_type(body):
        import msgspec

        return msgspec.msgpack.decode(body)["type"]

    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: serve_rpc(theirs, handle, token="t"))
        async with open_rpc_client(ours, token="t") as rpc:
            yield DaemonSandbox("sbx-1", rpc, lambda what: what)
        nursery.cancel_scope.cancel()


ROOT = TreeEntry(path=b"", kind="folder", mode=0o755)


@pytest.mark.parametrize(
    "pieces",
    [
        [TreeParts(parts=[ROOT, TreeEntry(path=b"../evil", kind="file", mode=0o644)], done=True)],
        [TreeParts(parts=[ROOT, TreeEntry(path=b"l", kind="symlink", mode=0, target=b"/etc/shadow")], done=True)],
        [TreeParts(parts=[], done=False)],
        [TreeParts(parts=[], done=True)],
        [
            TreeParts(parts=[TreeEntry(path=b"", kind="file", mode=0o644)], done=False),
            TreeParts(parts=[TreeContent(data=b"x" * MIB)], done=False),
        ],
    ],
    ids=["name", "link", "no progress", "no root", "endless"],
)
async def test_a_daemon_that_was_taken_over_writes_nothing_outside_and_is_refused(tmp_path, pieces):
    with trio.fail_after(20):
        async with _hostile(*pieces) as sandbox:
            with pytest.raises(ValueError, match=r".+"):
                await sandbox.download("/tmp/x", tmp_path / "out", options=TransferOptions(max_bytes=8 * MIB))
    assert os.listdir(tmp_path) == []
