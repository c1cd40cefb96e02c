from __future__ import annotations

import os
from pathlib import Path

import pytest

from prorl_trio.config import SearchConfig, load_config
from prorl_trio.config.toml_file import MAX_FILE_BYTES
from prorl_trio.types.errors import ConfigError


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
        ('[model]\npath = "x"\n[admission.session_weights]\na = 0\n', r"session_weights.*'a'.*0\.01.*admission"),
        ("[model", "not TOML"),
        (b'[model]\npath = "/m\xe9"\n', "not TOML.*utf-8"),
        ('[model]\npath = ""\n', r"length >= 1.*model\.path"),
        ('node_id = "../x"\n[model]\npath = "x"\n', "matching regex.*node_id"),
        ('node_id = " "\n[model]\npath = "x"\n', "matching regex.*node_id"),
        ('drain_timeout_s = -1\n[model]\npath = "x"\n', r">= 0.*drain_timeout_s"),
    ],
)
def test_a_bad_file_is_named_with_the_fields_path(tmp_path, text, message):
    file = tmp_path / "node.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


def test_what_is_not_a_regular_file_is_refused_without_a_wait(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "long").write_bytes(bytes(MAX_FILE_BYTES + 1))
    for path, why in {
        tmp_path / "none": "No such file or directory",
        tmp_path / "folder": "Is a directory",
        tmp_path / "loop": "Too many levels of symbolic links",
        tmp_path / "pipe": "it is not a regular file",
        Path("/dev/zero"): "it is not a regular file",
        Path("/dev/null"): "it is not a regular file",
        tmp_path / "long": f"it is longer than the limit of {MAX_FILE_BYTES} bytes",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value) == f"{path}: cannot be read: {why}"


@pytest.mark.parametrize("text", ['\N{BOM}[model]\npath = "x"\n', '[model]\r\npath = "x"\r\n'])
def test_a_file_of_another_editor_is_read(tmp_path, text):
    file = tmp_path / "node.toml"
    file.write_bytes(text.encode())
    assert load_config(file).model.path == "x"


@pytest.mark.parametrize("key", ["pipe", "/dev/zero"])
def test_a_search_key_that_is_not_a_file_is_refused_without_a_wait(tmp_path, key):
    os.mkfifo(tmp_path / "pipe")
    config = SearchConfig(backend="tavily", api_key_file=str(tmp_path / key))
    with pytest.raises(ConfigError, match=r"search\.api_key_file: .* it is not a regular file"):
        config.read_api_key()


@pytest.mark.parametrize(
    ("table", "field", "value", "allowed"),
    [
        ("listen", "port", 99_999, "<= 65535"),
        ("listen", "port", -1, ">= 0"),
        ("listen", "max_sessions", 0, ">= 1"),
        ("listen", "port", 65_536, "<= 65535"),
        ("listen", "idle_timeout_s", "nan", ">= 0.001"),
        ("listen", "descriptors", "[2]", ">= 3"),
        ("stages", "run_workers", 0, ">= 1"),
        ("stages", "ready_queue", 0, ">= 1"),
        ("budgets", "run_s", -1, ">= 0.001"),
        ("budgets", "run_s", "nan", ">= 0.001"),
        ("budgets", "total_s", "inf", "<= 3"),
        ("backends", "max_connections_per_backend", 0, ">= 1"),
        ("backends", "max_tasks_per_backend", -3, ">= 0"),
        ("backends", "request_timeout_s", 0, ">= 0.001"),
        ("sandbox", "max_concurrent_starts", 0, ">= 1"),
        ("sandbox", "max_warm", -1, ">= 0"),
        ("agent", "max_staleness", -1, ">= 0"),
        ("agent", "max_observation_chars", 0, ">= 1"),
        ("arena", "size_bytes", -1, ">= 0"),
        ("ledger", "max_attempts", 0, ">= 1"),
        ("ledger", "log_bytes", 1, ">= 65536"),
        ("backends.health", "interval_s", "nan", ">= 0"),
        ("backends.load", "skew_ratio", "nan", ">= 1"),
        ("backends.load", "max_kv_usage", 95, "<= 1"),
        ("telemetry", "otlp_endpoint", '"collector:4318"', "matching regex"),
        ("monitoring", "stall_warn_s", -1, ">= 0.001"),
        ("admission", "max_live", 0, ">= 1"),
    ],
)
def test_a_number_that_cannot_be_is_told_before_anything_starts(tmp_path, table, field, value, allowed):
    file = tmp_path / "node.toml"
    file.write_text(f'[model]\npath = "x"\n[{table}]\n{field} = {value}\n')
    with pytest.raises(ConfigError, match=rf"{allowed}.*{table}\.{field}"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("[stages]\nrun_worker = 3\n", "did you mean `run_workers`"),
        ("[backends.health]\ninterval = 3\n", "did you mean `interval_s`"),
        ("[stage]\nrun_workers = 3\n", "did you mean `stages`"),
        ("[budgets]\nx = 3\n", "there are: init_s, run_s, eval_s, total_s, agent_s"),
    ],
)
def test_a_field_that_does_not_exist_is_told_with_what_was_meant(tmp_path, text, advice):
    file = tmp_path / "node.toml"
    file.write_text(f'[model]\npath = "x"\n{text}')
    with pytest.raises(ConfigError, match=advice):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[model]\npath = "a\\u0000b"\n', "$.model.path"),
        ('[model]\npath = "x"\n[ledger]\ndir = "\\u0000"\n', "$.ledger.dir"),
        ('[model]\npath = "x"\n[sandbox]\npackages = ["a", "b\\u0000"]\n', "$.sandbox.packages[...]"),
        ('[model]\npath = "x"\n[rest.data_sources]\n"a\\u0000" = "math"\n', "$.rest.data_sources"),
    ],
)
def test_a_null_character_is_told_with_its_place(tmp_path, text, place):
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="a null character") as caught:
        load_config(file)
    assert f"`{place}`" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[model]\npath = " + "[" * 5000 + "]" * 5000,
        "[model.template_options]\na = " + "{a = " * 5000 + "1" + "}" * 5000,
        "model.template_options." + ".".join(["a"] * 5000) + " = 1",
        "[stages]\nrun_workers = " + "9" * 5000,
        "\x00",
    ],
    ids=["arrays", "tables", "dots", "digits", "binary"],
)
def test_a_file_that_no_reader_can_take_is_a_configuration_error(tmp_path, text):
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(file)
