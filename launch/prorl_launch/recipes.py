"""Conversion of image recipes between Dockerfiles and Apptainer definition files, by spython.

Nothing is dropped silently. Instructions without an equivalent are refused with their line before spython runs, and its
output is searched for each input. One order is lost: a definition file copies all its files before it runs anything.
"""

from __future__ import annotations

import posixpath
import re
import shlex
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_launch.progress import SetupError
from prorl_trio.sandbox.images import dockerfile
from prorl_trio.sandbox.images.dockerfile import Instruction, json_words

if TYPE_CHECKING:
    from collections.abc import Iterator


_SECTION: Final = re.compile(r"%(\w+)\s*(.*)")
_HEADER: Final = re.compile(r"(\w+)\s*:\s*(\S+)")
_EXPORT: Final = re.compile(r"export\s+([A-Za-z_][A-Za-z0-9_]*=(?:\"[^\"\\`]*\"|[^\s\"'\\`;&|]*))")
_CONVERTED: Final = ("post", "environment", "labels", "files", "runscript", "startscript")


# The subset of Dockerfiles that can become a sandbox's image: read into plain instructions, the rest refused by line.
#
# `recipes` passes this subset to spython. spython reads line by line, and treats unknown text as shell code or drops it
# silently. It therefore only receives instructions that it is known to convert faithfully.

_REFUSED: Final = {
    "ARG": "a definition file has no arguments: write their values where they are used",
    "ONBUILD": "it is for images that are built from this one",
    "HEALTHCHECK": "nobody watches a sandbox's programs",
    "SHELL": "the lines of a definition file are run by /bin/sh",
    "STOPSIGNAL": "a sandbox's processes are killed",
    "VOLUME": "a sandbox mounts nothing of its image's choice",
    "EXPOSE": "a sandbox has no network, or its host's",
}
_PLAIN_WORD: Final = re.compile(r"[A-Za-z0-9@%+=:,./_-]+")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_HEREDOC: Final = re.compile(r"<<-?\s*[\"']?[A-Za-z_]")
_URL: Final = re.compile(r"[a-z]+://|git@")
ARCHIVE: Final = re.compile(r"\.(tar|t?gz|t?bz2|t?xz|zst)$")
"""Names of archives that ADD unpacks."""


def is_dockerfile(text: str) -> bool:
    """Return whether `text` begins like a Dockerfile, rather than a definition file."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.split(" ")[0].upper() in ("FROM", "ARG")


def read_instructions(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile in order.

    Raises:
        SetupError: a directive requests another syntax.
    """
    try:
        return dockerfile.read_instructions(text)
    except ValueError as exc:
        raise SetupError(str(exc)) from exc


def _refuse(it: Instruction, why: str) -> SetupError:
    """Return an error that names the instruction."""
    return SetupError(it.problem(why))


def plain_instructions(text: str, folder: Path) -> list[Instruction]:
    """Return the Dockerfile in instructions that spython converts faithfully. Each RUN remains a separate shell.

    Args:
        text: the Dockerfile.
        folder: the build context, with the sources of COPY.

    Raises:
        SetupError: an instruction lacks an equivalent in a definition file; with its line.
    """
    instructions = read_instructions(text)
    if not instructions or instructions[0].name != "FROM":
        raise SetupError("a Dockerfile begins with FROM")
    plain: list[Instruction] = []
    workdir, started = "/", dict[str, Instruction]()
    for it in instructions:
        if why := _REFUSED.get(it.name):
            raise _refuse(it, why)
        match it.name:
            case "FROM":
                plain.append(it._replace(rest=_base(it, is_first=not plain)))
            case "RUN":
                plain.append(it._replace(rest=_command(it)))
            case "ENV" | "LABEL":
                plain += _assignments(it)
            case "WORKDIR":
                workdir = posixpath.join(workdir, _one_word(it))
                plain.append(it._replace(rest=workdir))
            case "COPY" | "ADD":
                plain += _copies(it, folder, workdir)
            case "USER":
                if it.rest not in ("root", "0", "root:root", "0:0"):
                    raise _refuse(it, "a sandbox has one user; what it runs is not that of its image")
            case "CMD" | "ENTRYPOINT":
                started[it.name] = it
            case "MAINTAINER":
                plain.append(it._replace(name="LABEL", rest=f"maintainer {it.rest}"))
            case _:
                raise _refuse(it, "there is no such instruction")
    return [*plain, *_start(started.get("ENTRYPOINT"), started.get("CMD"))]


