"""Atropos: a node's rollouts as an environment, whose groups a trainer reads from Atropos' API server."""

from __future__ import annotations

from prorl_trio.integrations.atropos.environment import AtroposEnvironment, ScoredData, open_environment, scored_data

__all__ = ["AtroposEnvironment", "ScoredData", "open_environment", "scored_data"]
