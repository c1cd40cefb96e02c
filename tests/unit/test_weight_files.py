"""Weights as files: what is written is what the safetensors library reads, and nothing that is wrong passes a check."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from prorl_trio.weights import source as writing
from prorl_trio.weights import store as stores
from prorl_trio.weights.check import all_finite, check_folder, stored_all_finite
from prorl_trio.weights.errors import WeightsRefused
from prorl_trio.weights.model_folder import ModelFolder
from prorl_trio.weights.safetensors import TensorFile, TensorType, raw_tensor, read_header
from prorl_trio.weights.source import check_adapter, is_this_host, write_model
from prorl_trio.weights.store import WeightStore
from support.tiny_weights import CONFIG, LORA_A, LORA_B, make_adapter, make_model, pair, tensors

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.fixture
def base(tmp_path):
    return ModelFolder.read(make_model(tmp_path / "base"))


def refused(folder, base, **options):
    with pytest.raises(WeightsRefused) as caught:
        check_folder(folder, [base], **options)
    return caught.value


def written(tmp_path, base, state, **options):
    folder = tmp_path / "new"
    folder.mkdir()
    write_model(state, folder, base, **options)
    return folder


# ---------------------------------------------------------------- the format


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_])
def test_what_is_written_is_what_the_library_reads(tmp_path, dtype):
    state = {"b": np.ones((3, 5), dtype), "a": np.zeros((), dtype), "empty": np.zeros((0, 4), dtype)}
    file = TensorFile(tmp_path / "x.safetensors")
    for name, array in state.items():
        kind, flat = raw_tensor(name, array)
        assert file.fits(name, kind)
        file.add(name, kind, flat)
    file.close()
    read = load_file(tmp_path / "x.safetensors")
    assert {name: (array.dtype, array.shape) for name, array in read.items()} == {
        name: (array.dtype, array.shape) for name, array in state.items()
    }
    assert all(np.array_equal(read[name], array) for name, array in state.items())
    assert {name: each.type.shape for name, each in read_header(tmp_path / "x.safetensors").items()} == {
        name: array.shape for name, array in state.items()
    }


def test_arrays_of_any_layout_are_written_in_row_major_order():
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    for array in (whole.T, whole[:, ::2], whole.astype(">f4"), np.asfortranarray(whole)):
        kind, flat = raw_tensor("x", array)
        assert kind.shape == array.shape
        assert np.array_equal(flat.view(np.float32).reshape(kind.shape), array)


@settings(max_examples=50)
@given(cut=st.integers(1, 400), junk=st.binary(max_size=40))
def test_a_file_that_is_cut_short_or_too_long_is_refused(tmp_path_factory, cut, junk):
    path = tmp_path_factory.mktemp("cut") / "x.safetensors"
    save_file(tensors(), path)
    whole = path.read_bytes()
    damaged = whole[: -min(cut, len(whole))] + junk
    assume(len(damaged) != len(whole))
    path.write_bytes(damaged)
    with pytest.raises(WeightsRefused):
        read_header(path)


def test_a_file_that_nobody_finished_cannot_be_read(tmp_path):
    file = TensorFile(tmp_path / "x.safetensors")
    file.add("a", TensorType("F32", (1,)), np.zeros(4, np.uint8))
    file.abandon()
    with pytest.raises(WeightsRefused, match="not of the safetensors format"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("dtype", "bits", "finite"),
    [
        ("F32", np.array([0x7F7FFFFF, 0xFF7FFFFF, 1], "<u4"), True),
        ("F32", np.array([0, 0x7F800000], "<u4"), False),
        ("F32", np.array([0xFFC00000], "<u4"), False),
        ("BF16", np.array([0x7F7F, 0xFF7F, 0x0001], "<u2"), True),
        ("BF16", np.array([0, 0x7FC0], "<u2"), False),
        ("BF16", np.array([0xFF80], "<u2"), False),
        ("F16", np.array([0x7BFF], "<u2"), True),
        ("F16", np.array([0xFC00], "<u2"), False),
        ("F64", np.array([np.inf]), False),
        ("F8_E4M3", np.array([0x7E, 0x78], np.uint8), True),
        ("F8_E4M3", np.array([0xFF], np.uint8), False),
        ("F8_E5M2", np.array([0x7B], np.uint8), True),
        ("F8_E5M2", np.array([0x7C], np.uint8), False),
        ("I8", np.array([0x7F], np.uint8), True),
    ],
)
def test_nan_and_infinity_are_found_by_their_bits(tmp_path, dtype, bits, finite):
    flat = np.concatenate([np.zeros(64, np.uint8), bits.view(np.uint8)])
    assert all_finite(dtype, flat) is finite
    file = TensorFile(tmp_path / "x.safetensors")
    size = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}.get(dtype, 1)
    file.add("x", TensorType(dtype, (flat.nbytes // size,)), flat)
    file.close()
    assert stored_all_finite(read_header(tmp_path / "x.safetensors")["x"]) is finite


# ---------------------------------------------------------------- a folder


def test_the_same_model_passes(tmp_path, base):
    check_folder(make_model(tmp_path / "new", tensors(2.0)), [base])
    half = {name: array.astype(np.float16) for name, array in tensors().items()}
    check_folder(make_model(tmp_path / "half", half), [base])
    check_folder(make_model(tmp_path / "alone"), [])


def test_a_tensor_that_is_missing_or_unknown_is_named(tmp_path, base):
    state = tensors()
    del state["model.norm.weight"]
    error = refused(make_model(tmp_path / "partial", state), base)
    assert (error.tensor, "is missing" in str(error)) == ("model.norm.weight", True)
    state = {**tensors(), "model.extra.weight": np.zeros(1, np.float32)}
    assert refused(make_model(tmp_path / "more", state), base).tensor == "model.extra.weight"
    state = {f"module.{name}": array for name, array in tensors().items()}
    assert "rename the tensors" in str(refused(make_model(tmp_path / "wrapped", state), base))


def test_another_vocabulary_size_is_called_that(tmp_path, base):
    state = {**tensors(), EMBEDDING: np.zeros((13, 4), np.float32)}
    error = refused(make_model(tmp_path / "new", state), base)
    assert error.tensor == EMBEDDING
    assert "[13, 4]" in str(error)
    assert "vocabulary" in str(error)
    assert "vocab_size 13" in str(refused(make_model(tmp_path / "config", vocab_size=13), base))


@pytest.mark.parametrize(
    "config", [{"architectures": ["OtherForCausalLM"]}, {"hidden_size": 8}, {"tie_word_embeddings": False}]
)
def test_a_configuration_of_another_model_is_refused(tmp_path, base, config):
    (field,) = config
    assert f"config.json has {field} " in str(refused(make_model(tmp_path / "new", **config), base))


def test_a_field_of_the_text_part_counts_as_well(tmp_path):
    base = ModelFolder.read(make_model(tmp_path / "base", text_config={"hidden_size": 4}))
    assert "hidden_size 8" in str(refused(make_model(tmp_path / "new", text_config={"hidden_size": 8}), base))


def test_what_an_engine_takes_from_its_own_configuration_may_differ(tmp_path, base):
    check_folder(make_model(tmp_path / "new", dtype="float32", transformers_version="9"), [base])


def test_a_dtype_that_no_engine_converts_is_refused(tmp_path, base):
    state = {**tensors(), "model.norm.weight": np.zeros(4, np.float64)}
    error = refused(make_model(tmp_path / "new", state), base)
    assert (error.tensor, "F64" in str(error)) == ("model.norm.weight", True)


def test_nan_is_found_unless_only_headers_are_looked_at(tmp_path, base):
    state = tensors()
    state["model.layers.0.mlp.weight"][3, 7] = np.nan
    folder = make_model(tmp_path / "new", state)
    assert refused(folder, base).tensor == "model.layers.0.mlp.weight"
    check_folder(folder, [base], "headers")


def test_a_tied_output_layer_may_be_there_if_it_is_the_embedding(tmp_path, base):
    state = {**tensors(2.0), HEAD: tensors(2.0)[EMBEDDING]}
    with_head = make_model(tmp_path / "both", state)
    check_folder(with_head, [base])
    check_folder(make_model(tmp_path / "one", tensors()), [ModelFolder.read(with_head)])
    assert (
        refused(make_model(tmp_path / "differs", {**tensors(2.0), HEAD: tensors(3.0)[EMBEDDING]}), base).tensor == HEAD
    )
    del state[EMBEDDING]
    assert refused(make_model(tmp_path / "head", state), base).tensor == EMBEDDING


def test_an_index_must_tell_where_everything_is(tmp_path, base):
    folder = make_model(tmp_path / "new")
    weight_map = dict.fromkeys(tensors(), "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    check_folder(folder, [base])
    index.write_text(json.dumps({"weight_map": {**weight_map, EMBEDDING: "other.safetensors"}}))
    assert "other.safetensors: it cannot be read" in str(refused(folder, base))
    save_file({"x": np.zeros(1, np.float32)}, folder / "other.safetensors")
    assert refused(folder, base).tensor == EMBEDDING
    index.unlink()
    save_file({EMBEDDING: tensors()[EMBEDDING]}, folder / "other.safetensors")
    assert "is in model.safetensors and in other.safetensors" in str(refused(folder, base))


def test_folders_without_weights_are_refused(tmp_path, base):
    assert "no such folder" in str(refused(tmp_path / "nowhere", base))
    assert "no *.safetensors file" in str(refused(tmp_path, base))


# ---------------------------------------------------------------- a state dict


def test_a_state_dict_becomes_a_folder_like_the_models_own(tmp_path, base):
    folder = written(tmp_path, base, {**tensors(2.0), HEAD: tensors(2.0)[EMBEDDING]})
    check_folder(folder, [base])
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", "tokenizer.json"}
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    read = load_file(folder / "model.safetensors")
    assert set(read) == {*tensors(), HEAD}, "an engine may have a copy of its tied output layer"
    assert all((array == 2.0).all() for array in read.values())


def test_a_tied_output_layer_that_is_not_given_is_written_too(tmp_path, base):
    found = ModelFolder.read(written(tmp_path, base, tensors(2.0)))
    assert set(found.tensors) == {*tensors(), HEAD}
    assert (load_file(found.tensors[HEAD].path)[HEAD] == 2.0).all()


@pytest.mark.parametrize("form", [dict, lambda s: iter(s.items()), lambda s: [{name: s[name]} for name in s]])
def test_mappings_pairs_and_lists_of_mappings_are_the_same(tmp_path, base, form):
    assert set(load_file(written(tmp_path, base, form(tensors())) / "model.safetensors")) == set(tensors())


def test_what_does_not_fit_one_file_is_in_several_with_an_index(tmp_path, base, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 1)
    folder = written(tmp_path, base, {**tensors(), HEAD: tensors()[EMBEDDING]})
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [
        *("model-00002.safetensors", "model-00003.safetensors", "model-00004.safetensors", "model.safetensors")
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(name in load_file(folder / index[name]) for name in tensors())
    check_folder(folder, [base])


def bad_states():
    yield "NaN", EMBEDDING, {**tensors(), EMBEDDING: np.full((12, 4), np.nan, np.float32)}
    yield "shape", EMBEDDING, {**tensors(), EMBEDDING: np.ones((13, 4), np.float32)}
    yield "missing", "model.norm.weight", {n: a for n, a in tensors().items() if n != "model.norm.weight"}
    yield "unknown", "x", {**tensors(), "x": np.ones(1, np.float32)}
    yield "double", EMBEDDING, [tensors(), {EMBEDDING: tensors()[EMBEDDING]}]
    yield "list", EMBEDDING, {**tensors(), EMBEDDING: [[1.0]]}
    yield "complex", EMBEDDING, {**tensors(), EMBEDDING: np.ones((12, 4), np.complex64)}
    yield "untied", EMBEDDING, {**tensors(), HEAD: tensors(9.0)[EMBEDDING]}
    yield "pairs", "", ["name"]


@pytest.mark.parametrize(("tensor", "state"), [pytest.param(*rest, id=name) for name, *rest in bad_states()])
def test_a_state_dict_that_is_not_the_models_is_refused(tmp_path, base, tensor, state):
    with pytest.raises(WeightsRefused) as caught:
        written(tmp_path, base, state)
    assert caught.value.tensor == tensor


# ---------------------------------------------------------------- an adapter


def adapter_refused(folder, base, **options):
    with pytest.raises(WeightsRefused) as caught:
        check_adapter(folder, [base], **options)
    return caught.value


def test_an_adapter_is_pairs_that_fit_the_models_matrices(tmp_path, base):
    check_adapter(make_adapter(tmp_path / "whole"), [base])
    joined = {name.replace("mlp", "joined"): array for name, array in pair().items()}
    check_adapter(make_adapter(tmp_path / "joined", joined), [base])
    assert adapter_refused(make_adapter(tmp_path / "half", {LORA_A: pair()[LORA_A]}), base).tensor == LORA_A
    other_model = {**pair(), LORA_A: np.ones((2, 9), np.float32)}
    assert adapter_refused(make_adapter(tmp_path / "other", other_model), base).tensor == LORA_B
    other_rank = {**pair(), LORA_B: np.ones((4, 3), np.float32)}
    assert adapter_refused(make_adapter(tmp_path / "rank", other_rank), base).tensor == LORA_B
    nan = make_adapter(tmp_path / "nan", {**pair(), LORA_B: np.full((4, 2), np.inf, np.float32)})
    assert adapter_refused(nan, base).tensor == LORA_B
    check_adapter(nan, [base], "headers")


def test_what_is_no_adapter_is_refused(tmp_path, base):
    assert "no rank" in str(adapter_refused(tmp_path, base))
    empty = make_adapter(tmp_path / "empty", tensors())
    assert "no tensor MODULE.lora_A.weight" in str(adapter_refused(empty, base))
    (empty / "adapter_model.safetensors").unlink()
    assert "cannot be read" in str(adapter_refused(empty, base))


# ---------------------------------------------------------------- private folders


def test_folders_are_kept_while_they_are_in_use(tmp_path):
    store = WeightStore(tmp_path)
    try:
        first, second = store.new_folder(), store.new_folder()
        assert first.stat().st_mode & 0o777 == 0o755
        assert first.parent.stat().st_mode & 0o777 == 0o700, "weights are the user's own"
        store.keep_only(second)
        assert (first.exists(), second.exists()) == (False, True)
        store.keep_only(None)
        assert not second.exists()
        store.new_folder()
    finally:
        store.close()
    assert list(tmp_path.iterdir()) == []


def test_folders_are_removed_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "AFTER_KILL_S", 0)
    store = WeightStore(tmp_path)
    store.new_folder()
    watchdog = store._watchdog
    assert watchdog is not None
    assert os.getsid(watchdog.pid) == watchdog.pid, "what kills the trainer's process group does not kill it"
    watchdog.stdin.close()  # as the kernel does for a killed process
    assert watchdog.wait(20) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_cannot_be_written_to_is_named(tmp_path):
    with pytest.raises(WeightsRefused, match="nowhere"):
        WeightStore(tmp_path / "nowhere").new_folder()


def test_hosts_are_told_apart():
    assert is_this_host("127.0.0.1")
    assert is_this_host("localhost")
    assert not is_this_host("192.0.2.1")
    assert not is_this_host("no-such-host.invalid")
