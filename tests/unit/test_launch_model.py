from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from prorl_launch import model

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 100}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    files = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in FILES.items()
    }
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / model.MANIFEST).write_text(json.dumps({"recipe": model.RECIPE, "files": files}))
    return folder


def test_a_whole_folder(folder):
    assert model.is_converted(folder)
    assert model.broken_files(folder) == []


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    assert not model.is_converted(folder)
    assert model.broken_files(folder) == [name]


def test_a_truncated_file(folder):
    (folder / "model.safetensors").write_bytes(b"weights")
    assert not model.is_converted(folder)
    assert model.broken_files(folder) == ["model.safetensors"]


def test_a_changed_byte_shows_in_the_checksums_only(folder):
    content = bytearray(FILES["model.safetensors"])
    content[50] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert model.is_converted(folder)
    assert model.broken_files(folder) == ["model.safetensors"]


@pytest.mark.parametrize("manifest", ["", "[]", "{}", "null", '{"recipe": 0, "files": {}}', '{"recipe": 1}'])
def test_another_manifest_is_none(folder, manifest):
    (folder / model.MANIFEST).write_text(manifest)
    assert not model.is_converted(folder)
    assert model.broken_files(folder) == [model.MANIFEST]


def test_no_folder(tmp_path):
    assert not model.is_converted(tmp_path / "none")
    assert model.broken_files(tmp_path / "none") == [model.MANIFEST]


def test_a_failed_conversion_leaves_what_was_there(folder, monkeypatch):
    def fail(_source: Path, staging: Path) -> None:
        (staging / "half").write_text("")
        raise MemoryError

    monkeypatch.setattr(model, "_gguf_folder", lambda: folder)
    monkeypatch.setattr(model, "_save_weights", fail)
    with pytest.raises(MemoryError):
        model.convert(folder)
    assert model.broken_files(folder) == []
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_conversion_replaces_the_folder_as_a_whole(folder, monkeypatch):
    def save(_source: Path, staging: Path) -> None:
        (staging / "config.json").write_text("{}")

    (folder / "left over").write_text("")
    source = folder.parent / "source"
    source.mkdir()
    (source / model._GGUF).write_bytes(b"GGUF")
    monkeypatch.setattr(model, "_gguf_folder", lambda: source)
    monkeypatch.setattr(model, "_save_weights", save)
    monkeypatch.setattr(model, "_save_tokenizer", lambda _source, _staging: None)
    monkeypatch.setattr(model.importlib.metadata, "version", lambda _name: "0.1.2")
    model.convert(folder)
    assert model.broken_files(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", model.MANIFEST]


def test_without_the_package_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(FileNotFoundError, match="prorl-trio setup engine"):
        model.convert(tmp_path / "model")
