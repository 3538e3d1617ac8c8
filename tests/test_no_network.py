"""Everything that is promised offline works with the network cut: `no_network` fails a test that so much as tries."""

from __future__ import annotations

import pytest

import labkit
from labkit import doctor, models
from labkit.models.tiny import TINY_NAMES

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture(autouse=True)
def not_told_that_it_is_offline(monkeypatch):
    """Without HF_HUB_OFFLINE, so that the libraries would reach out if they were asked to."""
    import huggingface_hub.constants  # a name of huggingface_hub only once it has been imported

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_tiny_models_load_without_a_network(name):
    lm = labkit.load(name, device="cpu")
    assert lm.model(**lm.tokenizer("The cat sat", return_tensors="pt")).logits.isfinite().all()


def test_an_embedded_model_is_converted_and_loaded_without_a_network(small_card):
    assert labkit.load("small", device="cpu").model is not None


def test_a_local_folder_loads_without_a_network(tiny, tmp_path):
    lm = tiny("tiny-gemma3")
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    assert labkit.load(tmp_path, device="cpu").tokenizer is not None


def test_the_list_of_models_and_the_doctor_need_no_network(own_cache):
    assert models.available()
    assert doctor.diagnose()


@pytest.mark.gemma
@pytest.mark.parametrize("name", ["gemma3-270m", "smollm2-135m"])
def test_real_weights_load_without_a_network(name):
    from tests.model_fixtures import load_or_skip

    assert load_or_skip(name).model is not None
