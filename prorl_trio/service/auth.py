"""The token that a trainer authenticates with."""

from __future__ import annotations

import hmac
import os
import stat
from typing import TYPE_CHECKING, Final

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from prorl_trio.config import ListenConfig

__all__ = ["load_token", "token_matches"]

MAX_TOKEN_BYTES: Final = 4096


def load_token(config: ListenConfig) -> bytes:
    """Return the token from `config.token` or the file `config.token_file`, without white space around it.

    Blocks on the disk.

    Raises:
        ConfigError: both or neither are set; the token is empty, too long or not one line of text; or other users can
            access the file.
    """
    if config.token and config.token_file:
        raise ConfigError("listen.token and listen.token_file are both set; keep one")
    token = (_read_private(config.token_file) if config.token_file else config.token.encode()).strip()
    if not token:
        where = f"the file {config.token_file} is empty" if config.token_file else "listen.token is empty"
        raise ConfigError(f"{where}; one is required: set listen.token, or listen.token_file (mode 0600)")
    if len(token) > MAX_TOKEN_BYTES:
        raise ConfigError(f"the token has {len(token)} bytes, more than the limit of {MAX_TOKEN_BYTES}")
    try:
        usable = token.decode().isprintable()
    except UnicodeDecodeError:
        usable = False
    if not usable:
        where = f"the file {config.token_file}" if config.token_file else "listen.token"
        raise ConfigError(f"{where} is not one line of text in UTF-8, so no trainer could send it; make another token")
    return token


def token_matches(expected: bytes, offered: str) -> bool:
    """Return whether the offered token is the expected one. Compares in constant time."""
    return hmac.compare_digest(expected, offered.encode())


def _read_private(path: str) -> bytes:
    try:
        # Non-blocking, since opening a named pipe would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"listen.token_file: {path} is not a regular file")
            if status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(f"listen.token_file: {path} has mode {mode:04o}, others can reach it; chmod 600 it")
            return file.read(MAX_TOKEN_BYTES + 2)  # a line end, and one byte more to see that it is too long
    except OSError as exc:
        raise ConfigError(f"listen.token_file: {path} cannot be read: {exc.strerror}") from exc
