"""The weights that a trainer has in hand, for an update: folders, state dicts and adapters."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import trio
from safetensors.numpy import load_file

from prorl_trio.client import (
    BlockingClient,
    PolicyUpdateFailed,
    WeightsRefused,
)
from support.fake_service import TOKEN, open_service
from support.pausable_engine import A, B
from support.tiny_weights import LORA_A, make_adapter, make_model, tensors
from support.update_rig import (
    AllBut,
    assert_old,
    open_look_alikes,
    open_trainer,
    open_updated_node,
    sampled_as,
    update_state,
    update_to,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def pool():
    async with open_updated_node(A, B) as node:
        yield node


# ---------------------------------------------------------------- weights that the trainer has in hand


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


async def test_a_folder_that_is_not_of_the_engines_model_is_refused_before_they_are_asked(tmp_path, model):
    """With the model's name in the probe, the folder that the engines were started with is found by itself."""
    async with open_look_alikes(model=str(model)) as (node, client, engines):
        state = {name: array for name, array in tensors().items() if "norm" not in name}
        partial = make_model(tmp_path / "partial", state)
        with pytest.raises(WeightsRefused, match=r"model\.norm\.weight .*is missing"):
            await update_to(client, "1", partial, check="headers")
        assert [engine.weights for engine in engines] == [str(model)] * 2
        assert not any(engine.paused for engine in engines)
        assert await sampled_as(node.backends) == "0"
        await update_to(client, "1", make_model(tmp_path / "whole"), check="values")
        assert await sampled_as(node.backends) == "1"


async def test_a_state_dict_is_loaded_and_what_is_no_longer_in_use_is_removed(tmp_path, model):
    async with open_look_alikes(model=str(model)) as (node, client, engines):
        places = []
        for version in ("1", "2"):
            async with client.policy_update(version) as update:
                await update.load_state_dict(tensors(float(version)), tmp_path)
            places.append(Path(engines[0].weights))
            assert engines[0].weights == engines[1].weights
            assert load_file(places[-1] / "model.safetensors")["model.norm.weight"][0] == float(version)
        assert [place.exists() for place in places] == [False, True]
        engines[1].bad_folders = AllBut(places[-1])
        with pytest.raises(PolicyUpdateFailed, match=engines[1].url):
            await update_state(client, "3", tmp_path)
        assert [engine.weights for engine in engines] == [str(places[-1])] * 2, "they are put back from there"
        assert list(places[-1].parent.iterdir()) == [places[-1]]
        with pytest.raises(WeightsRefused, match=r"norm.* NaN"):
            await update_state(client, "3", tmp_path, value=float("nan"))
        assert list(places[-1].parent.iterdir()) == [places[-1]]
        assert await sampled_as(node.backends) == "2"
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("load", ["load_folder", "load_adapter"])
async def test_weights_that_can_be_compared_with_nothing_are_refused(pool, model, tmp_path, load):
    given = {"load_folder": (model,), "load_adapter": ("policy", make_adapter(tmp_path / "adapter"))}[load]
    async with open_trainer(pool) as client:
        with pytest.raises(WeightsRefused, match=r"compared with nothing: .* Name a folder .*base=.*check='none'"):
            async with client.policy_update("1") as update:
                await getattr(update, load)(*given)
    assert_old(pool)


async def test_without_a_folder_it_is_shared_memory_where_all_engines_are_here(pool, model):
    async with open_trainer(pool) as client:
        with pytest.raises(WeightsRefused, match=f"{A}, {B}: not on this host.* folder="):
            await update_state(client, "1", None, base=model)
        with pytest.raises(WeightsRefused, match=r"not visible from here .*base="):
            await update_state(client, "1", model)
    assert_old(pool)
    async with open_look_alikes(model=str(model)) as (_, client, engines):
        await update_state(client, "1", None)
        place = Path(engines[0].weights)
        assert place.is_relative_to("/dev/shm")
        assert place.exists()
    assert not place.parent.exists()


