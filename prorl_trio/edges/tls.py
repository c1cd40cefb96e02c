"""The node's TLS certificate, for every listener that is reached over the network."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from prorl_ipc.tls import server_context
from prorl_trio.config.secrets import open_private
from prorl_trio.file_systems import open_regular
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    import ssl

    from prorl_trio.config import ListenConfig


def load_tls(config: ListenConfig) -> ssl.SSLContext | None:
    """Return the TLS context with the configured certificate; None if TLS is not configured. Blocks on the disk.

    Raises:
        ConfigError: only one of the two files is set, they cannot be used, or others can read the key.
    """
    if not config.tls_cert and not config.tls_key:
        return None
    if not config.tls_cert or not config.tls_key:
        raise ConfigError("listen.tls_cert and listen.tls_key go together; one of them is missing")
    os.close(open_private(config.tls_key, "listen.tls_key"))
    try:
        os.close(open_regular(config.tls_cert))  # OpenSSL would wait for the writer of a named pipe
        return server_context(config.tls_cert, config.tls_key)
    except OSError as exc:  # an SSLError is one
        raise ConfigError(
            f"listen.tls_cert {config.tls_cert}, tls_key {config.tls_key}: cannot be used: {exc}"
        ) from exc
