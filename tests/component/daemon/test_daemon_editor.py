"""The agents' editor through a real daemon: files, texts, history."""

from __future__ import annotations

import os
import stat

import pytest
import trio

from prorl_ipc.errors import CallFailed
from prorl_ipc.file_calls import EditFile, FileEdited


@pytest.fixture
def edit(sandbox):
    async def edit(command, path, **fields):
        with trio.fail_after(20):
            call = EditFile(command=command, path=str(path), **fields)
            return await sandbox.call(call, FileEdited, timeout_s=10)

    return edit


async def test_a_file_from_its_creation_to_the_last_undo(edit, tmp_path):
    path = tmp_path / "new" / "module.py"
    assert await edit("create", path, file_text="def f():\n\treturn 1\n") == FileEdited(
        output=f"File created successfully at: {path}", ok=True
    )
    viewed = await edit("view", path)
    assert viewed.output == f"Here's the result of running `cat -n` on {path}:\n     1\tdef f():\n     2\t\treturn 1\n"
    replaced = await edit("str_replace", path, old_str="return 1", new_str="return 2")
    assert replaced.output == (
        f"The file {path} has been edited. Here's the result of running `cat -n` on a snippet of {path}:\n"
        "     1\tdef f():\n     2\t\treturn 2\n"
        "Review the changes and make sure they are as expected. Edit the file again if necessary."
    )
    inserted = await edit("insert", path, insert_line=0, new_str="import os")
    assert "a snippet of the edited file:\n     1\timport os\n     2\tdef f():\n" in inserted.output
    assert path.read_text() == "import os\ndef f():\n\treturn 2\n"
    undone = await edit("undo_edit", path)
    assert undone.output.startswith(f"Last edit to {path} undone successfully. Here's the result of running `cat -n`")
    assert path.read_text() == "def f():\n\treturn 2\n"
    assert (await edit("undo_edit", path)).ok
    assert path.read_text() == "def f():\n\treturn 1\n"
    assert await edit("undo_edit", path) == FileEdited(output=f"No edit history found for {path}.", ok=False)


async def test_histories_are_per_file_and_end_with_it(edit, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_text("0")
        assert (await edit("str_replace", path, old_str="0", new_str="1")).ok
    assert (await edit("undo_edit", one)).ok
    assert (one.read_text(), two.read_text()) == ("0", "1")
    two.unlink()
    assert (await edit("create", two, file_text="fresh")).ok
    assert not (await edit("undo_edit", two)).ok


@pytest.mark.parametrize(
    ("command", "path", "fields", "said"),
    [
        ("view", "{tmp}/none", {}, "The path {tmp}/none does not exist. Please provide a valid path."),
        (
            "view",
            "etc/passwd",
            {},
            "The path etc/passwd is not an absolute path, it should start with `/`. Maybe you meant /etc/passwd?",
        ),
        (
            "create",
            "{tmp}/file",
            {"file_text": ""},
            "File already exists at: {tmp}/file. Cannot overwrite files using command `create`.",
        ),
        (
            "create",
            "{tmp}/dangling",
            {"file_text": ""},
            "File already exists at: {tmp}/dangling. Cannot overwrite files using command `create`.",
        ),
        (
            "insert",
            "{tmp}",
            {"insert_line": 0, "new_str": ""},
            "The path {tmp} is a directory and only the `view` command can be used on directories",
        ),
        (
            "view",
            "{tmp}",
            {"view_range": [1, 2]},
            "The `view_range` parameter is not allowed when `path` points to a directory.",
        ),
        ("create", "{tmp}/x", {}, "Parameter `file_text` is required for command: create"),
        ("str_replace", "{tmp}/file", {}, "Parameter `old_str` is required for command: str_replace"),
        ("insert", "{tmp}/file", {"new_str": "x"}, "Parameter `insert_line` is required for command: insert"),
        ("insert", "{tmp}/file", {"insert_line": 0}, "Parameter `new_str` is required for command: insert"),
        ("undo_edit", "{tmp}/file", {}, "No edit history found for {tmp}/file."),
        (
            "delete",
            "{tmp}/file",
            {},
            "Unrecognized command delete. The allowed commands for the str_replace_editor tool are: view, create, "
            "str_replace, insert, undo_edit",
        ),
        (
            "view",
            "{tmp}/binary",
            {},
            "The file {tmp}/binary is a binary file and cannot be viewed or edited with this tool.",
        ),
        (
            "view",
            "{tmp}/pipe",
            {},
            "The path {tmp}/pipe is not a regular file and cannot be viewed or edited with this tool.",
        ),
        (
            "view",
            "{tmp}/huge",
            {},
            "The file {tmp}/huge is too large for this tool: 1073741824 bytes, the limit is 10485760. Use shell tools "
            "such as `sed -n`, `head`, `tail` and `grep -n`.",
        ),
        (
            "create",
            "{tmp}/file/below",
            {"file_text": ""},
            "Ran into File exists while trying to write to {tmp}/file/below",
        ),
        ("view", "a\0b", {}, "The path holds a NUL. Please provide a valid path."),
    ],
)
async def test_what_is_wrong_is_said_in_the_trained_words_and_nothing_is_written(
    edit, tmp_path, command, path, fields, said
):
    (tmp_path / "file").write_text("content")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 30)
    before = sorted(os.listdir(tmp_path))
    answer = await edit(command, path.format(tmp=tmp_path), **fields)
    assert answer == FileEdited(output=said.format(tmp=tmp_path), ok=False)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_text() == "content"


