"""The checkpoint that labkit ships: it is the file of its card, it loads, and it has learned something."""

import json
import math
import re
import shutil

import pytest
import torch
from torch.nn import functional as F

import labkit
from labkit import files
from labkit.datasets.embedded import card_faults, passages
from labkit.errors import ModelError
from labkit.gpt import GPT
from labkit.pretrain import bits_per_byte, sample
from labkit.tasks.lm import cut_into_rows, fill_in_scores

pytestmark = pytest.mark.end_to_end

FOLDER = files.folder("data") / "checkpoints" / "gpt2-mini"
SHAKESPEARE = """I have a daughter, sir, called Katharina.

GREMIO:
You are too blunt: go to it orderly.

PETRUCHIO:
You wrong me, Signior Gremio: give me leave.
I am a gentleman of Verona, sir,
That, hearing of her beauty and her wit,
Her affability and bashful modesty,
Her wondrous qualities and mild behavior,
Am bold to show myself a forward guest
"""  # from the part of the text that was held out


@pytest.fixture(scope="module")
def mini():
    return labkit.load("gpt2-mini", device="cpu")


def test_the_files_are_those_of_the_card_and_an_altered_one_is_refused_by_name(tmp_path, monkeypatch):
    assert card_faults(FOLDER) == []
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 25e6
    copy = tmp_path / "data" / "checkpoints" / "gpt2-mini"
    shutil.copytree(FOLDER, copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"\x01")
    monkeypatch.setattr(files, "folder", lambda name: tmp_path / name)
    with pytest.raises(ModelError, match="model.safetensors"):
        labkit.load("gpt2-mini")


def test_it_is_in_float32_by_default_and_has_tokens_of_its_own_for_end_pad_and_mask(mini):
    assert mini.model.dtype == torch.float32 and mini.model.num_parameters() == 5_918_720
    t = mini.tokenizer
    assert (t.eos_token_id, t.pad_token_id, t.mask_token_id) == (0, 1, 2)
    text = 'Naïve "quotes", tabs\tand 日本 come back.'
    assert t.decode(t(text)["input_ids"]) == text
    assert len(t) <= mini.model.config.vocab_size == 4096


def test_it_predicts_held_out_shakespeare_better_than_nanogpts_character_model_and_writes_words(mini):
    with torch.no_grad():
        assert bits_per_byte(mini.model, mini.tokenizer, SHAKESPEARE) < 1.4697 / math.log(2)
    words = re.findall(r"[a-z]+", sample(mini.model, mini.tokenizer, "The captain", tokens=60).lower())
    known = set(re.findall(r"[a-z]+", json.dumps(mini.tokenizer.get_vocab()).lower()))
    assert len(words) >= 20 and sum(word in known for word in words) / len(words) > 0.6


def test_some_head_looks_at_the_previous_token_and_some_at_what_came_after_the_last_time(mini):
    g = GPT.from_transformers(mini.model)
    length = 64
    half = torch.randint(3, 4096, (8, length), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([half, half], dim=1)
    weights = g.attentions(ids)  # (layer, batch, head, query, key)
    query = torch.arange(1, 2 * length)
    previous = weights[..., query, query - 1].mean((1, 3))  # (layer, head)
    query = torch.arange(length, 2 * length - 1)
    induction = weights[..., query, query - length + 1].mean((1, 3))
    assert previous.max() >= 0.5, previous
    assert induction.max() >= 0.3, induction
    with torch.no_grad():
        costs = F.cross_entropy(g(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    assert costs[:, length:].mean() < costs[:, : length - 1].mean() - 1  # and it uses them


def test_unmasking_it_makes_filling_in_worse_until_it_is_trained(mini):
    lm = labkit.load("gpt2-mini", device="cpu")
    rows = cut_into_rows(lm.tokenizer, [passage.text for passage in passages("dev")], 64)
    causal = fill_in_scores(lm.model, lm.tokenizer, rows, reads="before", positions=60)
    labkit.to_bidirectional(lm.model)
    unmasked = fill_in_scores(lm.model, lm.tokenizer, rows, reads="before", positions=60)
    assert causal.accuracy > 0.02
    assert sum(unmasked.nats) > sum(causal.nats)
