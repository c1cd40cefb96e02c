"""A model's folder: its tokenizer, chat template, special tokens and end-of-sequence ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from prorl_trio.file_systems import read_regular
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.model_facts import architecture_of

MAX_FILE_BYTES: Final = 512 * 1024 * 1024
"""Far above the largest published tokenizer.json, 35 MB."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """The used content of a model's folder.

    Attributes:
        tokenizer_file: `tokenizer.json`, whose content is `tokenizer_json`.
        template_file: the file that contains the source `template`.
        special_tokens: `bos_token`, `eos_token` and so on: the variables a chat template may use.
        eos_token_ids: the end-of-sequence ids in generation_config.json; empty without it.
        rows: rows of the model's embedding in config.json, the exclusive upper bound of sampled ids; None without it.
        max_positions: the model's longest sequence in tokens, by config.json; 0 without it.
        architecture: facts of the model in config.json; see `architecture_of`.
    """

    tokenizer_file: Path
    tokenizer_json: bytes
    template_file: Path
    template: str
    special_tokens: dict[str, str]
    eos_token_ids: list[int]
    rows: int | None = None
    max_positions: int = 0
    architecture: dict[str, Any] = {}


def _hub_remedy(model_dir: Path) -> str:
    """Return what to do where the folder is not there and its name looks like one of the Hugging Face Hub."""
    if model_dir.exists() or model_dir.is_absolute() or len(model_dir.parts) != 2:
        return ""
    fetch = f"hf download {model_dir} --exclude '*.safetensors' --local-dir /models/{model_dir.name}"
    return f". {model_dir} looks like a name on the Hugging Face Hub: run `{fetch}`, and name that folder"


def read_model_folder(model_dir: Path) -> ModelFolder:
    """Read a model's tokenizer, chat template and settings from `model_dir`. Blocks on the disk.

    The chat template is searched in `chat_template.jinja`, `tokenizer_config.json` and `chat_template.json`, in this
    order.

    Raises:
        ConfigError: a required file is missing or broken; the message names it.
    """
    tokenizer_file = model_dir / "tokenizer.json"
    tokenizer_json = _read(tokenizer_file)
    if tokenizer_json is None:
        raise ConfigError(f"{tokenizer_file}: no such file; a model folder needs one{_hub_remedy(model_dir)}")
    config = _read_object(model_dir / "tokenizer_config.json")
    template, template_file = _template(model_dir, config)
    model_config = _read_object(model_dir / "config.json")
    return ModelFolder(
        tokenizer_file=tokenizer_file,
        tokenizer_json=tokenizer_json,
        template_file=template_file,
        template=template,
        special_tokens=_special_tokens(config),
        eos_token_ids=_eos_token_ids(_read_object(model_dir / "generation_config.json")),
        rows=_size(model_config, "vocab_size"),
        max_positions=_size(model_config, "max_position_embeddings") or 0,
        architecture=architecture_of(model_config),
    )


def _template(model_dir: Path, tokenizer_config: dict[str, Any]) -> tuple[str, Path]:
    """Return the source of the chat template and its file; of several named templates, `default`."""
    jinja_file = model_dir / "chat_template.jinja"
    source = _read(jinja_file)
    if source is not None:
        try:
            return source.decode(), jinja_file
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{jinja_file}: not UTF-8: {exc.reason} at byte {exc.start}") from exc
    origin, found = model_dir / "tokenizer_config.json", tokenizer_config.get("chat_template")
    if found is None:
        origin = model_dir / "chat_template.json"
        found = _read_object(origin).get("chat_template")
    if isinstance(found, list):
        found = next((e.get("template") for e in found if isinstance(e, dict) and e.get("name") == "default"), None)
    if not isinstance(found, str) or not found.strip():
        raise ConfigError(
            f"{model_dir}: no chat template in chat_template.jinja, tokenizer_config.json or chat_template.json; "
            "use the folder of an instruction-tuned model"
        )
    return found, origin


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _NAMED_TOKENS:
        token = tokenizer_config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _eos_token_ids(generation_config: dict[str, Any]) -> list[int]:
    """Return `eos_token_id`, which may be an id or a list of ids."""
    eos = generation_config.get("eos_token_id")
    return [each for each in (eos if isinstance(eos, list) else [eos]) if isinstance(each, int)]


def _size(model_config: dict[str, Any], name: str) -> int | None:
    """Return a number of the text model, which multimodal models have in a separate section."""
    text = model_config.get("text_config")
    found = (text if isinstance(text, dict) else model_config).get(name)
    return found if isinstance(found, int) and found > 0 else None


def _read(path: Path) -> bytes | None:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc


def _read_object(path: Path) -> dict[str, Any]:
    raw = _read(path)
    try:
        return {} if raw is None else msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path}: not a JSON object: {exc}") from exc