def _start(entrypoint: Instruction | None, cmd: Instruction | None) -> Iterator[Instruction]:
    """Yield the command of the image itself, as the one instruction that spython does not read as JSON."""
    takes_cmd = entrypoint is None or json_words(entrypoint.rest) is not None
    parts = [it for it in (entrypoint, cmd if takes_cmd else None) if it is not None]
    if parts:
        yield parts[0]._replace(name="ENTRYPOINT", rest=" ".join(("exec", *map(_command, parts))))


def _base(it: Instruction, *, is_first: bool) -> str:
    if not is_first:
        raise _refuse(it, "a build of several stages; build the stage that is to be run by itself")
    words = it.rest.split()
    image = words[0] if words else ""
    if image.startswith("--"):
        raise _refuse(it, "options of FROM; images are for this machine's platform")
    if "$" in image or not _PLAIN_WORD.fullmatch(image):
        raise _refuse(it, "name the image itself")
    if image.lower() == "scratch":
        raise _refuse(it, "there is no empty image to begin with")
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
        raise _refuse(it, "FROM takes an image, and AS a name")
    return image


def _command(it: Instruction) -> str:
    """Return a shell command in one line, with the arguments of the exec form quoted."""
    if it.rest.startswith("--"):
        raise _refuse(it, "options of RUN are the builder's (mounts, networks, secrets)")
    if it.name == "RUN" and _HEREDOC.search(it.rest):
        raise _refuse(it, "a here-document; put the script into a file and COPY it")
    words = json_words(it.rest)
    command = it.rest if words is None else shlex.join(words)
    if not command:
        raise _refuse(it, "there is no command")
    return f"/bin/sh -c {shlex.quote(command)}" if words is None else command


def _assignments(it: Instruction) -> Iterator[Instruction]:
    name, _, value = it.rest.partition(" ")
    if "=" not in name and not value.strip():
        raise _refuse(it, "a name and a value are wanted")
    if "'" in it.rest and "$" in it.rest:
        raise _refuse(it, "a $ and single quotes: use double quotes, or write the value out")
    try:
        # `ENV NAME value to the end of the line` is the old syntax.
        words = shlex.split(it.rest) if "=" in name else [f"{name}={value.strip()}"]
    except ValueError as exc:
        raise _refuse(it, str(exc).lower()) from exc
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _NAME.fullmatch(name) or not name.isprintable():
            raise _refuse(it, f"{word!r} is no NAME=VALUE")
        if any(character in value for character in "\"'`\\\n"):
            raise _refuse(it, f"quotes, backticks and backslashes in the value of {name}")
        if it.name == "LABEL":
            yield it._replace(rest=f"{name} {value}")
        else:
            yield it._replace(rest=f'{name}="{value}"')
            yield it._replace(name="RUN", rest=f"export {name}")  # the definition's lines are one shell


def _one_word(it: Instruction) -> str:
    if not _PLAIN_WORD.fullmatch(it.rest):
        raise _refuse(it, "a path of letters, digits and -+=:,./_@% is wanted")
    return it.rest


