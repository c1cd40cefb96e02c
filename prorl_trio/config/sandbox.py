"""Sandboxes, and the processes that score answers: what runs the code and reads the text of a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from prorl_ipc.limits import SandboxLimits
from prorl_trio.config.quantities import (
    MAX_BYTES,
    MAX_OPEN_FILES,
    YEAR_S,
    BytesOrZero,
    Count,
    Processes,
    ProcessesOrZero,
    Seconds,
    SecondsOrZero,
)
from prorl_trio.config.table import Table


class ImagesConfig(Table, frozen=True):
    """Images of registries (`docker://...`) that a task names and the store does not have.

    They are pulled once, by one process of the machine, while all who want them wait; see `docs/images.md`.

    Attributes:
        pull: pull them in INIT. Without it, what was not pulled beforehand is refused.
        max_concurrent_pulls: images at once.
        max_concurrent_layers: layers of one image at once.
        timeout_s: time that a rollout waits for its image, charged to no budget; the pull goes on after that.
        patience_s: time for which a registry may ask to wait, or fail, before a pull fails.
        max_store_bytes: disk space of the whole store; 0 for no such limit. Pulled images that are not in use make
            room, the least recently used first.
        min_free_bytes: so much of the store's disk stays free, for all else that is on it.
        plain_http: registries, with their ports, that speak no TLS.
    """

    pull: bool = True
    max_concurrent_pulls: Processes = 4
    max_concurrent_layers: Processes = 4
    timeout_s: Seconds = 3600.0
    patience_s: Seconds = 900.0
    max_store_bytes: BytesOrZero = 0
    min_free_bytes: BytesOrZero = 1024 * 1024 * 1024
    plain_http: tuple[str, ...] = ()


class SandboxConfig(Table, frozen=True):
    """The sandboxes that tools run in, one for each rollout.

    They are started in advance where they are in demand.

    Attributes:
        provider: what isolates tools: `apptainer`, `bubblewrap`, `process` (which isolates nothing), or one that an
            installed package offers. `auto` takes bubblewrap for the image `host`, folders and
            layers, and apptainer for `.sif` files, or one of them where the other does not pass its probe.
        image: for handlers that name none: `host` (this machine's userland, read-only), an unpacked root directory, a
            `.sif` file, a name of the image store, or the reference of an image in a registry.
        images: pulls of images that are not in the store.
        packages: Python packages, installed beside the node, that tools find in the image `host` besides the promised
            ones.
        network: let tools use this machine's network.
        fakeroot: the tools are root in there, so that they can install packages. apptainer only.
        start_timeout_s: time for a sandbox to be ready for its first command.
        max_concurrent_starts: sandboxes that start at the same time.
        max_concurrent_starts_per_image: of them, those of one image.
        max_warm: sandboxes that are kept ready; 0 for none.
        max_warm_per_image: of them, those of one image.
        max_warm_idle_s: one that nobody took for so long is ended.
        limits: what one sandbox may use.
        runtime_dir: node-local folder for control sockets. Empty: a private one below the system's temporary folder.
    """

    provider: str = "auto"
    image: str = "host"
    images: ImagesConfig = ImagesConfig()
    packages: tuple[str, ...] = ()
    network: bool = False
    fakeroot: bool = False
    start_timeout_s: Seconds = 60.0
    max_concurrent_starts: Processes = 4
    max_concurrent_starts_per_image: Processes = 4
    max_warm: ProcessesOrZero = 8
    max_warm_per_image: ProcessesOrZero = 8
    max_warm_idle_s: SecondsOrZero = 120.0
    limits: SandboxLimits = SandboxLimits()
    runtime_dir: str = ""

    @property
    def run_path(self) -> Path | None:
        """The `runtime_dir`, None where it is empty."""
        return Path(self.runtime_dir).absolute() if self.runtime_dir else None


class ScoringConfig(Table, frozen=True):
    """Limits of a scoring process. An answer is the policy's text: it may be made to eat all there is.

    Attributes:
        cpu_s: CPU time of one call.
        memory_bytes: private memory.
        stack_bytes: stack, which deep nesting fills.
        max_processes: processes and threads that scorers may add to those that the node's user has; root has no limit.
        max_open_files: files that a process may have open.
        max_file_bytes: size of a file.
    """

    cpu_s: Annotated[int, msgspec.Meta(ge=1, le=int(YEAR_S))] = 10
    memory_bytes: Annotated[int, msgspec.Meta(ge=256 * 1024 * 1024, le=MAX_BYTES)] = 1024 * 1024 * 1024
    stack_bytes: Annotated[int, msgspec.Meta(ge=1024 * 1024, le=MAX_BYTES)] = 16 * 1024 * 1024
    max_processes: Count = 256
    max_open_files: Annotated[int, msgspec.Meta(ge=64, le=MAX_OPEN_FILES)] = 256
    max_file_bytes: BytesOrZero = 64 * 1024 * 1024
