"""The endpoints of the ProRL Agent server, so that its clients work unchanged (`[rest] prorl_compat`)."""

from __future__ import annotations

from prorl_trio.edges.prorl_compat.endpoints import compat_endpoints, configured_endpoints

__all__ = ["compat_endpoints", "configured_endpoints"]
