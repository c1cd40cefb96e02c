"""`prorl-trio image`: manage the images that sandboxes are started from."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import trio
from rich.table import Table

from prorl_launch.bundle import build_bundle
from prorl_launch.image_store import build_image, check_image, pull_sif, references_in, unpack_image
from prorl_launch.progress import SetupError
from prorl_launch.recipes import convert_recipe, definition_of
from prorl_trio.client.terminal import Console, one_line, say, say_json
from prorl_trio.config import SandboxConfig
from prorl_trio.sandbox.images.compose import compose_image
from prorl_trio.sandbox.images.layers import list_layers, store_layer
from prorl_trio.sandbox.images.names import DOCKER, SUITES, parse_reference
from prorl_trio.sandbox.images.pull import PullOrder, PullRules
from prorl_trio.sandbox.images.puller import run_pull
from prorl_trio.sandbox.images.removal import measure_store, prune, remove_image
from prorl_trio.sandbox.images.store import find_image, is_reference, list_images
from prorl_trio.sandbox.providers.registry import choose_provider

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.sandbox.images.store import StoredImage

_MIB = 1024 * 1024
_DAY_S = 24 * 3600.0


class _Group(click.Group):
    """A group of commands that report a `SetupError` as a message instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SetupError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group)
def image() -> None:
    """Pull, build, list and verify the images of sandboxes.

    A sandbox's image is `host`, an unpacked root directory, a .sif file, or a name in this store.
    """


@image.command()
@click.argument("references", nargs=-1, metavar="[REFERENCE]...")
@click.option(
    "--tasks", type=click.Path(path_type=Path), help="Pull all images that a JSONL task file names in `image`."
)
@click.option(
    "--suite", type=click.Choice([*SUITES]), help="With --tasks: use this suite's image for rows without one."
)
@click.option("--again", is_flag=True, help="Pull stored images again, because a tag may have moved.")
@click.option("--no-https", is_flag=True, help="Use plain HTTP for the registry.")
@click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Images that are pulled at once; .sif files follow one by one.",
)
@click.option(
    "--max-gib", type=click.FloatRange(min=0), default=0.0, help="Largest size of the store in GiB; 0: no limit."
)
@click.option("--sif", is_flag=True, help="Store each image as one Apptainer file, instead of shared layers.")
def pull(
    references: tuple[str, ...],
    tasks: Path | None,
    suite: str | None,
    again: bool,
    no_https: bool,
    jobs: int,
    max_gib: float,
    sif: bool,
) -> None:
    """Pull docker:// images into the store, layer by layer; library:// and oras:// images by Apptainer.

    Existing images are skipped, and interrupted pulls are resumed. With --tasks, a failed image does not stop the
    others: the exit code is then 1, and the same command resumes.
    """
    wanted = [*references]
    if tasks is not None:
        wanted += [name for name in references_in(tasks, suite or "") if is_reference(name)]
        if not wanted:
            say(f"{tasks} names no image of a registry: there is nothing to pull")
    elif not references:
        raise click.UsageError("name a REFERENCE, or a task file with --tasks")

    wanted = list(dict.fromkeys(wanted))
    layered = [name for name in wanted if name.startswith(DOCKER) and not sif]
    plain_http = tuple(map(_host, layered)) if no_https else ()
    rules = PullRules(max_store_bytes=int(max_gib * 2**30), plain_http=plain_http)
    orders = [PullOrder(reference=name, rules=rules, again=again) for name in layered]
    failed = trio.run(_pull_layers, orders, jobs)
    for name in (each for each in wanted if each not in layered):
        try:
            _say(pull_sif(name, again=again, plain_http=no_https))
        except (SetupError, ValueError) as error:
            failed += 1
            say(f"error: {name}: {error}", color="red", err=True)
    if failed:
        raise click.ClickException(f"{failed} of {len(wanted)} images were not pulled")


