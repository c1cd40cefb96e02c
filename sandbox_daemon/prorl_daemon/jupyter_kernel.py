"""A Jupyter kernel of any language, used by the daemon in the same way as its own IPython child.

Imported when a Jupyter kernel is first requested, because it needs jupyter_client.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
import zmq
from jupyter_client.session import Session

from prorl_daemon.cell_output import OutputPipe
from prorl_daemon.child_wire import CellDone
from prorl_daemon.children import open_pipe
from prorl_daemon.displays import Displays
from prorl_daemon.keeper import StartFailed
from prorl_daemon.kernelspec import plan_kernel
from prorl_daemon.output import cap_text
from prorl_daemon.processes import kill_until_gone
from prorl_daemon.threads import run_blocking
from prorl_ipc.sandbox_calls import CellError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from prorl_daemon.cell_output import CellOutput
    from prorl_daemon.children import Child, ChildReaper
    from prorl_daemon.kernelspec import KernelPlan
    from prorl_daemon.processes import ProcessEntry, ProcessTable


START_TIMEOUT_S = 60.0
HELLO_AGAIN_S = 0.5
"""Delay before a kernel is asked again that answered on one channel, but was not yet subscribed to on the other."""
KILL_DEADLINE_S = 2.0
BEGIN_GRACE_S = 0.5
"""Time that an interrupt waits for a kernel that has not yet begun its cell."""
DRAIN_GRACE_S = 0.2
"""Time for a dead kernel's last messages and output to arrive."""
LAST_MESSAGE_GRACE_S = 2.0
"""Time for the end of a cell's output to arrive after its answer."""


# A client's ends of a Jupyter kernel's sockets, for trio: it waits for ZeroMQ's own descriptors, without polling.
#
# Imported when a Jupyter kernel is first requested, because it needs jupyter_client.

MAX_QUEUED_MESSAGES = 1000
"""Limit for each socket. Beyond it the kernel waits (shell, control), or drops its publications (iopub)."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""On a longer message, ZeroMQ drops the connection and reconnects."""

MAX_EXECUTION_COUNT = 2**63
"""One more than the largest count that can be sent: a cell can make its kernel report any count."""
_CONTROL_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


class JupyterCell:
    """The state of one cell.

    Attributes:
        begun: the kernel runs it, so that an interrupt reaches it.
        idle: all its publications have been received.
        reply: the content of the answer to its request.
    """

    def __init__(self, request_id: str, *, max_text_bytes: int, stdout: CellOutput, stderr: CellOutput) -> None:
        self.begun = False
        self.idle = False
        self.reply: Mapping[str, Any] | None = None
        self._request_id = request_id
        self._max_text_bytes = max_text_bytes
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._displays = Displays()
        self._result: str | None = None

    async def take_published(self, message: Mapping[str, Any]) -> None:
        """Process a message of the iopub channel. Output counts whoever wrote it, even a thread of an earlier cell."""
        content, ours = message["content"], message["parent_header"].get("msg_id") == self._request_id
        match message["header"]["msg_type"]:
            case "stream":
                await self._write(content.get("name", "stdout"), content.get("text", ""))
            case "display_data":
                if "text/plain" in content["data"]:
                    await self._write("stdout", f"{_text_of(content['data']['text/plain'])}\n")
                self._displays.add(_joined(content["data"]))
            case "execute_result" if ours:
                self._result = _text_of(content["data"].get("text/plain", ""))
                self._displays.add(_joined(content["data"]))
            case "execute_input" if ours:
                self.begun = True
            case "status" if ours and content["execution_state"] == "idle":
                self.idle = True

    def take_reply(self, message: Mapping[str, Any]) -> None:
        if message["parent_header"].get("msg_id") == self._request_id:
            self.reply = message["content"]

    def done(self) -> CellDone:
        """Return the answer. `reply` must be set."""
        assert self.reply is not None
        result, error, dropped_bytes = self._result, None, 0
        if result is not None:
            capped = cap_text(result, self._max_text_bytes)
            result, dropped_bytes = capped.text, capped.dropped_bytes
        if self.reply.get("status") != "ok":
            lines = [_text_of(line) for line in self.reply.get("traceback", ())]
            value = cap_text(_text_of(self.reply.get("evalue", "")), self._max_text_bytes)
            traceback = cap_text(without_control_codes("\n".join(lines)), self._max_text_bytes)
            name = _text_of(self.reply.get("ename", self.reply.get("status")))
            error = CellError(name=name, value=value.text, traceback=traceback.text)
            dropped_bytes += value.dropped_bytes + traceback.dropped_bytes
        count = self.reply.get("execution_count")
        return CellDone(
            result=result,
            error=error,
            execution_count=count if isinstance(count, int) and 0 <= count < MAX_EXECUTION_COUNT else 0,
            dropped_bytes=dropped_bytes,
            displays=self._displays.kept,
            dropped_displays=self._displays.dropped,
        )

    async def _write(self, stream: str, text: str) -> None:
        await self._streams[stream if stream == "stderr" else "stdout"].take(text.encode(errors="backslashreplace"))