async def test_a_state_dict_in_plain_calls(tmp_path, model):
    def train(url):
        with BlockingClient(url, TOKEN) as client:
            mine = threading.get_ident()
            taken_in = []

            def pairs():
                for name, array in tensors(3.0).items():
                    taken_in.append(threading.get_ident())
                    yield name, array

            with client.policy_update("1") as update:
                update.load_state_dict(pairs(), tmp_path)
            assert set(taken_in) == {mine}, "whoever gathers shards needs its own thread"
            with pytest.raises(WeightsRefused, match="vocabulary"), client.policy_update("2") as update:
                update.load_state_dict({"model.embed_tokens.weight": np.zeros((9, 4), np.float32)}, tmp_path)

    async with open_look_alikes(model=str(model)) as (node, _, engines):
        async with open_service(node) as service:
            await trio.to_thread.run_sync(train, service.url)
        assert await sampled_as(node.backends) == "1"
        assert engines[0].weights == engines[1].weights


# ---------------------------------------------------------------- adapters


async def test_completions_name_the_adapter_of_their_version(tmp_path, model):
    async with open_look_alikes(model=str(model), adapters=(True, True)) as (node, client, engines):
        adapter = make_adapter(tmp_path / "adapter")
        for version in ("1", "2"):
            async with client.policy_update(version) as update:
                await update.load_adapter("policy", adapter)
            assert await sampled_as(node.backends) == version
            assert {engine.requests[-1].model for engine in engines if engine.requests} >= {f"policy-v{version}"}
            assert [engine.adapters for engine in engines] == [{f"policy-v{version}": str(adapter)}] * 2
        half = make_adapter(tmp_path / "half", {LORA_A: np.ones((2, 8), np.float32)})
        with pytest.raises(WeightsRefused, match="other half"):
            await adapt(client, half)
        engines[1].bad_folders.add(str(adapter))
        with pytest.raises(PolicyUpdateFailed, match=f"{engines[1].url}: it finds no adapter in {adapter}"):
            await adapt(client, adapter)
        assert [engine.adapters for engine in engines] == [{"policy-v2": str(adapter)}] * 2
        assert await sampled_as(node.backends) == "2"


async def adapt(client, folder):
    async with client.policy_update("3") as update:
        await update.load_adapter("policy", folder)


async def test_the_weights_below_an_adapter_stay_where_they_are(tmp_path, model):
    async with open_look_alikes(model=str(model), adapters=(True, True)) as (_, client, engines):
        await update_state(client, "1", tmp_path)
        place = Path(engines[0].weights)
        await adapt(client, make_adapter(tmp_path / "adapter"))
        assert place.exists(), "a failed update puts the engines back to them"
        async with client.policy_update("4") as update:
            await update.load_state_dict(tensors(), tmp_path)
            await update.load_state_dict(tensors(), tmp_path)
        assert list(place.parent.iterdir()) == [Path(engines[0].weights)]


async def test_an_engine_that_takes_no_adapters_says_what_to_do(tmp_path, model):
    async with open_look_alikes(model=str(model), adapters=(True, False)) as (node, client, (good, other)):
        with pytest.raises(PolicyUpdateFailed, match=f"{other.url}: it takes no LoRA adapters: .*--enable-lora"):
            await adapt(client, make_adapter(tmp_path / "adapter"))
        assert good.adapters == {}
        assert await sampled_as(node.backends) == "0"


async def test_an_adapter_in_plain_calls(tmp_path, model):
    def train(url):
        with BlockingClient(url, TOKEN) as client, client.policy_update("1") as update:
            update.load_adapter("policy", make_adapter(tmp_path / "adapter"))

    async with open_look_alikes(model=str(model), adapters=(True, True)) as (node, _, engines):
        async with open_service(node) as service:
            await trio.to_thread.run_sync(train, service.url)
        assert all(list(engine.adapters) == ["policy-v1"] for engine in engines)
