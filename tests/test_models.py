"""`labkit.load`: registered names, folders, the hub, no network; the promises of the tiny models; refusals."""

from __future__ import annotations

import json
import shutil

import httpx
import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from transformers import BertConfig, T5Config

import labkit
from labkit import doctor
from labkit.decoder import limits
from labkit.errors import ModelError
from labkit.models import available
from labkit.models.registry import REGISTRY
from labkit.models.tiny import TINY_NAMES

IDS = torch.arange(3, 23).unsqueeze(0)


def logits(lm, ids=IDS):
    with torch.no_grad():
        return lm.model(ids).logits


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
    repo, commit = tmp_path / "hub" / "models--nobody--tiny", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return repo / "snapshots" / commit


# ---- tiny models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_tiny_model_is_the_same_every_time_and_in_eval_mode(tiny, name):
    torch.manual_seed(1)
    first, before = tiny(name), torch.get_rng_state()
    second = tiny(name, "eager")
    assert torch.equal(torch.get_rng_state(), before), "loading changed the global random state"
    assert not second.model.training
    torch.testing.assert_close(logits(first), logits(second), rtol=1e-4, atol=1e-4)
    rounded = labkit.load(name, device="cpu", dtype="bfloat16").model
    for exact, short in zip(first.model.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(exact.bfloat16(), short)


def test_the_tiny_tokenizer_keeps_any_text_pads_right_and_has_no_mask_token(tiny):
    tokenizer = tiny("tiny-llama").tokenizer
    for text in ["The cat sat on the mat", "  ünï 🎉\n\ttabs", "don't , stop .", "", "日本"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("The cat sat on the mat").input_ids) == 6, "common words are one token"
    batch = tokenizer(["The cat", "The"], padding=True)
    assert batch["attention_mask"] == [[1, 1], [1, 0]] and batch["input_ids"][1][1] == tokenizer.pad_token_id
    assert tokenizer.mask_token is None
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_the_list_agrees_with_the_models(tiny):
    rows = {row["name"]: row for row in available()}
    assert set(rows) == set(REGISTRY)
    for name in TINY_NAMES:
        lm = tiny(name)
        config = lm.model.config
        facts = sum(p.numel() for p in lm.model.parameters()), config.num_hidden_layers
        assert (rows[name]["parameters"], rows[name]["layers"], rows[name]["ready"]) == (*facts, True)
        assert rows[name]["window"] == getattr(config, "sliding_window", None)
        assert len(lm.tokenizer) == lm.model.get_input_embeddings().num_embeddings
        expected = "eager" if name == "tiny-gemma2" else "sdpa"  # Gemma 2's softcap is lost in sdpa
        assert config._attn_implementation == expected and ("eager" in lm.source) == (expected == "eager")
    assert rows["google/gemma-2-2b"]["origin"] == "hub google/gemma-2-2b"


# ---- folders and the hub ---------------------------------------------------------------------------------------------


def test_a_local_folder_loads_as_what_was_saved(folder, tiny):
    lm = labkit.load(folder, device="cpu")
    assert torch.equal(logits(lm), logits(tiny("tiny-gemma3")))
    assert lm.tokenizer("the cat").input_ids == tiny("tiny-gemma3").tokenizer("the cat").input_ids
    assert str(folder) in lm.source and lm.licence.startswith("not stated")
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# A model\n")
    lm.tokenizer.pad_token, lm.tokenizer.padding_side = None, "left"
    lm.tokenizer.save_pretrained(folder)
    lm = labkit.load(folder, device="cpu")
    assert (lm.tokenizer.pad_token, lm.tokenizer.padding_side) == (lm.tokenizer.eos_token, "right")
    assert "pads with its end-of-text token" in lm.source
    (folder / "tokenizer.json").unlink()
    lm = labkit.load(folder, task="base", device="cpu")
    assert lm.licence == "cc-by-4.0" and lm.tokenizer is None and not hasattr(lm.model, "lm_head")


def test_a_sharded_folder_loads_as_what_was_saved_and_a_lost_shard_is_named(tiny, tmp_path):
    tiny("tiny-llama").model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert torch.equal(logits(labkit.load(tmp_path, device="cpu")), logits(tiny("tiny-llama")))
    lost = sorted(tmp_path.glob("*.safetensors"))[-1]
    lost.unlink()
    with pytest.raises(ModelError, match=lost.name):
        labkit.load(tmp_path)


def test_a_model_in_the_hub_cache_loads_without_a_network_and_is_checked_first(
    hub_cache, tiny, no_network, monkeypatch
):
    lm = labkit.load("nobody/tiny", device="cpu")
    assert torch.equal(logits(lm), logits(tiny("tiny-gemma3")))
    assert "revision 0123456789ab" in lm.source
    (hub_cache / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="only part of it"):
        labkit.load("nobody/tiny")
    monkeypatch.setattr(limits, "available_bytes", lambda device="cpu": 1000)
    with pytest.raises(ModelError, match="nobody/tiny in float32.* needs about.*bfloat16"):
        labkit.load("nobody/tiny")


def _response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/api/models/google/gemma-2-2b"))


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (errors.GatedRepoError("gated", response=_response(403)), "accept its licence at .*gemma-2-2b"),
        (errors.RepositoryNotFoundError("?", response=_response(404)), "check the spelling"),
        (httpx.ReadTimeout("slow"), "cannot be reached.*local-dir.*gemma3-270m"),
    ],
)
def test_each_refusal_of_the_hub_is_explained(monkeypatch, raised, words):
    def refuse(*_, **__):
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=words):
        labkit.load("google/gemma-2-2b")


