from __future__ import annotations

import pytest

from prorl_trio.config import load_config
from prorl_trio.errors import ConfigError


def test_defaults_bind_to_loopback(tmp_path):
    file = tmp_path / "node.toml"
    file.write_text('[model]\npath = "/models/x"\n')
    config = load_config(file)
    assert config.listen.host == "127.0.0.1"
    assert config.sandbox.network is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model"),
        ('[model]\npath = "x"\n[listen]\nport = "8700"\n', r"listen\.port"),
        ('[model]\npath = "x"\n[stages]\nrun_worker = 3\n', r"run_worker.*stages"),
        ('[model]\npath = "x"\n[sandbox]\nprovider = "docker"\n', r"sandbox\.provider"),
        ('[model]\npath = "x"\n[admission.session_weights]\na = 0\n', r"session_weights.*'a'.*0\.01.*admission"),
        ("[model", "not TOML"),
    ],
)
def test_a_bad_file_is_named_with_the_fields_path(tmp_path, text, message):
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml")
