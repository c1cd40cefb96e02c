"""The Unix sockets for trainers on the node's own host, in a folder that only the node's user can enter."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from prorl_ipc.channel import MAX_SOCKET_PATH_BYTES
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_trio.config import ListenConfig

logger = logging.getLogger(__name__)


class LocalSockets(NamedTuple):
    """The paths of the sockets: `node` for sessions, `arena` for the node's shared memory."""

    node: Path
    arena: Path


def claim_local_sockets(listen: ListenConfig, default: Path | None = None) -> LocalSockets | None:
    """Create the folder for the sockets if it is missing, and remove sockets that a killed node left there.

    Returns the paths; None if none are configured, or if `auto` is configured but fails, which is logged. The listener
    unlinks the sockets when it closes. `default`: see `ListenConfig.unix_path`. Blocks on the disk.

    Raises:
        ConfigError: a configured path is too long, its folder is not exclusively ours, or a node listens there.
    """
    node = listen.unix_path(default)
    if node is None:
        return None
    sockets = LocalSockets(node, node.with_name(node.name + ".arena"))
    try:
        _claim(sockets)
    except ConfigError as exc:
        if listen.unix_socket != "auto":
            raise
        logger.warning("no socket for trainers on this host: %s", exc)
        return None
    return sockets


def check_local_sockets(listen: ListenConfig) -> None:
    """Check that a configured path can be claimed by `claim_local_sockets`. Blocks on the disk.

    Raises:
        ConfigError: it cannot.
    """
    if listen.unix_socket != "auto":
        claim_local_sockets(listen)


def release_local_sockets(listen: ListenConfig, sockets: LocalSockets) -> None:
    """Remove the folder that `auto` creates if it is empty. A configured folder is kept."""
    if listen.unix_socket == "auto":
        with suppress(OSError):
            sockets.node.parent.rmdir()


def _claim(sockets: LocalSockets) -> None:
    folder, size_bytes = sockets.node.parent, len(os.fsencode(sockets.arena))
    if size_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"listen.unix_socket: {sockets.arena} has {size_bytes} bytes, the kernel allows {MAX_SOCKET_PATH_BYTES}; "
            "choose a shorter path"
        )
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for found in (folder.lstat(), folder.stat()):  # both the folder and a link to it
            if found.st_uid != os.geteuid():
                raise ConfigError(
                    f"listen.unix_socket: {folder.absolute()} belongs to user {found.st_uid}; name a folder of our own"
                )
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISDIR(found.st_mode) or mode & 0o077:
            raise ConfigError(
                f"listen.unix_socket: the folder {folder.absolute()} has mode {mode:04o}, others can enter it; chmod "
                "700 it, or name a socket in a folder of its own"
            )
        for path in sockets:
            _remove_stale(path)
        _try_to_bind(sockets)
    except OSError as exc:
        raise ConfigError(
            f"listen.unix_socket: {exc.filename or sockets.node}: {exc.strerror}; name a socket in a folder that the "
            "node's user can make or write, or set it to an empty text for none"
        ) from exc


def _remove_stale(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"listen.unix_socket: {path} is there, and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        reached = probe.connect_ex(os.fspath(path))
    if reached == errno.ECONNREFUSED:  # not listening: left by a killed node
        path.unlink(missing_ok=True)
    elif reached != errno.ENOENT:
        raise ConfigError(f"listen.unix_socket: {path} belongs to a node that is running; choose another path")


def _try_to_bind(sockets: LocalSockets) -> None:
    """Raise OSError if the sockets cannot be created, such as on a full disk or one without sockets."""
    with ExitStack() as trials:
        for path in sockets:
            trials.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)).bind(os.fspath(path))
            trials.callback(path.unlink, missing_ok=True)
