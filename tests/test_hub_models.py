"""Folders and the hub: one route; every way a hub can refuse, each told apart."""

from __future__ import annotations

import json
import shutil

import httpx
import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import errors
from transformers import BertConfig, T5Config

import labkit
from labkit.decoder import limits as memory
from labkit.errors import (
    GatedModelError,
    HubUnreachableError,
    ModelError,
    NotEnoughMemoryError,
    UnknownModelError,
    UnsupportedModelError,
)


@pytest.fixture
def folder(tiny, tmp_path):
    """A model folder as save_pretrained writes it."""
    lm = tiny("tiny-gemma3")
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def hub_cache(folder, tmp_path, monkeypatch):
    """The same model in the hub's own cache, as nobody/tiny, without a network."""
    repo = tmp_path / "hub" / "models--nobody--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return repo / "snapshots" / commit


def logits(lm):
    with torch.no_grad():
        return lm.model(torch.arange(3, 23).unsqueeze(0)).logits


def test_a_local_folder_loads_as_what_was_saved(folder, tiny):
    lm = labkit.load(folder, device="cpu")
    assert torch.equal(logits(lm), logits(tiny("tiny-gemma3")))
    assert lm.tokenizer("the cat").input_ids == tiny("tiny-gemma3").tokenizer("the cat").input_ids
    assert str(folder) in lm.source
    assert lm.licence.startswith("not stated")


def test_a_sharded_folder_loads_as_what_was_saved(tiny, tmp_path):
    tiny("tiny-llama").model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    lm = labkit.load(tmp_path, device="cpu")
    assert torch.equal(logits(lm), logits(tiny("tiny-llama")))


def test_a_lost_shard_is_named(tiny, tmp_path):
    tiny("tiny-llama").model.save_pretrained(tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[-1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of .* {lost.name}"):
        labkit.load(tmp_path)


def test_a_folder_without_a_tokenizer_loads_and_says_so(folder):
    (folder / "tokenizer.json").unlink()
    lm = labkit.load(folder, device="cpu")
    assert lm.tokenizer is None
    assert "without a tokenizer" in lm.source


def test_a_tokenizer_without_a_pad_token_pads_with_eos_on_the_right_and_says_so(folder, tiny):
    tokenizer = tiny("tiny-gemma3").tokenizer
    tokenizer.pad_token = None
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    lm = labkit.load(folder, device="cpu")
    assert (lm.tokenizer.pad_token, lm.tokenizer.padding_side) == (lm.tokenizer.eos_token, "right")
    assert "pads with its end-of-text token" in lm.source


def test_a_new_head_is_called_untrained(folder, tiny, tmp_path):
    tiny("tiny-gpt2").model.save_pretrained(tmp_path / "gpt2")
    assert "untrained" in labkit.load(tmp_path / "gpt2", task="question-answering", device="cpu").source


def test_a_missing_weight_of_the_body_is_an_error_not_a_random_layer(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    lost = weights.pop("model.layers.1.self_attn.q_proj.weight")
    assert lost.numel()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.1\.self_attn\.q_proj"):
        labkit.load(folder)


def test_a_truncated_safetensors_file_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="model.safetensors is not a complete"):
        labkit.load(folder)


def test_weights_cut_short_behind_an_intact_header_are_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="model.safetensors is not a complete"):
        labkit.load(folder)


def test_pickled_weights_are_never_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights.*safetensors only"):
        labkit.load(folder)


def test_code_that_comes_with_a_model_is_never_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(UnsupportedModelError, match="code of its own, which labkit never runs"):
        labkit.load(folder)


@pytest.mark.parametrize(
    ("config", "why"), [(BertConfig(), "bert.*not a decoder"), (T5Config(), "t5.*encoder-decoder")]
)
def test_what_is_no_decoder_is_refused_by_its_family(tmp_path, config, why):
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=why):
        labkit.load(tmp_path)


def test_an_unknown_family_and_a_folder_without_a_model_are_told_apart(folder, tmp_path):
    (folder / "config.json").write_text('{"model_type": "never-heard-of"}')
    with pytest.raises(UnsupportedModelError, match="never-heard-of"):
        labkit.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="no config.json"):
        labkit.load(folder)


def test_the_licence_is_read_from_the_folders_own_card(folder):
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# A model\n")
    assert labkit.load(folder, device="cpu").licence == "cc-by-4.0"


def test_a_model_in_the_hub_cache_loads_without_a_network(hub_cache, tiny, no_network):
    lm = labkit.load("nobody/tiny", device="cpu")
    assert torch.equal(logits(lm), logits(tiny("tiny-gemma3")))
    assert "revision 0123456789ab" in lm.source


def test_half_a_model_in_the_hub_cache_is_not_taken_for_a_whole_one(hub_cache):
    (hub_cache / "model.safetensors").unlink()
    with pytest.raises(HubUnreachableError, match="only part of it"):
        labkit.load("nobody/tiny")


def test_without_a_network_a_hub_model_points_to_folders_and_to_models_that_work_offline(dead_network):
    with pytest.raises(HubUnreachableError, match="gemma-3-4b-it.*local-dir.*gemma3-270m"):
        labkit.load("google/gemma-3-4b-it")
    assert dead_network, "it never tried"


def _response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/api/models/google/gemma-2-2b"))


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        (
            errors.GatedRepoError("gated", response=_response(403)),
            GatedModelError,
            "accept its licence at .*gemma-2-2b",
        ),
        (errors.HfHubHTTPError("no", response=_response(401)), GatedModelError, "HTTP 401.*hf auth login"),
        (errors.HfHubHTTPError("no", response=_response(403)), GatedModelError, "HTTP 403.*accept its licence"),
        (errors.HfHubHTTPError("oops", response=_response(503)), HubUnreachableError, "HTTP 503"),
        (
            errors.RepositoryNotFoundError("?", response=_response(404)),
            UnknownModelError,
            "no model.*check the spelling",
        ),
        (errors.LocalEntryNotFoundError("offline"), HubUnreachableError, "cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), HubUnreachableError, "cannot be reached"),
        (httpx.ConnectError("refused"), HubUnreachableError, "cannot be reached"),
        (httpx.ReadTimeout("slow"), HubUnreachableError, "cannot be reached"),
        (TimeoutError("slow"), HubUnreachableError, "cannot be reached"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_refusal_of_the_hub_is_told_apart_and_says_what_to_do(monkeypatch, raised, expected, words):
    def refuse(*_, **__):
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(expected, match=words) as caught:
        labkit.load("google/gemma-2-2b")
    assert caught.value.__cause__ is raised or caught.value.__cause__.__cause__ is raised


def test_a_bug_is_not_taken_for_a_missing_network(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(ZeroDivisionError):
        labkit.load("google/gemma-2-2b")


def test_a_hub_model_too_large_for_the_memory_is_refused_before_its_weights_are_fetched(hub_cache, monkeypatch):
    (hub_cache / "model.safetensors").unlink()  # would be an error of its own if it came to fetching
    monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": 1000)
    with pytest.raises(NotEnoughMemoryError, match="nobody/tiny in float32"):
        labkit.load("nobody/tiny")
