"""Dockerfiles and definition files, one made of the other: what is converted is all there, the rest is refused."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from prorl_launch.image_commands import image as command
from prorl_launch.progress import SetupError
from prorl_launch.recipes import convert_recipe, definition_of

FULL = """\
# syntax=docker/dockerfile:1
from debian:12 AS base

LABEL a="b c" d=e
MAINTAINER somebody <a@b.c>
ENV PATH=/opt/bin:$PATH GREETING="hello world"
ENV OLD some text
WORKDIR /app
COPY . .
COPY --from-scratch.py /srv/
ADD ["app.py", "/etc/x.py"]
RUN apt-get update && \\
    # a comment in between

    apt-get install -y 'git' # the end
RUN ["echo", "a b"]
  workdir rel
COPY app.py sub ./
USER root
CMD ["python3", "-m", "app"]
""".replace("--from-scratch.py", "app.py")
CONVERTED = """\
Bootstrap: docker
From: debian:12
Stage: spython-base

%files
./. /app/
app.py /srv/app.py
app.py /etc/x.py
app.py /app/rel/app.py
sub/. /app/rel/
%labels
a b c
d e
maintainer somebody <a@b.c>
%post
PATH="/opt/bin:$PATH"
export PATH
GREETING="hello world"
export GREETING
OLD="some text"
export OLD
mkdir -p /app
cd /app
/bin/sh -c 'apt-get update &&     apt-get install -y '"'"'git'"'"' # the end'
echo 'a b'
mkdir -p /app/rel
cd /app/rel
%environment
export PATH="/opt/bin:$PATH"
export GREETING="hello world"
export OLD="some text"
%runscript
cd /app/rel
exec python3 -m app "$@"
%startscript
cd /app/rel
exec python3 -m app "$@"
"""
REFUSED = [
    ("FROM a AS one\nFROM b\n", "line 2: FROM b"),
    ("FROM a AS one\nRUN x\nFROM b\nCOPY --from=one /x /x\n", "line 3: FROM b"),
    ("FROM a\nCOPY --from=other/image /x /x\n", "line 2: COPY --from=other/image"),
    ("FROM a\nCOPY --chown=1:1 app.py /x\n", "--chown"),
    ("FROM a\nCOPY --chmod=755 app.py /x\n", "--chmod"),
    ("FROM a\nCOPY missing.py /x\n", "there is no"),
    ("FROM a\nCOPY ../secret /x\n", "outside of"),
    ("FROM a\nCOPY *.py /x/\n", "no patterns"),
    ("FROM a\nCOPY app.py\n", "a target"),
    ("FROM a\nCOPY $X /x\n", "no patterns"),
    ("FROM a\nCOPY <<EOF /x\nhello\nEOF\n", "here-document"),
    ("FROM a\nADD https://example.org/x /x\n", "downloads"),
    ("FROM a\nADD x.tar.gz /x\n", "archives"),
    ("ARG V=12\nFROM debian:$V\n", "begins with FROM"),
    ("FROM a\nARG V=12\n", "line 2: ARG V=12"),
    ("FROM debian:${V}\n", "name the image itself"),
    ("FROM --platform=linux/arm64 debian\n", "options of FROM"),
    ("FROM scratch\n", "no empty image"),
    ("FROM\n", "name the image itself"),
    ("FROM a\nONBUILD RUN x\n", "line 2: ONBUILD"),
    ("FROM a\nHEALTHCHECK --interval=5m CMD curl localhost\n", "line 2: HEALTHCHECK"),
    ('FROM a\nSHELL ["/bin/bash", "-c"]\n', "line 2: SHELL"),
    ("FROM a\nVOLUME /data\n", "line 2: VOLUME"),
    ("FROM a\nEXPOSE 80\n", "line 2: EXPOSE"),
    ("FROM a\nSTOPSIGNAL SIGINT\n", "line 2: STOPSIGNAL"),
    ("FROM a\nUSER nobody\n", "line 2: USER nobody"),
    ("FROM a\nRUN --mount=type=cache,target=/x make\n", "options of RUN"),
    ("FROM a\nRUN <<EOF\necho hello\nEOF\n", "here-document"),
    ("FROM a\nRUN\n", "no command"),
    ("FROM a\nENV A=$B'$C'\n", "single quotes"),
    ('FROM a\nENV A="x \\" y"\n', "quotes"),
    ("FROM a\nENV A\n", "a name and a value"),
    ("FROM a\nENV 1A=x\n", "NAME=VALUE"),
    ('FROM a\nENV A="x\n', "closing quotation"),
    ("FROM a\nWORKDIR /a b\n", "a path of letters"),
    ("FROM a\nRUNN x\n", "no such instruction"),
    ("FROM a\nRUN x \\\n", "backslash ends the file"),
    ("# escape=`\nFROM a\n", "escape"),
]


@pytest.fixture
def context(tmp_path):
    folder = tmp_path / "context"
    (folder / "sub").mkdir(parents=True)
    for name in ("app.py", "sub/f", "x.tar.gz"):
        (folder / name).write_text("x")
    return folder


def _write(context, text, name="Dockerfile"):
    path = context / name
    path.write_text(text)
    return path


def test_a_dockerfile_becomes_a_definition_file(context):
    recipe = convert_recipe(_write(context, FULL))
    assert (recipe.language, recipe.text) == ("Apptainer definition", CONVERTED)


def test_what_is_built_finds_its_sources_from_anywhere(context):
    definition = definition_of(_write(context, "FROM a\nWORKDIR /w\nCOPY app.py sub ./\nRUN cd /tmp\nRUN pwd\n"))
    assert f"\n{context}/app.py /w/app.py\n{context}/sub/. /w/\n" in definition
    assert "\n/bin/sh -c 'cd /tmp'\n/bin/sh -c pwd\n" in definition  # a shell each, as in a Dockerfile
    assert definition_of(_write(context, CONVERTED, "x.def")) is None


@pytest.mark.parametrize(
    ("lines", "run"),
    [
        ('CMD ["a", "b c"]', "exec a 'b c' \"$@\""),
        ("CMD true", 'exec /bin/sh -c true "$@"'),
        ('CMD ["true"]', 'exec true "$@"'),
        ('ENTRYPOINT ["a"]\nCMD ["b"]', 'exec a b "$@"'),
        ('ENTRYPOINT a "b"\nCMD ["c"]', 'exec /bin/sh -c \'a "b"\' "$@"'),
        ("CMD one\nCMD two", 'exec /bin/sh -c two "$@"'),
        ("", 'exec /bin/bash "$@"'),
    ],
)
def test_what_the_image_runs_by_itself(context, lines, run):
    text = convert_recipe(_write(context, f"FROM a\n{lines}\n")).text
    assert text.splitlines()[-1] == run


@pytest.mark.parametrize(("text", "why"), REFUSED)
def test_what_has_no_counterpart_is_refused_by_its_line(context, text, why):
    with pytest.raises(SetupError, match=r"line \d|begins with FROM") as refused:
        convert_recipe(_write(context, text))
    assert why in str(refused.value)


def test_what_spython_loses_is_noticed(context, monkeypatch):
    from spython.main.parse.writers import SingularityWriter

    convert = SingularityWriter.convert
    path = _write(context, "FROM a\nENV A=1\nRUN one\nRUN two\nCOPY app.py /x\nLABEL a=b\n")
    lines = convert_recipe(path).text.splitlines()
    kept = [line for line in lines if line not in ("", "Bootstrap: docker", "Stage: spython-base")]
    for lost in [line for line in kept if not line.startswith(("%", "exec"))]:
        monkeypatch.setattr(SingularityWriter, "convert", lambda self, lost=lost: convert(self).replace(lost, ""))
        with pytest.raises(SetupError, match="spython has lost"):
            convert_recipe(path)
    monkeypatch.setattr(SingularityWriter, "convert", lambda self: __import__("sys").exit(1))
    with pytest.raises(SetupError, match="spython cannot convert"):
        convert_recipe(path)


DEFINITION = """\
Bootstrap: docker
From: debian:12

