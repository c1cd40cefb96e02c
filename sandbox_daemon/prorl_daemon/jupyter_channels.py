"""A client's ends of a Jupyter kernel's sockets, for trio: ZeroMQ's own descriptors are waited for, nothing is polled.

Imported when a Jupyter kernel is first asked for: it needs jupyter_client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio
import zmq
from jupyter_client.session import Session

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_QUEUED_MESSAGES = 1000
"""For each socket. Beyond it the kernel waits (shell, control), or drops what it publishes (iopub)."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""ZeroMQ drops the connection over a longer one, and connects again."""


class BadMessage(Exception):
    """Something came that no kernel with our key sends."""


class JupyterChannels:
    """Signed messages to and from one kernel. Closed with `close`.

    Each socket may be read by one task at a time. Cancelling a read loses nothing.

    Args:
        connection: the content of the kernel's connection file.
    """

    def __init__(self, connection: Mapping[str, Any]) -> None:
        self._connection = connection
        self._session = Session(key=connection["key"].encode(), signature_scheme=connection["signature_scheme"])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._shell = self._connect(zmq.DEALER, "shell_port")
        self._control = self._connect(zmq.DEALER, "control_port")
        self._iopub = self._connect(zmq.SUB, "iopub_port")
        self._iopub.setsockopt(zmq.SUBSCRIBE, b"")

    def ask(self, kind: str, content: dict[str, Any]) -> str:
        """Send a request on the shell channel. Returns the id that its answers name as their parent."""
        return self._send(self._shell, kind, content)

    def ask_control(self, kind: str) -> str:
        """Send a request on the control channel, whose answers nobody reads."""
        while self._receive_nowait(self._control) is not None:
            continue
        return self._send(self._control, kind, {})

    async def receive_reply(self) -> dict[str, Any]:
        """The next message of the shell channel. Raises BadMessage. A checkpoint only if it has to wait."""
        return await self._receive(self._shell)

    async def receive_published(self) -> dict[str, Any]:
        """The next message of the iopub channel: output, displays, status. As `receive_reply`."""
        return await self._receive(self._iopub)

    def close(self) -> None:
        """Close the sockets and end ZeroMQ's thread, without waiting for the kernel. Blocks for that thread."""
        self._context.destroy(linger=0)

    def _connect(self, kind: int, port: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, self._session.bsession)
        socket.connect(f"ipc://{self._connection['ip']}-{self._connection[port]}")
        return socket

    def _send(self, socket: zmq.Socket[bytes], kind: str, content: dict[str, Any]) -> str:
        message: dict[str, Any] = self._session.send(socket, kind, content)  # type: ignore[assignment]
        return str(message["header"]["msg_id"])

    async def _receive(self, socket: zmq.Socket[bytes]) -> dict[str, Any]:
        # The descriptor tells of changes, not of a state: it may only be waited for after a read that found nothing.
        while (message := self._receive_nowait(socket)) is None:
            await trio.lowlevel.wait_readable(socket.fileno())
        return message

    def _receive_nowait(self, socket: zmq.Socket[bytes]) -> dict[str, Any] | None:
        try:
            _, message = self._session.recv(socket, zmq.NOBLOCK)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as exc:
            raise BadMessage(str(exc)) from exc
        return message