@pytest.mark.parametrize("name", ["tiny-gpt2", "gpt2-mini", "small", "folder"])
def test_what_is_promised_offline_tries_no_connection(name, small_card, folder, no_network, monkeypatch):
    """Without HF_HUB_OFFLINE, so that the libraries would reach out if they were asked to."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    lm = labkit.load(folder if name == "folder" else name, device="cpu")
    assert lm.model(**lm.tokenizer("the cat", return_tensors="pt")).logits.isfinite().all()
    assert available() and doctor.diagnose()
    assert no_network == []


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tiny-gpt2", {"attn": "flex_attention"}, "flex_attention.*choose one of eager, sdpa"),
        ("tiny-gpt2", {"dtype": "int8"}, "dtype is 'int8'.*float32, bfloat16"),
        ("tiny-gpt2", {"task": "poetry"}, "task is 'poetry'.*token-classification.*ner"),
        ("gemma3-270", {}, "'gemma3-270'.*did you mean.*gemma3-270m"),
    ],
)
def test_a_wrong_argument_is_named_with_the_right_ones(name, options, message):
    with pytest.raises(ModelError, match=message):
        labkit.load(name, **options)


def _change(file, **changes):
    def damage(folder):
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
        (folder / "evil.py").write_text("raise SystemExit('the code was run')")

    return damage


def _cut(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])


def _lose_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose_a_weight, r"lacks 1 weights.*layers\.1\.self_attn\.q_proj"),
        (_cut, "cannot be read"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pickled"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (_change("config.json", model_type="never-heard-of"), "never-heard-of"),
        (_change("config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"}), "code of its own"),
        (_change("config.json", labkit_attention={"window": "keep"}), "cannot be read"),
        (_change("tokenizer.json", model=None), "the tokenizer of .* cannot be read"),
        (lambda folder: BertConfig().save_pretrained(folder), "bert.*takes decoders"),
        (lambda folder: T5Config().save_pretrained(folder), "t5.*takes decoders"),
    ],
)
def test_an_unusable_folder_is_refused_and_no_code_is_run(folder, damage, message):
    damage(folder)
    with pytest.raises(ModelError, match=message):
        labkit.load(folder)


# ---- real weights ----------------------------------------------------------------------------------------------------


@pytest.mark.gemma
def test_the_real_models_are_those_of_their_cards_and_predict_a_capital(gemma, smollm):
    for lm, text in ((gemma, "The Eiffel Tower is located in the city of"), (smollm, "The capital of France is")):
        card, model = REGISTRY[lm.name], lm.model
        assert model.dtype == torch.bfloat16 and "quantised" in lm.source and "not bit-equal" in lm.source
        assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        assert card.parameters == sum(p.numel() for p in model.parameters())
        assert card.layers == model.config.num_hidden_layers
        assert card.window == getattr(model.config, "sliding_window", None)
        ids = lm.tokenizer(text, return_tensors="pt")
        assert "Paris" in lm.tokenizer.decode(model.generate(**ids, max_new_tokens=2, do_sample=False)[0])
    assert "GEMMA_TERMS.html" in gemma.licence