def _host(reference: str) -> str:
    """Return the registry's host; empty for an invalid reference, which its pull will refuse."""
    try:
        return parse_reference(reference).host
    except ValueError:
        return ""


async def _pull_layers(orders: Sequence[PullOrder], jobs: int) -> int:
    """Pull images, each in its own process, so that Ctrl-C ends them at once. Return the number of failures."""
    places, failed = trio.CapacityLimiter(jobs), 0

    async def pull_one(order: PullOrder) -> None:
        nonlocal failed
        async with places:
            report = await run_pull(order, lambda line: say(f"{order.reference}: {line}", err=True))
            if not report.error and (stored := find_image(order.reference)) is not None:
                _say(stored)
            else:
                failed += 1
                say(f"error: {report.error or f'{order.reference} is gone again'}", color="red", err=True)

    async with trio.open_nursery() as nursery:
        for order in orders:
            nursery.start_soon(pull_one, order, name=f"pull of {order.reference}")
    return failed


@image.command()
@click.argument("recipe", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--name", help="Name of the image. Default: the file name without .def, or the folder of a Dockerfile.")
@click.option("--fakeroot", is_flag=True, help="Let a normal user build as root inside, by /etc/subuid.")
def build(recipe: Path, name: str | None, fakeroot: bool) -> None:
    """Build an Apptainer definition file, or a Dockerfile, into the store.

    A Dockerfile is first converted, and the result is shown. Its sources are relative to its folder. Instructions
    without an equivalent are refused with their line: several stages, ARG, ONBUILD, HEALTHCHECK, another USER, COPY
    --from, ...
    """
    definition = definition_of(recipe)
    if definition is not None:
        say(f"{recipe} is a Dockerfile; as a definition file it is:\n\n{definition}")
    default = recipe.stem if definition is None else recipe.resolve().parent.name
    _say(build_image(recipe, name or default, fakeroot=fakeroot, definition=definition))


@image.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
def recipe(file: Path) -> None:
    """Print a Dockerfile as an Apptainer definition file, or a definition file as a Dockerfile.

    Instructions without an equivalent are refused with their line.
    """
    click.echo(convert_recipe(file).text, nl=False)


@image.command()
@click.argument("name", metavar="IMAGE")
def unpack(name: str) -> None:
    """Unpack a .sif file or a stored image. The bubblewrap provider needs this; all providers start faster with it."""
    _say(unpack_image(name))


@image.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
@click.option("--at", default="/", show_default=True, help="Path of the folder inside sandboxes.")
def layer(folder: Path, at: str) -> None:
    """Store a folder as a layer, named by its content.

    The printed digest is for a task's `layers`, and for `compose`.
    """
    try:
        say(store_layer(folder, at).record.digest)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


@image.command()
@click.argument("name", metavar="IMAGE")
@click.argument("layers", nargs=-1, required=True, metavar="LAYER...")
@click.option("--base", default="host", show_default=True, help="Base image: `host`, a path or a stored name.")
def compose(name: str, layers: tuple[str, ...], base: str) -> None:
    """Name an image made of a base and stored layers, lowest first. Nothing is copied."""
    try:
        _say(compose_image(name, base, layers))
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


@image.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """List the stored images."""
    images = list_images()
    if as_json:
        rows = [
            {**msgspec.to_builtins(found.record), "kind": _kind(found), "path": str(_place(found))} for found in images
        ]
        _print_json(rows)
        return
    table = Table("name", "kind", "MiB", "digest", "used")
    for found in images:
        record = found.record
        days = int((time.time() - found.used_at_s) / _DAY_S)
        used = "today" if days < 1 else f"{days} days ago"
        table.add_row(one_line(record.name), _kind(found), f"{record.size_bytes / _MIB:.0f}", record.digest[:19], used)
    Console().print(table)


@image.command("layers")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_stored_layers(as_json: bool) -> None:
    """List the stored layers, and the images that use them."""
    named: dict[str, list[str]] = {}
    for found in list_images():
        for digest in found.record.layers:
            named.setdefault(digest, []).append(found.record.name)
    rows = [(layer.record, named.get(layer.record.digest, [])) for layer in list_layers()]
    if as_json:
        _print_json([{**msgspec.to_builtins(record), "images": images} for record, images in rows])
        return
    table = Table()
    table.add_column("digest", overflow="fold")
    for title in ("MiB", "entries", "images"):
        table.add_column(title)
    for record, images in rows:
        shown = ", ".join(images[:3]) + (f" and {len(images) - 3} others" if len(images) > 3 else "")
        table.add_row(record.digest, f"{record.size_bytes / _MIB:.1f}", str(record.entries), one_line(shown))
    Console().print(table)


@image.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def du(as_json: bool) -> None:
    """Report the disk usage of images. Shared layers count once in the total."""
    use = measure_store()
    if as_json:
        _print_json({**use._asdict(), "images": [found._asdict() for found in use.images]})
        return
    table = Table("image", "own MiB", "shared MiB")
    for found in sorted(use.images, key=lambda found: -found.own_bytes):
        table.add_row(one_line(found.name), f"{found.own_bytes / _MIB:.1f}", f"{found.shared_bytes / _MIB:.1f}")
    table.add_row("layers of no image", f"{use.unnamed_bytes / _MIB:.1f}", "")
    table.add_row("downloads", f"{use.downloads_bytes / _MIB:.1f}", "")
    table.add_row("total", f"{use.total_bytes / _MIB:.1f}", "")
    Console().print(table)


@image.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="IMAGE...")
def remove(names: tuple[str, ...]) -> None:
    """Remove images with layers that no other image uses, or layers by digest. Images of running sandboxes are kept."""
    failed = 0
    for name in names:
        try:
            remove_image(name)
        except ValueError as error:
            failed += 1
            say(f"error: {error}", color="red", err=True)
    sys.exit(1 if failed else 0)


