"""A tied output layer is named for engines that keep a copy of it, whatever the folder of weights has."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prorl_trio.weights.check import check_folder
from prorl_trio.weights.model_folder import INDEX, ModelFolder
from prorl_trio.weights.source import lacks_head, link_with_head
from support.tiny_weights import make_model, tensors

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("state", "config", "lacks"),
    [
        (tensors(), {}, True),
        ({**tensors(), HEAD: tensors()[EMBEDDING]}, {}, False),
        (tensors(), {"tie_word_embeddings": False}, False),
        ({"transformer.wte.weight": tensors()[EMBEDDING]}, {}, False),
    ],
    ids=["left out", "there", "not tied", "a model of other names"],
)
def test_it_lacks_in_a_tied_model_alone(tmp_path, state, config, lacks):
    assert lacks_head(ModelFolder.read(make_model(tmp_path, state, **config)), []) is lacks


def test_a_folder_without_configuration_is_tied_if_the_engines_model_is(tmp_path):
    base = ModelFolder.read(make_model(tmp_path / "base"))
    bare = make_model(tmp_path / "bare")
    (bare / "config.json").unlink()
    assert lacks_head(ModelFolder.read(bare), [base])
    assert not lacks_head(ModelFolder.read(bare), [])


def test_the_folder_of_links_has_all_and_the_head(tmp_path):
    base, new = make_model(tmp_path / "base"), make_model(tmp_path / "new", tensors(3.0))
    linked = tmp_path / "linked"
    linked.mkdir()
    link_with_head(ModelFolder.read(new), linked)
    check_folder(linked, [ModelFolder.read(base)])
    assert {path.name for path in linked.iterdir() if path.is_symlink()} == {path.name for path in new.iterdir()}
    (head,) = [path for path in linked.glob("*.safetensors") if not path.is_symlink()]
    assert np.array_equal(load_file(head)[HEAD], tensors(3.0)[EMBEDDING])


def test_an_index_names_the_head_too(tmp_path):
    new = make_model(tmp_path / "new", tensors(3.0))
    (new / "model.safetensors").unlink()
    files = {name: f"part-{number}.safetensors" for number, name in enumerate(tensors())}
    for name, file in files.items():
        save_file({name: tensors(3.0)[name]}, new / file)
    (new / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    linked = tmp_path / "linked"
    linked.mkdir()
    link_with_head(ModelFolder.read(new), linked)
    found = ModelFolder.read(linked)
    assert found.tensors.keys() == {*files, HEAD}
    assert not lacks_head(found, [])
    check_folder(linked, [ModelFolder.read(new)])
