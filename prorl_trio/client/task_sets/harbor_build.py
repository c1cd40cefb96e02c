"""Dockerfiles of tasks, as the steps in which a sandbox is made of a stored image. What is none of them is refused."""

from __future__ import annotations

import base64
import posixpath
import re
import shlex
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prorl_trio.handlers.shell.payload import MAX_TASK_BYTES
from prorl_trio.sandbox.images.dockerfile import Instruction, json_words, read_instructions
from prorl_trio.sandbox.images.names import DOCKER
from prorl_trio.sandbox.images.store import is_reference
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PUBLISHED: Final = re.compile(r"[^/][:/@]")
_VARIABLE: Final = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_ROOT: Final = ("root", "0", "root:root", "0:0")
_NO_EFFECT: Final = ("CMD", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL")
"""A task's container is started by the harness, with a command of its own, and nothing reaches its ports."""
_OPTIONS: Final = "options of an instruction are the builder's"


class Files:
    """The files of one task on their way into its payload: all of them together within `MAX_TASK_BYTES`."""

    def __init__(self) -> None:
        self._size_bytes = 0

    def folder(self, source: Path, target: str) -> dict[str, Any]:
        """Return the files below `source` as those below `target`. Raises ConfigError, as `file`."""
        found = sorted(path for path in source.rglob("*") if path.is_symlink() or not path.is_dir())
        return {posixpath.join(target, path.relative_to(source).as_posix()): self.file(path, source) for path in found}

    def file(self, path: Path, within: Path) -> dict[str, Any]:
        """Return a file of the folder `within`, with its mode.

        Raises:
            ConfigError: it leads out of that folder, cannot be read, or there is too much with it; it is named.
        """
        if not path.resolve().is_relative_to(within.resolve()):
            raise ConfigError(f"{path} leads out of {within}")
        if not path.is_file():
            raise ConfigError(f"{path} is no file: links to folders, pipes and devices do not travel")
        try:
            self._size_bytes += path.stat().st_size
            if self._size_bytes > MAX_TASK_BYTES:
                raise ConfigError(
                    f"{path}: with it the task's files have {self._size_bytes} bytes; the limit is {MAX_TASK_BYTES}: "
                    "put large files into its image"
                )
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            return {"content": base64.b64encode(path.read_bytes()).decode(), "mode": mode}
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read: {exc}") from exc


class Built(NamedTuple):
    """An environment as a Dockerfile makes it."""

    image: str
    build: list[dict[str, Any]]
    workdir: str
    env: dict[str, str]


def image_of(name: str, images: Mapping[str, str]) -> str:
    """Return the node's name of an image: the one in `images`, else what a name with a tag or a path is in registries.

    Any other name is one of the node's image store, and `host` the node's own userland.
    """
    if name in images:
        return images[name]
    return f"{DOCKER}{name}" if _PUBLISHED.search(name) and not is_reference(name) else name


def read_dockerfile(path: Path, images: Mapping[str, str], files: Files) -> Built:
    """Return the steps of a Dockerfile of FROM, ARG, RUN, COPY, WORKDIR, ENV. Blocks on the disk.

    What says how a container is started or described (CMD, LABEL, EXPOSE, ...) has no effect on a task: it is left out.

    Raises:
        ConfigError: it cannot be read, or something in it cannot be done, with the file and the line.
    """
    try:
        instructions = read_instructions(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    reader = _Reader(path, files)
    first = next((number for number, it in enumerate(instructions) if it.name != "ARG"), len(instructions))
    if first == len(instructions) or instructions[first].name != "FROM":
        raise ConfigError(f"{path}: a Dockerfile begins with FROM")
    image = reader.base(instructions[first], instructions[:first])
    for it in instructions[first + 1 :]:
        reader.take(it)
    return Built(image_of(image, images), reader.build, reader.workdir, reader.env)


class _Reader:
    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files
        self.build: list[dict[str, Any]] = []
        self.workdir = ""
        self.env: dict[str, str] = {}
        self._global_args: dict[str, str] = {}
        self._args: dict[str, str] = {}

    def _refuse(self, it: Instruction, why: str) -> ConfigError:
        return ConfigError(f"{self._path}: {it.problem(why)}")

    def base(self, it: Instruction, args: Sequence[Instruction]) -> str:
        """Return the image of FROM, which may have variables of the ARGs before it."""
        for arg in args:
            self._global_args |= self._arg(arg, {})
        rest = _VARIABLE.sub(lambda found: self._global_args.get(found[1] or found[2], found[0]), it.rest)
        words = rest.split()
        if not words or words[0].startswith("--") or "$" in rest or len(words) not in (1, 3):
            raise self._refuse(it, "FROM takes an image, and AS a name; a variable needs an ARG with a value before it")
        return words[0]

    def _arg(self, it: Instruction, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of an ARG that have a value: its default, or that of an ARG before FROM."""
        try:
            words = shlex.split(it.rest)
        except ValueError as exc:
            raise self._refuse(it, str(exc)) from exc
        found: dict[str, str] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not _NAME.fullmatch(name) or "$" in value:
                raise self._refuse(it, f"{word!r} is no NAME or NAME=VALUE without variables")
            if equals:
                found[name] = value
            elif name in inherited:
                found[name] = inherited[name]
        return found

    def take(self, it: Instruction) -> None:
        """Take an instruction after FROM."""
        if it.rest.startswith("--"):
            raise self._refuse(it, _OPTIONS)
        match it.name:
            case "RUN":
                words = json_words(it.rest)
                self.build.append(self._step(it, it.rest if words is None else shlex.join(words)))
            case "COPY":
                self.build.append({"files": self._copied(it)})
            case "WORKDIR":
                if not it.rest or "$" in it.rest:
                    raise self._refuse(it, "a plain path is wanted")
                self.workdir = posixpath.normpath(posixpath.join(self.workdir or "/", it.rest))
                self.build.append({"cwd": self.workdir})
            case "ENV":
                self._assign(it)
            case "ARG":
                self._args |= self._arg(it, self._global_args)
            case "USER" if it.rest in _ROOT:
                pass
            case name if name in _NO_EFFECT:
                pass
            case "FROM":
                raise self._refuse(it, "a build of several stages")
            case _:
                raise self._refuse(
                    it,
                    "a task's Dockerfile has FROM, RUN, COPY, WORKDIR and ENV; or name a docker_image",
                )

    def _step(self, it: Instruction, command: str) -> dict[str, Any]:
        if "<<" in command:
            raise self._refuse(it, "a here-document; put the script into a file and COPY it")
        if not command:
            raise self._refuse(it, "there is no command")
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in (self._args | self.env).items())
        return {"command": exports + command, "cwd": self.workdir or "/"}

    def _assign(self, it: Instruction) -> None:
        try:
            words = shlex.split(it.rest)
        except ValueError as exc:
            raise self._refuse(it, str(exc)) from exc
        if "=" not in (words or [""])[0]:
            words = [f"{words[0]}={it.rest.partition(' ')[2].strip()}"] if len(words) > 1 else []
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not _NAME.fullmatch(name) or "$" in value:
                raise self._refuse(it, f"{word!r} is no NAME=VALUE without variables")
            self.env[name] = value
        if not words:
            raise self._refuse(it, "a name and a value are wanted")

    def _copied(self, it: Instruction) -> dict[str, Any]:
        *sources, target = json_words(it.rest) or it.rest.split() or [""]
        if not sources or any(mark in it.rest for mark in "*?$<"):
            raise self._refuse(it, "sources and a target are wanted, without patterns and variables")
        into_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
        target = posixpath.normpath(posixpath.join(self.workdir or "/", target))
        found: dict[str, Any] = {}
        for source in sources:
            path = self._path.parent / source.lstrip("/")
            if not path.resolve().is_relative_to(self._path.parent.resolve()):
                raise self._refuse(it, f"{source} is outside of {self._path.parent}")
            if not path.exists():
                raise self._refuse(it, f"there is no {path}")
            if path.is_dir():
                found |= self._files.folder(path, target)
            else:
                found[posixpath.join(target, path.name) if into_folder else target] = self._files.file(
                    path, self._path.parent
                )
        return found
