"""The configuration of pip, read and handed to uv."""

from __future__ import annotations

import os

import pytest

from prorl_launch.pip_config import index_options, pip_settings, uv_environment

BEST = ["--index-strategy", "unsafe-best-match"]


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


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, []),
        ({"index-url": "http://a"}, ["--index-url", "http://a"]),
        (
            {"extra-index-url": "http://a\nhttp://b"},
            ["--extra-index-url", "http://a", "--extra-index-url", "http://b"],
        ),
        ({"extra-index-url": "file:///nowhere/simple file:///usr"}, ["--extra-index-url", "file:///usr"]),
        ({"find-links": "/a /b"}, ["--find-links", "/a", "--find-links", "/b"]),
        ({"no-index": "true"}, ["--no-index"]),
        ({"no-index": "0"}, []),
    ],
)
def test_where_packages_are(settings, options):
    assert index_options(settings) == BEST + options


def test_the_network_is_reached_as_pip_reaches_it():
    ours = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    assert uv_environment({}) == ours
    found = uv_environment({"cert": "/c", "timeout": "9", "default-timeout": "8", "proxy": "http://p"})
    assert found == ours | {"SSL_CERT_FILE": "/c", "UV_HTTP_TIMEOUT": "9", "ALL_PROXY": "http://p"}
