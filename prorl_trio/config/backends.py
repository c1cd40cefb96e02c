"""LLM backends: which there are, and when one is given rollouts."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec

from prorl_trio.config.quantities import Amount, Connections, Count, Seconds, SecondsOrZero, Tokens, Weight
from prorl_trio.config.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable


class HealthConfig(Table, frozen=True):
    """A circuit breaker: a backend that fails is given no more rollouts, and its rollouts move, until it is well again.

    Attributes:
        interval_s: time between two probes of one backend; 0 for no probes: only calls tell then, and one that is out
            stays out until it is added again.
        open_after_failures: failures in a row, of calls (with all their retries) or of probes, that take a backend out.
            A single call is enough if none was answered since it was taken in again.
        close_after_successes: successes in a row, of probes, that take it in again; up to eight times as many while the
            first call afterwards fails.
    """

    interval_s: SecondsOrZero = 15.0
    open_after_failures: Count = 3
    close_after_successes: Count = 2

    def __post_init__(self) -> None:
        for name in ("open_after_failures", "close_after_successes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.interval_s < 0:
            raise ValueError(f"interval_s must be >= 0, got {self.interval_s}")


class LoadConfig(Table, frozen=True):
    """Balance by the load that engines report on their `/metrics`; nothing of it for one that reports none.

    A rollout moves to another backend, at most once a turn, when its wait here would be more than `skew_margin_s +
    skew_ratio * (wait there + time to read its prefix there)`.

    Attributes:
        interval_s: time between two reports of one backend; 0 for none, and then nothing of this happens.
        skew_margin_s: difference between the two waits that is left alone.
        skew_ratio: factor between the two waits that is left alone.
        max_kv_usage: share of the KV cache that running requests may fill. Above it, or when requests lost their place
            in the cache, the backend gets no more rollouts than `decrease_factor` of those it has; below it the limit
            grows again, up to `max_tasks_per_backend`. 0: never.
        decrease_factor: see `max_kv_usage`; above 0 and below 1.
        increase_tasks: rollouts by which the limit grows again at each report.
        min_tasks: rollouts that a backend is given however full it is.
    """

    interval_s: SecondsOrZero = 2.0
    skew_margin_s: SecondsOrZero = 2.0
    skew_ratio: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.5
    max_kv_usage: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95
    decrease_factor: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.8
    increase_tasks: Count = 1
    min_tasks: Count = 4

    def __post_init__(self) -> None:
        for name in ("interval_s", "skew_margin_s", "max_kv_usage"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("skew_ratio", "increase_tasks", "min_tasks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.decrease_factor < 1:
            raise ValueError(f"decrease_factor must be above 0 and below 1, got {self.decrease_factor}")


class BackendConfig(Table, frozen=True):
    """LLM backends known at the start; more may be added while running.

    Attributes:
        urls: `http://HOST:PORT` of each.
        allowed: addresses of further engines that may be added while the node runs: `HOST` or `HOST:PORT`, where HOST
            is a name, `*.DOMAIN`, an IP address, a network as `10.0.0.0/8` (`[fd00::/8]`), or `*`. A network allows no
            names. Empty: trainers that have the token may add any; through the endpoints of the ProRL Agent server,
            only `urls` and loopback addresses can be added.
        weights: shares of the rollouts, by URL: a backend of weight 2 gets twice as many as one of 1, which others
            have.
        engine: what the servers are: `vllm`, `sglang` (tested against a look-alike only), `prorl` (a trainer's own, as
            the ProRL Agent server knows it: `POST /generate` with `prompt_ids`), a kind that an installed package
            offers under the entry-point group `prorl_trio.engines`, or `auto`: each is asked as it is registered.
        max_model_len: the longest context, in tokens, of engines that do not say, which is `prorl` alone; 0: what the
            model's config.json has as `max_position_embeddings`.
        stream: have all completions sent token by token: nothing is lost then when one is cut, also where the engine
            cannot answer an abort with what it has; each token costs the node, and the engine, ten times the CPU.
        slice_tokens: completions are answered in slices, the first of so many tokens, each further one as long as all
            before it: one that a time-out, a lost connection or a pause cuts is continued from the slices it has. A few
            are streamed, to learn an engine's pace, and all those that might take half of `request_timeout_s`. 0: in
            one piece, and what is cut is sampled again, which favours short completions.
        required: refuse to start when a backend does not pass its probe; else it is `down`, and joins when it does. One
            that is paused is no reason to refuse.
        probe_timeout_s: time for one probe of a backend.
        request_timeout_s: time for each slice; a stream goes on from what it has then.
        max_connections_per_backend: calls of one backend at once; more wait.
        max_tasks_per_backend: rollouts that have a backend at the same time; 0 for no limit of its own (`run_workers`
            is one for all backends).
        lease_timeout_s: longest wait of a rollout for a backend with room, charged to no budget.
        health: when one is given no more rollouts because it fails.
        load: when one is given no more rollouts because it has enough.
    """

    urls: list[str] = msgspec.field(default_factory=list)
    allowed: list[str] = msgspec.field(default_factory=list)
    weights: dict[str, Weight] = msgspec.field(default_factory=dict)
    engine: str = "auto"
    max_model_len: Tokens = 0
    stream: bool = False
    slice_tokens: Tokens = 256
    required: bool = False
    probe_timeout_s: Seconds = 60.0
    request_timeout_s: Seconds = 600.0
    max_connections_per_backend: Connections = 512
    max_tasks_per_backend: Amount = 0
    lease_timeout_s: SecondsOrZero = 900.0
    health: HealthConfig = HealthConfig()
    load: LoadConfig = LoadConfig()

    def __post_init__(self) -> None:
        for url, weight in self.weights.items():
            if url not in self.urls:
                raise ValueError(f"weights: {url} is not among the urls")
            if not 0 < weight < float("inf"):
                raise ValueError(f"weights: that of {url} must be > 0, got {weight}")
        for pattern in self.allowed:
            _Pattern.parse(pattern)

    def allows(self, url: str, default: Iterable[str] = ("*",)) -> bool:
        """Return whether an engine at `url` may be contacted: it is one of `urls`, or matches one of `allowed`.

        `default` is used if `allowed` is empty.
        """
        origin = url.rstrip("/")
        if origin in {known.rstrip("/") for known in self.urls}:
            return True
        try:
            parts = urlsplit(origin)
            host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            return False
        return bool(host) and any(
            _Pattern.parse(pattern).matches(host or "", port) for pattern in self.allowed or default
        )


class _Pattern(msgspec.Struct, frozen=True):
    """A pattern of `BackendConfig.allowed`. `port` None: any."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> _Pattern:
        """Parse `HOST[:PORT]`. Raise ValueError if it is something else."""
        wrong = f"allowed: {text!r} is not HOST or HOST:PORT, as gpu1:8000, *.cluster.local or 10.0.0.0/8"
        host, port = text.strip().lower(), ""
        if host.startswith("["):
            host, bracket, port = host[1:].partition("]")
            if not bracket or (port and not port.startswith(":")):
                raise ValueError(wrong)
            port = port[1:]
        elif host.count(":") == 1:
            host, _, port = host.partition(":")
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
            raise ValueError(wrong)
        if "/" in host:
            try:
                ipaddress.ip_network(host)
            except ValueError as exc:
                raise ValueError(f"{wrong}: {exc}") from None
        elif not host or ("*" in host and host != "*" and not (host.startswith("*.") and host.count("*") == 1)):
            raise ValueError(wrong)
        return cls(host, int(port) if port else None)

    def matches(self, host: str, port: int) -> bool:
        """Return whether the pattern has this host, in lower case, and port."""
        if self.port not in (None, port):
            return False
        if self.host in ("*", host):
            return True
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if "/" not in self.host:
            return self.host == str(address)
        return address in ipaddress.ip_network(self.host)