def _copies(it: Instruction, folder: Path, workdir: str) -> Iterator[Instruction]:
    words = json_words(it.rest) or it.rest.split()
    if words and words[0].startswith("--"):
        raise _refuse(it, f"the option {words[0].partition('=')[0]}")
    if _HEREDOC.search(it.rest):
        raise _refuse(it, "a here-document; put it into a file")
    *sources, target = words or [""]
    if not sources or not all(_PLAIN_WORD.fullmatch(word) for word in words):
        raise _refuse(it, "sources and a target of letters, digits and -+=:,./_@% are wanted, no patterns")
    into_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
    target = posixpath.normpath(posixpath.join(workdir, target))
    for source in sources:
        if re.match(r"[a-z]+://|git@", source) or (
            it.name == "ADD" and re.search(r"\.(tar|t?gz|t?bz2|t?xz|zst)$", source)
        ):
            raise _refuse(it, "downloads and archives: unpack it in a RUN, or COPY what is in it")
        path = folder / source.lstrip("/")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise _refuse(it, f"{source} is outside of {folder}")
        if not path.exists():
            raise _refuse(it, f"there is no {path}")
        relative = source.lstrip("/") or "."
        if path.is_dir():  # copy the content, not the folder: `cp -r` does so with a dot at the end
            yield it._replace(name="COPY", rest=f"{posixpath.normpath(relative)}/. {target.rstrip('/')}/")
        else:
            inside = posixpath.join(target, posixpath.basename(relative)) if into_folder else target
            yield it._replace(name="COPY", rest=f"{relative} {inside}")


class Recipe(NamedTuple):
    """A recipe in the other language, and the name of that language."""

    language: str
    text: str


def convert_recipe(path: Path) -> Recipe:
    """Return the Dockerfile at `path` as a definition file, or the reverse. Blocks; needs no network.

    Raises:
        SetupError: it cannot be read, is neither, or an instruction lacks an equivalent; with its line.
    """
    text = _read(path)
    if is_dockerfile(text):
        return Recipe("Apptainer definition", _to_definition(text, path, absolute=False))
    return Recipe("Dockerfile", _to_dockerfile(text, path.resolve().parent))


def definition_of(path: Path) -> str | None:
    """Return the input of `apptainer build`, from any folder, for the Dockerfile at `path`; None for other files.

    Raises:
        SetupError: as `convert_recipe`.
    """
    text = _read(path)
    return _to_definition(text, path, absolute=True) if is_dockerfile(text) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SetupError(f"{path} cannot be read: {exc}") from exc


def _to_definition(text: str, path: Path, *, absolute: bool) -> str:
    folder = path.resolve().parent
    if absolute and re.search(r"\s", str(folder)):
        raise SetupError(f"{folder}: a definition file has no way to name folders with spaces")
    plain = plain_instructions(text, folder)
    if absolute:
        plain = [it._replace(rest=f"{folder}/{it.rest}") if it.name == "COPY" else it for it in plain]
    from spython.main.parse.parsers import DockerParser
    from spython.main.parse.writers import SingularityWriter

    with _spython() as scratch:
        scratch.write_text("".join(f"{it.name} {it.rest}\n" for it in plain), encoding="utf-8")
        converted: str = SingularityWriter(DockerParser(str(scratch)).recipe).convert()
    _look_through(plain, converted)
    return f"{converted}\n"


def _look_through(plain: list[Instruction], converted: str) -> None:
    """Raise SetupError if one of the instructions is not in the definition file, in order."""
    lines = iter(converted.splitlines())
    sections: dict[str, list[str]] = {"": []}
    name = ""
    for line in lines:
        if line.startswith("%"):
            name = line[1:]
            sections.setdefault(name, [])
        else:
            sections[name].append(line.strip())
    expected: dict[str, list[str]] = {}
    for it in plain:
        match it.name:
            case "FROM":
                expected.setdefault("", []).append(f"From: {it.rest}")
            case "RUN":
                expected.setdefault("post", []).append(it.rest)
            case "WORKDIR":
                expected.setdefault("post", []).append(f"cd {it.rest}")
            case "ENV":
                expected.setdefault("post", []).append(it.rest)
                expected.setdefault("environment", []).append(f"export {it.rest}")
            case "LABEL":
                expected.setdefault("labels", []).append(it.rest)
            case "COPY":
                expected.setdefault("files", []).append(it.rest)
    for section, wanted in expected.items():
        found = iter(sections.get(section, ()))
        for line in wanted:
            if line not in found:  # consumes it, so the order is checked, too
                raise SetupError(f"spython has lost `{line}` of section %{section}; write a definition file instead")


