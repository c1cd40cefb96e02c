"""The base of every table of a configuration."""

from __future__ import annotations

import msgspec


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a configuration file: immutable; an unknown key is an error."""
