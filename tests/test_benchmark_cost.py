"""benchmarks/cost.py: the arithmetic that it counts, and what becomes of rows that cannot be measured."""

import json
import os

import pytest
import torch
import transformers

from benchmarks import cost
from labkit.decoder import limits

ROW = {"model": "tiny-llama", "batch_size": 2, "length": 32, "dtype": "float32", "attn": None}
ROW |= {"method": "full", "mask": "bidirectional", "device": "cpu"}


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-gemma3"])
def test_flops_are_those_of_the_formula_of_palm(name):
    """6 for each weight of a matrix product, and 12 x heads x head width x keys for each layer (appendix B)."""
    model, _ = cost.load(name, None, "float32", "cpu")
    config, length = model.config.get_text_config(), 96
    matrices = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, matrices))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    expected = 6 * weights + 12 * config.num_hidden_layers * config.num_attention_heads * width * length
    assert cost.flops_per_token(type(model), model.config, "full", length) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt2", 124_439_808), ("gemma-2-2b", 2_614_341_888), ("gemma-2-9b", 9_241_705_984)]
)
def test_random_shapes_have_as_many_weights_as_the_published_models(name, parameters):
    config = cost.shape(f"random:{name}")
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    assert limits.configured_parameters(config, kind) == parameters


@pytest.mark.parametrize("method", ["full", "lora"])
def test_numbers_of_a_row_agree_with_each_other(method):
    row = cost.measure(ROW | {"method": method}, seconds=0.05)
    assert row["reason"] is None and row["seconds_per_step"]["n"] >= 1
    assert row["tokens_per_second"] == pytest.approx(2 * 32 / row["seconds_per_step"]["median"])
    rate = row["flops_per_token"] * row["tokens_per_second"]
    assert row["mfu"] == pytest.approx(rate / row["matmul_flops_per_second"])
    assert (row["trained_parameters"] == row["parameters"]) == (method == "full")
    assert row["peak_memory_bytes"] > 4 * row["parameters"]


def test_a_row_that_does_not_fit_or_cannot_run_has_a_reason(monkeypatch):
    refused = cost.measure(ROW | {"model": "tiny-gemma2", "attn": "sdpa"})
    assert list(refused) == ["reason"] and "attn is 'sdpa'" in refused["reason"]
    monkeypatch.setattr(limits, "available_bytes", lambda device="cpu": 0)
    large = cost.measure(ROW | {"model": "random:gemma-2-9b", "method": "lora", "dtype": "bfloat16"})
    assert "needs about 22" in large["reason"]


def killed_or_measured(row, seconds):
    """In place of `cost.measure` in the process of a row."""
    if row["batch_size"] == 1:
        os._exit(9)
    return cost.measure(row, seconds)


@pytest.mark.end_to_end
def test_a_row_whose_process_is_killed_is_stored_and_the_next_one_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(cost, "measure", killed_or_measured)
    output = tmp_path / "cost.json"
    arguments = f"cost --models tiny-gpt2 --batch-sizes 1,2 --lengths 8 --seconds 0.05 --device cpu --output {output}"
    monkeypatch.setattr(cost.sys, "argv", arguments.split())
    assert cost.main() == 0
    first, second = json.loads(output.read_text())["rows"]
    assert "killed" in first["reason"] and second["reason"] is None and second["tokens_per_second"] > 0
