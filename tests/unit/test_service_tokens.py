"""The node's token: where it comes from, which is accepted, and how it is compared."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from prorl_ipc import handshake
from prorl_ipc.handshake import token_matches
from prorl_trio.config import ListenConfig
from prorl_trio.config.secrets import agreed_token, check_token, load_token, read_token_file
from prorl_trio.edges.auth import Door
from prorl_trio.edges.tcp import load_tls
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

LONG = "".join(chr(33 + index * 7 % 90) for index in range(300))


def private(path: Path, content: str | bytes, mode: int = 0o600) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return str(path)


def refusal(**listen: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_token(ListenConfig(**listen))
    return str(caught.value)


def test_a_token_comes_from_the_config_or_a_private_file(tmp_path):
    assert load_token(ListenConfig(token=" secret ")) == b"secret"
    for mode in (0o600, 0o400):
        assert load_token(ListenConfig(token_file=private(tmp_path / "token", "secret\n", mode))) == b"secret"
        (tmp_path / "token").unlink()
    (tmp_path / "link").symlink_to(private(tmp_path / "token", "two words\r\n"))
    assert load_token(ListenConfig(token_file=str(tmp_path / "link"))) == b"two words"


def test_a_token_is_compared_as_a_whole():
    assert token_matches(LONG.encode(), LONG)
    assert token_matches(LONG.encode(), LONG.encode())
    for index in range(len(LONG)):
        other = "~" if LONG[index] != "~" else "!"
        assert not token_matches(LONG.encode(), LONG[:index] + other + LONG[index + 1 :]), index
        assert not token_matches(LONG.encode(), LONG[:index]), index
        assert not token_matches(LONG[:index].encode(), LONG), index
    for other in (LONG + " ", LONG + "\0", " " + LONG, LONG * 2, LONG.swapcase(), "", "\0", "geheim\u00fc", b"\xff"):
        assert not token_matches(LONG.encode(), other)


def test_tokens_are_compared_in_constant_time_by_one_function(monkeypatch):
    seen = []
    monkeypatch.setattr(handshake.hmac, "compare_digest", lambda a, b: seen.append((a, b)) or a == b)
    assert Door(b"right").admits("right")
    assert not Door(b"right").admits("r")
    assert seen == [(b"right", b"right"), (b"right", b"r")], "no shortcut before it"


def test_a_token_that_is_no_secret_is_refused(tmp_path):
    path = tmp_path / "token"
    assert "is empty; one is required" in refusal()
    assert "is empty; one is required" in refusal(token="  \n")
    assert "both set" in refusal(token="a", token_file=str(path))
    assert "cannot be read: No such file" in refusal(token_file=str(path))
    assert "cannot be read: Is a directory" in refusal(token_file=str(tmp_path))
    assert "not a regular file" in refusal(token_file="/dev/null")
    assert "cannot be read" in refusal(token_file="nul\0byte")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(token_file=str(tmp_path / "pipe"))
    assert "is empty; a token is required" in refusal(token_file=private(path, " \n"))
    assert "more than the limit of 4096" in refusal(token_file=private(path, b"x" * 5000))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o602, 0o644, 0o777])
def test_a_file_that_others_can_reach_is_refused(tmp_path, mode):
    path = private(tmp_path / "token", "secret", mode)
    assert f"{path} has mode {mode:04o}, others can reach it; chmod 600 it" in refusal(token_file=path)
    private(tmp_path / "cert", "x")
    with pytest.raises(ConfigError, match=f"listen.tls_key: {path} has mode {mode:04o}"):
        load_tls(ListenConfig(tls_cert=str(tmp_path / "cert"), tls_key=path))


@pytest.mark.parametrize(
    ("owner", "mode", "problem"),
    [(1234, 0o600, "belongs to user 1234"), (0, 0o640, ""), (0, 0o660, "mode 0660"), (0, 0o644, "mode 0644")],
)
def test_a_file_of_somebody_else_is_refused_and_one_that_root_shares_is_not(
    tmp_path, monkeypatch, owner, mode, problem
):
    path = private(tmp_path / "token", "secret", mode)
    found = os.stat(path)
    there = os.stat_result((*found[:4], owner, *found[5:]))
    monkeypatch.setattr(os, "fstat", lambda _descriptor: there)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if problem:
        with pytest.raises(ConfigError, match=problem):
            read_token_file(path, "listen.token_file")
    else:
        assert read_token_file(path, "listen.token_file") == "secret"


@pytest.mark.parametrize("content", [b"caf\xe9", "größer".encode(), b"two\nlines", b"a\x00b", b"tab\tbed", b"\x7f"])
def test_a_token_that_http_cannot_carry_is_refused_at_the_start(tmp_path, content):
    path = private(tmp_path / "token", content)
    assert f"the file {path} is not one line of printable ASCII" in refusal(token_file=path)
    with pytest.raises(ConfigError, match="the token is not one line of printable ASCII"):
        check_token(content.decode("latin-1"), "the token")


def test_two_different_tokens_are_an_error_and_none_wins_in_silence(tmp_path):
    path = private(tmp_path / "token", "of the file\n")
    for listen, named in (
        (ListenConfig(token_file=path), f"listen.token_file {path}"),
        (ListenConfig(token="of the file"), "listen.token"),
    ):
        assert agreed_token(listen, "") == agreed_token(listen, " of the file\n") == "of the file"
        with pytest.raises(ConfigError) as caught:
            agreed_token(listen, "of the environment")
        assert f"PRORL_TOKEN and {named} hold two different tokens" in str(caught.value)
        assert "of the" not in str(caught.value), "no token is shown"
    assert agreed_token(ListenConfig(), "of the environment") == "of the environment"
    assert agreed_token(ListenConfig(), "") == ""
    with pytest.raises(ConfigError, match="PRORL_TOKEN is not one line"):
        agreed_token(ListenConfig(), "gr\u00fc\u00df")
