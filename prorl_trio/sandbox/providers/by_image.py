"""Two providers as one: each sandbox by the one that is better at its image."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.sandbox import Sandbox

__all__ = ["ByImage"]


class ByImage(SandboxProvider):
    """Sandboxes of the image `host` by one provider, and all others, those of layers over it among them, by another."""

    isolated: ClassVar[bool] = True

    def __init__(self, host: SandboxProvider, images: SandboxProvider) -> None:
        self._host, self._images = host, images
        self.name = f"{host.name}+{images.name}"  # type: ignore[misc]  # of these two, and not of the class
        self.has_layers = host.has_layers and images.has_layers  # type: ignore[misc]  # likewise

    def serving(self, spec: SandboxSpec) -> SandboxProvider:
        plain = spec.image == "host" and not spec.layers
        return (self._host if plain else self._images).serving(spec)

    async def probe(self) -> ProviderReport:
        """Report both: the problem of either is one."""
        reports = [await self._host.probe(), await self._images.probe()]
        return ProviderReport(
            name=self.name,
            usable=all(report.usable for report in reports),
            version=", ".join(filter(None, (report.version for report in reports))),
            problem="; ".join(filter(None, (report.problem for report in reports))),
            remedy="; ".join(filter(None, (report.remedy for report in reports))),
        )

    @asynccontextmanager
    async def open_shared(self) -> AsyncIterator[None]:
        async with self._host.open_shared(), self._images.open_shared():
            yield

    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return self.serving(spec).open_sandbox(spec)