def _to_dockerfile(text: str, folder: Path) -> str:
    plain, script = _plain_definition(text, folder)
    from spython.main.parse.parsers import SingularityParser
    from spython.main.parse.writers import DockerWriter

    with _spython() as scratch:
        scratch.write_text(plain, encoding="utf-8")
        converted: str = DockerWriter(SingularityParser(str(scratch)).recipe).convert()
    written = [(it.name, it.rest) for it in read_instructions(converted)]
    if script and ("RUN", script) not in written:
        raise SetupError("spython has lost the section %post; write a Dockerfile instead")
    return f"{converted}\n"


def _plain_definition(text: str, folder: Path) -> tuple[str, str]:
    """Return the definition file in the form that spython converts faithfully, and its %post as one line.

    spython makes a separate RUN from each line of %post, so that `cd` and `if` would not affect later lines.
    """
    headers: dict[str, str] = {}
    sections: dict[str, list[str]] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if found := _SECTION.fullmatch(stripped):
            section = found[1].lower()
            if section not in _CONVERTED or found[2]:
                raise SetupError(f"line {number}: {stripped}: cannot be converted: Dockerfiles have no such section")
            sections.setdefault(section, [])
        elif section == "post":
            sections[section].append(line)
        elif not stripped or stripped.startswith("#"):
            continue
        elif section:
            sections[section].append(_plain_line(number, section, stripped, folder))
        elif header := _HEADER.fullmatch(stripped):
            headers[header[1].lower()] = header[2]
        else:
            raise SetupError(f"line {number}: {stripped}: cannot be converted: it is no header of a definition file")
    base = headers.pop("from", "")
    headers.pop("stage", None)
    if headers.pop("bootstrap", "").lower() != "docker" or headers or not base:
        raise SetupError("only `Bootstrap: docker` with a `From:`, and no other header, has a counterpart")
    if base != base.lower():
        raise SetupError(f"From: {base}: cannot be converted: spython writes capital letters small")
    run = sections.get("runscript", [])
    if sections.pop("startscript", run) != run:
        raise SetupError("%startscript: cannot be converted: it is another than %runscript")
    if len(run) > 1:
        sections["runscript"] = [f"/bin/sh -c \"$(printf '%s\\n' {shlex.join(run)})\""]
    script = ""
    if any(line.strip() for line in sections.get("post", ())):
        script = f"printf '%s\\n' {shlex.join(sections['post'])} | /bin/sh -e"
        if "USER" in script or script.endswith("\\"):
            raise SetupError("%post: cannot be converted: spython takes lines with USER for another instruction")
        sections["post"] = [script]
    body = "".join(f"\n%{name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items() if lines)
    return f"Bootstrap: docker\nFrom: {base}\n{body}", script


def _plain_line(number: int, section: str, line: str, folder: Path) -> str:
    words = line.split()
    problem = ""
    match section:
        case "environment" if not _EXPORT.fullmatch(line):
            problem = "only `export NAME=VALUE` has a counterpart"
        case "files" if len(words) > 2 or re.search(r"[*?\[\\\"']", line):
            problem = "one source and one target are wanted, no patterns"
        case "files" if ARCHIVE.search(words[0]):
            problem = "a Dockerfile would unpack the archive"
        case "files" if (folder / words[0]).is_dir() and not words[0].endswith("/."):
            problem = f"a Dockerfile copies what is in it: write {words[0].rstrip('/')}/. and a / at the target's end"
        case "files" if len(words) == 1:
            return f"{line} {line}"
        case "labels":
            if len(words) < 2:
                problem = "a name and a value are wanted"
            else:
                return f"{words[0]}={shlex.quote(' '.join(words[1:]))}"
    if problem:
        raise SetupError(f"line {number}: {line}: cannot be converted: {problem}")
    return line


@contextmanager
def _spython() -> Iterator[Path]:
    """Yield a file for spython to read, and turn its exit on failure into an error. Its output is suppressed."""
    from spython.logger import bot

    level, bot.level = bot.level, 0
    try:
        with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
            yield Path(folder) / "recipe"
    except (SystemExit, NotImplementedError) as exc:
        raise SetupError(f"spython cannot convert it: {exc}") from exc
    finally:
        bot.level = level
