"""The node's token: where it comes from, and what is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from prorl_trio.config import ListenConfig
from prorl_trio.service.auth import load_token, token_matches
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_token_comes_from_the_config_or_a_private_file(tmp_path: Path):
    assert load_token(ListenConfig(token=" secret ")) == b"secret"
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(0o600)
    assert load_token(ListenConfig(token_file=str(path))) == b"secret"
    path.chmod(0o400)
    assert load_token(ListenConfig(token_file=str(path))) == b"secret"
    assert token_matches(b"secret", "secret")
    assert not token_matches(b"secret", "Secret")
    assert not token_matches(b"secret", "")
    assert not token_matches(b"secret", "geheim\u00fc")


def test_a_token_that_is_no_secret_is_refused(tmp_path: Path):
    def refusal(**listen: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_token(ListenConfig(**listen))
        return str(caught.value)

    path = tmp_path / "token"
    assert "is empty; one is required" in refusal()
    assert "is empty; one is required" in refusal(token="  \n")
    assert "both set" in refusal(token="a", token_file=str(path))
    assert "cannot be read: No such file" in refusal(token_file=str(path))
    assert "cannot be read: Is a directory" in refusal(token_file=str(tmp_path))
    assert "not a regular file" in refusal(token_file="/dev/null")
    path.write_text("secret")
    path.chmod(0o640)
    assert "mode 0640, others can reach it; chmod 600" in refusal(token_file=str(path))
    path.chmod(0o600)
    path.write_text(" \n")
    assert "is empty; one is required" in refusal(token_file=str(path))
    path.write_bytes(b"x" * 5000)
    assert "more than the limit of 4096" in refusal(token_file=str(path))


@pytest.mark.parametrize("content", [b"caf\xe9", b"two\nlines", b"a\x00b", b"tab\tbed"])
def test_a_token_that_nobody_could_send_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"the file {path} is not one line of text in UTF-8"):
        load_token(ListenConfig(token_file=str(path)))
    path.write_text("größer als ein Wort")
    assert load_token(ListenConfig(token_file=str(path))).decode() == "größer als ein Wort"
