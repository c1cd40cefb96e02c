"""Tinker's SDK beside our own packages, and a server that it can train with: the fake one with training calls."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pytest

from prorl_launch import venv
from prorl_launch.progress import SetupError
from prorl_trio.inference.engines.tinker_api import fields_of
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.testing.fake_http import Answer, HttpCall
from prorl_trio.testing.fake_tinker import PROTO, FakeTinker, message_field
from support.skips import because

if TYPE_CHECKING:
    from pathlib import Path

PINS: Final = (
    "tinker==0.38.0",
    "h2==4.4.1",
    "hpack==4.2.0",
    "httpcore==1.0.9",
    "httpx==0.28.1",
    "hyperframe==6.1.0",
    "orjson==3.13.0",
    "pyqwest==0.12.0",
    "zstandard==0.25.0",
)
"""What the SDK imports and the checkout's environment lacks."""
_DTYPES: Final = {1: np.float32, 2: np.int64}


def tinker_packages() -> Path:
    """Return a folder of packages for PYTHONPATH, made in the cache folder once: 60 MB, some seconds."""
    folder = cache_dir() / "test-tools" / "tinker"
    arguments = ["-m", "pip", "install", "--no-deps", "--only-binary", ":all:", *PINS]
    (cache_dir() / "logs").mkdir(parents=True, exist_ok=True)
    log_file = cache_dir() / "logs" / "tinker.log"
    try:
        venv.install(folder, " ".join(PINS), [("Tinker's SDK", arguments)], log_file=log_file)
    except (SetupError, subprocess.SubprocessError) as error:
        pytest.skip(because(f"Tinker's SDK cannot be had: {error}", "look at the network, or at the package index"))
    return folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"


class TrainingServer(FakeTinker):
    """A server that records what it is trained on.

    Attributes:
        trained: of each `forward_backward`: the loss, its settings, and for each datum its tokens and inputs.
        steps: the learning rate of each optimiser step.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trained: deque[tuple[str, dict[str, float], list[tuple[list[int], dict[str, Any]]]]] = deque()
        self.steps: list[float] = []
        self._results: dict[str, Answer] = {}

    async def _answer(self, call: HttpCall) -> Answer:
        name = call.path.removeprefix("/api/v1/")
        if name == "forward_backward":
            self.trained.append(read_training(call.body))
            metrics = message_field(1, b"loss:sum") + bytes((2 << 3 | 1,)) + struct.pack("<d", 0.5)
            return self._promise(Answer(200, message_field(1, b"ArrayRecord") + message_field(3, metrics), PROTO))
        if call.method == "GET" and name.startswith("samplers/"):
            return Answer(200, b"{}")
        if name == "retrieve_future":
            request_id = msgspec.json.decode(call.body)["request_id"]
            if request_id in self._results:
                return self._results[request_id]
            return await super()._answer(call)
        asked = msgspec.json.decode(call.body) if call.body else {}
        match name:
            case "client/config" | "client/dynamic_config":
                return answer({})
            case "telemetry":
                return answer({"status": "accepted"})
            case "create_model":
                return self._promise(answer({"type": "create_model", "model_id": "run"}))
            case "get_info":
                data = {"model_name": self.config.model, "arch": "fake"}
                fields = {"model_id": "run", "model_name": self.config.model, "is_lora": True, "lora_rank": 32}
                return answer({"type": "get_info", "model_data": data, **fields})
            case "optim_step":
                self.steps.append(asked["adam_params"]["learning_rate"])
                return self._promise(answer({"type": "optim_step", "metrics": {}}))
            case "save_weights_for_sampler":
                self.checkpoints.add(path := f"tinker://run/sampler_weights/{asked['path']}")
                return self._promise(answer({"type": "save_weights_for_sampler", "path": path}))
        return await super()._answer(call)

    def _promise(self, result: Answer) -> Answer:
        self._results[request_id := f"r{len(self._results)}"] = result
        return answer({"request_id": request_id, "model_id": "run"})


def answer(content: object) -> Answer:
    return Answer(200, msgspec.json.encode(content))


def read_training(body: bytes) -> tuple[str, dict[str, float], list[tuple[list[int], dict[str, Any]]]]:
    """Return the loss, its settings and the data of a protobuf `ForwardBackwardRequest`."""
    loss, settings, data = "", {}, []
    for number, _, value in fields_of(body):
        if number == 3:
            data.append(_datum(value))
        elif number == 4:
            loss = value.decode()
        elif number == 5:
            entry = _message(value)
            settings[entry[1].decode()] = struct.unpack("<d", entry[2])[0]
    return loss, settings, data


def _datum(body: bytes) -> tuple[list[int], dict[str, Any]]:
    tokens, inputs = [], {}
    for number, _, value in fields_of(body):
        if number == 1:
            tokens += np.frombuffer(_message(_message(value)[1])[1], np.int32).tolist()
        elif number == 2:
            entry = _message(value)
            tensor = _message(entry[2])
            inputs[entry[1].decode()] = np.frombuffer(tensor[1], _DTYPES[tensor[3]])
    return tokens, inputs


def _message(body: bytes) -> dict[int, Any]:
    return {number: value for number, _, value in fields_of(body)}
