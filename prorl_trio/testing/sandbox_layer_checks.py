"""Promises of a sandbox provider about the layers of a spec: it lays them over the image, or refuses them."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.transfer import TransferOptions
from prorl_trio.testing.sandbox_check import CHECK_TIMEOUT_S, Contract, checked_sandbox, open_and_close, raises
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


@contextmanager
def _layers(**files: dict[str, str]) -> Iterator[dict[str, Path]]:
    """Folders by name, each with these files."""
    with tempfile.TemporaryDirectory(prefix="prorl-layers-") as scratch:
        folders = {}
        for name, content in files.items():
            folders[name] = Path(scratch, name)
            folders[name].mkdir()
            for place, text in content.items():
                path = folders[name] / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        yield folders


def _spec(*layers: Path) -> SandboxSpec:
    return SandboxSpec(layers=tuple(map(str, layers)))


async def check_layers_lie_in_order(contract: Contract) -> None:
    """All layers are seen; of a file that two of them have, the later one is."""
    environment = {"opt/env/lib/a": "a", "testbed/both": "environment"}
    repository = {"testbed/own": "own", "testbed/both": "repository"}
    with _layers(environment=environment, repository=repository) as folders:
        for order, seen in (
            (("environment", "repository"), b"repository"),
            (("repository", "environment"), b"environment"),
        ):
            async with checked_sandbox(contract, _spec(*(folders[name] for name in order))) as sandbox:
                assert await sandbox.read_file("/opt/env/lib/a") == b"a"
                assert await sandbox.read_file("/testbed/own") == b"own"
                assert await sandbox.read_file("/testbed/both") == seen, order


async def check_layers_are_read_only(contract: Contract) -> None:
    """Changes are seen inside, and by nobody else: neither on the host nor in another sandbox."""
    with _layers(repository={"testbed/file": "before", "testbed/other": "other"}) as folders:
        spec = _spec(folders["repository"])
        async with checked_sandbox(contract, spec) as sandbox:
            await sandbox.write_file("/testbed/file", b"after")
            await sandbox.write_file("/testbed/new/file", b"new")
            assert await sandbox.read_file("/testbed/file") == b"after"
            assert await sandbox.read_file("/testbed/new/file") == b"new"
            async with contract.provider.open_sandbox(spec) as second:
                assert await second.read_file("/testbed/file") == b"before"
                await raises(FileNotFoundError, second.read_file("/testbed/new/file"))
        found = {str(path.relative_to(folders["repository"])) for path in folders["repository"].rglob("*")}
        assert found == {"testbed", "testbed/file", "testbed/other"}
        assert (folders["repository"] / "testbed/file").read_text() == "before"


async def check_uploads_over_layers(contract: Contract) -> None:
    """An upload replaces files and folders of a layer as a whole, as any other, and goes beside them."""
    layer = {
        "testbed/repo/old": "old",
        "testbed/repo/in/old": "old",
        "testbed/repo/in/both": "old",
        "testbed/file": "old",
    }
    new = {"in/both": "new", "in/new/er": "new", "own": "new"}
    options = TransferOptions(overwrite=True)
    with _layers(repository=layer, new=new, out={}) as folders:
        async with checked_sandbox(contract, _spec(folders["repository"])) as sandbox:
            # Beside the layer's, over it, and over what came of that.
            for number, remote in enumerate(("/testbed/other", "/testbed/repo", "/testbed/repo")):
                await sandbox.upload(folders["new"], remote, options=options)
                await sandbox.download(remote, folders["out"] / f"{number}")
                assert _files(folders["out"] / f"{number}") == new
            await sandbox.upload(folders["new"] / "own", "/testbed/file", options=options)
            assert await sandbox.read_file("/testbed/file") == b"new"


def _files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


async def check_missing_layers(contract: Contract) -> None:
    """A folder or a digest that is not there, and what is neither, is refused by its name."""
    unknown = f"sha256:{'0' * 64}"
    with trio.fail_after(CHECK_TIMEOUT_S):
        for layer in ("/no/such/layer", unknown, "a-name"):
            error = await raises(SandboxUnavailable, open_and_close(contract, SandboxSpec(layers=(layer,))))
            assert layer in str(error)


async def check_what_layers_cannot_cover(contract: Contract) -> None:
    """The userland of `host`, and what a launcher would run before the daemon, are refused by their names."""
    with trio.fail_after(CHECK_TIMEOUT_S), _layers(x={"usr/bin/x": ""}, y={".singularity.d/env/x.sh": ""}) as folders:
        for name, covered in (("x", "/usr"), ("y", "/.singularity.d")):
            error = await raises(SandboxUnavailable, open_and_close(contract, _spec(folders[name])))
            assert str(folders[name]) in str(error)
            assert covered in str(error)


async def check_layers_are_refused(contract: Contract) -> None:
    """A provider without layers says so, instead of starting a sandbox that lacks them."""
    with trio.fail_after(CHECK_TIMEOUT_S), _layers(x={"testbed/x": ""}) as folders:
        error = await raises(SandboxUnavailable, open_and_close(contract, _spec(folders["x"])))
        assert str(folders["x"]) in str(error)
        assert contract.provider.name in str(error)


LAYER_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_layers_lie_in_order,
    check_layers_are_read_only,
    check_uploads_over_layers,
    check_missing_layers,
    check_what_layers_cannot_cover,
)
"""For providers that say `has_layers`."""

NO_LAYER_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (check_layers_are_refused,)
"""For the others."""
