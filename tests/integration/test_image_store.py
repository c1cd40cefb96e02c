"""Images from a registry to a sandbox: pulled, listed, verified, unpacked, started. The registry is a small one."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from prorl_launch.image_commands import image as command
from prorl_launch.image_store import check_image, pull_sif, references_in, squashfs_offset_bytes, unpack_image
from prorl_launch.progress import SetupError
from prorl_trio.sandbox.images.locate import locate_image
from prorl_trio.sandbox.images.store import find_image, images_dir, list_images
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.apptainer import ApptainerProvider, find_apptainer
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider
from prorl_trio.types.errors import SandboxUnavailable
from support.programs import find_busybox
from support.skips import because

TIMEOUT_S = 60


class Registry(http.server.ThreadingHTTPServer):
    """Serves one image, as `tiny:1`, to whoever asks."""

    def __init__(self):
        self.blobs = {}
        self.requested = []
        content = _layer()
        layer = self._add(content)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/opt/tiny/bin:/bin", "TINY=yes"], "Cmd": ["/bin/sh"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self._add(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": [layer],
        }
        self.manifest = json.dumps(manifest).encode()
        # The socket comes last: nobody would close it if there were no content and the test were skipped.
        super().__init__(("127.0.0.1", 0), Handler)
        self.reference = f"docker://127.0.0.1:{self.server_address[1]}/tiny:1"

    def _add(self, content, media_type="application/vnd.oci.image.layer.v1.tar"):
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blobs[digest] = content
        return {"mediaType": media_type, "size": len(content), "digest": digest}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.requested.append(self.path)
        if "/manifests/" in self.path:
            self._send(self.server.manifest, "application/vnd.oci.image.manifest.v1+json")
        elif "/blobs/" in self.path:
            self._send(self.server.blobs[name], "application/octet-stream")
        else:
            self._send(b"{}", "application/json")

    do_HEAD = do_GET

    def _send(self, content, media_type):
        self.send_response(200)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Docker-Content-Digest", f"sha256:{hashlib.sha256(content).hexdigest()}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def _layer():
    program = find_busybox()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for folder in ("bin", "dev", "etc", "proc", "sys", "tmp", "var"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        entry = tarfile.TarInfo("bin/busybox")
        content = Path(program).read_bytes()
        entry.size, entry.mode = len(content), 0o755
        tar.addfile(entry, io.BytesIO(content))
        for applet in ("sh", "true", "env", "cat", "mkdir"):
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return packed.getvalue()


@pytest.fixture(scope="module")
def registry():
    if find_apptainer() is None:
        pytest.skip(because("apptainer is not installed: nothing can be pulled", "make apptainer"))
    with Registry() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(TIMEOUT_S)


@pytest.fixture
def cache(tmp_path, monkeypatch, runtime):
    """A cache folder of the test's own, with the real runtime in it."""
    folder = tmp_path / "cache"
    (folder / "runtimes").mkdir(parents=True)
    (folder / "runtimes" / runtime.name).symlink_to(runtime)
    monkeypatch.setenv("PRORL_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def pulled(cache, registry):
    stored = pull_sif(registry.reference, plain_http=True)
    registry.requested.clear()
    return stored


async def _usable(provider_type, base):
    provider = provider_type(base)
    report = await provider.probe()
    if not report.usable:
        pytest.skip(f"{provider.name} cannot run here: {report.problem}. What to do: {report.remedy}")
    return provider


async def test_pulled_image_runs_with_its_environment(pulled, registry, tmp_path):
    provider = await _usable(ApptainerProvider, tmp_path)
    with trio.fail_after(TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(image=registry.reference)) as sandbox:
            lines = (await sandbox.exec(["env"], timeout_s=20)).stdout.decode().splitlines()
    assert "TINY=yes" in lines
    assert next(line for line in lines if line.startswith("PATH=")).startswith("PATH=/opt/tiny/bin:/bin")


async def test_unpacked_image_runs_with_bubblewrap_in_the_same_environment(pulled, registry, tmp_path):
    provider = await _usable(BubblewrapProvider, tmp_path)
    spec = SandboxSpec(image=registry.reference)
    with trio.fail_after(TIMEOUT_S):
        with pytest.raises(SandboxUnavailable, match="image unpack docker://"):
            async with provider.open_sandbox(spec):
                pass
        unpack_image(registry.reference)
        async with provider.open_sandbox(spec) as sandbox:
            lines = (await sandbox.exec(["env"], timeout_s=20)).stdout.decode().splitlines()
    assert "TINY=yes" in lines
    assert next(line for line in lines if line.startswith("PATH=")).startswith("PATH=/opt/tiny/bin:/bin")


def test_what_is_stored_is_not_pulled_again(pulled, registry):
    assert pull_sif(registry.reference, plain_http=True) == pulled
    assert registry.requested == []
    renewed = pull_sif(registry.reference, again=True, plain_http=True)
    assert registry.requested
    assert renewed.folder == pulled.folder
    assert [stored.record for stored in list_images()] == [renewed.record]


def test_its_record_says_what_it_is(pulled, registry):
    assert pulled.sif is not None
    assert pulled.record.name == registry.reference
    assert pulled.record.digest == f"sha256:{hashlib.sha256(pulled.sif.read_bytes()).hexdigest()}"
    assert pulled.record.size_bytes == pulled.sif.stat().st_size
    os.utime(pulled.folder / "image.json", (1, 1))
    assert locate_image(registry.reference) == pulled.sif
    assert pulled.used_at_s > 1


def test_two_at_once_pull_once(cache, registry):
    registry.requested.clear()
    code = f"from prorl_launch.image_store import pull_sif; pull_sif({registry.reference!r}, plain_http=True)"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(TIMEOUT_S) for process in processes] == [0, 0]
    assert len([path for path in registry.requested if "/blobs/" in path]) == len(registry.blobs)
    assert find_image(registry.reference) is not None


