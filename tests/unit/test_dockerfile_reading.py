"""Dockerfiles as tasks bring them, by our reader and by spython's.

The reader of `sandbox.images.dockerfile` is there because of what spython makes of these files. Where a newer spython
reads one rightly, its row fails: see then whether the rest can be left to it.
"""

from __future__ import annotations

import pytest
from spython.logger import bot
from spython.main.parse.parsers import DockerParser

from prorl_trio.tasks.sets.harbor import Files, read_dockerfile
from prorl_trio.types.errors import ConfigError

FILES = {
    "a comment in a continued line": ("RUN echo a \\\n# no\n  && echo b\n", ["echo a   && echo b"]),
    "small letters": ("run echo a\n", ["echo a"]),
    "the exec form": ('RUN ["echo", "a b"]\n', ["echo 'a b'"]),
    "a value to the end of the line": ("ENV NAME some words\nRUN true\n", ["export NAME='some words'; true"]),
    "a here-document": ("RUN cat <<END\nCOPY x y\nEND\n", "line 2: RUN cat <<END: .* a here-document"),
    "no such instruction": ("RNU echo a\n", "line 2: RNU echo a: cannot be converted"),
    "another shell": ('SHELL ["/bin/bash", "-c"]\n', "line 2: SHELL .*: cannot be converted"),
    "for images that are built of it": ("ONBUILD RUN echo a\n", "line 2: ONBUILD RUN echo a: cannot be converted"),
    "several stages": ("FROM debian:13\nRUN true\n", "line 2: FROM debian:13: .* several stages"),
    "an option": ("RUN --mount=type=cache true\n", "line 2: RUN --mount=type=cache true: .* options"),
    "a path of several words": ('COPY ["a b", "/to"]\n', ["/to"]),
    "files between commands": ("RUN one\nCOPY file /to\nRUN two\n", ["one", "/to", "two"]),
}
"""By what is in them: what follows `FROM debian:12`, and the commands and files in order that it asks for, or the
error, which has the line."""


@pytest.fixture
def dockerfile(request, tmp_path):
    for name in ("file", "a b", "x"):
        (tmp_path / name).write_text("")
    text, asked = FILES[request.param]
    (tmp_path / "Dockerfile").write_text(f"FROM debian:12\n{text}")
    return tmp_path / "Dockerfile", asked


def done(path):
    return [step.get("command") or next(iter(step["files"])) for step in read_dockerfile(path, {}, Files()).build]


def spython_does(path, monkeypatch):
    monkeypatch.setattr(bot, "level", 0)
    try:
        found = list(DockerParser(str(path)).recipe.values())
    except IndexError as exc:  # with neither the file nor the line
        return str(exc)
    return [line for recipe in found for line in recipe.install] + [to for recipe in found for _, to in recipe.files]


@pytest.mark.parametrize("dockerfile", FILES, indirect=True)
def test_a_dockerfile_is_read_as_docker_reads_it_or_refused_by_its_line(dockerfile):
    path, asked = dockerfile
    if isinstance(asked, list):
        assert done(path) == asked
    else:
        with pytest.raises(ConfigError, match=asked):
            done(path)


@pytest.mark.parametrize("dockerfile", FILES, indirect=True)
def test_spython_does_something_else_or_fails_without_a_line(dockerfile, monkeypatch):
    path, asked = dockerfile
    assert spython_does(path, monkeypatch) != asked
