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
    """The node's one server. The WebSocket of trainers is at the path `/`, REST is at the paths that `/docs` lists.

    Attributes:
        host: address or name to listen on.
        port: 0 takes a free one.
        descriptors: numbers of inherited sockets that listen already, as systemd passes them from 3 on: `[3]`. If one
            is a TCP socket, `host` and `port` are not bound. TLS is spoken on TCP sockets only.
        token: the secret that trainers show: one line of printable ASCII. It, or `token_file`, is required. A new token
            ends the connections that showed the former one; their sessions and jobs go on.
        token_file: file that holds the token, of mode 0600. It is read again at SIGHUP.
        endpoint_file: written once the node listens: `{"url": "ws://...", "rest_url": "http://..."}`; empty: none.
        unix_socket: path of one more listener, for trainers on the same host (`unix://PATH`), never with TLS; through
            the socket beside it they map the arena. Its folder must have mode 0700, and is made so if it is missing.
            `auto`: in a folder beside the endpoint file, if there is one, and for the head of a fleet without, in the
            machine's temporary folder; empty: none.
        hosts: host names by which proxies and clients without the token address this node, as
            `["rollouts.example.com"]`, and whose pages may use it from a browser. IP addresses, `localhost`, the
            machine's name and the names in `listen.host` and `fleet.advertise` need not be listed. Requests that have
            the token, and programs that use the WebSocket, may use any name.
        tls_cert, tls_key: PEM files, the key of mode 0600. With both the port speaks TLS: `wss://` and `https://`.
        max_connections: HTTP connections with the token, event streams and long polls included; more are refused.
        max_unauthenticated: connections that have not shown the token yet. One more makes another one give way.
        max_header_bytes: longest head of a request.
        max_body_bytes: longest body of a request.
        handshake_timeout_s: time for each step of a new connection: its first byte, the TLS handshake, the head of a
            request, the first frame of a trainer.
        idle_timeout_s: time between two requests of a connection.
        body_timeout_s: time for the body of a request.
        send_timeout_s: time for a client to take the next 256 KiB of an answer.
        close_timeout_s: at the node's end, time for requests in progress to be answered, and for trainers to take what
            is queued for them.
        max_message_bytes: longest message of a trainer's connection, and so the largest outcome.
        max_sessions: sessions with a connection, and sessions that hold nothing: of the latter the one that was left
            alone longest gives way to a new one.
        heartbeat_interval_s: time between two heartbeats to a trainer; less than `heartbeat_timeout_s`.
        heartbeat_timeout_s: a trainer's connection on which nothing came for so long is lost.
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
    """REST, at the same port as the WebSocket, with the same token, sessions and jobs.

    Attributes:
        max_wait_s: whatever `?wait=` asks for, an answer comes by then.
        results_retention_s: an outcome of a session that was begun here, and that no trainer is connected to, is
            dropped after so long if it was neither acknowledged nor deleted.
        max_jobs_per_request: jobs in one request that does not wait for them.
        max_results_per_reply: outcomes in one answer.
        max_reply_bytes: size of the outcomes in one answer; the first one always fits.
        max_event_streams: listeners of `/v1/events`.
        event_buffer_events: events that a listener may lag behind.
        event_heartbeat_interval_s: time between two comments in an event stream.
        prorl_compat: serve the endpoints of the ProRL Agent server, too.
        prorl_compat_token: require the token for them. That server's clients have no field for it, but take it in a URL
            (`http://any:TOKEN@HOST:PORT`). `false` lets every user of this machine use them, and is refused if others
            could come: `listen.host` is not a loopback address, or sandboxes have a network.
        prorl_compat_timeout_s: their `/process` answers by then; the job goes on.
        data_sources: for `prorl_compat`, which handler works on an instance of a `data_source`. For `swe`, a published
            row (SWE-bench, SWE-Gym, SWE-rebench, SWE-smith, R2E-Gym) becomes the payload.
        swe_specs: for such rows that do not say how their tests are run, as those of SWE-bench 4 and SWE-Gym: a JSON
            file of commands by repository and version, as of `prorl-trio eval --specs`. Empty: they are refused.
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
