"""The checkpoint that labkit ships: it is the file of its card, it loads, and it has learned something."""

import json
import math
import re
import shutil

import pytest
import torch

import labkit
from labkit import resources
from labkit.datasets.catalogue import card_faults
from labkit.errors import ModelError
from labkit.pretraining import bits_per_byte, sample

FOLDER = resources.folder("data") / "checkpoints" / "gpt2-mini"
VAL_LINES = """GREMIO:
Good morrow, neighbour Baptista.

BAPTISTA:
Good morrow, neighbour Gremio.
God save you, gentlemen!

PETRUCHIO:
And you, good sir! Pray, have you not a daughter
Call'd Katharina, fair and virtuous?

BAPTISTA:
I have a daughter, sir, called Katharina.

GREMIO:
You are too blunt: go to it orderly.

PETRUCHIO:
You wrong me, Signior Gremio: give me leave.
I am a gentleman of Verona, sir,
That, hearing of her beauty and her wit,
Her affability and bashful modesty,
Her wondrous qualities and mild behavior,
Am bold to show myself a forward guest
"""  # Shakespeare, from the part of the text that was held out


@pytest.fixture(scope="module")
def mini():
    return labkit.load("gpt2-mini", device="cpu")


def test_the_files_are_those_of_the_card_and_small_enough_to_ship():
    assert card_faults(FOLDER) == []
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 25e6
    assert sum(p.numel() for p in labkit.load("gpt2-mini").model.parameters()) == 5_918_720


def test_an_altered_checkpoint_is_refused_by_name(tmp_path, monkeypatch):
    copy = tmp_path / "data" / "checkpoints" / "gpt2-mini"
    shutil.copytree(FOLDER, copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"\x01")
    monkeypatch.setattr(resources, "folder", lambda name: tmp_path / name)
    with pytest.raises(ModelError, match="model.safetensors"):
        labkit.load("gpt2-mini")


def test_the_card_says_what_was_trained_on_how_and_how_good_it_is():
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("public domain", "labkit pretrain", "steps", "bits per byte", "seed"))
    shakespeare = float(re.search(r"input.txt \| ([\d.]+)", card)[1])
    assert shakespeare < 1.88 / math.log(2)  # nanoGPT's CPU preset on the same bytes


def test_it_is_in_float32_by_default_and_has_tokens_of_its_own_for_end_pad_and_mask(mini):
    assert mini.model.dtype == torch.float32
    t = mini.tokenizer
    assert (t.eos_token_id, t.pad_token_id, t.mask_token_id) == (0, 1, 2)
    text = 'Naïve "quotes", tabs\tand 日本 come back.'
    assert t.decode(t(text)["input_ids"]) == text
    assert len(t) <= mini.model.config.vocab_size == 4096


def test_it_says_held_out_shakespeare_in_fewer_bits_than_nanogpts_cpu_preset(mini):
    with torch.no_grad():
        assert bits_per_byte(mini.model, mini.tokenizer, VAL_LINES) < 1.88 / math.log(2)


def test_it_writes_words_that_are_in_its_books(mini):
    text = sample(mini.model, mini.tokenizer, "The captain", tokens=60)
    words = re.findall(r"[a-z]+", text.lower())
    known = set(re.findall(r"[a-z]+", json.dumps(mini.tokenizer.get_vocab()).lower()))
    assert len(words) >= 20 and sum(word in known for word in words) / len(words) > 0.6
