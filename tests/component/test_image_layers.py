"""Layers and images of them in the store: stored once by content, whole or absent, found by name."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from prorl_launch.image_commands import image as command
from prorl_trio.sandbox.images.compose import compose_image
from prorl_trio.sandbox.images.layers import find_layer, layers_dir, list_layers, remove_tree, store_layer
from prorl_trio.sandbox.images.locate import ImageRoot, locate_root
from prorl_trio.sandbox.images.store import find_image
from prorl_trio.types.errors import SandboxUnavailable


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_of(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    return path


def test_a_layer_is_stored_once_by_what_is_in_it(tmp_path):
    first = folder_of(tmp_path / "first", {"a/b": "1", "a/c": "2", "d": ""})
    second = folder_of(tmp_path / "second", {"d": "", "a/c": "2", "a/b": "1"})
    os.utime(second / "d", (1, 1))
    stored = store_layer(first)
    assert store_layer(second) == stored
    assert [layer.record for layer in list_layers()] == [stored.record]
    assert stored.record.entries == 4
    assert stored.record.size_bytes >= 2 * 4096
    assert [path.name for path in layers_dir().iterdir()] == [stored.folder.name]


@pytest.mark.parametrize("change", ["content", "mode", "name", "link", "place"])
def test_another_content_is_another_layer(change, tmp_path):
    folder = folder_of(tmp_path / "x", {"a/b": "1", "c": "2"})
    before = store_layer(folder).record.digest
    at = "/"
    match change:
        case "content":
            (folder / "c").write_text("3")
        case "mode":
            (folder / "c").chmod(0o755)
        case "name":
            (folder / "c").rename(folder / "d")
        case "link":
            (folder / "c").unlink()
            (folder / "c").symlink_to("a/b")
        case "place":
            at = "/x"
    assert store_layer(folder, at).record.digest != before


def test_a_layer_is_a_copy_with_links_modes_and_times_at_its_place(tmp_path):
    folder = folder_of(tmp_path / "x", {"bin/run": "#!/bin/sh\n", "data": "1"})
    (folder / "bin/run").chmod(0o4755)
    (folder / "data").chmod(0o444)
    (folder / "link").symlink_to("/nowhere")
    os.utime(folder / "data", (1, 5))
    content = store_layer(folder, "/opt/x").content / "opt/x"
    (folder / "data").unlink()
    assert (content / "bin/run").stat().st_mode & 0o7777 == 0o755
    assert (content / "data").stat().st_mtime == 5
    assert os.readlink(content / "link") == "/nowhere"


def test_what_cannot_be_a_layer_is_refused_and_leaves_nothing(tmp_path):
    folder = folder_of(tmp_path / "x", {"a": ""})
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "socket"))
        with pytest.raises(ValueError, match="neither file, folder nor link"):
            store_layer(folder)
    for source, at in ((folder / "a", "/"), (folder / "none", "/"), (folder, "relative"), (folder, "/a/../..")):
        with pytest.raises(ValueError, match=r"folder|absolute"):
            store_layer(source, at)
    assert list(layers_dir().iterdir()) == []


def test_trees_with_closed_folders_are_removed(tmp_path):
    folder = folder_of(tmp_path / "x", {"a/b/c/d": "", "e": ""})
    for closed in ("a/b/c", "a/b", "a"):
        (folder / closed).chmod(0)
    remove_tree(folder)
    assert not folder.exists()


def test_an_image_of_layers_is_its_base_and_them(tmp_path):
    root = folder_of(tmp_path / "root", {"etc/motd": ""})
    environment = store_layer(folder_of(tmp_path / "e", {"e": "1"}), "/opt/env")
    repository = store_layer(folder_of(tmp_path / "r", {"r": "1"}), "/testbed")
    compose_image("env", str(root), [environment.record.digest])
    made = compose_image("task/1", "env", [repository.record.digest])
    assert made.record.layers == (environment.record.digest, repository.record.digest)
    assert made.record.size_bytes == environment.record.size_bytes + repository.record.size_bytes
    over = str(folder_of(tmp_path / "o", {"o": "1"}))
    expected = ImageRoot(root, (environment.content, repository.content, Path(over)))
    assert locate_root("task/1", [over]) == expected
    assert locate_root("host", [repository.record.digest]) == ImageRoot(None, (repository.content,))
    # Another image under the base's name changes nothing.
    compose_image("env", "host", [repository.record.digest])
    assert locate_root("task/1", [over]) == expected
    assert compose_image("again", str(root), made.record.layers).record.digest == made.record.digest


def test_what_is_not_in_the_store_is_told(tmp_path):
    layer = store_layer(folder_of(tmp_path / "x", {"a": ""}))
    with pytest.raises(ValueError, match="base nothing of image x is not in the store"):
        compose_image("x", "nothing", [layer.record.digest])
    with pytest.raises(ValueError, match=r"sha256:0+ of image x is not in the store"):
        compose_image("x", "host", [f"sha256:{'0' * 64}"])
    for name in ("", "host", "/x", "docker://debian:12"):
        with pytest.raises(ValueError, match="cannot be called"):
            compose_image(name, "host", [layer.record.digest])
    assert find_image("x") is None
    compose_image("x", "host", [layer.record.digest])
    remove_tree(layer.folder)
    assert find_layer(layer.record.digest) is None
    with pytest.raises(SandboxUnavailable, match=f"layer {layer.record.digest} of image x is not in the store"):
        locate_root("x")


def test_commands(tmp_path):
    run = CliRunner().invoke
    folder = folder_of(tmp_path / "x", {"a": ""})
    digest = run(command, ["layer", str(folder), "--at", "/testbed"]).output.strip()
    assert find_layer(digest) is not None
    done = run(command, ["compose", "mine", digest])
    assert (done.exit_code, find_image("mine").record.layers) == (0, (digest,)), done.output
    assert "1 layers over host" in run(command, ["list"]).output
    assert run(command, ["compose", "mine", "sha256:none"]).exit_code == 1
    assert run(command, ["layer", str(folder / "a")]).exit_code == 1


def test_the_guide_stores_composes_and_names_layers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "venv", {"bin/python": ""})
    folder_of(tmp_path / "click-8.1", {"setup.py": ""})
    text = (Path(__file__).parents[2] / "docs/images.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    named, spelled_out = (locate_root(spec.image, spec.layers) for spec in (names["named"], names["spelled_out"]))
    assert named == spelled_out
    assert [sorted(os.listdir(layer)) for layer in named.layers] == [["opt"], ["testbed"]]
