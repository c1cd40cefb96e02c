"""`str_replace_editor`: the file editor that agents are trained on. The work is done inside the sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import trio

from prorl_ipc.file_calls import EditFile
from prorl_trio.tools.arguments import read_arguments
from prorl_trio.tools.base import Observation, Tool
from prorl_trio.types.errors import HandlerError, field_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.sandbox.sandbox import Sandbox

DESCRIPTION = """\
View, create and edit text files.
* `view` shows a file with line numbers, as `cat -n` does, or lists a directory two levels deep without hidden items
* `create` makes a new file; it does not overwrite an existing one
* `str_replace` replaces `old_str` with `new_str`; `old_str` must match exactly one place of the file, whitespace \
included, so give it enough lines of context to be unique
* `insert` puts `new_str` after the line `insert_line`
* `undo_edit` takes back the last edit made to the file
Long output is clipped and marked with `<response clipped>`. Files keep their state between calls."""


class EditorTool(Tool):
    """A tool that views or edits one file by one command of the editor."""

    name = "str_replace_editor"
    description = DESCRIPTION
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
                "description": "The command to run.",
            },
            "path": {"type": "string", "description": "Absolute path to file or directory, e.g. `/repo/file.py`."},
            "file_text": {"type": "string", "description": "Required by `create`: the content of the file."},
            "old_str": {"type": "string", "description": "Required by `str_replace`: the text in `path` to replace."},
            "new_str": {
                "type": "string",
                "description": "The new text of `str_replace` (nothing if left out); required by `insert`.",
            },
            "insert_line": {
                "type": "integer",
                "description": "Required by `insert`: `new_str` goes AFTER this line of `path`; 0 is the beginning.",
            },
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For `view` of a file: the lines to show, e.g. [11, 12]; -1 is the last line.",
            },
        },
        "required": ["command", "path"],
    }

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Raises SandboxLost when the sandbox is gone."""
        if sandbox is None:
            raise HandlerError(f"the tool {self.name!r} needs a sandbox, but this handler opens none")
        arguments = read_arguments(arguments, self.parameters)
        known = {key: arguments[key] for key in self.parameters["properties"] if key in arguments}
        try:
            edit = msgspec.convert({**known, "type": "EditFile"}, EditFile)
        except msgspec.ValidationError as exc:
            problem, path, _ = field_error(exc)
            return Observation.refused(f"an argument is of the wrong type: {problem} - at `{path.removeprefix('$.')}`.")
        edited = None
        with trio.move_on_after(timeout_s):
            edited = await sandbox.edit_file(edit)
        if edited is None:
            return Observation.refused(
                f"not done within {timeout_s:g} s. Look at the file before you go on.", "timed_out"
            )
        return Observation(text=edited.output, outcome="ok" if edited.ok else "error")
