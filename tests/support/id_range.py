"""A range of ids for root's sandboxes on a machine whose /etc/subuid gives root none. The machine stays as it is."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from prorl_launch.doctor import _fakeroot
from prorl_trio.sandbox.providers.apptainer import find_apptainer
from support.skips import because

RANGE = "root:100000:65536\n"
PROBE_TIMEOUT_S = 20
SCRIPT = """\
#!/bin/sh
exec unshare --mount sh -c '{binds} && exec "$0" "$@"' {apptainer} "$@"
"""


def apptainer_with_ids(folder):
    """The system's Apptainer; for root without a range, one that sees a /etc/subuid with it in a mount namespace.

    What that takes is written to `folder`.
    """
    found = find_apptainer()
    if found is None or os.geteuid() != 0 or _fakeroot().state == "ok":
        return found
    program, problem = _pretended(found, folder)
    if problem:
        pytest.skip(
            because(
                f"root has no range of ids in /etc/subuid, and may pretend none: {problem}",
                "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 root",
            )
        )
    return program


def _pretended(apptainer, folder):
    binds = []
    for name in ("subuid", "subgid"):
        (folder / name).write_text(RANGE)
        binds.append(f"mount --bind {shlex.quote(str(folder / name))} /etc/{name}")
    program = folder / "apptainer"
    program.write_text(SCRIPT.format(binds=" && ".join(binds), apptainer=shlex.quote(apptainer)))
    program.chmod(0o755)
    tried = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    return str(program), tried.stderr.strip() if tried.returncode else ""
