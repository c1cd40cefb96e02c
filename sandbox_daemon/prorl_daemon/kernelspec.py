"""Jupyter's installed kernels, and their start. Imports jupyter_client, an optional dependency, when it is needed.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import inspect
import os
import re
import secrets
import sys
import tempfile
from typing import Any, NamedTuple

from prorl_daemon import jupyter_output
from prorl_ipc.channel import MAX_SOCKET_PATH_BYTES
from prorl_ipc.server import CallError

KEY_BYTES = 16
MAX_LISTED_KERNELS = 20
INTERPRETER_VARIABLES = ("PYTHONHOME", "LD_LIBRARY_PATH")
"""Variables of the daemon's own environment, for kernels that run in the daemon's own Python."""
IPYKERNELS = frozenset({"ipykernel", "ipykernel_launcher"})
"""The modules whose kernels accept ipykernel's options."""
LONGEST_SOCKET_NAME = "/s-5"
"""The longest suffix of the folder in the path of a kernel's socket."""


class KernelPlan(NamedTuple):
    """The plan of a kernel's start.

    `folder` holds its connection file and its sockets; the caller removes it.

    `connection` is the content of the connection file. `interrupt_by_message`: it expects a message instead of SIGINT.
    `opening` is code that it runs invisibly before the first cell; may be empty.
    """

    argv: list[str]
    env: dict[str, str]
    folder: str
    connection: dict[str, Any]
    interrupt_by_message: bool
    opening: str


def find_kernelspec(name: str) -> Any:
    """Return the installed kernelspec of this name.

    Raises:
        CallError: `no_kernel`, it does not exist (the message names the existing ones), or jupyter_client is not
            installed.
    """
    try:
        import jupyter_client.session  # noqa: F401  # imported here for its later use on the event loop
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError as exc:
        message = f"the kernel {name!r} needs jupyter_client beside the daemon: install prorl-trio[jupyter] ({exc})"
        raise CallError("no_kernel", message) from exc
    kernelspecs = KernelSpecManager()
    try:
        return kernelspecs.get_kernel_spec(name)
    except NoSuchKernel:
        installed = sorted(kernelspecs.find_kernel_specs())
        listed = ", ".join(installed[:MAX_LISTED_KERNELS]) or "none"
        raise CallError("no_kernel", f"there is no Jupyter kernel {name!r} here; installed: {listed}") from None


def plan_kernel(spec: Any, *, env: dict[str, str], runtime_env: dict[str, str]) -> KernelPlan:
    """Make the folder of a new kernel of this kernelspec, with its connection file: IPC transport, its own key.

    Raises:
        OSError: the folder cannot be made, or its path is too long for a socket.
    """
    from jupyter_client.connect import write_connection_file

    folder = tempfile.mkdtemp(prefix="jk-")  # mode 0700
    if len(os.fsencode(folder + LONGEST_SOCKET_NAME)) > MAX_SOCKET_PATH_BYTES:
        os.rmdir(folder)
        raise OSError(f"{folder} is too long for a socket's path ({MAX_SOCKET_PATH_BYTES} bytes); set a shorter TMPDIR")
    file, connection = write_connection_file(
        f"{folder}/connection.json",
        transport="ipc",
        ip=f"{folder}/s",
        key=secrets.token_hex(KEY_BYTES).encode(),
        kernel_name=spec.name,
    )
    blanks = {"connection_file": file, "resource_dir": spec.resource_dir, "prefix": sys.prefix}
    argv = [re.sub(r"\{(\w+)\}", lambda blank: blanks.get(blank[1], blank[0]), part) for part in spec.argv]
    kernel_env = {"PYDEVD_DISABLE_FILE_VALIDATION": "1", **env, **spec.env}
    if re.fullmatch(r"python(\d(\.\d+)?)?", argv[0]):  # as Jupyter does: a kernelspec that means its own Python
        argv[0] = sys.executable
    if argv[0] == sys.executable:
        kernel_env = {name: runtime_env[name] for name in INTERPRETER_VARIABLES if name in runtime_env} | kernel_env
    opening = ""
    if not IPYKERNELS.isdisjoint(argv):
        argv.append("--IPKernelApp.capture_fd_output=False")
        source = f"{inspect.getsource(jupyter_output)}\n{jupyter_output.publish_descriptors.__name__}()\n"
        opening = f"exec({source!r}, {{'__name__': {jupyter_output.__name__!r}}})"
    return KernelPlan(argv, kernel_env, folder, dict(connection), spec.interrupt_mode == "message", opening)