def test_a_failed_pull_says_what_to_do_and_leaves_nothing(cache):
    with pytest.raises(SetupError, match=r"(?s)copy the \.sif file here"):
        pull_sif("docker://127.0.0.1:9/tiny:1", plain_http=True)
    assert [path for path in images_dir().iterdir() if path.name not in {".locks", ".layers"}] == []
    with pytest.raises(SetupError, match="no reference"):
        pull_sif("debian")


def test_what_a_killed_pull_left_is_removed_by_the_next(cache, registry):
    stored = pull_sif(registry.reference, plain_http=True)
    left = images_dir() / f".new-{stored.folder.name}-x"
    (left / "root").mkdir(parents=True)
    (left / "root").chmod(0o500)
    stranger = images_dir() / ".new-another-12345678-x"
    stranger.mkdir()
    pull_sif(registry.reference, again=True, plain_http=True)
    assert not left.exists()
    assert stranger.exists()


def test_commands(cache, registry, tmp_path):
    run = CliRunner().invoke
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"image": registry.reference}, {"payload": {"image": registry.reference}}, {"payload": {}}]
    tasks.write_text("\n".join(map(json.dumps, rows)) + "\n")
    done = run(command, ["pull", "--sif", "--no-https", "--tasks", str(tasks)])
    assert (done.exit_code, done.output.count("sha256:")) == (0, 1), done.output
    (listed,) = json.loads(run(command, ["list", "--json"]).output)
    assert (listed["name"], listed["kind"]) == (registry.reference, "sif")
    assert "today" in run(command, ["list"]).output
    done = run(command, ["verify"])
    assert (done.exit_code, done.output) == (0, f"{registry.reference}: ok\n")
    Path(listed["path"]).write_bytes(b"something else")
    done = run(command, ["verify", registry.reference])
    assert done.exit_code == 1
    assert "changed since it was stored" in done.output
    assert "not in the store: nothing" in run(command, ["verify", "nothing"]).output


