"""Layers and registries that ask for more memory or disk than they send: refused while they are read, by a limit."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
import tracemalloc
import zlib

import msgspec
import pytest

from prorl_trio.sandbox.images import pull as pull_module
from prorl_trio.sandbox.images import unpack as unpack_module
from prorl_trio.sandbox.images.layers import layers_dir, list_layers
from prorl_trio.sandbox.images.pull import PullError, PullRules, pull_image
from prorl_trio.sandbox.images.store import list_images
from prorl_trio.sandbox.images.unpack import UnpackError, unpack_layer
from support.registry import digest_of, open_registry, tar_of

MIB = 1024 * 1024
END = bytes(1024)


def header(name, kind, size=0, extra=b""):
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT)[:512])
    block[124:136] = b"%011o\0" % size
    block[156:157] = kind
    block[386 : 386 + len(extra)] = extra
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(content):
    return content + bytes(-len(content) % 512)


def entry(name, kind=b"0", content=b"", extra=b""):
    return header(name, kind, len(content), extra) + padded(content)


def pax(records, kind=b"x"):
    content = b""
    for key, value in records.items():
        body = b" %s=%s\n" % (key.encode(), value)
        length = len(body) + 1
        while length != len(body) + len(str(length)):
            length = len(body) + len(str(length))
        content += b"%d" % length + body
    return entry("./PaxHeader", kind, content)


def sparse(real, *, more=False):
    """An old GNU sparse entry of one hole."""
    number = b"%011o\0" % real
    return header("zeros", b"S", 0, number + b"%011o\0" % 0 + bytes(72) + bytes([more]) + number)


def packed_zeros(head, count, end):
    """A layer with `count` zeros in it, packed piece by piece."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    pieces = [packer.compress(head), *(packer.compress(bytes(MIB)) for _ in range(count // MIB))]
    return b"".join([*pieces, packer.compress(end), packer.flush()])


def unpack(tmp_path, layer, on_progress=lambda: None):
    (tmp_path / "blob").write_bytes(layer)
    (tmp_path / "tree").mkdir()
    return unpack_layer(tmp_path / "blob", "application/vnd.oci.image.layer.v1.tar", tmp_path / "tree", on_progress)


def used_bytes(folder):
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_dir())


LONG_MAP = pax({"GNU.sparse.major": b"1", "GNU.sparse.minor": b"0"}) + header("f", b"0", 4 * MIB)
HEADERS = {
    "PAX": packed_zeros(header("./PaxHeader", b"x", 64 * MIB), 64 * MIB, END),
    "global PAX": packed_zeros(header("./PaxHeader", b"g", 64 * MIB), 64 * MIB, END),
    "long name": packed_zeros(header("././@LongLink", b"L", 64 * MIB), 64 * MIB, END),
    "long link": packed_zeros(header("././@LongLink", b"K", 64 * MIB), 64 * MIB, END),
    "claims more than it has": header("./PaxHeader", b"x", 8 * 1024**3 - 1) + END,
    "sparse map": sparse(MIB, more=True) + (bytes(504) + b"\1" + bytes(7)) * 2100 + END,
    "sparse map in content": LONG_MAP + padded(b"16000\n" + (b"0" * 127 + b"\n") * 16_000) + END,
    "chain": entry("././@LongLink", b"L", b"a" * 500) * 2000 + END,
}


@pytest.mark.parametrize("layer", HEADERS.values(), ids=HEADERS)
def test_headers_are_bounded_before_they_are_read(layer, tmp_path):
    tracemalloc.start()
    try:
        with pytest.raises(UnpackError, match=r"the headers of an entry .* the limit|is no tar stream that can"):
            unpack(tmp_path, layer)
        assert tracemalloc.get_traced_memory()[1] < 24 * MIB
    finally:
        tracemalloc.stop()


def test_headers_of_many_entries_are_not_remembered(tmp_path):
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    pieces = [packer.compress(pax({"comment": b"x" * 900_000}) + entry(f"f{number}")) for number in range(20)]
    tracemalloc.start()
    try:
        unpack(tmp_path, b"".join([*pieces, packer.compress(END), packer.flush()]))
        assert tracemalloc.get_traced_memory()[1] < 12 * MIB
    finally:
        tracemalloc.stop()
    assert len(list((tmp_path / "tree").iterdir())) == 20


