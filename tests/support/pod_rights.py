"""Runs a command with the rights that the manifest of a pod leaves it. For root, on the machine itself.

    python pod_rights.py whole|masked COMMAND...

A user namespace of 65,536 ids, and process ids and mounts of its own; user 1000, no capability, no new privileges. With
`masked`, parts of /proc are hidden, as container runtimes do. Exit code 77: such a namespace cannot be made here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000  # CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWPID
IDS = "0 100000 65536"
USER = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all")
IMPOSSIBLE = 77


def main() -> int:
    """Return the exit code of the command."""
    masked, command = sys.argv[1] == "masked", sys.argv[2:]
    ready, has_ids = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(_inside(ready[1], has_ids[0], command, masked=masked))
    os.close(ready[1])
    if os.read(ready[0], 1):
        try:
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{child}/{name}", "w") as file:
                    file.write(IDS)
        except PermissionError:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return IMPOSSIBLE
        os.write(has_ids[1], b".")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _inside(ready: int, has_ids: int, command: list[str], *, masked: bool) -> int:
    if ctypes.CDLL(None).unshare(NAMESPACES) != 0:
        return IMPOSSIBLE
    os.write(ready, b".")
    os.read(has_ids, 1)
    os.setgid(0)
    os.setuid(0)
    script = "mount -t proc proc /proc && "
    script += "mount -t tmpfs -o ro tmpfs /proc/fs && " if masked else ""
    script += f'exec {" ".join(USER)} --no-new-privs "$@"'
    return subprocess.run(["sh", "-c", script, "sh", *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
