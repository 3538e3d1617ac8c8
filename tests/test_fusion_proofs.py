"""The proofs hold for the engines and fail for each of the six faults."""

import functools

import pytest
import torch

import labkit
from labkit import fusion
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


@pytest.mark.matrix
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


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", faults.ALL, ids=lambda fault: fault.name)
def test_each_fault_fails_the_proof_that_is_to_catch_it(name, fault):
    found = prove(labkit.load(name), fault.engine)
    assert fault.caught_by in found.failed
    assert "FAILS" in str(found) and len(found.proofs) == 8


def test_a_model_that_is_changed_for_good_is_found():
    class Leaving(ReferenceEngine):
        def start(self):
            self.model.lm_head.register_forward_hook(lambda *args: None)
            return super().start()

    lm = labkit.load("tiny-llama")
    found = prove(lm, lambda model, prompts: Leaving(model, prompts, rendering="dense"))
    assert found.failed == ["the model is left as it was"]


def _patch_class(model):
    kind = type(model.model.layers[0].self_attn)
    kind.forward = functools.wraps(kind.forward)(
        lambda self, *args, before=kind.forward, **more: before(self, *args, **more)
    )


LEFT = {
    "a method of its own": lambda model: setattr(model, "generate", lambda *args: None),
    "a setting": lambda model: setattr(model.config, "use_cache", False),
    "a setting of writing": lambda model: setattr(model.generation_config, "num_beams", 3),
    "the class's forward": _patch_class,
    "a weight": lambda model: model.lm_head.weight.data.mul_(1.001),
    "a hook on an attention module": lambda model: model.model.layers[1].self_attn.register_forward_hook(
        lambda *a: None
    ),
}


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_whatever_an_engine_leaves_behind_is_found(leave, monkeypatch):
    lm = labkit.load("tiny-llama")
    kind = type(lm.model.model.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", kind.forward)  # put back at the end
    done = []

    class Leaving(ReferenceEngine):
        def step(self, tokens):
            if not done:
                done.append(leave(self.model))
            return super().step(tokens)

    found = prove(lm, lambda model, prompts: Leaving(model, prompts, rendering="dense"))
    assert "the model is left as it was" in found.failed


def test_one_token_that_is_read_again_at_any_step_is_found():
    class Forgetful(ReferenceEngine):
        steps = 0

        def step(self, tokens):
            Forgetful.steps += 1
            if Forgetful.steps == 1:
                self.model(torch.tensor([[1, 2]]))
            return super().step(tokens)

    found = prove(labkit.load("tiny-llama"), lambda model, prompts: Forgetful(model, prompts, rendering="dense"))
    assert found.failed == ["what has been read is not read again"]


def test_isolation_is_measured_for_an_engine_that_keeps_nothing():
    found = prove(labkit.load("tiny-llama"), faults.ALL[4].engine)
    assert found.failed == ["what has been read is not read again"]
    (isolation,) = [proof for proof in found.proofs if proof.name == "no paraphrase sees another"]
    assert isolation.holds and isolation.value == 0


def test_in_half_precision_it_is_no_proof():
    assert not prove(labkit.load("tiny-llama", dtype="bfloat16")).strict
    assert prove(labkit.load("tiny-llama")).strict


def test_proofs_need_two_paraphrases():
    with pytest.raises(FusionError, match="at least two paraphrases"):
        prove(labkit.load("tiny-llama"), paraphrases=["the cat sat"])


@pytest.mark.gemma
@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])  # notebook 11
def test_all_proofs_hold_on_real_models_in_single_precision(name):
    found = prove(labkit.load(name, dtype="float32", device="cpu"))
    assert found.holds, str(found)


@pytest.mark.gemma
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_engines_agree_on_real_models_in_single_precision(name):
    lm = labkit.load(name, dtype="float32", device="cpu")
    asked = [["Which city is the capital of France?", "France's capital is which city?", "Name the capital of France."]]
    settings = {"prefix": "Answer in one word.\n", "cue": "Answer:", "max_new_tokens": 3}
    fast, dense, flex = (
        fusion.generate(lm, asked, "fuse", engine, **settings) for engine in ("fast", "dense", "reference")
    )
    for other in (dense, flex):
        gap = (fast.first_logits - other.first_logits).abs().max() / other.first_logits.abs().max()
        assert float(gap) <= TOLERANCE[torch.float32]
        assert fast.tokens == other.tokens and fast.log_probs == pytest.approx(other.log_probs, abs=1e-3)


@pytest.mark.slow
@pytest.mark.gemma
def test_all_proofs_hold_beyond_gemmas_window():
    lm = labkit.load("gemma3-270m", dtype="float32", device="cpu")
    text = "the river of the old town " * 90
    assert len(lm.tokenizer(text)["input_ids"]) > lm.model.config.sliding_window
    found = prove(lm, paraphrases=[text + " begins where?", text + " has its source in which land?"])
    assert found.holds, str(found)
