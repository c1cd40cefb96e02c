"""Layers beside what they replace: an environment uploaded into each sandbox, and many different images at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_trio.sandbox.host import SandboxHost
    from prorl_trio.sandbox.provider import SandboxProvider

__all__ = ["build_environment", "build_repository", "measure_inits", "time_environment"]

ENVIRONMENT_FILES: Final = 2700
"""The size of a virtual environment with a data-frame package."""
ENVIRONMENT_PLACE: Final = "/workspace/env"
"""Below a folder that a sandbox takes uploads for."""
FILES_PER_FOLDER: Final = 30
FILE_BYTES: Final = 12_000
REPOSITORY_FILES: Final = 120
START_TIMEOUT_S: Final = 240.0


def build_environment(folder: Path) -> Path:
    """Fill the new layer `folder` with an environment of 2,700 files, 32 MB. Blocks; returns `folder`."""
    return _fill(folder, f"{ENVIRONMENT_PLACE}/lib".lstrip("/"), ENVIRONMENT_FILES)


def build_repository(folder: Path) -> Path:
    """Fill the new layer `folder` with a repository at /testbed. Blocks; returns `folder`."""
    return _fill(folder, "testbed", REPOSITORY_FILES)


def _fill(folder: Path, below: str, count: int) -> Path:
    for number in range(count):
        package = folder / below / f"package{number // FILES_PER_FOLDER}"
        package.mkdir(parents=True, exist_ok=True)
        (package / f"module{number}.py").write_bytes(f"NUMBER = {number:7}\n".encode() * (FILE_BYTES // 17))
    return folder


async def time_environment(host: SandboxHost, image: str, environment: Path, *, as_layer: bool) -> float:
    """Milliseconds from nothing to a sandbox that has the environment: as a layer of it, or uploaded into it."""
    layers = (str(environment),) if as_layer else ()
    began = time.perf_counter()
    sandbox = await host.open(SandboxSpec(image=image, layers=layers, start_timeout_s=START_TIMEOUT_S))
    if not as_layer:
        await sandbox.upload(environment / ENVIRONMENT_PLACE.lstrip("/"), ENVIRONMENT_PLACE)
    taken_ms = (time.perf_counter() - began) * 1e3
    last = (
        f"{ENVIRONMENT_PLACE}/lib/package{(ENVIRONMENT_FILES - 1) // FILES_PER_FOLDER}/module{ENVIRONMENT_FILES - 1}.py"
    )
    if not (await sandbox.read_file(last)).startswith(b"NUMBER"):
        raise RuntimeError(f"the environment is not in {sandbox!r}")
    await sandbox.aclose()
    return taken_ms


async def measure_inits(
    provider: SandboxProvider, image: str, environment: Path, scratch: Path, count: int
) -> dict[str, float]:
    """Start so many sandboxes at the same time, each of another image: one base and environment, a repository each."""
    repositories = [scratch / f"repository-{number}" for number in range(count)]
    for number, folder in enumerate(repositories):
        (folder / "testbed").mkdir(parents=True)
        (folder / "testbed" / "number").write_text(str(number))
    failed = 0

    async def start(number: int) -> None:
        nonlocal failed
        layers = (str(environment), str(repositories[number]))
        try:
            sandbox = await host.open(SandboxSpec(image=image, layers=layers, start_timeout_s=START_TIMEOUT_S))
        except SandboxUnavailable:
            failed += 1
            return
        failed += await sandbox.read_file("/testbed/number") != str(number).encode()
        await sandbox.aclose()

    began = time.perf_counter()
    async with open_sandbox_host(provider) as host, trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(start, number)
    return {"inits.images": count, "inits.seconds": round(time.perf_counter() - began, 2), "inits.failed": failed}
