"""Trees of files: what is safe, what travels, and what a hostile sender or a racing neighbour cannot do."""

from __future__ import annotations

import errno
import gc
import os
import stat
from contextlib import closing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_ipc.file_calls import TreeContent, TreeEntry
from prorl_ipc.tree import TreeLimits, TreeRefused, link_stays_inside, split_path
from prorl_ipc.tree_reader import TreeReader
from prorl_ipc.tree_writer import TreeWriter

MIB = 1024 * 1024
LIMITS = TreeLimits()
ROOT = TreeEntry(path=b"", kind="folder", mode=0o755)


def file(path, mode=0o644):
    return TreeEntry(path=path, kind="file", mode=mode)


def link(path, target, kind="symlink"):
    return TreeEntry(path=path, kind=kind, mode=0, target=target)


def copy(source, target, *, limits=LIMITS, overwrite=False):
    with closing(TreeReader(os.fsencode(source), limits)) as reader:
        with closing(TreeWriter(os.fsencode(target), limits, overwrite=overwrite)) as writer:
            done = False
            while not done:
                parts, done = reader.next_parts()
                writer.take(parts)
            writer.finish()
        return reader


def write(target, *parts):
    writer = TreeWriter(os.fsencode(target), LIMITS, overwrite=False)
    try:
        writer.take(parts)
        writer.finish()
    finally:
        writer.close()


@pytest.fixture(autouse=True)
def no_fd_is_left(quick_gc):
    gc.collect()  # what earlier tests left is closed before it counts
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def test_everything_a_tree_has_travels(tmp_path):
    source = tmp_path / "source"
    (source / "read-only").mkdir(parents=True)
    (source / "read-only" / "file").write_bytes(os.urandom(3_000_000))
    (source / "tool").write_bytes(b"x")
    (source / "tool").chmod(0o6755)
    (source / os.fsdecode(b"caf\xe9")).touch()
    os.link(source / "tool", source / "read-only" / "same")
    (source / "read-only" / "up").symlink_to("../tool")
    (source / "dangling").symlink_to("nowhere")
    (source / "read-only").chmod(0o555)
    reader = copy(source, tmp_path / "target")
    target = tmp_path / "target"
    assert reader.left_out_total == 0
    assert (target / "read-only" / "file").read_bytes() == (source / "read-only" / "file").read_bytes()
    assert stat.S_IMODE((target / "read-only").stat().st_mode) == 0o555
    assert stat.S_IMODE((target / "tool").stat().st_mode) == 0o755
    assert (target / "tool").stat().st_ino == (target / "read-only" / "same").stat().st_ino
    assert os.readlink(target / "read-only" / "up") == "../tool"
    assert os.readlink(target / "dangling") == "nowhere"
    assert os.path.exists(os.fsencode(target) + b"/caf\xe9")
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


@pytest.mark.parametrize(
    "layout",
    [
        [(0, b"x"), (64 * MIB, b"y")],
        [(64 * MIB, b"y")],
        [(3 * MIB - 1, b"ab"), (5 * MIB, bytes(8192) + b"c")],
        [],
        [(4095, b"\0" * 4097)],
    ],
)
def test_what_is_written_takes_no_more_room_than_its_content(tmp_path, layout):
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as sparse:
        for at, content in layout:
            sparse.seek(at)
            sparse.write(content)
        sparse.truncate(65 * MIB + 17)
    copy(source, target, overwrite=True)
    assert target.stat().st_size == 65 * MIB + 17
    assert target.stat().st_blocks * 512 <= 32 * 1024
    assert target.read_bytes() == source.read_bytes()


def test_links_out_of_the_tree_and_devices_are_left_out_and_named(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "shadow").symlink_to("/etc/shadow")
    (source / "up").symlink_to("../secret")
    os.mkfifo(source / "pipe")
    (source / "file").write_bytes(b"content")
    reader = copy(source, tmp_path / "target")
    assert os.listdir(tmp_path / "target") == ["file"]
    assert sorted(reader.left_out) == [b"pipe", b"shadow", b"up"]
    assert reader.left_out_total == 3