def without_control_codes(text: str) -> str:
    """Return `text` without the terminal's escape sequences: colours, titles, cursor movements."""
    return _CONTROL_CODE.sub("", text)


def _joined(forms: Mapping[str, Any]) -> dict[str, Any]:
    return {mime: _text_of(form) for mime, form in forms.items()}


def _text_of(form: Any) -> str:
    """Return a text, which in Jupyter may always be a list of lines."""
    return "".join(map(str, form)) if isinstance(form, list) else str(form)


class BadMessage(Exception):
    """A message that no kernel with our key sends."""


MALFORMED = (BadMessage, LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)
"""Errors of reading an invalid message: a cell accessed its kernel's sockets, and the kernel is lost."""


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
        """Send a request on the control channel, whose answers are not read."""
        while self._receive_nowait(self._control) is not None:
            continue
        return self._send(self._control, kind, {})

    async def receive_reply(self) -> dict[str, Any]:
        """Return the next message of the shell channel. Raises BadMessage. A checkpoint only if it has to wait."""
        return await self._receive(self._shell)

    async def receive_published(self) -> dict[str, Any]:
        """Return the next message of the iopub channel: output, displays, status. As `receive_reply`."""
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
        # The descriptor reports changes, not a state: wait for it only after an empty read.
        while (message := self._receive_nowait(socket)) is None:
            await trio.lowlevel.wait_readable(socket.fileno())
        return message

    def _receive_nowait(self, socket: zmq.Socket[bytes]) -> dict[str, Any] | None:
        try:
            _, message = self._session.recv(socket, zmq.NOBLOCK)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as exc:
            raise BadMessage(str(exc)) from exc
        return message


