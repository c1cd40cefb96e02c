"""The contract of the shell, through every provider, in every kind of image."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.testing.bash_contract import PORTABLE, SESSIONS, check_sessions
from support.programs import find_busybox

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime")]

SANDBOXES = 4
"""Of one image at a time: the sessions mostly wait."""
TABLE_TIMEOUT_S = 400
CASES = [
    ("apptainer", "host"),
    ("apptainer", "debian"),
    ("apptainer", "sif"),
    ("apptainer", "busybox"),
    ("bubblewrap", "host"),
    ("bubblewrap", "debian"),
    ("bubblewrap", "busybox"),
    ("process", "host"),
]
LACKING = {"debian": {"less"}, "sif": {"less"}, "busybox": {"python3"}}
"""What sessions need, and an image is known not to have. On `host`, the programs that this machine has not."""


@pytest.fixture(scope="session")
def busybox(tmp_path_factory):
    program = find_busybox()
    root = tmp_path_factory.mktemp("busybox") / "root"
    for folder in ("bin", "dev", "etc", "proc", "tmp", "usr", "var"):
        (root / folder).mkdir(parents=True)
    shutil.copy2(program, root / "bin/busybox")
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout
    for applet in set(listed.split()) - {"busybox"}:
        (root / "bin" / applet).symlink_to("busybox")
    return root


@pytest.mark.parametrize(("name", "kind"), CASES, ids=["-".join(case) for case in CASES])
async def test_table(name, kind, request, tmp_path, record_property):
    image = "host" if kind == "host" else str(request.getfixturevalue(kind))
    provider = PROVIDERS[name](tmp_path)
    report = await provider.probe()
    if not report.usable:
        pytest.skip(f"{name} cannot run here: {report.problem}. What to do: {report.remedy}")
    sessions = PORTABLE if kind == "busybox" else SESSIONS
    with trio.fail_after(TABLE_TIMEOUT_S):
        async with AsyncExitStack() as stack:
            sandboxes = [
                await stack.enter_async_context(provider.open_sandbox(SandboxSpec(image=image)))
                for _ in range(SANDBOXES)
            ]
            left_out = await check_sessions(sandboxes, sessions)
    record_property("left_out", left_out)
    if kind == "host":
        lacking = {session.needs for session in sessions if session.needs}
        lacking = {needed for needed in lacking if not shutil.which(needed) and not Path(needed).exists()}
    else:
        lacking = LACKING[kind]
    if name == "apptainer":
        lacking = lacking | {"/dev/full"}  # its /dev has but a few devices
    assert left_out == sorted(session.name for session in sessions if session.needs in lacking)
