"""Images from a registry, as layers: once, whole, resumed, with credentials, within limits of requests and disk."""

from __future__ import annotations

import base64
import errno
import fcntl
import io
import json
import os
import random
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time

import msgspec
import pytest
from click.testing import CliRunner

from prorl_launch.image_commands import image as command
from prorl_launch.image_store import references_in
from prorl_trio.sandbox.images import pull as pull_module
from prorl_trio.sandbox.images.layers import find_layer, layers_dir, list_layers
from prorl_trio.sandbox.images.locate import locate_root, open_root
from prorl_trio.sandbox.images.names import Reference, parse_reference, swe_bench_image, swe_gym_image
from prorl_trio.sandbox.images.pull import ENV_SCRIPT, PullError, PullRules, pull_image
from prorl_trio.sandbox.images.registry import find_credentials
from prorl_trio.sandbox.images.removal import measure_store
from prorl_trio.sandbox.images.store import find_image, list_images
from prorl_trio.sandbox.images.unpack import UnpackError, unpack_layer
from support.registry import PASSWORD, USER, digest_of, open_registry, tar_of

MIB = 1024 * 1024
NOISE = random.Random(0).randbytes(3 * MIB)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def registry():
    with open_registry() as server:
        yield server


@pytest.fixture
def rules(registry):
    return PullRules(plain_http=(registry.host,), patience_s=20, min_free_bytes=MIB)


def blobs_left(cache):
    return [path.name for path in (cache / "blobs").iterdir()]


def test_an_image_is_its_layers_which_are_shared(registry, rules, cache):
    base = tar_of({"bin": None, "bin/sh": b"shell", "etc/motd": b"base"}, pack=True)
    first = pull_image(registry.push("a:1", [base, tar_of({"a": b"1"})], ["A=it's 1", "PATH=/bin", "1=x"]), rules)
    registry.requests.clear()
    second = pull_image(registry.push("b:1", [base, tar_of({"b": b"2"})], index=True), rules)
    assert digest_of(base) not in "".join(registry.blob_requests())
    assert first.record.layers[0] == second.record.layers[0]
    root = locate_root(first.record.name)
    assert (root.base / "bin/sh").read_bytes() == b"shell"
    assert (root.layers[0] / "a").read_bytes() == b"1"
    assert (root.layers[1] / ENV_SCRIPT).read_text() == "#!/bin/sh\nexport A='it'\"'\"'s 1'\nexport PATH=/bin\n"
    assert len(locate_root(second.record.name).layers) == 1
    assert blobs_left(cache) == []
    registry.requests.clear()
    assert pull_image(first.record.name, rules) == first
    assert registry.requests == []


def test_a_tag_that_has_moved_is_pulled_again(registry, rules):
    reference = registry.push("a:1", [tar_of({"a": b"1"})])
    before = pull_image(reference, rules)
    with open_root(reference) as running:
        registry.push("a:1", [tar_of({"a": b"2"})])
        after = pull_image(reference, rules, again=True)
        assert before.record.digest != after.record.digest
        assert (locate_root(reference).base / "a").read_bytes() == b"2"
        assert (running.base / "a").read_bytes() == b"1"
    assert [image.record for image in list_images()] == [after.record]


PULL = """
import sys, msgspec
from prorl_trio.sandbox.images.pull import PullRules, pull_image
pull_image(sys.argv[1], msgspec.json.decode(sys.argv[2], type=PullRules))
"""


