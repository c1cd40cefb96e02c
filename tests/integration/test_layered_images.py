"""Sandboxes from layers of the store and of a registry: what they show, whose variables they have, many at once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import trio

from prorl_launch.image_store import check_image
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.images.compose import compose_image
from prorl_trio.sandbox.images.layers import store_layer
from prorl_trio.sandbox.images.locate import locate_root
from prorl_trio.sandbox.images.pull import PullRules
from prorl_trio.sandbox.images.puller import PullLimits
from prorl_trio.sandbox.images.removal import remove_image
from prorl_trio.sandbox.images.store import find_image, list_images
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.apptainer import ApptainerProvider, find_apptainer
from prorl_trio.sandbox.runtime.host_python import require_host_python
from prorl_trio.tasks.grading.repository_base import RepositoryBase, make_base
from support.programs import find_busybox
from support.registry import open_registry, tar_of
from support.skips import because

TIMEOUT_S = 240


@pytest.fixture
def cache(tmp_path, monkeypatch, runtime):
    """A cache folder of the test's own, with the real runtimes in it."""
    folder = tmp_path / "cache"
    for kind, real in (("runtimes", runtime), ("host-pythons", require_host_python())):
        (folder / kind).mkdir(parents=True)
        (folder / kind / real.name).symlink_to(real)
    monkeypatch.setenv("PRORL_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def registry():
    with open_registry() as server:
        yield server


@pytest.fixture
def userland():
    """The stream of a layer with a shell in it."""
    entries = dict.fromkeys(("bin", "dev", "etc", "proc", "sys", "tmp", "var", "usr"))
    entries["bin/busybox"] = Path(find_busybox()).read_bytes()
    entries |= {
        f"bin/{applet}": ("symlink", "busybox")
        for applet in ("sh", "cat", "env", "ls", "find", "sort", "rm", "mv", "mkdir")
    }
    return tar_of(entries, pack=True)


def limits_of(registry):
    return PullLimits(rules=PullRules(plain_http=(registry.host,), min_free_bytes=1))


async def test_a_registrys_image_is_pulled_when_it_is_wanted_and_shows_what_its_layers_leave(
    provider, cache, registry, userland, tmp_path
):
    below = {"d/old": b"1", "d/kept": b"1", "e/x": b"1", "f": b"1", "g/x": b"1", "etc/motd": b"below"}
    above = {".wh.f": b"", "d/.wh.old": b"", "e/.wh..wh..opq": b"", "e/new": b"2", ".wh.g": b"", "g": None, "g/y": b"2"}
    reference = registry.push("a:1", [userland, tar_of(below), tar_of(above)], ["PATH=/opt/a/bin:/bin", "A=it's"])
    task = tmp_path / "task"
    task.mkdir()
    (task / "motd").write_text("above")
    over = store_layer(task, "/etc").record.digest
    with trio.fail_after(TIMEOUT_S):
        async with open_sandbox_host(provider, pulls=limits_of(registry)) as host:
            sandbox = await host.open(SandboxSpec(image=reference, layers=(over,)))
            found = await sandbox.exec(["sh", "-c", "find /d /e /f /g -type f 2>/dev/null | sort"], timeout_s=20)
            assert found.stdout.split() == [b"/d/kept", b"/e/new", b"/g/y"]
            assert await sandbox.read_file("/etc/motd") == b"above"
            variables = (await sandbox.exec(["env"], timeout_s=20)).stdout.decode().splitlines()
            assert "A=it's" in variables
            assert next(line for line in variables if line.startswith("PATH=")).startswith("PATH=/opt/a/bin:/bin")
            with pytest.raises(ValueError, match="sandboxes use it"):
                remove_image(reference)
            await sandbox.aclose()
    remove_image(reference)


async def test_a_named_image_of_layers_over_the_host(provider, cache, tmp_path):
    for name in ("environment", "repository"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own").write_text(name)
    environment = store_layer(tmp_path / "environment", "/opt/env").record.digest
    repository = store_layer(tmp_path / "repository", "/testbed").record.digest
    compose_image("task", "host", [environment, repository])
    with trio.fail_after(TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(image="task")) as sandbox:
            done = await sandbox.bash(
                "cat /opt/env/own /testbed/own; echo x > /testbed/new; ls -1 /testbed", timeout_s=20
            )
            assert done.output == "environmentrepositorynew\nown\n"
            assert (await sandbox.bash("touch /usr/x /opt/prorl/lib/x", timeout_s=20)).exit_code == 1
            assert (await sandbox.ipython("import numpy; 1 + 1", timeout_s=60)).result == "2"
        task = find_image("task")
        assert await check_image(task, provider) == ""
        (locate_root("task").layers[1] / "testbed/own").write_text("changed")
        assert f"layer {repository} changed since it was stored" in await check_image(task, provider)


CHANGE = """
git checkout -q -b other && git rm -rq --cached d && rm -r d && echo x > d && git add d && git commit -qm x &&
git checkout -q master && test -f d/in/file && git checkout -q other && test -f d && rm d &&
mv e moved && mkdir e && test -f moved/in/file && ! test -e e/in && rm -r moved .git && ! test -e .git && echo done
"""


async def test_folders_of_layers_and_images_can_be_removed_renamed_and_replaced(
    provider, cache, registry, userland, tmp_path, monkeypatch
):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    repository = tmp_path / "repository/testbed"
    for path in ("d/in/file", "e/in/file"):
        (repository / path).parent.mkdir(parents=True)
        (repository / path).write_text("x")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q", "-b", "master"), ("add", "-A"), (*who, "commit", "-qm", "x")):
        subprocess.run(["git", "-C", str(repository), *command], check=True)
    layer = str(repository.parent)
    identity = dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "a")
    reference = registry.push("a:1", [userland, tar_of({"d/in/file": b"1", "e/in/file": b"1", "f": b"1"})], [])
    change = (
        "cd / && rm -r d && ! test -e d && mv e d && test -f d/in/file && rm f && mkdir f && rm -r /var && echo done"
    )
    with trio.fail_after(TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec(layers=(layer,), env=identity)) as sandbox:
            done = await sandbox.bash(f"cd /testbed && {CHANGE.strip()}", timeout_s=60)
            assert done.output == "done\n"
        async with provider.open_sandbox(SandboxSpec(layers=(layer,))) as sandbox:
            await make_base(sandbox, RepositoryBase(repo_dir="/testbed"))
            assert (
                await sandbox.exec(
                    ["git", "-c", "safe.directory=*", "-C", "/testbed", "status", "--short"], timeout_s=60
                )
            ).stdout == b""
        async with open_sandbox_host(provider, pulls=limits_of(registry)) as host:
            sandbox = await host.open(SandboxSpec(image=reference))
            assert (await sandbox.exec(["sh", "-c", change], timeout_s=60)).stdout == b"done\n"


async def test_an_overlay_that_cannot_remove_folders_is_found_out(tmp_path, monkeypatch):
    if find_apptainer() is None:
        pytest.skip(because("apptainer is not installed", "make apptainer"))
    monkeypatch.setattr(ApptainerProvider, "_write_config", lambda *_args, **_fields: None)
    report = await ApptainerProvider(tmp_path).probe()
    if not report.usable:
        pytest.skip(f"apptainer cannot run here: {report.problem}. What to do: {report.remedy}")
    assert "Input/output error" in report.images_problem
    assert "fuse-overlayfs" in report.remedy


@pytest.mark.slow
async def test_sixty_four_starts_of_sixty_four_images_at_once(provider, cache, registry, userland):
    references = [registry.push(f"task:{n}", [userland, tar_of({"own": str(n).encode()})]) for n in range(64)]
    seen = {}

    async def start(host, number):
        sandbox = await host.open(SandboxSpec(image=references[number], start_timeout_s=TIMEOUT_S))
        seen[number] = await sandbox.read_file("/own")
        await sandbox.aclose()

    with trio.fail_after(4 * TIMEOUT_S):
        async with open_sandbox_host(provider, pulls=limits_of(registry)) as host, trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(start, host, number)
    assert seen == {number: str(number).encode() for number in range(64)}
    assert len(list_images()) == 64
    assert len(registry.blob_requests()) == 1 + 64 + 64  # one userland; of each its own layer and its configuration