@pytest.mark.parametrize(("count", "size"), [(1500, 1), (4, MIB // 3)], ids=["many", "long"])
def test_global_records_are_bounded_for_all_entries_together(count, size, tmp_path):
    layer = b"".join(pax({f"key{number}": b"x" * size}, b"g") + entry("f") for number in range(count))
    with pytest.raises(UnpackError, match="global PAX records"):
        unpack(tmp_path, layer + END)


def test_zeros_become_holes(tmp_path):
    content = b"a" * 5000 + bytes(9 * MIB) + b"b" + bytes(MIB)
    layer = packed_zeros(header("gzip-bomb", b"0", 16 * MIB), 16 * MIB, sparse(2**28) + entry("f", b"0", content) + END)
    asked = []
    unpack(tmp_path, layer, lambda: asked.append(0))
    tree = tmp_path / "tree"
    assert used_bytes(tree) < MIB
    assert [(tree / name).stat().st_size for name in ("gzip-bomb", "zeros", "f")] == [16 * MIB, 2**28, len(content)]
    assert (tree / "f").read_bytes() == content
    assert len(asked) >= 2**28 / (64 * MIB)  # by what is written, not by what is read alone


def test_a_sparse_file_of_the_present_format_is_unpacked(tmp_path):
    names = {
        "GNU.sparse.major": b"1",
        "GNU.sparse.minor": b"0",
        "GNU.sparse.name": b"f",
        "GNU.sparse.realsize": b"90000",
    }
    layer = pax(names) + entry("GNUSparseFile.0/f", b"0", padded(b"1\n80000\n4\n") + b"data") + END
    unpack(tmp_path, layer)
    assert (tmp_path / "tree" / "f").read_bytes() == bytes(80000) + b"data" + bytes(9996)


LIMITS = {
    "stream": ("MAX_LAYER_BYTES", MIB, entry("f", b"0", bytes(2 * MIB)), "bytes in its stream"),
    "end of the stream": ("MAX_LAYER_BYTES", MIB, entry("f") + END + bytes(2 * MIB), "bytes in its stream"),
    "skipped content": ("MAX_LAYER_BYTES", MIB, entry("d", b"5", bytes(2 * MIB)), "bytes in its stream"),
    "holes": ("MAX_LAYER_BYTES", MIB, sparse(8**11 - 1), "bytes in its files"),
    "entries": ("MAX_ENTRIES", 50, b"".join(entry(f"f{n}") for n in range(60)), "files, folders and links"),
    "whiteouts": ("MAX_ENTRIES", 50, b"".join(entry(f".wh..wh.{n}") for n in range(60)), "files, folders and links"),
    "same name": ("MAX_ENTRIES", 50, entry("f") * 60, "files, folders and links"),
    "implied folders": ("MAX_ENTRIES", 50, entry("a/" * 26 + "x") + entry("b/" * 26 + "x"), "files, folders and"),
    "depth": ("MAX_DEPTH", 20, entry("a/" * 30), "below more than 20 folders"),
    "depth by links": (
        "MAX_DEPTH",
        20,
        tar_of({"l": ("symlink", "a/" * 60), "l/x": b""}),
        "below more than 20 folders",
    ),
    "names": ("MAX_NAMES_BYTES", 90, b"".join(entry(f"folder{n}", b"5") for n in range(20)), "names of its folders"),
    "opaque": ("MAX_OPAQUE", 5, b"".join(entry(f"{n}/.wh..wh..opq") for n in range(9)), "hide what lies below"),
}


@pytest.mark.parametrize(("limit", "value", "layer", "why"), LIMITS.values(), ids=LIMITS)
def test_a_layer_has_limits(limit, value, layer, why, tmp_path, monkeypatch):
    monkeypatch.setattr(unpack_module, limit, value)
    with pytest.raises(UnpackError, match=f"{why}.*limit.*--sif"):
        unpack(tmp_path, layer + END)
    assert used_bytes(tmp_path / "tree") <= MIB


def test_progress_is_asked_for_entries_too(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack_module, "_WATCH_ENTRIES", 10)
    asked = []
    unpack(tmp_path, b"".join(entry(f"d{n}/f") for n in range(40)) + END, lambda: asked.append(0))
    assert len(asked) == 8


DAMAGED = {
    "a header amid others": entry("a") + b"x" * 512 + entry("b") + END,
    "half a header": entry("a") + entry("b")[:300],
    "deflated": gzip.compress(entry("a") + os.urandom(4096) + END)[:300] + b"\xff" * 300,
    "size below 0": pax({"size": b"-1024"}) + entry("a") + END,
    "size of letters": pax({"GNU.sparse.size": b"x", "GNU.sparse.map": b"1,x"}) + entry("a") + END,
    "no map": LONG_MAP + padded(b"x" * 512) + END,
    "time that is none": pax({"mtime": b"nan"}) + entry("a") + END,
    "time without end": pax({"mtime": b"inf"}) + entry("a") + END,
    "time of a folder": pax({"mtime": b"1e300"}) + entry("a", b"5") + END,
    "a link with a NUL": pax({"linkpath": b"a\0b"}) + entry("a", b"2") + END,
}


@pytest.mark.parametrize("layer", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_stream_is_refused_by_name_and_never_cut_short(layer, tmp_path):
    with pytest.raises(UnpackError):
        unpack(tmp_path, layer)


@pytest.fixture
def registry():
    with open_registry() as server:
        yield server


@pytest.fixture
def rules(registry, tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    return PullRules(plain_http=(registry.host,), min_free_bytes=0, patience_s=5.0)


def rewrite(registry, reference, change):
    """Change the manifest of an image."""
    repository, _, tag = reference.partition("/")[2].partition("/")[2].partition("/")[2].rpartition(":")
    media_type, content = registry.manifests[repository, tag]
    manifest = json.loads(content)
    change(manifest)
    registry.manifests[repository, tag] = (media_type, json.dumps(manifest).encode())


@pytest.mark.parametrize("place", ["config", "layer"])
@pytest.mark.parametrize("path", ["{}", "sha256:{}", "sha256:../../../victim", "sha256:" + "0" * 64 + "\n"])
def test_a_digest_names_no_other_file(path, place, registry, rules, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    reference = registry.push("a:1", [tar_of({"a": b"1"})])
    digest = path.format(victim)

    def change(manifest):
        (manifest["config"] if place == "config" else manifest["layers"][0]).update(digest=digest, size=10**6)

    rewrite(registry, reference, change)
    with pytest.raises(PullError, match="digest"):
        pull_image(reference, rules)
    assert victim.read_bytes() == b"precious"


def test_a_blob_without_an_end_is_cut_off(registry, rules, tmp_path):
    layer = tar_of({"a": b"1"})
    reference = registry.push("a:1", [layer])
    registry.blobs[digest_of(layer)] = layer + os.urandom(32 * MIB)
    blobs = tmp_path / "cache" / "blobs"
    with pytest.raises(PullError, match="or more, and should have"):
        pull_image(reference, rules)
    assert sum(path.stat().st_size for path in blobs.iterdir()) == 0
    assert (list_images(), list_layers()) == ([], [])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda manifest: manifest["config"].update(size=2**40), "configuration has"),
        (lambda manifest: manifest["layers"][0].update(size=2**70), "store would not be enough"),
        (lambda manifest: manifest["layers"][0].update(size=-1), "should have -1"),
        (lambda manifest: manifest.update(layers=manifest["layers"] * 501), "501 layers"),
        (lambda manifest: manifest["layers"][0].update(platform=json.loads('{"a":' * 400 + "1" + "}" * 400)), ""),
    ],
)
def test_a_manifest_that_claims_much_is_refused_and_evicts_nothing(change, why, registry, rules):
    kept = registry.push("kept:1", [tar_of({"kept": b"1"})])
    pull_image(kept, rules)
    reference = registry.push("a:1", [tar_of({"a": b"1"})])
    rewrite(registry, reference, change)
    if why:
        with pytest.raises(PullError, match=why):
            pull_image(reference, rules)
    else:
        pull_image(reference, rules)
    assert kept in [image.record.name for image in list_images()]


def test_a_layer_writes_no_more_than_the_store_may_have(registry, rules):
    rules = msgspec.structs.replace(rules, max_store_bytes=4 * MIB)
    layer = gzip.compress(tar_of({"a": b"\1" * 40 * MIB}))
    with pytest.raises(PullError, match=r"images\.max_store_bytes"):
        pull_image(registry.push("a:1", [layer]), rules)
    assert [path.name for path in layers_dir().iterdir()] == [".locks"]


def test_a_disk_without_inodes_is_no_room(registry, rules, monkeypatch):
    monkeypatch.setattr(unpack_module, "_WATCH_ENTRIES", 10)
    monkeypatch.setattr(pull_module, "_MAX_USED_INODES", 0.0)
    with pytest.raises(PullError, match="inodes left") as refused:
        pull_image(registry.push("a:1", [tar_of({f"f{n}": b"" for n in range(20)})]), rules)
    assert refused.value.full
    assert [path.name for path in layers_dir().iterdir()] == [".locks"]


def test_tokens_come_from_no_file(registry, rules, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text('{"token": "the-token"}')
    reference = registry.push("a:1", [tar_of({"a": b"1"})])
    registry.private = True
    registry.realm = f"file://{secret}"
    with pytest.raises(PullError, match="names no address for tokens"):
        pull_image(reference, rules)


@pytest.mark.parametrize(
    "name",
    ["../" + "n" * 900_000, "../\x1b[2J\u202e\udcff", "a" * 5000],
    ids=["long", "control characters", "too long"],
)
def test_a_name_in_a_refusal_is_short_and_printable(name, registry, rules):
    layer = pax({"path": name.encode(errors="surrogateescape")}) + entry("f") + END
    with pytest.raises(PullError) as refused:
        pull_image(registry.push("a:1", [layer]), rules)
    assert len(str(refused.value)) < 2100
    assert str(refused.value).isprintable()


def test_an_entry_that_replaces_a_folder_forgets_all_below_it(tmp_path):
    layer = entry("d", b"5") + entry("d/e", b"5") + entry("d/e/.wh..wh..opq") + entry("d") + entry("d/e/f") + END
    assert unpack(tmp_path, layer).opaque == ("d",)
