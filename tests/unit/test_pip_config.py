"""The configuration of pip, read and handed to uv."""

from __future__ import annotations

import os

import pytest

from prorl_launch.pip_config import index_options, pip_settings, uv_environment

OURS = {
    "UV_INDEX_STRATEGY": "unsafe-best-match",
    "UV_NO_CONFIG": "1",
    "UV_PYTHON_DOWNLOADS": "never",
    "UV_NO_PROGRESS": "1",
}


def test_files_and_variables_are_read_and_variables_win(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nindex-url = http://a/simple\ncert = /ours.pem\n[download]\nretries = 9\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "http://b/simple")
    settings = pip_settings()
    assert settings["index-url"] == "http://b/simple"
    assert settings["cert"] == "/ours.pem"
    assert "retries" not in settings


def test_what_pip_is_told_for_installs_counts_and_what_is_empty_does_not(tmp_path, monkeypatch):
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = http://a\nfind-links = /a\n[install]\nindex-url = http://b\nno-index = Yes\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "/c")
    monkeypatch.setenv("PIP_QUIET", "1")
    settings = pip_settings()
    assert (settings["index-url"], settings["find-links"]) == ("http://b", "/c")
    assert index_options(settings) == ["--no-index"]


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ({}, {}),
        ({"index-url": "http://u:p@a"}, {"UV_DEFAULT_INDEX": "http://u:p@a"}),
        ({"extra-index-url": "\nhttp://a\nhttp://b"}, {"UV_EXTRA_INDEX_URL": "http://a http://b"}),
        ({"extra-index-url": "file:///nowhere/simple file:///%75sr"}, {"UV_EXTRA_INDEX_URL": "file:///%75sr"}),
        ({"find-links": "/a /b"}, {"UV_FIND_LINKS": "/a,/b"}),
        ({"trusted-host": "a\nb"}, {"UV_INSECURE_HOST": "a b"}),
    ],
)
def test_where_packages_are(settings, variables):
    assert uv_environment(settings) == OURS | variables
    assert index_options(settings) == []


@pytest.mark.parametrize(("value", "options"), [("true", ["--no-index"]), ("Y", ["--no-index"]), ("0", [])])
def test_no_index_as_pip_reads_it(value, options):
    assert index_options({"no-index": value}) == options


def test_the_network_is_reached_as_pip_reaches_it():
    found = uv_environment({"cert": "/c", "timeout": "9", "default-timeout": "8", "proxy": "http://p"})
    assert found == OURS | {"SSL_CERT_FILE": "/c", "UV_HTTP_TIMEOUT": "9", "ALL_PROXY": "http://p"}