def test_many_processes_pull_once(registry, rules):
    reference = registry.push("a:1", [tar_of({"a": NOISE}), tar_of({"b": b"2"})])
    argv = [sys.executable, "-c", PULL, reference, msgspec.json.encode(rules).decode()]
    processes = [subprocess.Popen(argv) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert len(registry.blob_requests()) == len(set(registry.blob_requests())) == 3


def test_images_with_a_layer_in_common_fetch_it_once_also_at_the_same_time(registry, rules):
    shared = tar_of({"shared": NOISE})
    references = [registry.push(f"a:{n}", [shared, tar_of({"own": str(n).encode()})]) for n in range(4)]
    threads = [threading.Thread(target=pull_image, args=(reference, rules)) for reference in references]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(list_images()) == 4
    assert len([path for path in registry.blob_requests() if path.endswith(digest_of(shared))]) == 1


def test_layers_of_an_image_come_at_the_same_time(registry, rules):
    layers = [tar_of({str(number): b"x"}) for number in range(4)]
    together = threading.Barrier(4)
    registry.before_blob = lambda digest: together.wait(30) if digest in map(digest_of, layers) else None
    pull_image(registry.push("a:1", layers), rules)


def test_what_broke_off_goes_on_from_there(registry, rules, cache, monkeypatch):
    layer = tar_of({"a": NOISE})
    reference = registry.push("a:1", [layer])
    config = next(digest for digest in registry.blobs if digest != digest_of(layer))
    assert len(registry.blobs[config]) < 1000
    registry.break_after = [1000, MIB, MIB]
    pull_image(reference, rules)
    assert (locate_root(reference).base / "a").read_bytes() == NOISE
    assert len(registry.blob_requests()) == 4
    # Now it breaks off for good, and a later pull goes on.
    monkeypatch.setattr(pull_module, "_BROKEN_PAUSE_S", 0.0)
    other = tar_of({"b": NOISE})
    reference = registry.push("b:1", [other])
    registry.break_after = [1000, MIB, *[0] * 100]
    with pytest.raises(PullError, match=f"breaks off at {MIB} bytes, again and again"):
        pull_image(reference, rules)
    assert blobs_left(cache) == [digest_of(other).removeprefix("sha256:")]
    registry.break_after = []
    registry.requests.clear()
    pull_image(reference, rules)
    assert (locate_root(reference).base / "b").read_bytes() == NOISE


def test_what_came_wrong_is_fetched_again_and_then_refused(registry, rules, cache):
    layer = tar_of({"a": b"1"})
    reference = registry.push("a:1", [layer])
    registry.blobs[digest_of(layer)] = bytes(len(layer))
    with pytest.raises(PullError, match="came with another content"):
        pull_image(reference, rules)
    assert (find_image(reference), list_layers(), blobs_left(cache)) == (None, [], [])


def test_a_limit_of_requests_is_kept_by_all(registry, rules):
    reference = registry.push("a:1", [tar_of({"a": b"1"})])
    registry.refuse, registry.retry_after = 2, "0.5"
    began = time.monotonic()
    pull_image(reference, rules)
    assert time.monotonic() - began >= 1.0
    registry.refuse, registry.retry_after = 1, "3600"
    with pytest.raises(PullError, match=r"429, next try in 3600 s. What has been downloaded is kept"):
        pull_image(registry.push("b:1", [tar_of({"b": b"1"})]), rules)
    count = len(registry.requests)
    with pytest.raises(PullError, match=r"the registry limits requests, and wants none for 3\d\d\d s more"):
        pull_image(registry.push("c:1", [tar_of({"c": b"1"})]), rules)
    assert len(registry.requests) == count


def test_a_private_image_wants_the_right_credentials(registry, rules, tmp_path, monkeypatch):
    reference = registry.push("a:1", [tar_of({"a": b"1"})])
    registry.private = True
    with pytest.raises(PullError, match=r"no token was given.*docker login"):
        pull_image(reference, rules)
    auth = tmp_path / "auth.json"
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth))
    packed = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    auth.write_text(json.dumps({"auths": {registry.host: {"auth": packed}}}))
    pull_image(reference, rules)
    assert PASSWORD not in repr(find_credentials(registry.host))
    assert find_credentials("other.example") is None


def test_an_identity_token_gets_access_from_the_realm(registry, rules, tmp_path, monkeypatch):
    reference = registry.push("a:1", [tar_of({"a": b"1"})])
    registry.private = True
    auth = tmp_path / "auth.json"
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(auth))
    nobody = base64.b64encode(b"00000000-0000-0000-0000-000000000000:").decode()
    auth.write_text(json.dumps({"auths": {registry.host: {"auth": nobody, "identitytoken": PASSWORD}}}))
    pull_image(reference, rules)
    auth.write_text(json.dumps({"auths": {registry.host: {"auth": nobody, "identitytoken": "another"}}}))
    with pytest.raises(PullError, match="no token was given"):
        pull_image(registry.push("b:1", [tar_of({"b": b"1"})]), rules)


PACKED = base64.b64encode(b"u:s").decode()