%labels
    a b c
%files
    app.py /srv/app.py
    sub/. /srv/sub/
%environment
    # where it is
    export PATH=/opt/bin:$PATH
    export GREETING="hello world"
%post
    if true; then
        cd /opt
    fi
    echo "it's in $PWD"
%runscript
    cd /opt
    exec "$@"
"""
DOCKERFILE = """\
FROM debian:12 AS spython-base
ADD app.py /srv/app.py
ADD sub/. /srv/sub/
LABEL a='b c'
ENV PATH=/opt/bin:$PATH
ENV GREETING="hello world"
RUN printf '%s\\n' '    if true; then' '        cd /opt' '    fi' '    echo "it'"'"'s in $PWD"' | /bin/sh -e
CMD /bin/sh -c "$(printf '%s\\n' 'cd /opt' 'exec "$@"')"
"""


def test_a_definition_file_becomes_a_dockerfile(context):
    recipe = convert_recipe(_write(context, DEFINITION, "x.def"))
    assert (recipe.language, recipe.text) == ("Dockerfile", DOCKERFILE)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Bootstrap: library\nFrom: x\n", "Bootstrap: docker"),
        ("Bootstrap: docker\n", "From:"),
        ("Bootstrap: docker\nFrom: x:Tag\n", "capital letters"),
        ("Bootstrap: docker\nFrom: x\nRegistry: y\n", "no other header"),
        ("Bootstrap: docker\nFrom: x\n%setup\ntouch x\n", "line 3: %setup"),
        ("Bootstrap: docker\nFrom: x\n%help\nhelp\n", "line 3: %help"),
        ("Bootstrap: docker\nFrom: x\n%test\ntrue\n", "line 3: %test"),
        ("Bootstrap: docker\nFrom: x\n%apprun y\ntrue\n", "line 3: %apprun y"),
        ("Bootstrap: docker\nFrom: x\n%files from other\na b\n", "line 3: %files from other"),
        ("Bootstrap: docker\nFrom: x\n%files\nsub /srv\n", "line 4: sub /srv"),
        ("Bootstrap: docker\nFrom: x\n%files\n*.py /srv\n", "line 4: *.py"),
        ("Bootstrap: docker\nFrom: x\n%files\nx.tar.gz /srv\n", "unpack"),
        ("Bootstrap: docker\nFrom: x\n%environment\nif true; then\n", "line 4: if true"),
        ("Bootstrap: docker\nFrom: x\n%environment\nA=1\n", "line 4: A=1"),
        ("Bootstrap: docker\nFrom: x\n%post\necho $USER\n", "USER"),
        ("Bootstrap: docker\nFrom: x\n%runscript\na\n%startscript\nb\n", "%startscript"),
        ("nonsense\n", "line 1: nonsense"),
    ],
)
def test_a_definition_file_that_says_more_is_refused(context, text, why):
    with pytest.raises(SetupError) as refused:
        convert_recipe(_write(context, text, "x.def"))
    assert why in str(refused.value)


def test_there_and_back(context):
    text = "FROM debian:12\nENV A=1\nCOPY app.py /srv/app.py\nWORKDIR /app\nRUN echo hello\nCMD true\n"
    there = convert_recipe(_write(context, text)).text
    back = convert_recipe(_write(context, there, "x.def")).text
    assert "FROM debian:12" in back
    assert 'ENV A="1"' in back
    assert "ADD app.py /srv/app.py" in back
    assert "echo hello" in back


def test_the_commands(context):
    runner = CliRunner()
    shown = runner.invoke(command, ["recipe", str(_write(context, "FROM a\nRUN b\n"))])
    assert (shown.exit_code, shown.output.splitlines()[:2]) == (0, ["Bootstrap: docker", "From: a"])
    for name in ("recipe", "build"):
        refused = runner.invoke(command, [name, str(_write(context, "FROM a\nARG b\n"))])
        assert refused.exit_code == 1
        assert "line 2: ARG b: cannot be converted" in refused.output
