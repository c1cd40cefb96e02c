"""The documentation site: built without network, without a warning, and with the API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def test_the_site_is_built_without_a_warning_and_has_the_api(tmp_path):
    argv = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/site", ".", str(tmp_path)]
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env={"PATH": "", **proxies}, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs/site/api.html").read_text()
    for name in ("BlockingClient.submit", "JobSpec", "AgentHandler.eval", "read_outcomes"):
        assert f'id="prorl_trio.{name}"' in page or f'id="prorl_trio.runs.{name}"' in page, name
