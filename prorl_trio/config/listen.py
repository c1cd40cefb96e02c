"""The addresses a node listens on, the limits of its server, and those of REST."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from prorl_trio.config.quantities import (
    Connections,
    Count,
    MessageBytes,
    Port,
    ProcessesOrZero,
    Seconds,
    SecondsOrZero,
    Table,
)

HostName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")]
"""A host name without scheme and port."""
Descriptor = Annotated[int, msgspec.Meta(ge=3, le=65_535)]
"""The number of an open file that this process inherited; 0 to 2 are its standard streams."""
HeaderBytes = Annotated[int, msgspec.Meta(ge=1024, le=1024 * 1024)]
"""The size of a request's head. Each connection may hold one."""

MOVED: Final = {
    "rest.enabled": "REST is always served, at the port of [listen]; remove this field",
    "rest.host": "REST is served at the host of [listen]; remove this field, and set listen.host",
    "rest.port": "REST is served at the port of [listen]; remove this field, and set listen.port",
    "rest.tls": "REST speaks TLS where [listen] does, at the same port; remove this field",
    "rest.max_connections": "one server has one limit; set listen.max_connections",
    "rest.max_body_bytes": "one server has one limit; set listen.max_body_bytes",
    "rest.idle_timeout_s": "one server has one limit; set listen.idle_timeout_s, and listen.handshake_timeout_s",
    "rest.body_timeout_s": "one server has one limit; set listen.body_timeout_s",
    "rest.send_timeout_s": "one server has one limit; set listen.send_timeout_s",
}
"""Fields of former versions, and what replaced them."""


class ListenConfig(Table, frozen=True):
    """The node's only server. The WebSocket is at the path `/`, and `/docs` lists the REST paths.

    Attributes:
        host: address or name to listen on.
        port: port to listen on. 0: any free port.
        descriptors: numbers of inherited listening sockets. systemd passes them from 3 on: `[3]`. If one is a TCP
            socket, `host` and `port` are not used. Only TCP sockets use TLS.
        token: the trainers' secret, one line of printable ASCII. Either this or `token_file` is required. A new token
            closes connections with the old one. Their sessions and jobs continue.
        token_file: file with the token, mode 0600. It is read again at SIGHUP.
        endpoint_file: file that the node writes when it listens: `{"url": "ws://...", "rest_url": "http://..."}`.
            Empty: none.
        unix_socket: path of a listener for local trainers (`unix://PATH`), without TLS. Through a socket next to it
            they map the arena. Its folder needs mode 0700, and is created if missing. `auto`: in a folder next to the
            endpoint file, if there is one. A head without endpoint file uses the temporary folder. Empty: none.
        hosts: host names that proxies and clients without the token may use, for example `["rollouts.example.com"]`.
            Browser pages of these hosts may use the node. IP addresses, `localhost`, the machine's name, `listen.host`
            and `fleet.advertise` are always allowed. Requests with the token may use any name.
        tls_cert, tls_key: PEM files, the key with mode 0600. With both, the port uses TLS: `wss://` and `https://`.
        max_connections: HTTP connections with the token, including event streams and long polls. Further connections
            are refused.
        max_unauthenticated: connections that have not sent the token. A new connection evicts another.
        max_header_bytes: size of a request's head.
        max_body_bytes: size of a request's body.
        handshake_timeout_s: timeout of each step of a new connection: first byte, TLS handshake, request head, first
            frame.
        idle_timeout_s: timeout between two requests of a connection.
        body_timeout_s: timeout of a request's body.
        send_timeout_s: time for a client to receive the next 256 KiB of an answer.
        close_timeout_s: time at shutdown for open requests, and for trainers to receive queued outcomes.
        max_message_bytes: size of a message on a trainer's connection, and of an outcome.
        max_sessions: connected or empty sessions. A new session evicts the empty session with the longest idle time.
        heartbeat_interval_s: interval of heartbeats to a trainer, less than `heartbeat_timeout_s`.
        heartbeat_timeout_s: a trainer's connection without messages for this time is closed.
    """

    host: str = "127.0.0.1"
    port: Port = 8700
    descriptors: list[Descriptor] = msgspec.field(default_factory=list)
    token: str = ""
    token_file: str = ""
    endpoint_file: str = ""
    unix_socket: str = "auto"
    hosts: list[HostName] = msgspec.field(default_factory=list)
    tls_cert: str = ""
    tls_key: str = ""
    max_connections: Connections = 128
    max_unauthenticated: Connections = 64
    max_header_bytes: HeaderBytes = 32 * 1024
    max_body_bytes: MessageBytes = 64 * 1024 * 1024
    handshake_timeout_s: Seconds = 10.0
    idle_timeout_s: Seconds = 15.0
    body_timeout_s: Seconds = 60.0
    send_timeout_s: Seconds = 60.0
    close_timeout_s: Seconds = 5.0
    max_message_bytes: MessageBytes = 64 * 1024 * 1024
    max_sessions: Connections = 64
    heartbeat_interval_s: Seconds = 10.0
    heartbeat_timeout_s: Seconds = 30.0

    def unix_path(self, default: Path | None = None) -> Path | None:
        """Return the path of the Unix socket, or None if there is none.

        `default` is that of `auto` where there is no endpoint file.
        """
        if self.unix_socket != "auto":
            return Path(self.unix_socket) if self.unix_socket else None
        if not self.endpoint_file:
            return default
        endpoint = Path(self.endpoint_file)
        return endpoint.with_name(f".{endpoint.stem}") / "node"


