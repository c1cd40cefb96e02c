"""The cost of a sandbox: cold and warm starts, ends, layers, and the memory of many live ones.

The same run measures `apptainer exec true` and `bwrap true` themselves. An image with layers is compared with the image
alone, and an environment as a layer with an uploaded one.

    python -m perf.sandboxes [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import trio

from perf.harness import CannotRun, Case, Options, Report, Series, measure_interleaved, run_benchmark
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.apptainer import ApptainerProvider, find_apptainer
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider, find_bubblewrap
from prorl_trio.sandbox.reaper import children, descendants
from prorl_trio.sandbox.warm_pool import WarmLimits
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from prorl_trio.sandbox.host import HostedSandbox, SandboxHost
    from prorl_trio.sandbox.provider import SandboxProvider

PROGRAMS = ("bash", "sh", "cat", "env", "ls", "sleep", "true")
FOLDERS = ("bin", "dev", "etc", "proc", "tmp", "usr", "var")
BUILD_TIMEOUT_S = 120.0


def build_directory_image(root: Path) -> Path:
    """Fill the new folder `root` from this machine, some 30 MB. Blocks; returns `root`."""
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
    binaries = [Path(found) for name in PROGRAMS if (found := shutil.which(name))]
    for binary in binaries:
        shutil.copy2(binary, root / "bin" / binary.name)
    extensions = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")
    for library in _libraries([*binaries, Path(sys.executable), Path(msgspec._core.__file__), *extensions]):
        target = root / str(library).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    return root


def _libraries(files: Iterable[Path]) -> set[Path]:
    """Return the libraries that the dynamic loader would load for `files`, itself included."""
    listed = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    words = {word for line in listed.splitlines() if line[:1].isspace() for word in line.split()}
    return {Path(word) for word in words if word.startswith("/") and Path(word).is_file()}


def build_sif(apptainer: str, root: Path, sif: Path) -> Path:
    """Build the directory image `root` as one file. Blocks; returns `sif`.

    Raises:
        subprocess.CalledProcessError: Apptainer cannot build it; its output is in `stderr`.
    """
    command = [apptainer, "--quiet", "build", str(sif), str(root)]
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S)
    return sif


ENVIRONMENT_FILES: Final = 2700
"""Number of files in a virtual environment with a data-frame package."""
ENVIRONMENT_PLACE: Final = "/workspace/env"
"""A path below a folder that accepts uploads in a sandbox."""
FILES_PER_FOLDER: Final = 30
FILE_BYTES: Final = 12_000
REPOSITORY_FILES: Final = 120


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


async def measure_inits(
    provider: SandboxProvider, image: str, environment: Path, scratch: Path, count: int
) -> dict[str, float]:
    """Start `count` sandboxes at once. Their images share base and environment, but each has its own repository."""
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


COLD_TARGET_MS, FORKED_TARGET_MS, WARM_TARGET_MS = 400.0, 80.0, 10.0
MAX_LAYERED_RATIO = 1.3
START_TIMEOUT_S = 240.0
LIVE_OF = {"cold.host": "live", "cold.bwrap": "live_bwrap"}
"""The starts that are used to measure many live sandboxes, with the names of their figures."""
LIVE_STARTS_AT_ONCE = 4
KIB_PER_MIB = 1024


class Size(NamedTuple):
    """The sizes of a measurement."""

    rounds: int
    warm_opens: int
    live: int
    uploads: int
    images: int


QUICK = Size(rounds=6, warm_opens=15, live=24, uploads=2, images=16)
FULL = Size(rounds=60, warm_opens=200, live=200, uploads=20, images=64)


class StartedEach(BubblewrapProvider):
    """A provider that starts each sandbox by bwrap, as a node does before it has a fork server."""

    def want_forks(self) -> None:
        """Do not start a fork server."""


class Start(NamedTuple):
    """A kind of cold start."""

    name: str
    provider: SandboxProvider
    image: str
    floor: str
    layers: tuple[str, ...] = ()


async def benchmark(options: Options) -> Report:
    """Measure cold starts and their floors, interleaved; then warm starts; then many at once."""
    size = QUICK if options.quick else FULL
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="prorl-perf-") as scratch:
        folder = Path(scratch)
        root = await trio.to_thread.run_sync(build_directory_image, folder / "image")
        environment = await trio.to_thread.run_sync(build_environment, folder / "environment")
        repository = await trio.to_thread.run_sync(build_repository, folder / "repository")
        starts = await _usable_starts(folder, root, (str(environment), str(repository)), notes)
        if not starts:
            raise CannotRun("neither Apptainer nor bubblewrap works here; `prorl-trio doctor` says why")
        series = await _measure_cold(starts, root, size.rounds)
        usual = next((start for start in starts if start.name == "cold.dir"), starts[0])
        series += await _measure_warm(usual, size.warm_opens)
        metrics: dict[str, float] = {}
        for start in starts:
            if start.name in LIVE_OF:
                live = await measure_live(start, size.live)
                metrics |= {f"{LIVE_OF[start.name]}.{name}": value for name, value in live.items()}
        series += await _measure_environment(usual, environment, size.uploads)
        metrics |= await measure_inits(usual.provider, str(root), environment, folder, size.images)
    title = "sandboxes: from open() to ready, and the launchers alone"
    return Report(title=title, series=series, more_metrics=metrics, notes=notes)


async def _usable_starts(folder: Path, root: Path, layers: tuple[str, ...], notes: list[str]) -> list[Start]:
    starts: list[Start] = []
    apptainer, bubblewrap = ApptainerProvider(folder), BubblewrapProvider(folder)
    executable = find_apptainer()
    if executable is not None and (await apptainer.probe()).usable:
        floor = "floor.apptainer_exec"
        starts += [Start("cold.host", apptainer, "host", floor), Start("cold.dir", apptainer, str(root), floor)]
        starts.append(Start("cold.layers", apptainer, str(root), "cold.dir", layers))
        try:
            sif = await trio.to_thread.run_sync(build_sif, executable, root, folder / "image.sif")
        except subprocess.SubprocessError as exc:
            notes.append(f"left out: a .sif, which cannot be built: {exc}")
        else:
            starts.append(Start("cold.sif", apptainer, str(sif), floor))
    if (await bubblewrap.probe()).usable:
        starts.append(Start("cold.bwrap", bubblewrap, "host", "floor.bwrap"))
        starts.append(Start("cold.bwrap_first", StartedEach(folder), "host", "floor.bwrap"))
        starts.append(Start("cold.bwrap_dir", bubblewrap, str(root), "floor.bwrap"))
        starts.append(Start("cold.bwrap_layers", bubblewrap, str(root), "cold.bwrap_dir", layers))
    return starts


def _floor_commands(root: Path) -> dict[str, Sequence[str]]:
    """Return the launchers with their own isolation and an empty command. They are the floor of a start."""
    isolated = ("--userns", "--containall", "--net", "--network", "none", "--no-mount", "sys,bind-paths")
    bare = ("--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev")
    return {
        "floor.apptainer_exec": (find_apptainer() or "", "--quiet", "exec", *isolated, str(root), "true"),
        "floor.bwrap": (find_bubblewrap() or "", *bare, "true"),
    }


async def _measure_cold(starts: list[Start], root: Path, rounds: int) -> list[Series]:
    """Open and close each kind of sandbox in each round, and run the launchers alone.

    The first round is not counted.
    """
    closed_ms: dict[str, list[float]] = {}

    async def open_and_close(start: Start) -> float:
        began = time.perf_counter()
        sandbox = await hosts[start.name].open(_spec(start))
        opened = time.perf_counter()
        await sandbox.aclose()
        closed_ms.setdefault(start.name.replace("cold", "close"), []).append((time.perf_counter() - opened) * 1e3)
        return opened - began

    async def launch(argv: Sequence[str]) -> None:
        await trio.run_process(argv, stdin=subprocess.DEVNULL, capture_stdout=True, capture_stderr=True)

    cases = [_case(start.name, partial(open_and_close, start), floor=start.floor) for start in starts]
    floors = {start.floor for start in starts}
    cases += [
        Case(name=name, run=partial(launch, argv)) for name, argv in _floor_commands(root).items() if name in floors
    ]
    async with AsyncExitStack() as stack:
        hosts = {start.name: await stack.enter_async_context(open_sandbox_host(start.provider)) for start in starts}
        for start in starts:
            if start.name == "cold.bwrap":
                await _wait_for_forks(start.provider)
        series = await measure_interleaved(cases, rounds=rounds, warm_up_rounds=1)
    return [*series, *(Series(case=Case(name=name), samples=taken[1:]) for name, taken in closed_ms.items())]


def _spec(start: Start) -> SandboxSpec:
    return SandboxSpec(image=start.image, layers=start.layers, start_timeout_s=START_TIMEOUT_S)


def _case(name: str, run: Callable[[], Awaitable[float]], floor: str | None = None) -> Case:
    targets = {"cold.host": COLD_TARGET_MS, "cold.dir": COLD_TARGET_MS, "cold.bwrap": FORKED_TARGET_MS}
    targets["warm"] = WARM_TARGET_MS
    layered = MAX_LAYERED_RATIO if name.endswith("layers") else None
    return Case(name=name, run=run, self_timed=True, floor=floor, max_p50=targets.get(name), max_x_floor=layered)


async def _measure_warm(start: Start, opens: int) -> list[Series]:
    """Open sandboxes from a full stock. The time between is for the refill."""

    async def open_warm() -> float:
        await host.wait_stocked()
        taken = host.statistics()["warm_taken_total"]
        began = time.perf_counter()
        sandbox = await host.open(spec)
        taken_s = time.perf_counter() - began
        if host.statistics()["warm_taken_total"] != taken + 1:
            raise RuntimeError(f"a sandbox that should be warm was not: {host.statistics()}")
        await sandbox.aclose()
        return taken_s

    spec = SandboxSpec(image=start.image, start_timeout_s=START_TIMEOUT_S)
    async with open_sandbox_host(start.provider, warm=WarmLimits(max_warm=2)) as host:
        await (await host.open(spec)).aclose()
        return await measure_interleaved([_case("warm", open_warm)], rounds=opens, warm_up_rounds=0)


async def _measure_environment(start: Start, environment: Path, rounds: int) -> list[Series]:
    """Measure the start of a sandbox with an environment of 2,700 files, as a layer or uploaded."""
    number = ENVIRONMENT_FILES - 1
    last = f"{ENVIRONMENT_PLACE}/lib/package{number // FILES_PER_FOLDER}/module{number}.py"

    async def open_with(layers: tuple[str, ...]) -> float:
        began = time.perf_counter()
        sandbox = await host.open(_spec(start._replace(layers=layers)))
        if not layers:
            await sandbox.upload(environment / ENVIRONMENT_PLACE.lstrip("/"), ENVIRONMENT_PLACE)
        taken_s = time.perf_counter() - began
        if not (await sandbox.read_file(last)).startswith(b"NUMBER"):
            raise RuntimeError(f"the environment is not in {sandbox!r}")
        await sandbox.aclose()
        return taken_s

    layer, upload = "environment.layer", "environment.upload"
    cases = [_case(layer, partial(open_with, (str(environment),))), _case(upload, partial(open_with, ()), floor=layer)]
    async with open_sandbox_host(start.provider) as host:
        return await measure_interleaved(cases, rounds=rounds, warm_up_rounds=0)


async def measure_live(start: Start, count: int) -> dict[str, float]:
    """Open `count` sandboxes at once, each with a shell that ran a command. Memory is the proportional set size."""
    spec = SandboxSpec(image=start.image, start_timeout_s=START_TIMEOUT_S)
    sandboxes: list[HostedSandbox] = []
    async with open_sandbox_host(start.provider, max_concurrent_starts=LIVE_STARTS_AT_ONCE) as host:
        await _wait_for_forks(start.provider)
        others = set(children(os.getpid()))
        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(_open_into, host, spec, sandboxes)
        opened_s = time.perf_counter() - began
        async with trio.open_nursery() as nursery:
            for sandbox in sandboxes:
                nursery.start_soon(_run_true, sandbox)
        mib = await trio.to_thread.run_sync(_mib_of_each, others)
        live = host.statistics()["live"]
    return {
        "count": live,
        "starts_per_s": round(count / opened_s, 2),
        "mib_each": round(statistics.mean(mib), 1),
        "mib_max": round(max(mib), 1),
    }


async def _wait_for_forks(provider: SandboxProvider | None) -> None:
    """Wait until the sandboxes of `provider` are forked, if it supports that."""
    if isinstance(provider, BubblewrapProvider) and not isinstance(provider, StartedEach):
        provider.want_forks()
        with trio.move_on_after(START_TIMEOUT_S):
            await provider.wait_fork_server()


async def _open_into(host: SandboxHost, spec: SandboxSpec, sandboxes: list[HostedSandbox]) -> None:
    sandboxes.append(await host.open(spec))


async def _run_true(sandbox: HostedSandbox) -> None:
    result = await sandbox.bash("true", timeout_s=START_TIMEOUT_S)
    if result.exit_code != 0:
        raise RuntimeError(f"`true` failed in {sandbox!r}: {result}")


def _mib_of_each(others: set[int]) -> list[float]:
    """Return the MiB of each of our sandboxes: of each child that is not in `others`, with its descendants."""
    families = [
        {child, *(process.pid for process in descendants(child))} for child in set(children(os.getpid())) - others
    ]
    return [sum(map(_pss_kib, family)) / KIB_PER_MIB for family in families]


def _pss_kib(pid: int) -> int:
    """Return the memory of a process in KiB, each shared page divided among its users.

    The daemon hides itself, so that only root sees this. For other users, return its resident memory, with shared pages
    in full.
    """
    for file, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
                if line.startswith(field):
                    return int(line.split()[1])
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
