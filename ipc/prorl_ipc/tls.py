"""TLS around a byte stream, for `wss://`: at least version 1.2; clients check certificates."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.errors import ProtocolViolation
from prorl_ipc.websocket import CloseCode, LinkClosed

if TYPE_CHECKING:
    from os import PathLike

_HUNG_UP = (ssl.SSLEOFError, ssl.SSLZeroReturnError)


def server_context(cert_file: str | PathLike[str], key_file: str | PathLike[str]) -> ssl.SSLContext:
    """Make a server's context from its certificate chain and private key, PEM. Reads the disk.

    Raises:
        OSError: a file cannot be read.
        ssl.SSLError: a file is invalid, or the two do not match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert_file, key_file)
    return context


def client_context(ca_file: str | PathLike[str] | None = None) -> ssl.SSLContext:
    """Make a client's context that trusts the authorities in `ca_file` (PEM), or the system's. Reads the disk.

    Raises:
        OSError: the file cannot be read.
        ssl.SSLError: the file contains no certificate.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


async def open_tls(
    stream: trio.abc.Stream, context: ssl.SSLContext, *, server_hostname: str | None, timeout_s: float
) -> trio.abc.Stream:
    """Perform the TLS handshake on `stream`, which the result owns. `server_hostname` is None on the server's side.

    On failure or a cancel, `stream` is closed.

    Raises:
        ProtocolViolation: the peer does not speak this TLS, or its certificate cannot be verified; the message has the
            reason.
        LinkClosed: the peer hung up, or did not finish within `timeout_s`.
    """
    secured = trio.SSLStream(
        stream, context, server_hostname=server_hostname, server_side=server_hostname is None, https_compatible=True
    )
    done = False
    try:
        with trio.move_on_after(timeout_s):
            await secured.do_handshake()
            done = True
    except trio.BrokenResourceError as exc:
        reason = exc.__cause__
        if isinstance(reason, ssl.SSLError) and not isinstance(reason, _HUNG_UP):
            raise ProtocolViolation(f"TLS: {_said(reason)}") from None
        raise LinkClosed(CloseCode.ABNORMAL, f"hung up during the TLS handshake: {reason or exc}") from None
    finally:
        if not done:
            await trio.aclose_forcefully(stream)
    if not done:
        raise LinkClosed(CloseCode.ABNORMAL, f"no TLS handshake within {timeout_s:g} s")
    return secured


_NO_ISSUER: Final = frozenset({18, 19, 20, 21})
"""OpenSSL's codes of a certificate with an unknown issuer: self-signed, or with an incomplete chain."""


def _said(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = "; name the PEM file of its authority: --tls-ca, tls_ca=" if error.verify_code in _NO_ISSUER else ""
        return f"the certificate cannot be verified: {error.verify_message}{remedy}"
    return (error.reason or str(error)).lower().replace("_", " ")
