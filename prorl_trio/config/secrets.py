"""The secrets that a configuration names: the node's token, and private files."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from prorl_trio.file_systems import open_regular
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from prorl_trio.config.listen import ListenConfig

TOKEN_VARIABLE: Final = "PRORL_TOKEN"
MAX_TOKEN_BYTES: Final = 4096
_NEW_TOKEN: Final = "make another: head -c 24 /dev/urandom | base64"


def load_token(config: ListenConfig) -> bytes:
    """Return the token from `config.token` or the file `config.token_file`, without white space around it.

    Blocks on the disk.

    Raises:
        ConfigError: both or neither are set; the token cannot be one (`check_token`); or other users can access the
            file.
    """
    if config.token and config.token_file:
        raise ConfigError("listen.token and listen.token_file are both set; keep one")
    if config.token_file:
        return read_token_file(config.token_file, "listen.token_file").encode()
    if not config.token.strip():
        raise ConfigError("listen.token is empty; one is required: set listen.token, or listen.token_file (mode 0600)")
    return check_token(config.token, "listen.token").encode()


def read_token_file(path: str, field: str) -> str:
    """Return the token in a private file. `field` names the setting in messages. Blocks on the disk.

    Raises:
        ConfigError: the file cannot be read, or others can access it, or its content cannot be a token.
    """
    descriptor = open_private(path, field)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(MAX_TOKEN_BYTES + 2)  # a line end, and one byte more to see that it is too long
    if not content.strip():
        raise ConfigError(f"{field}: the file {path} is empty; a token is required; {_NEW_TOKEN}")
    return check_token(content.decode("latin-1"), f"{field}: the file {path}")


def check_token(token: str, where: str) -> str:
    """Return `token` without white space around it. `where` names its source in messages.

    Raises:
        ConfigError: it is empty, longer than `MAX_TOKEN_BYTES`, or has other characters than printable ASCII: clients
            encode those in different ways in HTTP headers, so nodes accept none.
    """
    token = token.strip()
    if not token:
        raise ConfigError(f"{where} is empty; a token is required")
    if len(token) > MAX_TOKEN_BYTES:
        raise ConfigError(f"{where} has {len(token)} characters, more than the limit of {MAX_TOKEN_BYTES} of a token")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{where} is not one line of printable ASCII characters, which a token must be; {_NEW_TOKEN}")
    return token


def agreed_token(config: ListenConfig, given: str) -> str:
    """Return the node's token where `PRORL_TOKEN`, if it is set, is `given`; empty if none is named anywhere.

    Blocks on the disk.

    Raises:
        ConfigError: the configuration names another token than `given`; or see `load_token` and `check_token`.
    """
    configured = load_token(config).decode() if config.token or config.token_file else ""
    given = check_token(given, TOKEN_VARIABLE) if given else ""
    if configured and given and configured != given:
        field = f"listen.token_file {config.token_file}" if config.token_file else "listen.token"
        raise ConfigError(
            f"the environment variable {TOKEN_VARIABLE} and {field} hold two different tokens; unset {TOKEN_VARIABLE}, "
            "or remove the other one from node.toml"
        )
    return configured or given


def open_private(path: str, field: str) -> int:
    """Open a file that holds a secret for reading; return the descriptor, which is the caller's to close.

    The file must belong to our own user and be closed to all others, or belong to root and be closed to all but its
    group: such a file is how systems share a secret with a service. `field` names the setting in messages.

    Raises:
        ConfigError: the file cannot be read, is not a regular file, or others can access it.
    """
    try:
        descriptor = open_regular(path)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{field}: {path} cannot be read: {getattr(exc, 'strerror', exc)}") from exc
    problem = _exposure(path, os.fstat(descriptor))
    if problem:
        os.close(descriptor)
        raise ConfigError(f"{field}: {problem}")
    return descriptor


def _exposure(path: str, found: os.stat_result) -> str:
    mode, user = stat.S_IMODE(found.st_mode), os.geteuid()
    if found.st_uid not in (user, 0):
        return (
            f"{path} belongs to user {found.st_uid}, who can read and replace it; chown it to {user}, the node's user"
        )
    if mode & (0o077 if found.st_uid == user else 0o037):
        return f"{path} has mode {mode:04o}, others can reach it; chmod 600 it"
    return ""
