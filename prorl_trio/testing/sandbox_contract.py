"""The contract of sandbox providers, as checks that anyone can run against theirs.

`CORE_CHECKS` hold for any provider, also an in-memory fake; `PROCESS_CHECKS` for those that start processes here;
`ISOLATION_CHECKS` for those that say `isolated`, `LAYER_CHECKS` for those that say `has_layers` and `NO_LAYER_CHECKS`
for the others. A check takes a `Contract` and raises AssertionError. Each has its own
deadline. They use what a sandbox itself offers, so they hold for whatever is inside.
"""

from __future__ import annotations

from prorl_trio.testing.sandbox_check import Contract
from prorl_trio.testing.sandbox_core_checks import CORE_CHECKS
from prorl_trio.testing.sandbox_isolation_checks import ISOLATION_CHECKS
from prorl_trio.testing.sandbox_layer_checks import LAYER_CHECKS, NO_LAYER_CHECKS
from prorl_trio.testing.sandbox_process_checks import PROCESS_CHECKS

__all__ = ["CORE_CHECKS", "ISOLATION_CHECKS", "LAYER_CHECKS", "NO_LAYER_CHECKS", "PROCESS_CHECKS", "Contract"]