class JupyterKernel:
    """A running kernel. One cell at a time, which its caller ensures. A `CellKernel`.

    Its publications are the output. Its own descriptors, which ipykernel publishes as well, are only stored to explain
    a failed start.
    """

    def __init__(
        self, plan: KernelPlan, child: Child, stdout: OutputPipe, stderr: OutputPipe, limiter: trio.CapacityLimiter
    ) -> None:
        self.child = child
        self._plan = plan
        self._channels = JupyterChannels(plan.connection)
        self._stdout = stdout
        self._stderr = stderr
        self._limiter = limiter
        self._reading = trio.Lock()
        self._cell: JupyterCell | None = None
        self._ended = trio.Event()
        self._gone = trio.Event()

    def __repr__(self) -> str:
        return f"<JupyterKernel {self.child.pid}: {'gone' if self._gone.is_set() else 'running'}>"

    async def wait_gone(self) -> None:
        await self._gone.wait()

    async def begin(self, code: str, *, max_text_bytes: int, stdout: CellOutput, stderr: CellOutput) -> None:
        if self._ended.is_set():
            return
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
        request_id = self._channels.ask("execute_request", {**content, "allow_stdin": False, "stop_on_error": False})
        self._cell = JupyterCell(request_id, max_text_bytes=max_text_bytes, stdout=stdout, stderr=stderr)

    async def wait_done(self) -> CellDone | None:
        cell = self._cell
        if cell is not None and not self._gone.is_set():
            async with self._reading:
                await self._converse(cell)
            with suppress(*MALFORMED):
                if cell.reply is not None:
                    return cell.done()
        await self.kill()
        await self._gone.wait()
        return None

    async def interrupt(self) -> None:
        """Send SIGINT to the kernel and its process group, or the message that it expects instead.

        Waits until the kernel has begun the cell, because it ignores earlier interrupts.
        """
        if self._cell is None or self._ended.is_set():
            return
        with trio.move_on_after(BEGIN_GRACE_S):
            async with self._reading:
                await self._read_until_begun(self._cell)
        if self._ended.is_set():
            return
        if self._plan.interrupt_by_message:
            self._channels.ask_control("interrupt_request")
        else:
            self.child.kill_group(signal.SIGINT)

    async def kill(self) -> None:
        if self.child.exit_code is not None:
            return
        session = self.child.pid

        def members(table: ProcessTable) -> set[ProcessEntry]:
            return table.with_descendants(lambda entry: entry.session == session)

        self.child.kill_group(signal.SIGKILL)
        await kill_until_gone(members)

    async def start(self) -> bool:
        """Wait until both of its channels work and its opening code has run; return False if it ended or failed."""
        ready = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_after, self._ended, nursery.cancel_scope, 0)
            with suppress(*MALFORMED):
                await self._ask_until_subscribed()
                ready = await self._open()
            nursery.cancel_scope.cancel()
        return ready

    async def _ask_until_subscribed(self) -> None:
        published = False
        while not published:
            self._channels.ask("kernel_info_request", {})
            await self._channels.receive_reply()
            with trio.move_on_after(HELLO_AGAIN_S):
                await self._channels.receive_published()
                published = True

    async def _open(self) -> bool:
        if not self._plan.opening:
            return True
        content = {"code": self._plan.opening, "silent": True, "store_history": False, "allow_stdin": False}
        request_id = self._channels.ask("execute_request", content)
        while (reply := await self._channels.receive_reply())["parent_header"].get("msg_id") != request_id:
            continue
        return bool(reply["content"]["status"] == "ok")

    def recent_errors(self) -> str:
        return self._stderr.recent_text()

    async def serve(self) -> None:
        """Read the kernel's output until it ends, then close all its resources. On cancellation it is killed."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stdout.serve)
                nursery.start_soon(self._stderr.serve)
                await self.child.wait()
                self._ended.set()
                nursery.cancel_scope.deadline = trio.current_time() + DRAIN_GRACE_S
        finally:
            self._ended.set()
            with trio.move_on_after(KILL_DEADLINE_S, shield=True):
                await self.kill()
            self._stdout.close()
            self._stderr.close()
            self._gone.set()

    async def aclose(self) -> None:
        """Close the channels when they are no longer read, which is soon after the kernel's end."""
        async with self._reading:
            await run_blocking(self._channels.close, limiter=self._limiter, or_here=True)

    async def _read_until_begun(self, cell: JupyterCell) -> None:
        with suppress(*MALFORMED):  # `wait_done` finds the kernel lost
            while not (cell.begun or cell.idle):
                await cell.take_published(await self._channels.receive_published())

    async def _converse(self, cell: JupyterCell) -> None:
        """Read both channels until the cell or the kernel has ended; in the second case `reply` is not set."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                def end_soon() -> None:
                    if cell.reply is not None and cell.idle:
                        scope.cancel()
                    else:
                        scope.deadline = min(scope.deadline, trio.current_time() + LAST_MESSAGE_GRACE_S)

                async def read_replies() -> None:
                    while cell.reply is None:
                        cell.take_reply(await self._channels.receive_reply())
                    end_soon()

                async def read_published() -> None:
                    while not cell.idle:
                        await cell.take_published(await self._channels.receive_published())
                    end_soon()

                async def read(reader: Any) -> None:
                    try:
                        await reader()
                    except MALFORMED:
                        scope.cancel()

                nursery.start_soon(_cancel_after, self._ended, scope, DRAIN_GRACE_S)
                nursery.start_soon(read, read_replies)
                nursery.start_soon(read, read_published)


async def _cancel_after(event: trio.Event, scope: trio.CancelScope, grace_s: float) -> None:
    await event.wait()
    scope.deadline = min(scope.deadline, trio.current_time() + grace_s)


@asynccontextmanager
async def open_jupyter_kernel(
    spec: Any,
    reaper: ChildReaper,
    *,
    env: dict[str, str],
    cwd: str,
    runtime_env: dict[str, str],
    limiter: trio.CapacityLimiter,
) -> AsyncIterator[JupyterKernel]:
    """Start a kernel of this kernelspec and yield it ready for its first cell.

    On exit, also by a cancel, all processes in its session are killed, and the files made for its start are removed.

    Args:
        spec: the kernelspec of jupyter_client.
        reaper: starts it, and is notified of its end.
        cwd: the folder that its cells begin in.
        limiter: limiter of the threads for blocking work.
        env: the environment of cells and their children, in addition to the kernelspec's own.
        runtime_env: the environment that this daemon's Python needs to start, for a kernel that runs in it.

    Raises:
        StartFailed: it could not be started, or was not ready within `START_TIMEOUT_S`.
    """
    try:
        plan = await run_blocking(partial(plan_kernel, spec, env=env, runtime_env=runtime_env), limiter=limiter)
    except OSError as exc:
        raise StartFailed(f"the kernel {spec.name!r} could not be started: {exc}") from exc
    try:
        kernel = await _spawn(plan, reaper, cwd=cwd, limiter=limiter)
        ready = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kernel.serve)
                with trio.move_on_after(START_TIMEOUT_S):
                    ready = await kernel.start()
                if ready:
                    yield kernel
                nursery.cancel_scope.cancel()
        finally:
            with trio.move_on_after(KILL_DEADLINE_S, shield=True):
                await kernel.aclose()
        if not ready:
            said = kernel.recent_errors()
            raise StartFailed(f"{spec.name!r} did not get ready (limit {START_TIMEOUT_S:g} s); it said: {said}")
    finally:
        with trio.move_on_after(KILL_DEADLINE_S, shield=True):
            await run_blocking(partial(shutil.rmtree, plan.folder, ignore_errors=True), limiter=limiter, or_here=True)


async def _spawn(plan: KernelPlan, reaper: ChildReaper, *, cwd: str, limiter: trio.CapacityLimiter) -> JupyterKernel:
    with ExitStack() as ours, ExitStack() as theirs:
        stdout_read, stdout_write = open_pipe(ours, theirs)
        stderr_read, stderr_write = open_pipe(ours, theirs)
        streams = (subprocess.DEVNULL, stdout_write, stderr_write)
        try:
            there = await run_blocking(partial(os.path.isdir, cwd), limiter=limiter)
            child = await reaper.start(plan.argv, streams, env=plan.env, cwd=cwd if there else "/", limiter=limiter)
        except OSError as exc:
            raise StartFailed(f"{plan.argv[0]} could not be started: {exc}") from exc
        ours.pop_all()
    return JupyterKernel(plan, child, OutputPipe("stdout", stdout_read), OutputPipe("stderr", stderr_read), limiter)