@image.command("prune")
@click.option(
    "--days",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Remove images unused for this many days.",
)
def prune_(days: float) -> None:
    """Remove layers that no image uses and no sandbox has used recently, and leftovers of killed commands."""
    for digest in prune(days * _DAY_S):
        say(digest)


@image.command()
@click.argument("names", nargs=-1, metavar="[IMAGE]...")
def verify(names: tuple[str, ...]) -> None:
    """Verify checksums and start a sandbox, for all stored images or the named ones. Exit code 1 if one fails."""
    images = list_images()
    if names:
        found = {name: find_image(name) for name in names}
        if missing := [name for name, stored in found.items() if stored is None]:
            raise click.ClickException(f"not in the store: {', '.join(missing)}")
        images = [stored for stored in found.values() if stored is not None]
    problems = trio.run(_verify, images)
    for stored in images:
        problem = problems[stored.record.name]
        say(f"{stored.record.name}: {problem or 'ok'}", color="red" if problem else "green")
    sys.exit(1 if any(problems.values()) else 0)


async def _verify(images: list[StoredImage]) -> dict[str, str]:
    provider = await choose_provider(SandboxConfig())
    async with provider.open_shared():
        return {stored.record.name: await check_image(stored, provider) for stored in images}


@image.command()
def runtime() -> None:
    """Build the self-contained Python for sandboxes in images other than `host`. It takes some seconds, once."""
    say(build_bundle())


def _print_json(value: object) -> None:
    say_json(value)


def _say(stored: StoredImage) -> None:
    say(f"{stored.record.name}: {stored.record.digest} in {_place(stored)}")


def _kind(stored: StoredImage) -> str:
    if stored.record.layers:
        return f"{len(stored.record.layers)} layers over {stored.record.base}" if stored.record.base else "layers"
    return " + ".join(kind for kind, path in (("sif", stored.sif), ("directory", stored.root)) if path is not None)


def _place(stored: StoredImage) -> Path:
    return stored.root or stored.sif or stored.folder