async def test_a_relative_path_that_is_below_the_working_directory_is_suggested(edit, tmp_path):
    (tmp_path / "home" / "notes").write_text("")
    assert (await edit("view", "notes")).output.endswith(f"Maybe you meant {tmp_path}/home/notes?")


async def test_a_directory_is_listed_two_levels_deep_without_hidden_items(edit, tmp_path):
    for name in ("b/c/d", ".hidden/x", "a"):
        (tmp_path / "tree" / name).mkdir(parents=True)
    (tmp_path / "tree" / "b" / "file").touch()
    (tmp_path / "tree" / "link").symlink_to("b")
    root = f"{tmp_path}/tree"
    listing = "".join(f"{line}\n" for line in (root, f"{root}/a/", f"{root}/b/", f"{root}/b/c/", f"{root}/b/file"))
    assert (await edit("view", root)).output == (
        f"Here's the files and directories up to 2 levels deep in {root}, excluding hidden items:\n"
        f"{listing}{root}/link\n"
    )


async def test_a_large_directory_is_cut_short(edit, tmp_path):
    for number in range(1100):
        (tmp_path / f"{number:04}").touch()
    listed = (await edit("view", tmp_path)).output
    assert listed.endswith("[more than 1000 entries; the rest is left out]\n")
    assert listed.count("\n") == 1003


async def test_mode_line_ends_encoding_and_links_stay(edit, tmp_path):
    path = tmp_path / "script"
    path.write_bytes(b"caf\xe9 one\r\ntwo\r\n")
    path.chmod(0o750)
    (tmp_path / "link").symlink_to("script")
    replaced = await edit("str_replace", tmp_path / "link", old_str="one\ntwo", new_str="1\n2")
    assert replaced.ok
    assert "[not valid UTF-8: read as Latin-1]\n[lines end in CR LF, which is kept]\n" in replaced.output
    assert path.read_bytes() == b"caf\xe9 1\r\n2\r\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert (tmp_path / "link").is_symlink()
    assert {entry.name for entry in tmp_path.iterdir()} == {"script", "link", "home"}


async def test_long_files_are_clipped(edit, tmp_path):
    path = tmp_path / "long"
    path.write_text("line\n" * 100_000)
    clipped = await edit("view", path, max_output_bytes=5000)
    assert clipped.output.count("\n") < 500
    assert "<response clipped><NOTE>" in clipped.output
    tail = await edit("view", path, view_range=[99_999, -1])
    assert tail.output.endswith(" 99999\tline\n100000\tline\n")


async def test_history_is_bounded(edit, tmp_path):
    path = tmp_path / "file"
    path.write_text("edit 0")
    for number in range(110):
        assert (await edit("str_replace", path, old_str=str(number), new_str=str(number + 1))).ok
    undone = 0
    while (await edit("undo_edit", path)).ok:
        undone += 1
    assert undone == 100
    assert path.read_text() == "edit 10"


async def test_an_impossible_limit_is_a_failure_of_the_call(edit, tmp_path):
    with pytest.raises(CallFailed, match="max_output_bytes"):
        await edit("view", tmp_path, max_output_bytes=0)
