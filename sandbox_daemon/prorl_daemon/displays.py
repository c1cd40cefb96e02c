"""The rich output of a cell: images are carried, other forms are only named. Pure."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from prorl_ipc.sandbox_calls import Display

if TYPE_CHECKING:
    from collections.abc import Mapping

CARRIED_TYPES = ("image/png", "image/jpeg")
NAMED_TYPES = ("image/svg+xml", "text/html")
MAX_DISPLAY_BYTES = 4 * 1024 * 1024
"""Limit of all images of one cell together. An image that does not fit is only named."""
MAX_DISPLAYS = 32
"""Limit of displays of one cell. Further ones are counted."""


class Displays:
    """Collects the displays of one cell, at most `MAX_DISPLAYS` and `MAX_DISPLAY_BYTES`."""

    def __init__(self) -> None:
        self.dropped = 0
        """The number of displays that were dropped."""
        self.kept: list[Display] = []
        self._room_bytes = MAX_DISPLAY_BYTES

    def add(self, forms: Mapping[str, Any]) -> None:
        """Add one object with its forms by MIME type, as in Jupyter: images as bytes, or as text in base 64.

        The first form of `CARRIED_TYPES`, then of `NAMED_TYPES`, is the object's display. An object without these forms
        is not displayed.
        """
        for mime in (*CARRIED_TYPES, *NAMED_TYPES):
            if mime in forms:
                self._keep(mime, _raw(forms[mime], is_image=mime in CARRIED_TYPES))
                return

    def _keep(self, mime: str, raw: bytes) -> None:
        if len(self.kept) == MAX_DISPLAYS:
            self.dropped += 1
            return
        carried = mime in CARRIED_TYPES and len(raw) <= self._room_bytes
        if carried:
            self._room_bytes -= len(raw)
        self.kept.append(Display(mime=mime, data=raw if carried else b"", size_bytes=len(raw)))


def _raw(form: Any, *, is_image: bool) -> bytes:
    if isinstance(form, bytes):
        return form
    text = form if isinstance(form, str) else str(form)
    encoded = text.encode(errors="backslashreplace")
    if is_image:
        try:
            return base64.b64decode(encoded)
        except binascii.Error:
            return b""
    return encoded
