"""Where code of the policy's runs: sandboxes, and the processes that score its answers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ipc.limits import SandboxLimits
from prorl_trio.config.quantities import Amount, Count, Seconds, SecondsOrZero
from prorl_trio.config.table import Table

__all__ = ["SandboxConfig", "ScoringConfig"]


class SandboxConfig(Table, frozen=True):
    """`auto` takes apptainer, then bubblewrap, whichever passes its probe first. `process` isolates nothing.

    Sandboxes are started in advance where they are in demand: at most `max_warm`, 0 for none, and `max_warm_per_image`
    of one image; one that nobody took for `max_warm_idle_s` is ended.
    """

    provider: Literal["auto", "apptainer", "bubblewrap", "process"] = "auto"
    image: str = "host"
    packages: tuple[str, ...] = ()
    """Of those installed beside the node, what tools find in the image `host` besides the promised ones."""
    network: bool = False
    fakeroot: bool = False
    """The tools are root in there, so that they can install packages. apptainer only."""
    start_timeout_s: Seconds = 60.0
    max_concurrent_starts: Count = 4
    max_concurrent_starts_per_image: Count = 4
    max_warm: Amount = 8
    max_warm_per_image: Amount = 8
    max_warm_idle_s: SecondsOrZero = 120.0
    limits: SandboxLimits = SandboxLimits()
    runtime_dir: str = ""
    """Node-local folder for control sockets. Empty: a private one below the system's temporary folder."""


class ScoringConfig(Table, frozen=True):
    """What a scoring process may use. An answer is the policy's text: it may be made to eat all there is.

    Attributes:
        cpu_s: CPU time of one call.
        memory_bytes: of private memory.
        stack_bytes: what deep nesting fills.
        max_processes: processes and threads that scorers may add to those that the node's user has; root has no limit.
        max_file_bytes: of one file.
    """

    cpu_s: Annotated[int, msgspec.Meta(ge=1)] = 10
    memory_bytes: Annotated[int, msgspec.Meta(ge=256 * 1024 * 1024)] = 1024 * 1024 * 1024
    stack_bytes: Annotated[int, msgspec.Meta(ge=1024 * 1024)] = 16 * 1024 * 1024
    max_processes: Count = 256
    max_open_files: Annotated[int, msgspec.Meta(ge=64)] = 256
    max_file_bytes: Amount = 64 * 1024 * 1024
