"""What fits: rows within the positions of a model, and bytes within the memory of a GPU or of a container."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import GPT2Config, OPTConfig

from labkit.decoder import limits
from labkit.decoder.limits import require_memory_for_training, training_bytes
from labkit.errors import DataError, ModelError, TrainingError
from labkit.models import load
from labkit.training import peak_memory, preset


@pytest.mark.parametrize(("limit", "left"), [("9000", 9000 - 8000 + 5000), ("max", None)])
def test_a_container_has_what_is_below_its_limit_and_the_idle_pages_of_files(tmp_path, monkeypatch, limit, left):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("8000")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 7000\ninactive_file 5000\nactive_file 2000\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    free = limits.available_bytes()
    assert free == left if left else free > 0.5 * psutil.virtual_memory().available


def test_a_gpu_has_what_is_free_and_what_torch_keeps(monkeypatch):
    for name, value in {"mem_get_info": (40, 100), "memory_reserved": 20, "memory_allocated": 14}.items():
        monkeypatch.setattr(torch.cuda, name, lambda at, value=value: value if at == torch.device("cuda:3") else None)
    assert limits.available_bytes("cuda:3") == 40 + 6


def test_memory_is_judged_in_the_dtype_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(limits, "available_bytes", lambda device="cpu": int(3e9))
    limits.require_memory_for_model("m", 10**9, torch.bfloat16)
    with pytest.raises(ModelError, match=r"m in float32 .* 4\.\d GB.*3\.0 GB free.*dtype='bfloat16'"):
        limits.require_memory_for_model("m", 10**9, torch.float32)


@pytest.mark.parametrize("config", [GPT2Config(n_positions=32), OPTConfig(max_position_embeddings=32)])
def test_a_row_may_be_as_long_as_the_model_has_positions(config):
    limits.require_positions(32, config)
    with pytest.raises(DataError, match="33 tokens, and the model has 32 positions.*--max-length 32"):
        limits.require_positions(33, config, refusal=DataError)


# -- training ----------------------------------------------------------------------------------------------------------

_STEPS = """
import json, torch
from labkit.models import load
from labkit.decoder.limits import PROCESS, SLACK, training_bytes
from labkit.training import peak_memory, preset

model = load("gpt2-mini", task="question-answering", device="cpu").model.train()
settings = preset("mini", per_device_train_batch_size=12, dtype="float32")
optimizer = torch.optim.AdamW(model.parameters())
answer = torch.zeros(12, dtype=torch.long)
for _ in range(2):
    ids = torch.randint(3, 4096, (12, 128))
    model(ids, torch.ones_like(ids), start_positions=answer, end_positions=answer).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps([PROCESS + SLACK * sum(training_bytes(model, settings, 128).values()), peak_memory()]))
"""


@pytest.mark.end_to_end
def test_the_estimate_is_near_what_the_training_takes():
    held = torch.ones(250_000_000)  # 1 GB of this process, which the other one must not count
    paths = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, "-c", _STEPS]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    estimate, taken = json.loads(done.stdout)
    assert 0.85 * taken < estimate < 1.3 * taken + 0.3e9  # what the libraries take differs between machines
    assert torch.cuda.is_available() or held.nbytes <= peak_memory() < psutil.virtual_memory().total


@pytest.fixture(scope="module")
def model():
    return load("tiny-gpt2", task="question-answering", device="cpu").model


def test_weights_gradients_and_moments_are_those_of_what_is_trained_and_activations_those_of_the_rows(model):
    def estimated(length: int = 32, **changes) -> dict[str, int]:
        return training_bytes(model, preset("gemma", **{"dtype": "float32"} | changes), length)

    parameters = sum(p.numel() for p in model.parameters())
    full, activations = estimated(), estimated()["activations"]
    assert (full["weights"], full["training"]) == (4 * parameters, 12 * parameters)
    assert estimated(dtype="bfloat16")["training"] == 14 * parameters  # copies in 2 bytes
    assert estimated(per_device_train_batch_size=8)["activations"] == 2 * activations < estimated(64)["activations"]
    assert estimated(gradient_checkpointing=True)["activations"] < activations
    assert estimated(batch_tokens=4 * 32)["activations"] == activations
    model.backbone.requires_grad_(False)
    trained = estimated()["training"]
    model.backbone.requires_grad_(True)
    assert trained == 12 * sum(p.numel() for p in model.head.parameters())


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "a smaller --batch-size, --gradient-checkpointing, or --method lora"),
        ({"batch_tokens": 2**21}, "a smaller --batch-tokens"),
    ],
)
def test_what_does_not_fit_is_refused_on_a_cpu_and_tried_on_a_gpu(monkeypatch, model, changes, advice):
    settings = preset("gemma", dtype="float32", **changes)
    monkeypatch.setattr(limits, "available_bytes", lambda device: 1e12)
    assert "are free" in require_memory_for_training(model, settings, 2048)
    monkeypatch.setattr(limits, "available_bytes", lambda device: 1e6)
    with pytest.raises(TrainingError, match=advice):
        require_memory_for_training(model, settings, 2048)
    gpu = torch.device("cuda:0")
    weight = SimpleNamespace(device=gpu, requires_grad=True, numel=lambda: 6, element_size=lambda: 4)
    monkeypatch.setattr(model, "parameters", lambda: iter([weight]))
    assert "are free" in require_memory_for_training(model, settings, 2048)  # a GPU that is full raises an error