@pytest.mark.parametrize(
    ("config", "host", "found"),
    [
        ({"auths": {"r.example": {"auth": PACKED}}}, "r.example", ("u", "s", False)),
        ({"auths": {"https://r.example": {"auth": PACKED}}}, "r.example", ("u", "s", False)),
        ({"auths": {"https://r.example/": {"auth": PACKED}}}, "r.example", ("u", "s", False)),
        ({"auths": {"https://r.example/v2/": {"auth": PACKED}}}, "r.example", ("u", "s", False)),
        ({"auths": {"r.example/v1": {"auth": PACKED}}}, "r.example", ("u", "s", False)),
        ({"auths": {"http://r.example:5000": {"auth": PACKED}}}, "r.example:5000", ("u", "s", False)),
        ({"auths": {"http://r.example:5000": {"auth": PACKED}}}, "r.example", None),
        ({"auths": {"r.example/team/image": {"auth": PACKED}}}, "r.example", None),
        ({"auths": {"https://index.docker.io/v1/": {"auth": PACKED}}}, "docker.io", ("u", "s", False)),
        ({"auths": None}, "r.example", None),
        ({"auths": {}, "credHelpers": None, "credsStore": None}, "r.example", None),
        ({"auths": {"r.example": None}}, "r.example", None),
        ({"auths": {"r.example": {"auth": 7, "identitytoken": None}}}, "r.example", None),
        ({"auths": [], "credHelpers": []}, "r.example", None),
    ],
)
def test_credentials_of_a_file(tmp_path, monkeypatch, config, host, found):
    for name in ("HOME", "DOCKER_CONFIG", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_credentials(host) == found


def test_credentials_of_a_helper(tmp_path, monkeypatch):
    helper = tmp_path / "docker-credential-test"
    helper.write_text('#!/bin/sh\nread host; printf \'{"Username": "u", "Secret": "%s"}\' "$host"\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text('{"credHelpers": {"r.example": "test"}}')
    assert find_credentials("r.example") == ("u", "r.example", False)
    assert find_credentials("s.example") is None
    helper.write_text('#!/bin/sh\nprintf \'{"Username": "<token>", "Secret": "t"}\'\n')
    assert find_credentials("r.example")[1:] == ("t", True)


def test_an_image_that_is_not_there_is_told(registry, rules):
    with pytest.raises(PullError, match="HTTP 404; there is no such image"):
        pull_image(registry.reference("none:1"), rules)
    with pytest.raises(PullError, match="is no reference"):
        pull_image("docker://x/UPPER", rules)


def test_what_a_layer_removes_is_not_seen(registry, rules):
    below = tar_of({"d/old": b"1", "d/kept": b"1", "e/x": b"1", "f": b"1", "g/x": b"1"})
    above = {".wh.f": b"", "d/.wh.old": b"", "e/.wh..wh..opq": b"", "e/new": b"2", ".wh.g": b"", "g": None, "g/y": b"2"}
    pull_image(registry.push("a:1", [below, tar_of(above)]), rules)
    root = locate_root(registry.reference("a:1"))
    assert seen([root.base, *root.layers]) == {"d/kept": b"1", "e/new": b"2", "g/y": b"2"}


@pytest.mark.parametrize(
    ("above", "shown"),
    [
        ({".wh.d": b"", "d/new": b"2"}, {"d/new": b"2"}),
        ({"d/new": b"2", ".wh.d": b""}, {"d/new": b"2"}),
        ({".wh.d": b"", "d": None, "d/new": b"2"}, {"d/new": b"2"}),
        ({".wh.d": b"", "d/deep/new": b"2"}, {"d/deep/new": b"2"}),
        ({".wh.d": b"", "d/.wh.x": b""}, {}),
        ({"d": b"file", "d/new": b"2"}, {"d/new": b"2"}),
    ],
)
def test_a_folder_that_a_layer_makes_anew_hides_the_one_below(registry, rules, above, shown):
    below = tar_of({"d/old": b"1", "d/deep/old": b"1", "d/x": b"1"})
    pull_image(registry.push("a:1", [below, tar_of(above)]), rules)
    root = locate_root(registry.reference("a:1"))
    assert seen([root.base, *root.layers]) == shown


def unpack(tmp_path, entries):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, target in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = kind, target, 0o755
            tar.addfile(entry)
    (tmp_path / "blob").write_bytes(stream.getvalue())
    (tmp_path / "tree").mkdir()
    return unpack_layer(tmp_path / "blob", "application/vnd.oci.image.layer.v1.tar", tmp_path / "tree", lambda: None)


def test_the_later_entry_of_a_layer_replaces_a_folder(tmp_path):
    file, folder, link = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE
    entries = [("lib", folder, ""), ("lib/x", file, ""), ("lib/.wh..wh..opq", file, ""), ("lib", link, "usr/lib")]
    entries += [("usr/lib/y", file, ""), ("bin/sub", folder, ""), ("bin", file, "")]
    assert unpack(tmp_path, entries).opaque == ()
    tree = tmp_path / "tree"
    assert (os.readlink(tree / "lib"), (tree / "lib" / "y").is_file(), (tree / "bin").is_file()) == (
        "usr/lib",
        True,
        True,
    )


@pytest.mark.parametrize(
    "entries",
    [
        [("a", tarfile.LNKTYPE, "below")],
        [(".wh.gone", tarfile.REGTYPE, ""), ("a", tarfile.LNKTYPE, "gone")],
        [("d", tarfile.DIRTYPE, ""), ("a", tarfile.LNKTYPE, "d")],
        [("d/x", tarfile.REGTYPE, ""), ("d", tarfile.LNKTYPE, "d/x")],
    ],
    ids=["of a layer below", "of a whiteout", "of a folder", "of what it replaces"],
)
def test_a_hard_link_to_what_the_layer_does_not_have_is_refused_with_a_way_out(tmp_path, entries):
    with pytest.raises(UnpackError, match=r"is a hard link to .*pull the image with --sif"):
        unpack(tmp_path, entries)


def seen(layers):
    """Return the tree that an overlay of plain folders and whiteouts shows."""
    files = {}
    for layer in layers:
        for path in sorted(layer.rglob("*")):
            name = str(path.relative_to(layer))
            status = path.lstat()
            if stat.S_ISCHR(status.st_mode):
                assert status.st_rdev == 0
                files = {other: it for other, it in files.items() if other != name and not other.startswith(f"{name}/")}
            elif stat.S_ISREG(status.st_mode):
                files[name] = path.read_bytes()
    return files


@pytest.mark.parametrize(
    "entries",
    [
        {"../out": b"x"},
        {"a/../../out": b"x"},
        {"a": ("link", "../../out")},
        {"a": ("link", "none")},
        {"a": ("symlink", "a"), "a/b": b"x"},
    ],
    ids=["up", "up-inside", "link-up", "link-to-nothing", "loop"],
)
def test_hostile_layers_are_refused_and_leave_nothing(entries, registry, rules, tmp_path):
    before = set(tmp_path.rglob("out"))
    with pytest.raises(PullError, match="was not pulled"):
        pull_image(registry.push("a:1", [tar_of(entries)]), rules)
    assert set(tmp_path.rglob("out")) == before
    assert [path.name for path in layers_dir().iterdir() if path.name != ".locks"] == []


def test_links_lead_nowhere_outside(registry, rules, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    entries = {"abs": ("symlink", str(outside)), "abs/x": b"1", "up": ("symlink", "../../.."), "up/y": b"2"}
    pull_image(registry.push("a:1", [tar_of(entries)]), rules)
    content = locate_root(registry.reference("a:1")).base
    assert list(outside.iterdir()) == []
    assert (content / str(outside).lstrip("/") / "x").read_bytes() == b"1"
    assert (content / "y").read_bytes() == b"2"


def test_a_full_store_makes_room_and_then_refuses(registry, rules):
    rules = msgspec.structs.replace(rules, max_store_bytes=9 * MIB)
    old, used = (registry.push(f"{name}:1", [tar_of({name: NOISE})]) for name in ("old", "used"))
    for number, reference in enumerate((old, used)):
        os.utime(pull_image(reference, rules).folder / "image.json", (number, number))
    new = registry.push("new:1", [tar_of({"new": NOISE + NOISE[:MIB]})])
    with open_root(used) as running:
        pull_image(new, rules)
        assert [image.record.name for image in list_images()] == sorted([new, used])
        assert (running.base / "used").read_bytes() == NOISE
        with open_root(new):
            with pytest.raises(PullError, match=r"there is no room for it: .* may take 0.01 GiB") as refused:
                pull_image(registry.push("more:1", [tar_of({"more": NOISE})]), rules)
            assert refused.value.full
            assert (running.base / "used").read_bytes() == NOISE
    assert measure_store().total_bytes <= 9 * MIB
    pull_image(registry.push("more:1", [tar_of({"more": NOISE})]), rules)


def test_a_disk_that_has_to_stay_free_stays_free(registry, rules):
    rules = msgspec.structs.replace(rules, min_free_bytes=2**60)
    with pytest.raises(PullError, match="GiB of the disk free") as refused:
        pull_image(registry.push("a:1", [tar_of({"a": b"1"})]), rules)
    assert refused.value.full
    assert (list_images(), list_layers()) == ([], [])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_while_unpacking_is_told_and_left_as_it_was(code, registry, rules, monkeypatch):
    reference = registry.push("a:1", [tar_of({"a": NOISE})])

    def unpack(blob, media_type, target, on_progress, **limits):
        (target / "half").write_bytes(b"x")
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(pull_module, "unpack_layer", unpack)
        with pytest.raises(PullError, match=os.strerror(code)) as refused:
            pull_image(reference, rules)
    assert refused.value.full
    assert (list_images(), list_layers()) == ([], [])
    assert [path.name for path in layers_dir().iterdir()] == [".locks"]
    pull_image(reference, rules)


def test_what_a_killed_pull_was_unpacking_is_removed_by_the_next(registry, rules):
    left, being_made = layers_dir() / ".new-left", layers_dir() / ".new-made"
    for folder in (left, being_made):
        folder.mkdir(parents=True)
        os.utime(folder, (1, 1))
    lock = os.open(being_made, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    pull_image(registry.push("a:1", [tar_of({"a": b"1"})]), rules)
    os.close(lock)
    assert (left.exists(), being_made.exists()) == (False, True)


def test_references():
    assert parse_reference("docker://debian") == Reference("docker.io", "library/debian", "latest", "")
    assert parse_reference("docker://debian").api_host == "registry-1.docker.io"
    assert parse_reference("docker://u/x:1.0") == Reference("docker.io", "u/x", "1.0", "")
    assert parse_reference("docker://h:5000/a/b/c:t") == Reference("h:5000", "a/b/c", "t", "")
    digest = f"sha256:{'a' * 64}"
    assert parse_reference(f"docker://ghcr.io/x@{digest}") == Reference("ghcr.io", "x", "", digest)
    for wrong in ("docker://", "docker://x:", "docker://h.x/", "docker://x@sha256:1"):
        with pytest.raises(ValueError, match="is no reference"):
            parse_reference(wrong)


def test_images_of_suites_have_their_names(tmp_path):
    assert swe_bench_image("astropy__astropy-12907") == (
        "docker://swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"
    )
    assert swe_gym_image("Project-MONAI__MONAI-6446") == (
        "docker://xingyaoww/sweb.eval.x86_64.project-monai_s_monai-6446:latest"
    )
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"instance_id": "a__b-1"}\n{"instance_id": "a__b-2", "image": "docker://own"}\n')
    named = "docker://swebench/sweb.eval.x86_64.a_1776_b-1:latest"
    assert references_in(tasks, "swe-bench") == [named, "docker://own"]
    assert references_in(tasks) == ["docker://own"]
    parse_reference(named)


def test_the_command_pulls_layers(registry):
    references = [registry.push(f"a:{number}", [tar_of({"a": str(number).encode()})]) for number in range(3)]
    done = CliRunner().invoke(command, ["pull", "--no-https", "--jobs", "2", *references, registry.reference("none:1")])
    assert (done.exit_code, len(list_images())) == (1, 3), done.output
    assert "1 of 4 images were not pulled" in done.output
    assert find_layer(list_images()[0].record.layers[0]) is not None


def test_a_registry_that_is_away_is_named_at_once_and_one_interrupt_ends_the_wait(free_tcp_port, cache):
    argv = [sys.executable, "-m", "prorl_trio.cli", "image", "pull", "--no-https"]
    with subprocess.Popen(
        [*argv, f"docker://127.0.0.1:{free_tcp_port}/x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as command:
        first = command.stdout.readline()
        command.send_signal(signal.SIGINT)
        rest, _ = command.communicate(timeout=20)
    assert "Connection refused; retrying in 1 s, for 14 min 5" in first
    assert (command.returncode, rest.splitlines()[-1]) == (130, "interrupted")