@pytest.mark.parametrize(
    "parts",
    [
        [ROOT, file(b"/etc/evil")],
        [ROOT, file(b"../evil")],
        [ROOT, file(b"a/../../evil")],
        [ROOT, file(b"./a")],
        [ROOT, file(b"a//b")],
        [ROOT, file(b"a\0b")],
        [ROOT, file(b"x" * 256)],
        [ROOT, file(b"/".join([b"d"] * 65))],
        [ROOT, link(b"l", b"/etc/passwd")],
        [ROOT, link(b"l", b"../evil")],
        [ROOT, link(b"l", b"d/../../evil")],
        [ROOT, link(b"l", b"")],
        [ROOT, file(b"a"), file(b"a")],
        [ROOT, ROOT],
        [file(b"a")],
        [link(b"", b"a")],
        [file(b""), file(b"a")],
        [TreeContent(data=b"x")],
        [ROOT, TreeContent(data=b"x")],
        [ROOT, file(b"a"), TreeContent(data=b"")],
        [ROOT, link(b"h", b"l", "hardlink")],
        [ROOT, link(b"l", b"a"), link(b"h", b"l", "hardlink")],
        [ROOT, link(b"h", b"../../etc/passwd", "hardlink")],
        [ROOT, link(b"l", b"nowhere"), file(b"l")],
        [ROOT, TreeEntry(path=b"d", kind="folder", mode=0o755), link(b"d/l", b".."), file(b"d/l/evil")],
        [ROOT, file(b"a"), file(b"a/b")],
        [],
    ],
    ids=lambda parts: repr([getattr(part, "path", b"")[:20] for part in parts]),
)
def test_a_hostile_sender_writes_nothing_and_leaves_nothing(tmp_path, parts):
    target = tmp_path / "target"
    with pytest.raises((TreeRefused, OSError)):
        write(target, *parts)
    assert os.listdir(tmp_path) == []


def test_no_sender_can_set_user_id_bits(tmp_path):
    write(tmp_path / "target", file(b"", 0o7777), TreeContent(data=b"x"))
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o777


