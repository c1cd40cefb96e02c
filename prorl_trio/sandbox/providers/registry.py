"""Sandbox providers: the built-in ones, and the providers of installed packages.

A package offers a provider under the entry-point group `prorl_trio.providers`:

    [project.entry-points."prorl_trio.providers"]
    mine = "my_package:MyProvider"

`sandbox.provider = "mine"` selects it. It is a subclass of `SandboxProvider`, made by `configured`, and must pass
`prorl_trio.testing.sandbox_contract`.
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
    """A combination of two providers; each sandbox is started by one provider.

    Args:
        folders: starts most sandboxes.
        files: starts the other ones.
        is_for_files: selects the sandboxes for `files`; called for every spec except the image `host` alone. Blocks.
    """

    isolated: ClassVar[bool] = True

    def __init__(
        self, *, folders: SandboxProvider, files: SandboxProvider, is_for_files: Callable[[SandboxSpec], bool]
    ) -> None:
        self._folders, self._files, self._is_for_files = folders, files, is_for_files
        self._by_files: set[tuple[str, tuple[str, ...]]] = set()
        """The images, with layers, of sandboxes that `files` has opened."""
        self.name = f"{folders.name}+{files.name}"  # type: ignore[misc]  # of this instance, not of the class
        self.has_layers = folders.has_layers and files.has_layers  # type: ignore[misc]  # likewise

    def serving(self, spec: SandboxSpec) -> SandboxProvider:
        """Return the provider of an opened sandbox of `spec`; before that, the provider of most sandboxes."""
        return (self._files if _root_of(spec) in self._by_files else self._folders).serving(spec)

    async def probe(self) -> ProviderReport:
        """Report on both: a problem of either counts."""
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
            # Each time: an image may have been unpacked or pulled since.
            if await run_blocking(self._is_for_files, spec):
                self._by_files.add(_root_of(spec))
            else:
                self._by_files.discard(_root_of(spec))
        async with self.serving(spec).open_sandbox(spec) as sandbox:
            yield sandbox


def _root_of(spec: SandboxSpec) -> tuple[str, tuple[str, ...]]:
    return spec.image, spec.layers


class ProcessProvider(SandboxProvider):
    """Runs agents' code as the user of this process, with its files and its network. Only for trusted code.

    It does promise a clean environment, a separate home directory that is removed, and that its processes end.
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
"""The built-in providers by name."""


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
    """Return the configured provider; or, of the isolating providers that work here, the best one for each image.

    These are probed once per process. If both work, bubblewrap runs the image `host`, folders and layers, which it
    starts faster and on the kernel's own overlay, and Apptainer runs `.sif` files. If only one can lay folders over one
    another, by its probe, it runs all images except `host`. With `fakeroot` it is Apptainer.

    Raises:
        ConfigError: the name is unknown; none works, with each one's problem and remedy; the provider does not support
            `fakeroot`; or an installed package's provider cannot be used (see `load_plugins`).
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
    """Return the report of each built-in isolating provider, in order of preference. The result is not cached."""
    return [await _probe(name, kind(runtime_dir)) for name, kind in PROVIDERS.items() if kind.isolated]


async def _probe(name: str, provider: SandboxProvider) -> ProviderReport:
    """Return the provider's report.

    An operation that the system refuses, such as a cache folder, is only its problem.
    """
    try:
        return await provider.probe()
    except OSError as exc:
        remedy = "set PRORL_CACHE_DIR and sandbox.runtime_dir to folders that the node's user can write, with room"
        return ProviderReport(name=name, usable=False, problem=str(exc), remedy=remedy)
