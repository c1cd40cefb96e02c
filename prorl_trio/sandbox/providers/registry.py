"""Sandbox providers: those that are built in, and those that installed packages offer.

A package offers one under the entry-point group `prorl_trio.providers`:

    [project.entry-points."prorl_trio.providers"]
    mine = "my_package:MyProvider"

and `sandbox.provider = "mine"` has it used. It is a subclass of `SandboxProvider`, made by `configured`.
`prorl_trio.testing.sandbox_contract` is what it must pass.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from prorl_trio.plugins import load_plugins
from prorl_trio.sandbox.provider import SandboxProvider
from prorl_trio.sandbox.providers.apptainer import ApptainerProvider
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider, is_beyond_bubblewrap
from prorl_trio.sandbox.providers.by_image import ByImage
from prorl_trio.sandbox.providers.process import ProcessProvider
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.provider import ProviderReport

logger = logging.getLogger(__name__)

GROUP: Final = "prorl_trio.providers"
AUTO: Final = "auto"
PROVIDERS: Final[Mapping[str, type[ApptainerProvider | BubblewrapProvider | ProcessProvider]]] = {
    provider.name: provider for provider in (ApptainerProvider, BubblewrapProvider, ProcessProvider)
}
"""The built-in ones by name."""

_reports: dict[tuple[str, str, bool], ProviderReport] = {}


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
            report = _reports[key] = await provider.probe()
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
    return [await provider(runtime_dir).probe() for provider in PROVIDERS.values() if provider.isolated]
