"""A cell in a Jupyter kernel: from the kernel's messages to our answer. Pure, but for the order of output."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from prorl_daemon.child_wire import CellDone
from prorl_daemon.displays import Displays
from prorl_daemon.output import cap_text
from prorl_ipc.sandbox_calls import CellError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_daemon.cell_output import CellOutput

MAX_EXECUTION_COUNT = 2**63
"""The largest count that can be sent on, and one: a cell can have its kernel say any."""
_CONTROL_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


class JupyterCell:
    """The state of one cell.

    Attributes:
        begun: the kernel runs it; an interrupt reaches it.
        idle: everything it published has been taken.
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
        """Take a message of the iopub channel. Output counts whoever wrote it, a thread of an earlier cell too."""
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
        """Take a message of the shell channel."""
        if message["parent_header"].get("msg_id") == self._request_id:
            self.reply = message["content"]

    def done(self) -> CellDone:
        """The answer. `reply` must be there."""
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
    """`text` without the terminal's escape sequences: colours, titles, cursor movements."""
    return _CONTROL_CODE.sub("", text)


def _joined(forms: Mapping[str, Any]) -> dict[str, Any]:
    return {mime: _text_of(form) for mime, form in forms.items()}


def _text_of(form: Any) -> str:
    """Jupyter allows a list of lines wherever there is text."""
    return "".join(map(str, form)) if isinstance(form, list) else str(form)
