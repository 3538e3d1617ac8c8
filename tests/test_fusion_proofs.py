"""The proofs hold for the engines and fail for each of the six faults."""

import pytest
import torch

import labkit
from labkit.errors import FusionError
from labkit.fusion import faults
from labkit.fusion.proofs import TOLERANCE, prove
from labkit.fusion.reference import ReferenceEngine

NAMES = ("tiny-gpt2", "tiny-llama", "tiny-gemma2", "tiny-gemma3")


def reference(rendering):
    return lambda model, prompts: ReferenceEngine(model, prompts, rendering=rendering)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_proofs_hold_for_the_fast_engine(name, dtype):
    found = prove(labkit.load(name, dtype=dtype))
    assert found.holds, str(found)
    assert len(found.proofs) == 8
    if name == "tiny-gemma2":  # eager, whose softmax is in single precision
        return
    agree = [proof.value for proof in found.proofs if proof.name in ("copies are one", "order does not matter")]
    assert max(agree) <= TOLERANCE[getattr(torch, dtype)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attn", ["eager", None])
def test_all_proofs_hold_for_the_dense_reference(name, attn):
    found = prove(labkit.load(name, attn=attn), reference("dense"))
    assert found.holds, str(found)


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_all_proofs_hold_for_the_flex_reference(name):
    found = prove(labkit.load(name), reference("flex"))
    assert found.holds, str(found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", faults.ALL, ids=lambda fault: fault.name)
def test_each_fault_fails_the_proof_that_is_to_catch_it(name, fault):
    found = prove(labkit.load(name), fault.engine)
    assert fault.caught_by in found.failed
    assert "FAILS" in str(found)


def test_there_are_six_faults_and_each_tells_its_story():
    assert len({fault.name for fault in faults.ALL}) == 6
    assert all(len(fault.story) > 30 for fault in faults.ALL)


def test_a_model_that_is_changed_for_good_is_found():
    class Leaving(ReferenceEngine):
        def start(self):
            self.model.lm_head.register_forward_hook(lambda *args: None)
            return super().start()

    lm = labkit.load("tiny-llama")
    found = prove(lm, lambda model, prompts: Leaving(model, prompts, rendering="dense"))
    assert found.failed == ["the model is left as it was"]


def test_proofs_need_two_paraphrases():
    with pytest.raises(FusionError, match="at least two paraphrases"):
        prove(labkit.load("tiny-llama"), paraphrases=["the cat sat"])


@pytest.mark.gemma
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_all_proofs_hold_on_real_models_in_single_precision(name):
    found = prove(labkit.load(name, dtype="float32", device="cpu"))
    assert found.holds, str(found)


@pytest.mark.slow
@pytest.mark.gemma
def test_all_proofs_hold_beyond_gemmas_window():
    lm = labkit.load("gemma3-270m", dtype="float32", device="cpu")
    text = "the river of the old town " * 90
    assert len(lm.tokenizer(text)["input_ids"]) > lm.model.config.sliding_window
    found = prove(lm, paraphrases=[text + " begins where?", text + " has its source in which land?"])
    assert found.holds, str(found)
