"""The URLs at which a node listens, and the file that it publishes them in (`listen.endpoint_file`)."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


def endpoint_url(address: tuple[str, int], *, secure: bool = False) -> str:
    """Return the WebSocket URL for a listener's (host, port): `wss://` if `secure`, else `ws://`."""
    return f"{'wss' if secure else 'ws'}://{_authority(address)}"


def rest_url(address: tuple[str, int], *, secure: bool = False) -> str:
    """Return the base URL of REST for a listener's (host, port): `https://` if `secure`, else `http://`."""
    return f"{'https' if secure else 'http'}://{_authority(address)}"


def check_endpoint_file(endpoint_file: Path) -> None:
    """Check that `announce` could write the file, without changing it. Blocks on the disk.

    Raises:
        ConfigError: it could not.
    """
    with _open_draft(endpoint_file):
        pass


def announce(endpoint_file: Path, endpoints: Mapping[str, str]) -> None:
    """Write the endpoints to the file as JSON, atomically. Blocks on the disk.

    Raises:
        ConfigError: the file cannot be written.
    """
    with _open_draft(endpoint_file) as (draft, file):
        file.write(msgspec.json.encode(endpoints))
        file.close()
        draft.replace(endpoint_file)


@contextmanager
def _open_draft(endpoint_file: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Open a new file next to the endpoint file. Remove it on leaving, if it still has its name.

    Raises:
        ConfigError: it cannot be created, the endpoint file cannot be replaced, or the block raised an OSError.
    """
    # An unpredictable name and O_EXCL: in a folder with several users, others may have placed a link there.
    draft = endpoint_file.with_name(f".{endpoint_file.name}.{secrets.token_hex(8)}")
    try:
        if endpoint_file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if endpoint_file.exists() and not endpoint_file.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")  # root would replace a device by a file
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
                yield draft, file
        finally:
            draft.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"listen.endpoint_file: {endpoint_file} cannot be written: {exc.strerror}; name a file in a folder that "
            "exists and is yours"
        ) from exc


def _authority(address: tuple[str, int]) -> str:
    host, port = address
    return f"{f'[{host}]' if ':' in host else host}:{port}"