def test_a_folder_swapped_for_a_link_under_way_is_not_written_through(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    writer = TreeWriter(os.fsencode(tmp_path / "target"), LIMITS, overwrite=False)
    try:
        writer.take([ROOT, TreeEntry(path=b"d", kind="folder", mode=0o755), file(b"other")])
        (staging,) = tmp_path.glob(".*.part")
        (staging / "d").rmdir()
        (staging / "d").symlink_to(outside)
        with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
            writer.take([file(b"d/evil")])
    finally:
        writer.close()
    assert os.listdir(outside) == []
    assert os.listdir(tmp_path) == ["outside"]


def test_a_folder_swapped_for_a_link_under_way_is_not_read_through(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_bytes(b"secret")
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    reader = TreeReader(os.fsencode(source), LIMITS)
    try:
        (source / "d").rmdir()
        (source / "d").symlink_to(secret)
        parts, done = reader.next_parts()
    finally:
        reader.close()
    assert ([part.path for part in parts], done) == ([b""], True)
    assert reader.left_out == [b"d"]


def test_a_link_swapped_for_a_folder_under_way_is_left_out(tmp_path, monkeypatch):
    source, readlink = tmp_path / "source", os.readlink
    source.mkdir()
    (source / "link").symlink_to("nowhere")

    def swap_and_read(name, *, dir_fd):
        (source / "link").unlink()
        (source / "link").mkdir()
        return readlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "readlink", swap_and_read)
    with closing(TreeReader(os.fsencode(source), LIMITS)) as reader:
        parts, done = reader.next_parts()
    assert ([part.path for part in parts], done) == ([b""], True)
    assert reader.left_out == [b"link"]


def test_a_link_in_the_place_of_the_tree_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("/etc")
    reader = TreeReader(os.fsencode(tmp_path / "link"), LIMITS)
    try:
        with pytest.raises(TreeRefused, match="neither a file nor a folder"):
            reader.next_parts()
    finally:
        reader.close()


@pytest.mark.parametrize("limits", [TreeLimits(max_bytes=9), TreeLimits(max_entries=2)], ids=["bytes", "entries"])
def test_limits_hold_on_both_sides(tmp_path, limits):
    source = tmp_path / "source"
    source.mkdir()
    for name in "ab":
        (source / name).write_bytes(b"12345")
    with pytest.raises(TreeRefused, match=r"more than \d"):
        copy(source, tmp_path / "target", limits=limits)
    writer = TreeWriter(os.fsencode(tmp_path / "target"), limits, overwrite=False)
    try:
        with pytest.raises(TreeRefused, match=r"more than \d"):
            writer.take([ROOT, file(b"a"), TreeContent(data=b"12345"), file(b"b"), TreeContent(data=b"12345")])
    finally:
        writer.close()
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("before", ["file", "folder"])
@pytest.mark.parametrize("after", ["file", "folder"])
def test_what_is_there_is_replaced_as_a_whole_or_not_at_all(tmp_path, before, after):
    def make(path, kind, name):
        if kind == "file":
            path.write_text(name)
        else:
            (path / "sub").mkdir(parents=True)
            (path / "sub" / name).touch()

    make(tmp_path / "target", before, "old")
    make(tmp_path / "source", after, "new")
    with pytest.raises(TreeRefused, match="exists already"):
        copy(tmp_path / "source", tmp_path / "target")
    copy(tmp_path / "source", tmp_path / "target", overwrite=True)
    if after == "file":
        assert (tmp_path / "target").read_text() == "new"
    else:
        assert os.listdir(tmp_path / "target" / "sub") == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


@given(st.lists(st.sampled_from([b"..", b".", b"a", b"b", b""]), max_size=6), st.integers(0, 3))
def test_a_link_that_is_taken_never_climbs_out(names, depth):
    path = b"/".join([b"d"] * depth + [b"l"])
    target = b"/".join(names)
    if link_stays_inside(path, target):
        resolved = os.path.normpath(b"/root/" + b"d/" * depth + target)
        assert resolved == b"/root" or resolved.startswith(b"/root/")
        assert b".." not in target.lstrip(b"./")


@given(st.binary(max_size=50))
def test_a_path_that_is_taken_is_plain(path):
    try:
        names = split_path(path)
    except TreeRefused:
        return
    assert b"/".join(names) == path
    assert not {b"", b".", b".."} & set(names)


@pytest.mark.parametrize("which", ["lower", "all"])
@pytest.mark.parametrize("after", ["file", "folder"])
def test_a_folder_that_cannot_be_renamed_stays_and_gets_the_new_content(tmp_path, monkeypatch, after, which):
    """As over a layer: what is there has no other name, and links in it are removed, not followed."""
    target, source, elsewhere = (tmp_path / name for name in ("target", "source", "elsewhere"))
    for path in (target / "both/old", target / "gone/old", elsewhere / "kept"):
        path.mkdir(parents=True)
    (target / "file").mkdir()
    (target / "link").symlink_to(elsewhere)
    if after == "folder":
        (source / "both/new").mkdir(parents=True)
        (source / "link").mkdir()
        (source / "file").write_text("new")
        source.chmod(0o750)
    else:
        source.write_text("new")
    lower = {os.stat(path).st_ino for path in (target, target / "both", target / "file")}
    rename = os.rename

    def overlay_rename(old, new, *, src_dir_fd, dst_dir_fd):
        found = os.stat(old, dir_fd=src_dir_fd, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode) and (which == "all" or found.st_ino in lower):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", overlay_rename)
    copy(source, target, overwrite=True)
    copy(source, tmp_path / "beside")
    assert (tmp_path / "beside").exists()
    if after == "folder":
        found = {path.relative_to(target).as_posix() for path in target.rglob("*")}
        assert found == {"both", "both/new", "link", "file"}
        assert stat.S_IMODE(target.stat().st_mode) == 0o750
        assert (target / "file").read_text() == "new"
        assert not (target / "link").is_symlink()
    else:
        assert target.read_text() == "new"
    assert (elsewhere / "kept").is_dir()
    assert sorted(os.listdir(tmp_path)) == ["beside", "elsewhere", "source", "target"]


@pytest.mark.parametrize("number", [errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EINVAL, errno.EILSEQ, errno.EFBIG])
def test_what_the_disk_does_not_take_of_a_tree_is_the_trees_fault(tmp_path, monkeypatch, number):
    def refuse(*_args, **_fields):
        raise OSError(number, "refused")

    for call, parts in (
        ("link", [ROOT, file(b"a"), link(b"b", b"a", "hardlink")]),
        ("symlink", [ROOT, link(b"b", b"a")]),
        ("write", [ROOT, file(b"a"), TreeContent(data=b"x")]),
        ("ftruncate", [ROOT, file(b"a"), TreeContent(data=bytes(4096))]),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, refuse)
            with pytest.raises(TreeRefused, match="cannot be on this disk") as refused:
                write(tmp_path / "target", *parts)
        assert refused.value.code == "unsafe"
        assert os.listdir(tmp_path) == [], call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_write_is_no_fault_of_the_tree(tmp_path, monkeypatch, number):
    def fail(*_args, **_fields):
        raise OSError(number, "failed")

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(os, "ftruncate", fail)
    for parts in ([file(b"a"), link(b"b", b"a", "hardlink")], [file(b"a"), TreeContent(data=bytes(4096)), file(b"c")]):
        with pytest.raises(OSError, match="failed"):
            write(tmp_path / "target", ROOT, *parts)


def test_who_receives_a_tree_can_read_all_of_it(tmp_path):
    folder = TreeEntry(path=b"f", kind="folder", mode=0)
    write(tmp_path / "target", msgspec.structs.replace(ROOT, mode=0o020), file(b"a", 0), folder, file(b"f/b", 0o017))
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "target", *sorted((tmp_path / "target").rglob("*")))
    }
    assert modes == {"target": 0o520, "a": 0o400, "f": 0o500, "b": 0o417}
    write(tmp_path / "single", file(b"", 0o002))
    assert stat.S_IMODE((tmp_path / "single").stat().st_mode) == 0o402
