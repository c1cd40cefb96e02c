"""Two providers as one: each sandbox by the one that is better at its image."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider
from prorl_trio.sandbox.threads import run_blocking

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.sandbox import Sandbox


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
