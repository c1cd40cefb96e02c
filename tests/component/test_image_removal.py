"""Removal from the store of images: nothing in use goes, nothing that others are made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from prorl_launch.image_commands import image as command
from prorl_trio.sandbox.images.compose import compose_image, record_image
from prorl_trio.sandbox.images.layers import find_layer, layers_dir, list_layers, store_layer
from prorl_trio.sandbox.images.locate import open_root
from prorl_trio.sandbox.images.removal import StoreFull, evict, measure_store, prune, remove_image
from prorl_trio.sandbox.images.store import find_image, image_folder, images_dir, list_images
from prorl_trio.sandbox.images.uses import in_use, store_lock

KIB = 1024


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def layer(tmp_path):
    """Makes a layer whose file has so many KiB, and returns its digest."""

    def make(name, kib=4):
        folder = tmp_path / f"layer-{name}"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode() * (kib * KIB // len(name)))
        return store_layer(folder).record.digest

    return make


def pulled(name, layers, used_at_s):
    """An image as a registry's would be."""
    image = record_image(f"docker://{name}", "", layers)
    os.utime(image.folder / "image.json", (used_at_s, used_at_s))
    return image.record.name


def names():
    return [image.record.name for image in list_images()]


def test_an_image_goes_with_the_layers_that_only_it_has(layer):
    shared, own, other = layer("shared"), layer("own"), layer("other")
    compose_image("a", "host", [shared, own])
    compose_image("b", "host", [shared, other])
    remove_image("a")
    assert names() == ["b"]
    assert {found.record.digest for found in list_layers()} == {shared, other}
    with pytest.raises(ValueError, match="is of image b"):
        remove_image(other)
    remove_image("b")
    assert (list_layers(), list(layers_dir().iterdir())) == ([], [])
    for name in ("a", other):
        with pytest.raises(ValueError, match="is not in the store"):
            remove_image(name)


def test_what_is_in_use_stays(layer):
    digest, alone = layer("x"), layer("alone")
    compose_image("a", "host", [digest])
    with open_root("a", [alone]):
        for name in ("a", alone):
            with pytest.raises(ValueError, match="sandboxes use it"):
                remove_image(name)
        # Another image has taken the name: what the sandbox has, stays.
        compose_image("a", "host", [layer("y")])
        assert prune(0, time.time() + 10**6) == []
        assert find_layer(digest) is not None
    with store_lock():
        assert in_use() == frozenset()
    assert set(prune(0, time.time() + 10**6)) == {digest, alone}
    remove_image("a")


USE = """
import sys
from prorl_trio.sandbox.images.locate import open_root
with open_root("a"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_what_another_process_uses_stays_until_it_is_killed(layer):
    compose_image("a", "host", [layer("x")])
    user = subprocess.Popen([sys.executable, "-c", USE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with user:
        assert user.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="sandboxes use it"):
            remove_image("a")
        user.kill()
    remove_image("a")
    assert names() == []


def test_the_base_of_another_stays(tmp_path, layer):
    base = image_folder("base")
    (base / "root").mkdir(parents=True)
    record = {"name": "base", "digest": "sha256:0", "size_bytes": 1, "made_at_s": 0.0}
    (base / "image.json").write_text(json.dumps(record))
    compose_image("a", "base", [layer("x")])
    with pytest.raises(ValueError, match="it is the base of a"):
        remove_image("base")
    remove_image("a")
    remove_image("base")
    assert names() == []


def test_prune_takes_what_nobody_names_or_has_used_and_what_killed_commands_left(layer):
    named, old, new = layer("named"), layer("old"), layer("new")
    compose_image("a", "host", [named])
    for digest in (named, old):
        os.utime(find_layer(digest).folder / "layer.json", (1, 1))
    left, fresh = layers_dir() / ".new-left", images_dir() / ".new-fresh"
    for folder in (left, fresh):
        folder.mkdir()
    os.utime(left, (1, 1))
    done = CliRunner().invoke(command, ["prune"])
    assert done.output.split() == [old]
    assert {found.record.digest for found in list_layers()} == {named, new}
    assert (left.exists(), fresh.exists()) == (False, True)


def test_du_counts_shared_layers_once(layer):
    shared, own, alone = layer("shared", 400), layer("own", 100), layer("alone", 40)
    compose_image("a", "host", [shared, own])
    compose_image("b", "host", [shared])
    sizes = {digest: find_layer(digest).record.size_bytes for digest in (shared, own, alone)}
    assert [sizes[digest] // KIB for digest in (shared, own, alone)] == [400, 100, 40]
    use = measure_store()
    assert use.images == (("a", sizes[own], sizes[shared]), ("b", 0, sizes[shared]))
    assert (use.unnamed_bytes, use.downloads_bytes, use.total_bytes) == (sizes[alone], 0, sum(sizes.values()))
    printed = json.loads(CliRunner().invoke(command, ["du", "--json"]).output)
    assert (printed["total_bytes"], printed["images"][0]["own_bytes"]) == (sum(sizes.values()), sizes[own])
    assert "total" in CliRunner().invoke(command, ["du"]).output
    rows = json.loads(CliRunner().invoke(command, ["layers", "--json"]).output)
    assert {row["digest"]: row["images"] for row in rows} == {shared: ["a", "b"], own: ["a"], alone: []}
    assert own[:20] in CliRunner().invoke(command, ["layers"]).output


def test_the_least_recently_used_that_can_be_pulled_again_goes_first(layer):
    shared = layer("shared", 40)
    first = pulled("first", [shared, layer("1", 400)], 100)
    second = pulled("second", [shared, layer("2", 400)], 50)
    third = pulled("third", [layer("3", 400)], 10)
    compose_image("mine", "host", [layer("mine", 400)])
    total = measure_store().total_bytes
    assert evict(lambda used: used <= total) == []
    with open_root(third):  # used now, and in use
        assert evict(lambda used: used < total) == [second]
        assert find_layer(shared) is not None
        assert evict(lambda used: used < total - 800 * KIB) == [first]
        with pytest.raises(StoreFull, match="2 images 1 can be pulled again, of which 1 are in use"):
            evict(lambda used: used == 0)
    assert names() == [third, "mine"]
    with pytest.raises(StoreFull, match="1 images 0 can be pulled again"):
        evict(lambda used: used == 0)
    assert names() == ["mine"]


def test_removal_says_what_it_cannot(layer):
    compose_image("a", "host", [layer("x")])
    done = CliRunner().invoke(command, ["rm", "none", "a"])
    assert (done.exit_code, names()) == (1, [])
    assert "image none is not in the store" in done.output


@pytest.mark.alone
def test_a_thousand_images_from_one_base_are_small_and_listed_in_under_a_second(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "library").write_bytes(os.urandom(64 * KIB * KIB))
    below = store_layer(base, "/opt/env").record.digest
    repository = tmp_path / "repository"
    repository.mkdir()
    for number in range(1000):
        (repository / "task.py").write_text(f"NUMBER = {number}\n")
        compose_image(f"task-{number}", "host", [below, store_layer(repository, "/testbed").record.digest])
    on_disk = subprocess.run(["du", "-sk", str(tmp_path / "cache")], capture_output=True, text=True, check=True)
    assert int(on_disk.stdout.split()[0]) * KIB < 2**30
    assert measure_store().total_bytes < 2**30
    began = time.process_time()
    assert len(list_images()) == 1000
    assert time.process_time() - began < 1.0
    assert find_image("task-999").record.size_bytes > 64 * KIB * KIB
