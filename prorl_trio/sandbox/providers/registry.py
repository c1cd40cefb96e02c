"""Which sandbox provider a node uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from prorl_trio.sandbox.providers.apptainer import ApptainerProvider
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider
from prorl_trio.sandbox.providers.process import ProcessProvider
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider

__all__ = ["PROVIDERS", "choose_provider", "probe_providers"]

PROVIDERS: Final[Mapping[str, type[ApptainerProvider | BubblewrapProvider | ProcessProvider]]] = {
    provider.name: provider for provider in (ApptainerProvider, BubblewrapProvider, ProcessProvider)
}
"""By name. `auto` tries the isolating ones, in this order."""

_reports: dict[tuple[str, Path | None, bool], ProviderReport] = {}


async def choose_provider(config: SandboxConfig) -> SandboxProvider:
    """The provider that `config` names, or the first isolating one that works here, probed once per process.

    Raises:
        ConfigError: none works; with what each said and what to do. Or `fakeroot` is asked of one that has none.
    """
    runtime_dir = Path(config.runtime_dir) if config.runtime_dir else None
    isolated = [name for name, provider in PROVIDERS.items() if provider.isolated]
    names: list[str] = isolated if config.provider == "auto" else [config.provider]
    if config.fakeroot:
        names = _with_fakeroot(names)
    refusals = []
    for name in names:
        provider = _make(name, runtime_dir, config)
        key = (name, runtime_dir, config.fakeroot)
        report = _reports.get(key)
        if report is None or not report.usable:
            report = _reports[key] = await provider.probe()
        if report.usable:
            return provider
        refusals.append(f"{name}: {report.problem}. What to do: {report.remedy}")
    raise ConfigError("no sandbox can be started here.\n" + "\n".join(f"  {refusal}" for refusal in refusals))


def _with_fakeroot(names: list[str]) -> list[str]:
    able = [name for name in names if name == ApptainerProvider.name]
    if not able:
        raise ConfigError(
            f"sandbox.fakeroot: the provider {names[0]!r} has none; set sandbox.provider to "
            f"{ApptainerProvider.name!r}, or sandbox.fakeroot to false"
        )
    return able


def _make(name: str, runtime_dir: Path | None, config: SandboxConfig) -> SandboxProvider:
    if name == ApptainerProvider.name:
        return ApptainerProvider(runtime_dir, fakeroot=config.fakeroot, packages=config.packages)
    if name == BubblewrapProvider.name:
        return BubblewrapProvider(runtime_dir, packages=config.packages)
    return ProcessProvider(runtime_dir)


async def probe_providers(runtime_dir: Path | None = None) -> list[ProviderReport]:
    """The report of each isolating provider, in order of preference. Nothing is remembered."""
    return [await provider(runtime_dir).probe() for provider in PROVIDERS.values() if provider.isolated]
