"""Which sandbox provider a node uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from prorl_trio.errors import ConfigError
from prorl_trio.sandbox.apptainer import ApptainerProvider
from prorl_trio.sandbox.bubblewrap import BubblewrapProvider
from prorl_trio.sandbox.process import ProcessProvider

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider

__all__ = ["PROVIDERS", "choose_provider", "probe_providers"]

PROVIDERS: Final[Mapping[str, type[ApptainerProvider | BubblewrapProvider | ProcessProvider]]] = {
    provider.name: provider for provider in (ApptainerProvider, BubblewrapProvider, ProcessProvider)
}
"""By name. `auto` tries the isolating ones, in this order."""

_reports: dict[tuple[str, Path | None], ProviderReport] = {}


async def choose_provider(config: SandboxConfig) -> SandboxProvider:
    """The provider that `config` names, or the first isolating one that works here, probed once per process.

    Raises:
        ConfigError: none works; with what each said and what to do.
    """
    runtime_dir = Path(config.runtime_dir) if config.runtime_dir else None
    names = [config.provider] if config.provider != "auto" else [n for n, p in PROVIDERS.items() if p.isolated]
    refusals = []
    for name in names:
        provider = PROVIDERS[name](runtime_dir)
        report = _reports.get((name, runtime_dir))
        if report is None or not report.usable:
            report = _reports[name, runtime_dir] = await provider.probe()
        if report.usable:
            return provider
        refusals.append(f"{name}: {report.problem}. What to do: {report.remedy}")
    raise ConfigError("no sandbox can be started here.\n" + "\n".join(f"  {refusal}" for refusal in refusals))


async def probe_providers(runtime_dir: Path | None = None) -> list[ProviderReport]:
    """The report of each isolating provider, in order of preference. Nothing is remembered."""
    return [await provider(runtime_dir).probe() for provider in PROVIDERS.values() if provider.isolated]
