"""The checkpoint that labkit ships: it is the file of its card, it loads, and it has learned something."""

import math
import shutil

import pytest
import torch

import labkit
from labkit import files
from labkit.datasets.embedded import card_faults
from labkit.errors import ModelError
from labkit.pretrain import bits_per_byte

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


def test_it_predicts_held_out_shakespeare_better_than_nanogpts_character_model(mini):
    with torch.no_grad():
        assert bits_per_byte(mini.model, mini.tokenizer, SHAKESPEARE) < 1.4697 / math.log(2)
