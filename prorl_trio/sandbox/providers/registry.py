"""Sandbox providers: those that are built in, and those that installed packages offer.

A package offers one under the entry-point group `prorl_trio.providers`:

    [project.entry-points."prorl_trio.providers"]
    mine = "my_package:MyProvider"

and `sandbox.provider = "mine"` has it used. It is a subclass of `SandboxProvider`, made by `configured`.
`prorl_trio.testing.sandbox_contract` is what it must pass.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar, Final, Self

from prorl_trio.plugins import load_plugins
from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider
from prorl_trio.sandbox.providers.apptainer import ApptainerProvider
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider, is_beyond_bubblewrap
from prorl_trio.sandbox.providers.start import Launch, open_daemon_sandbox
from prorl_trio.sandbox.run_dir import open_shared_run_dir
from prorl_trio.sandbox.runtime.runtime import process_runtime
from prorl_trio.threads import run_blocking
from prorl_trio.types.errors import ConfigError, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.run_dir import RunDir, SandboxDir
    from prorl_trio.sandbox.sandbox import Sandbox


GROUP: Final = "prorl_trio.providers"
AUTO: Final = "auto"

_reports: dict[tuple[str, str, bool], ProviderReport] = {}

logger = logging.getLogger(__name__)


class ByImage(SandboxProvider):
    """Two providers, of which each sandbox is started by one.

    Args:
        folders: starts most sandboxes.
        files: starts the others.
        is_for_files: tells the others, for specs of anything but the image `host` alone. Blocks.
    """

    isolated: ClassVar[bool] = True

    def __init__(
        self, *, folders: SandboxProvider, files: SandboxProvider, is_for_files: Callable[[SandboxSpec], bool]
    ) -> None:
        self._folders, self._files, self._is_for_files = folders, files, is_for_files
        self._by_files: set[tuple[str, tuple[str, ...]]] = set()
        """The images, with layers, of sandboxes that `files` has opened."""
        self.name = f"{folders.name}+{files.name}"  # type: ignore[misc]  # of these two, and not of the class
        self.has_layers = folders.has_layers and files.has_layers  # type: ignore[misc]  # likewise

    def serving(self, spec: SandboxSpec) -> SandboxProvider:
        """Return the provider of a sandbox of `spec` that was opened; before that, the one that opens most."""
        return (self._files if _root_of(spec) in self._by_files else self._folders).serving(spec)

    async def probe(self) -> ProviderReport:
        """Report both: the problem of either is one."""
        reports = [await self._folders.probe(), await self._files.probe()]
        return ProviderReport(
            name=self.name,
            usable=all(report.usable for report in reports),
            version=", ".join(filter(None, (report.version for report in reports))),
            problem="; ".join(filter(None, (report.problem for report in reports))),
            images_problem="; ".join(filter(None, (report.images_problem for report in reports))),
            remedy="; ".join(filter(None, (report.remedy for report in reports))),
        )

    @asynccontextmanager
    async def open_shared(self) -> AsyncIterator[None]:
        async with self._folders.open_shared(), self._files.open_shared():
            yield

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        if spec.image != "host" or spec.layers:
            # Each time: an image may have been unpacked, or pulled anew, since.
            if await run_blocking(self._is_for_files, spec):
                self._by_files.add(_root_of(spec))
            else:
                self._by_files.discard(_root_of(spec))
        async with self.serving(spec).open_sandbox(spec) as sandbox:
            yield sandbox


def _root_of(spec: SandboxSpec) -> tuple[str, tuple[str, ...]]:
    return spec.image, spec.layers


class ProcessProvider(SandboxProvider):
    """Runs agents' code as the user of this process, with its files and its network. Only for code you trust.

    What it does promise: a clean environment, a home directory of its own that is removed, and that its processes end.
    """

    name: ClassVar[str] = "process"
    isolated: ClassVar[bool] = False

    def __init__(self, runtime_dir: Path | None = None) -> None:
        """`runtime_dir`: see `run_dir.open_run_dir`."""
        self._runtime_dir = runtime_dir
        logger.warning("the sandbox provider `process` isolates NOTHING: agents' code runs as you, with your files")

    @classmethod
    def configured(cls, config: SandboxConfig) -> Self:
        return cls(config.run_path)

    async def probe(self) -> ProviderReport:
        return ProviderReport(name=self.name, usable=True, version="no isolation")

    def open_shared(self) -> AbstractAsyncContextManager[None]:
        return open_shared_run_dir(self._runtime_dir)

    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return open_daemon_sandbox(spec, self._runtime_dir, lambda run_dir, folder: _plan(spec, run_dir, folder))


PROVIDERS: Final[Mapping[str, type[ApptainerProvider | BubblewrapProvider | ProcessProvider]]] = {
    provider.name: provider for provider in (ApptainerProvider, BubblewrapProvider, ProcessProvider)
}
"""The built-in ones by name."""


def _plan(spec: SandboxSpec, run_dir: RunDir, folder: SandboxDir) -> Launch:
    if spec.image != "host":
        raise SandboxUnavailable(f"image {spec.image}: the provider `process` has no images; use `host`")
    if spec.layers:
        raise SandboxUnavailable(
            f"layer {spec.layers[0]}: the provider `process` has no layers; use apptainer or bubblewrap"
        )
    runtime = process_runtime(str(run_dir.lib))
    tool_env = {**runtime.tool_env, "HOME": str(folder.home)}
    env = {**runtime.env, **tool_env}
    return Launch((*runtime.daemon_argv(), "--guard"), env, tool_env, str(folder.home), isolated=False)


async def choose_provider(config: SandboxConfig) -> SandboxProvider:
    """Return the provider that `config` names; or, of those that isolate and work here, the best for each image.

    Those are probed once a process. Where both work, bubblewrap takes the image `host`, folders and layers, which it
    starts in less time and on the kernel's own overlay, and Apptainer the `.sif` files. If only one of them can lay
    folders over one another, as its probe found, it takes all images but `host`. With `fakeroot` it is Apptainer.

    Raises:
        ConfigError: there is none of that name; none works, with what each said and what to do; `fakeroot` is asked of
            one that has none; or what an installed package offers cannot be used (see `load_plugins`).
    """
    refusals = []
    usable: dict[str, SandboxProvider] = {}
    lame: dict[str, str] = {}
    for name, kind in _candidates(config).items():
        provider = kind.configured(config)
        key = (name, config.runtime_dir, config.fakeroot)
        report = _reports.get(key)
        if report is None or not report.usable or report.images_problem:
            report = _reports[key] = await _probe(name, provider)
        if report.usable:
            usable[name] = provider
        if report.images_problem:
            lame[name] = f"{name}: {report.images_problem}. What to do: {report.remedy}"
        refusals.append(f"{name}: {report.problem}. What to do: {report.remedy}")
    if not usable:
        raise ConfigError("no sandbox can be started here.\n" + "\n".join(f"  {refusal}" for refusal in refusals))
    if lame.keys() >= usable.keys():
        logger.warning(
            "sandboxes of images other than `host`, or of layers, do not work here: %s", "; ".join(lame.values())
        )
    if usable.keys() == {ApptainerProvider.name, BubblewrapProvider.name}:
        bubblewrap, apptainer = usable[BubblewrapProvider.name], usable[ApptainerProvider.name]
        if BubblewrapProvider.name in lame and ApptainerProvider.name not in lame:
            return ByImage(folders=bubblewrap, files=apptainer, is_for_files=lambda _: True)
        return ByImage(folders=bubblewrap, files=apptainer, is_for_files=is_beyond_bubblewrap)
    return next(iter(usable.values()))


def _candidates(config: SandboxConfig) -> Mapping[str, type[SandboxProvider]]:
    """Whom to try, in order."""
    installed = load_plugins(GROUP, SandboxProvider)
    if taken := installed.keys() & {AUTO, *PROVIDERS}:
        raise ConfigError(f"an installed package offers a provider called {min(taken)!r}, as a built-in one is")
    known: dict[str, type[SandboxProvider]] = {**PROVIDERS, **installed}
    if config.provider == AUTO:
        wanted: dict[str, type[SandboxProvider]] = {name: kind for name, kind in PROVIDERS.items() if kind.isolated}
    elif config.provider in known:
        wanted = {config.provider: known[config.provider]}
    else:
        there = ", ".join([AUTO, *known])
        raise ConfigError(f"sandbox.provider: no provider is called {config.provider!r}; this node has: {there}")
    able = {name: kind for name, kind in wanted.items() if kind.has_fakeroot or not config.fakeroot}
    if not able:
        others = " or ".join(repr(name) for name, kind in known.items() if kind.has_fakeroot)
        raise ConfigError(
            f"sandbox.fakeroot: the provider {config.provider!r} has none; set sandbox.provider to {others}, or "
            "sandbox.fakeroot to false"
        )
    return able


async def probe_providers(runtime_dir: Path | None = None) -> list[ProviderReport]:
    """Return the report of each built-in isolating provider, in order of preference. Nothing is remembered."""
    return [await _probe(name, kind(runtime_dir)) for name, kind in PROVIDERS.items() if kind.isolated]


async def _probe(name: str, provider: SandboxProvider) -> ProviderReport:
    """Return the provider's report. What the system refused it, such as its cache folder, is a problem of it alone."""
    try:
        return await provider.probe()
    except OSError as exc:
        remedy = "set PRORL_CACHE_DIR and sandbox.runtime_dir to folders that the node's user can write, with room"
        return ProviderReport(name=name, usable=False, problem=str(exc), remedy=remedy)