class RestConfig(Table, frozen=True):
    """REST, on the port of the WebSocket, with the same token, sessions and jobs.

    Attributes:
        max_wait_s: longest wait of a request, whatever `?wait=` requests.
        results_retention_s: time until an unacknowledged outcome is dropped, if its session was created by REST and no
            trainer is connected.
        max_jobs_per_request: jobs in one request without a wait.
        max_results_per_reply: outcomes in one answer.
        max_reply_bytes: size of the outcomes in one answer. The first outcome always fits.
        max_event_streams: listeners of `/v1/events`.
        event_buffer_events: events that a listener may lag behind.
        event_heartbeat_interval_s: interval of comments in an event stream.
        prorl_compat: serve the endpoints of the ProRL Agent server.
        prorl_compat_token: require the token for these endpoints. Their clients pass it in the URL
            (`http://any:TOKEN@HOST:PORT`). `false` admits every user of this machine. It is refused if `listen.host` is
            not a loopback address, or sandboxes have a network.
        prorl_compat_timeout_s: timeout of their `/process`. The job continues.
        data_sources: for `prorl_compat`: handler by `data_source`. With `swe`, a published row (SWE-bench, SWE-Gym,
            SWE-rebench, SWE-smith, R2E-Gym) becomes the payload.
        swe_specs: for rows without test commands (SWE-bench 4, SWE-Gym): a JSON file of commands by repository and
            version, as for `prorl-trio eval --specs`. Empty: such rows are refused.
    """

    max_wait_s: SecondsOrZero = 600.0
    results_retention_s: Seconds = 86_400.0
    max_jobs_per_request: Count = 10_000
    max_results_per_reply: Count = 256
    max_reply_bytes: MessageBytes = 256 * 1024 * 1024
    max_event_streams: ProcessesOrZero = 16
    event_buffer_events: Count = 4096
    event_heartbeat_interval_s: Seconds = 15.0
    prorl_compat: bool = False
    prorl_compat_token: bool = True
    prorl_compat_timeout_s: Seconds = 7200.0
    data_sources: dict[str, str] = msgspec.field(
        default_factory=lambda: {"deepscaler": "math", "gsm8k": "math", "math": "math", "swebench": "swe"}
    )
    swe_specs: str = ""
