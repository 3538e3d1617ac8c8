"""The proofs hold for the engines and fail for each of the six faults."""

import pytest
import torch

import labkit
from labkit import fusion
from labkit.errors import DataError
from labkit.fusion.generation import make_engine
from labkit.fusion.proofs import FAULTS, TOLERANCE, prove
from labkit.fusion.reference import ReferenceEngine

NAMES = ("tiny-gpt2", "tiny-llama", "tiny-gemma2", "tiny-gemma3")


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("engine", "settings"),
    [("fast", {}), ("fast", {"dtype": "float64"}), ("dense", {}), ("dense", {"attn": "eager"}), ("reference", {})],
)
def test_all_proofs_hold_for_all_engines(name, engine, settings):
    proofs = prove(labkit.load(name, **settings), lambda *read: make_engine(engine, *read))
    assert proofs.holds and proofs.strict and len(proofs.proofs) == 8, str(proofs)


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_fails_the_proof_that_is_to_catch_it(name, fault):
    proofs = prove(labkit.load(name), fault.engine)
    assert fault.caught_by in proofs.failed and len(proofs.proofs) == 8
    if fault.name == "no cache":
        assert proofs.failed == [fault.caught_by], "isolation is measured for an engine without a cache too"


LEFT_BEHIND = {
    "a method of its own": lambda model: setattr(model, "generate", lambda *args: None),
    "a setting": lambda model: setattr(model.config, "use_cache", False),
    "a generation setting": lambda model: setattr(model.generation_config, "num_beams", 3),
    "a weight": lambda model: model.lm_head.weight.data.mul_(1.001),
    "a hook": lambda model: model.model.layers[1].self_attn.register_forward_hook(lambda *args: None),
}


@pytest.mark.parametrize("leave", LEFT_BEHIND.values(), ids=LEFT_BEHIND)
def test_what_an_engine_leaves_behind_is_detected(leave):
    class Leaving(ReferenceEngine):
        def step(self, tokens):
            leave(self.model)
            return super().step(tokens)

    proofs = prove(labkit.load("tiny-llama"), lambda *read: Leaving(*read, rendering="dense"))
    assert "the model is left as it was" in proofs.failed


def test_in_half_precision_it_is_no_proof_and_one_paraphrase_is_not_enough():
    assert not prove(labkit.load("tiny-llama", dtype="bfloat16")).strict
    with pytest.raises(DataError, match="at least two paraphrases"):
        prove(labkit.load("tiny-llama"), paraphrases=["the cat sat"])


@pytest.mark.gemma
@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])  # notebook 11
def test_all_proofs_hold_on_real_models_in_single_precision(name):
    proofs = prove(labkit.load(name, dtype="float32", device="cpu"))
    assert proofs.holds, str(proofs)


@pytest.mark.gemma
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_engines_agree_on_real_models_in_single_precision(name):
    lm = labkit.load(name, dtype="float32", device="cpu")
    asked = [["Which city is the capital of France?", "France's capital is which city?", "Name the capital of France."]]
    settings = {"prefix": "Answer in one word.\n", "cue": "Answer:", "max_new_tokens": 3}
    fast, *others = (
        fusion.generate(lm, asked, "fuse", engine, **settings) for engine in ("fast", "dense", "reference")
    )
    for other in others:
        gap = (fast.first_logits - other.first_logits).abs().max() / other.first_logits.abs().max()
        assert float(gap) <= TOLERANCE[torch.float32]
        assert fast.tokens == other.tokens and fast.log_probs == pytest.approx(other.log_probs, abs=1e-3)


@pytest.mark.slow
@pytest.mark.gemma
def test_all_proofs_hold_beyond_gemmas_window():
    lm = labkit.load("gemma3-270m", dtype="float32", device="cpu")
    text = "the river of the old town " * 90
    assert len(lm.tokenizer(text)["input_ids"]) > lm.model.config.sliding_window
    proofs = prove(lm, paraphrases=[text + " begins where?", text + " has its source in which land?"])
    assert proofs.holds, str(proofs)