def test_one_of_a_batch_that_fails_does_not_hold_the_others_up(cache, registry, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    images = ("docker://127.0.0.1:9/missing:1", "host", registry.reference)
    tasks.write_text("\n".join(json.dumps({"image": image}) for image in images))
    done = CliRunner().invoke(command, ["pull", "--sif", "--no-https", "--tasks", str(tasks)])
    assert done.exit_code == 1
    assert "1 of 2 images were not pulled" in done.output
    assert find_image(registry.reference) is not None


def test_build_and_start_by_name(cache, pulled, tmp_path, ranged_apptainer, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(ranged_apptainer), prepend=os.pathsep)
    root = unpack_image(pulled.record.name).root
    definition = tmp_path / "mine.def"
    definition.write_text(
        f"Bootstrap: localimage\nFrom: {root}\n%post\n    echo made > /made\n%environment\n    export MINE=1\n"
    )
    done = CliRunner().invoke(command, ["build", "--fakeroot", str(definition)])
    assert done.exit_code == 0, done.output

    async def start():
        provider = await _usable(ApptainerProvider, tmp_path)
        async with provider.open_sandbox(SandboxSpec(image="mine")) as sandbox:
            return (await sandbox.exec(["sh", "-c", "cat /made; env"], timeout_s=20)).stdout.decode()

    assert {"made", "MINE=1"} <= set(trio.run(start).splitlines())
    assert CliRunner().invoke(command, ["build", str(tmp_path / "none.def")]).exit_code == 1
    assert CliRunner().invoke(command, ["build", str(definition), "--name", "host"]).exit_code == 1


DOCKERFILE = """\
FROM {base}
ENV MINE="two words" PATH=/opt/mine:$PATH
WORKDIR /work
COPY sub ./sub/
COPY app.py .
RUN cat app.py sub/f > copied && cd /tmp
RUN env > env-of-run; exit 0
RUN echo again > after
"""


def test_build_from_a_dockerfile(cache, registry, tmp_path, ranged_apptainer, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(ranged_apptainer), prepend=os.pathsep)
    monkeypatch.setenv("APPTAINER_NOHTTPS", "1")
    context = tmp_path / "mine"
    (context / "sub" / "deep").mkdir(parents=True)
    for name in ("app.py", "sub/f", "sub/deep/g"):
        (context / name).write_text(f"{name}\n")
    (context / "Dockerfile").write_text(DOCKERFILE.format(base=registry.reference.removeprefix("docker://")))
    done = CliRunner().invoke(command, ["build", "--fakeroot", str(context / "Dockerfile")])
    assert done.exit_code == 0, done.output
    assert "as a definition file it is:" in done.output
    assert f"\n{context}/sub/. /work/sub/\n" in done.output
    look = "cd /work; cat copied sub/deep/g after env-of-run; echo inside; env"

    async def start():
        provider = await _usable(ApptainerProvider, tmp_path)
        async with provider.open_sandbox(SandboxSpec(image="mine")) as sandbox:
            return (await sandbox.exec(["sh", "-c", look], timeout_s=20)).stdout.decode()

    built, inside = trio.run(start).split("inside\n")
    assert built.splitlines()[:4] == ["app.py", "sub/f", "sub/deep/g", "again"]
    assert {"MINE=two words", "PWD=/work"} <= set(built.splitlines())
    assert "MINE=two words" in inside.splitlines()
    assert any(line.startswith("PATH=/opt/mine:/opt/tiny/bin:/bin") for line in inside.splitlines())


async def test_an_image_that_cannot_start_is_told(cache, pulled, tmp_path):
    provider = await _usable(ApptainerProvider, tmp_path)
    unpacked = unpack_image(pulled.record.name)
    assert unpacked.root is not None
    with trio.fail_after(TIMEOUT_S):
        assert await check_image(unpacked, provider) == ""
        (unpacked.root / "bin/true").unlink()
        assert "true" in await check_image(unpacked, provider)


def test_references_of_a_task_file(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"image": "docker://a"}\n\n{"payload": {"image": "b.sif"}}\n{"image": "docker://a"}\n')
    assert references_in(tasks) == ["docker://a", "b.sif"]
    tasks.write_text('{}\n["no object"]\n')
    with pytest.raises(SetupError, match="line 2"):
        references_in(tasks)
    tasks.write_bytes(b'{"image": "\xff"}\n')
    with pytest.raises(SetupError, match=r"line 1: .*utf-8"):
        references_in(tasks)
    with pytest.raises(SetupError, match="cannot be read"):
        references_in(tmp_path / "none")


def test_files_that_are_no_images(tmp_path):
    path = tmp_path / "x.sif"
    for content in (
        b"",
        b"x" * 4096,
        b"x" * 32 + b"SIF_MAGIC\0" + b"\0" * 86,
        b"x" * 32 + b"SIF_MAGIC\0" + b"\xff" * 86,
    ):
        path.write_bytes(content)
        with pytest.raises((ValueError, OSError)):
            squashfs_offset_bytes(path)
    path.write_bytes(b"hsqs" + bytes(200))
    assert squashfs_offset_bytes(path) == 0
