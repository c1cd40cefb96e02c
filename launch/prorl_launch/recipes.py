"""Image recipes from one language to the other: Dockerfiles and Apptainer's definition files, by spython.

Nothing is left out in silence: what has no counterpart is refused with its line, before spython sees it, and what it
has written is looked through for each thing that it was given. One order is lost: a definition file copies all its
files before it runs anything.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_launch.dockerfile import ARCHIVE, Instruction, is_dockerfile, plain_instructions, read_instructions
from prorl_launch.progress import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SECTION: Final = re.compile(r"%(\w+)\s*(.*)")
_HEADER: Final = re.compile(r"(\w+)\s*:\s*(\S+)")
_EXPORT: Final = re.compile(r"export\s+([A-Za-z_][A-Za-z0-9_]*=(?:\"[^\"\\`]*\"|[^\s\"'\\`;&|]*))")
_CONVERTED: Final = ("post", "environment", "labels", "files", "runscript", "startscript")


class Recipe(NamedTuple):
    """A recipe in the other language, and which that is."""

    language: str
    text: str


def convert_recipe(path: Path) -> Recipe:
    """The Dockerfile at `path` as a definition file, or the other way round. Blocks; needs no network.

    Raises:
        SetupError: it cannot be read, is neither, or something in it has no counterpart; with its line.
    """
    text = _read(path)
    if is_dockerfile(text):
        return Recipe("Apptainer definition", _to_definition(text, path, absolute=False))
    return Recipe("Dockerfile", _to_dockerfile(text, path.resolve().parent))


def definition_of(path: Path) -> str | None:
    """Return what `apptainer build` takes for the Dockerfile at `path`, run from anywhere; None for what is none.

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
    """Raise SetupError if one of the instructions is not in the definition file, in its place."""
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
            if line not in found:  # consumes it: the order is looked at, too
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
    """The definition file in the words that spython converts faithfully, and the one line that its %post has become.

    spython makes a RUN of each line of %post, where neither `cd` nor `if` would reach the next.
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
    """A file for spython to read, and its way to give up, which is to end the process, as an error. It says nothing."""
    from spython.logger import bot

    level, bot.level = bot.level, 0
    try:
        with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
            yield Path(folder) / "recipe"
    except (SystemExit, NotImplementedError) as exc:
        raise SetupError(f"spython cannot convert it: {exc}") from exc
    finally:
        bot.level = level
