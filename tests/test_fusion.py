"""Paraphrase fusion on tiny models: the methods against plain prompts, and the engines against each other."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit import fusion
from labkit.errors import DataError, ModelError
from labkit.fusion import engine as engines
from labkit.fusion.layout import Segment, prompts, token_ids
from labkit.fusion.methods import METHODS
from labkit.fusion.proofs import _state

NAMES = ("tiny-gpt2", "tiny-llama", "tiny-gemma2", "tiny-gemma3")
EXACT = ("tiny-gpt2", "tiny-llama", "tiny-gemma3")  # Gemma 2 is eager, whose softmax is in single precision
PREFIX = "the token of the model is past. the word: and the mask of it is that you can not see. "
QUESTIONS = [
    ["the capital of France is the city that you all know", "Paris was the city"],
    ["money on the bank of river"],
    ["the cat sat", "the mat sat on one", "look at the past and the future"],
]
WEIGHTS = [[2.0, 1.0], [1.0], [1.0, 2.0, 3.0]]
TOLERANCE = 2e-5


def answered(lm, method="fuse", engine="fast", questions=QUESTIONS, **settings):
    given = {"weights": WEIGHTS[: len(questions)]} if method == "weighted" else {}
    given |= {"prefix": PREFIX, "cue": "word:", "max_new_tokens": 5} | settings
    return fusion.generate(lm, questions, method, engine, **given)


def gap(one, other):
    return float((one - other).abs().max() / other.abs().max())


def plain(lm, *pieces):
    """The model's own logits after these pieces of text, each tokenised alone."""
    ids = lm.tokenizer("")["input_ids"][:1] + [
        token
        for piece in (PREFIX, *pieces, "word:")
        for token in lm.tokenizer(piece, add_special_tokens=False)["input_ids"]
    ]
    with torch.no_grad():
        return lm.model(torch.tensor([ids])).logits[:, -1]


# ---- engines -------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", fusion.METHODS)
def test_all_engines_agree_and_the_result_names_the_engine(name, method):
    lm = labkit.load(name)
    before, dense = _state(lm.model), answered(lm, method, "dense")
    others = {"fast": "fast", "cacheless": "reference (dense, without cache)", "reference": "reference (flex)"}
    for engine, reported in others.items() if method == "fuse" else list(others.items())[:2]:
        other = answered(lm, method, engine)
        assert gap(other.first_logits, dense.first_logits) < TOLERANCE
        assert other.tokens == dense.tokens and other.engine == reported
    assert dense.engine == "reference (dense)" and dense.first_logits.shape == (3, lm.model.config.vocab_size)
    assert _state(lm.model) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2"])
def test_the_compiled_flex_reference_agrees(name):
    lm = labkit.load(name, device="cuda")
    flex, fast = answered(lm, engine="reference"), answered(lm)
    assert gap(flex.first_logits, fast.first_logits) < TOLERANCE and flex.tokens == fast.tokens
    assert flex.engine == "reference (flex, compiled)"


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", fusion.METHODS)
def test_a_batch_is_its_questions_one_by_one(name, method):
    lm = labkit.load(name)
    together = answered(lm, method)
    apart = []
    in_batches = answered(lm, method, batch_size=1, on_batch=apart.append)
    for result in (in_batches, *apart):
        assert result.engine == together.engine and result.method == method
    assert in_batches.tokens == together.tokens == [tokens for result in apart for tokens in result.tokens]
    assert gap(in_batches.first_logits, together.first_logits) < TOLERANCE
    assert in_batches.votes == together.votes


def test_segments_read_in_several_forward_passes_are_those_of_one(monkeypatch):
    lm = labkit.load("tiny-gemma3", dtype="float64")
    one = answered(lm)
    monkeypatch.setitem(engines.TOKENS_AT_ONCE, "cpu", 40)
    assert gap(answered(lm).first_logits, one.first_logits) < 1e-10


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), begin=st.integers(0, 50), tokens=st.integers(1, 400)
)
def test_packed_rows_contain_every_segment_once_and_no_more_than_fits(lengths, begin, tokens):
    placed = [(Segment(tuple(range(length)), 0), place) for place, length in enumerate(lengths)]
    batches = list(engines.packed(placed, begin, tokens))
    assert sorted((pair for batch in batches for row in batch for pair in row), key=lambda pair: pair[1]) == placed
    for batch in batches:
        rows = [sum(len(segment.ids) for segment, _ in row) for row in batch]
        assert max(rows) == max(len(segment.ids) for row in batch for segment, _ in row)
        assert len(batch) == 1 or len(batch) * (begin + max(rows)) <= tokens


@pytest.mark.parametrize("name", EXACT)
def test_segments_that_share_a_row_are_what_they_are_alone(name):
    lm = labkit.load(name, dtype="float64")
    words = "one two three four five six seven eight nine ten".split()
    texts = [" ".join(words[:count]) for count in (10, 7, 3, 2, 1)]
    begin, (ids,), cue = token_ids(lm.tokenizer, [texts], PREFIX, "word:", "\n")
    segments = prompts(METHODS["fuse"], begin, [ids], cue).rows[0].segments
    (batch,) = engines.packed([(segment, 0) for segment in segments], len(begin), 8192)
    assert len(batch) < len(texts), "or the test shows nothing"
    fast, dense = (answered(lm, "fuse", engine, [texts]) for engine in ("fast", "dense"))
    assert gap(fast.first_logits, dense.first_logits) < 1e-10


@pytest.mark.parametrize("name", EXACT)
def test_a_prefix_read_once_is_the_prefix_read_with_each_paraphrase(name):
    lm = labkit.load(name, dtype="float64")
    begin, (ids,), cue = token_ids(lm.tokenizer, [QUESTIONS[2]], PREFIX, "word:", "\n")
    for method in (METHODS["fuse"], METHODS["logit-average"]):
        shared = engines.FastEngine(lm.model, prompts(method, begin, [ids], cue))
        repeated = engines.FastEngine(lm.model, prompts(method, (), [[begin + segment for segment in ids]], cue))
        assert gap(shared.start(), repeated.start()) < 1e-10


@pytest.mark.parametrize("method", ["isolate", "fuse"])
def test_a_long_paraphrase_beside_a_short_one_needs_no_more_positions_than_its_own(method):
    lm = labkit.load("tiny-gpt2")  # 1,024 learned positions
    questions = [["the word of it " * 180, "the cat sat"]]
    fast, dense = (answered(lm, method, engine, questions, prefix="") for engine in ("fast", "dense"))
    assert gap(fast.first_logits, dense.first_logits) < TOLERANCE and fast.tokens == dense.tokens


@pytest.mark.parametrize("engine", ["fast", "reference", "dense"])
def test_the_model_is_as_it_was_also_after_an_exception(engine):
    lm = labkit.load("tiny-gemma3")
    lm.model.train()
    lm.model.model.layers[0].eval()
    lm.model.lm_head.register_forward_pre_hook(lambda *args: 1 / 0)
    before = _state(lm.model)
    with pytest.raises(ZeroDivisionError):
        answered(lm, "hidden-average", engine)
    assert _state(lm.model) == before


# ---- methods -------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["fast", "dense"])
def test_one_paraphrase_is_the_plain_prompt_in_every_method(name, engine):
    lm, text = labkit.load(name), QUESTIONS[0][0]
    expected = plain(lm, text + "\n")
    log_probs = expected.log_softmax(-1)
    expected_by_method = {"confidence-average": log_probs, "confidence-max": log_probs + log_probs.max()}
    for method in fusion.METHODS:
        weights = {"weights": [[7.0]]} if method == "weighted" else {}
        logits = answered(lm, method, engine, [[text]], **weights).first_logits
        assert torch.allclose(logits, expected_by_method.get(method, expected), atol=1e-4), method


@pytest.mark.parametrize("name", NAMES)
def test_concat_is_the_plain_prompt_with_all_paraphrases(name):
    lm, texts = labkit.load(name), QUESTIONS[2]
    expected = plain(lm, *(text + "\n" for text in texts))
    assert gap(answered(lm, "concat", questions=[texts]).first_logits, expected) < TOLERANCE


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("copies", [2, 5])
def test_copies_are_one_in_fuse_and_not_without_its_weights(name, copies):
    lm, text = labkit.load(name, dtype="float64"), QUESTIONS[0][0]  # longer than the tiny models' window
    expected = plain(lm, text + "\n")
    for engine in ("fast", "dense"):
        assert gap(answered(lm, "fuse", engine, [[text] * copies]).first_logits, expected) < 1e-10
    assert gap(answered(lm, "isolate+restart", questions=[[text] * copies]).first_logits, expected) > 1e-5


@pytest.mark.parametrize("method", set(fusion.METHODS) - {"single", "weighted", "majority-vote", "hidden-average"})
def test_the_order_matters_only_where_positions_continue(method):
    lm = labkit.load("tiny-llama")
    here, there = (answered(lm, method, questions=[texts]) for texts in (QUESTIONS[2], QUESTIONS[2][::-1]))
    changed = gap(here.first_logits, there.first_logits)
    assert changed > 1e-3 if method in ("concat", "isolate") else changed < TOLERANCE


def test_equal_weights_are_fuse_and_a_great_weight_is_that_paraphrase_alone():
    lm = labkit.load("tiny-llama", dtype="float64")
    question = ["the cat sat on the mat", "the mat sat on the cat"]  # of one length, so the cue has the same position
    fused = answered(lm, questions=[question]).first_logits
    for make in (list, torch.tensor, np.array):
        equal = answered(lm, "weighted", questions=[question], weights=[make([3.0, 3.0])])
        assert gap(equal.first_logits, fused) < 1e-10
    great = answered(lm, "weighted", questions=[question], weights=[[1.0, 1e14]])
    assert gap(great.first_logits, answered(lm, "single", questions=[question[1:]]).first_logits) < 1e-10


def test_averages_over_rows_are_those_of_single_answers():
    lm, question = labkit.load("tiny-gpt2"), QUESTIONS[2]
    apart = torch.cat([answered(lm, "single", questions=[[text]]).first_logits for text in question])
    probs = apart.softmax(-1)
    confidence = probs.max(-1, keepdim=True).values
    expected = {
        "logit-average": apart.mean(0),
        "logit-max": apart.max(0).values,
        "confidence-average": (confidence / confidence.sum() * probs.log()).sum(0),
        "confidence-max": (probs * confidence).max(0).values.log(),
    }
    for method, logits in expected.items():
        assert torch.allclose(answered(lm, method, questions=[question]).first_logits[0], logits, atol=1e-4), method


def test_hidden_average_of_the_last_layer_is_the_logits_of_the_mean_state():
    lm = labkit.load("tiny-llama", dtype="float64")
    states, last = [], []
    handle = lm.model.model.layers[-1].register_forward_hook(lambda module, args, out: states.append(out[0, -1]))
    for text in QUESTIONS[2]:
        answered(lm, "single", questions=[[text]], max_new_tokens=1)
        last.append(states[-1])  # at the cue
    handle.remove()
    with torch.no_grad():
        expected = lm.model.lm_head(lm.model.model.norm(torch.stack(last).mean(0)))
    logits = answered(lm, "hidden-average", questions=[QUESTIONS[2]], layer=1).first_logits[0]
    assert gap(logits, expected) < 1e-10


def test_majority_vote_takes_the_most_frequent_answer():
    lm = labkit.load("tiny-llama")
    question = ["the cat sat", "the cat sat", "look at the past and the future"]
    texts = [answered(lm, "single", questions=[[text]]).texts[0] for text in question]
    assert texts[0] != texts[2]
    result = answered(lm, "majority-vote", questions=[question])
    assert result.texts == [texts[0]] and sorted(result.votes[0].values()) == [1, 2]
    assert answered(lm).votes is None


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"questions": []}, "there is no question"),
        ({"questions": [["a"], []]}, "question 1 has no paraphrase"),
        ({"questions": ["a b"]}, "question 0 is a text"),
        ({"questions": [["a", " "]]}, "paraphrase 1 of question 0 is empty"),
        ({"method": "fusion"}, "'fusion'; choose one of single, concat"),
        ({"engine": "slow"}, "'slow'; choose one of fast"),
        ({"cue": ""}, "the cue is empty"),
        ({"weights": [[1.0], [1.0], [1.0]]}, "takes no weights"),
        ({"method": "weighted", "weights": None}, "needs a weight for each paraphrase"),
        ({"method": "weighted", "weights": [[1.0, 1.0]]}, "weights for 1 questions, but 3"),
        ({"method": "weighted", "weights": [[1.0], [1.0], [1.0] * 3]}, "question 0 has 2 paraphrases and 1 weights"),
        ({"method": "weighted", "weights": [[1.0, 0.0], [1.0], [1.0] * 3]}, "must be a positive number"),
        ({"method": "weighted", "weights": [[1.0, float("nan")], [1.0], [1.0] * 3]}, "must be a positive number"),
        ({"layer": 1}, "averages no layer"),
        ({"method": "hidden-average", "layer": 2}, "no layer 2: the model has layers 0 to 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "the seed is -1; it must be from 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 1000}, "1,0.. tokens, and the model has 1,024 positions"),
        ({"questions": [["the word of it " * 300] * 2], "method": "concat"}, "a method that restarts positions"),
        ({"temperature": 0.5}, "only applies to sampling"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": True, "num_beams": 2}, "beam search does not sample"),
        ({"stop": ("\n", "")}, "one of the stop texts is empty"),
    ],
)
def test_invalid_arguments_are_refused(invalid, message):
    with pytest.raises(DataError, match=message):
        answered(labkit.load("tiny-llama"), **invalid)


def test_a_prompt_beyond_the_memory_is_refused_and_new_tokens_and_beams_count(monkeypatch):
    lm, tokens = labkit.load("tiny-llama"), {}
    monkeypatch.setattr("labkit.decoder.limits.available_bytes", lambda device: 1000)
    for name, more in (("plain", {}), ("longer", {"max_new_tokens": 500}), ("beams", {"num_beams": 4})):
        with pytest.raises(DataError, match="use a smaller batch_size") as refused:
            answered(lm, **more)
        tokens[name] = int(re.search(r"of ([\d,]+) tokens", str(refused.value))[1].replace(",", ""))
    assert tokens["longer"] == tokens["plain"] + 3 * 495 and tokens["beams"] == 4 * tokens["plain"]


def test_models_that_cannot_be_fused_are_refused():
    from transformers import BloomConfig, BloomForCausalLM

    lm = labkit.load("tiny-llama")
    bloom = BloomForCausalLM(BloomConfig(vocab_size=lm.model.config.vocab_size, hidden_size=32, n_layer=2, n_head=2))
    expected = answered(lm).tokens
    labkit.to_bidirectional(lm.model)
    refused = {
        "has no tokenizer": replace(labkit.load("tiny-llama"), tokenizer=None),
        "it contains no decoder that labkit knows": replace(lm, model=bloom.eval()),
        "call labkit.to_causal first": lm,
    }
    for message, model in refused.items():
        with pytest.raises((DataError, ModelError), match=message):
            answered(model)
    labkit.to_causal(lm.model)
    assert answered(lm).tokens == expected
    for setting, value, message in (
        ("is_causal", False, "its configuration declares it bidirectional"),
        ("use_bidirectional_attention", True, "its configuration declares it bidirectional"),
        ("alibi", True, "its positions are counted along the row"),
    ):
        other = labkit.load("tiny-llama")
        setattr(other.model.config, setting, value)
        with pytest.raises((DataError, ModelError), match=message):
            answered(other)


def test_a_backend_that_takes_no_numbers_is_sent_to_the_reference():
    lm = labkit.load("tiny-llama", attn="flex_attention")
    for engine in ("fast", "dense"):
        with pytest.raises(DataError, match="use engine='reference'"):
            answered(lm, engine=engine)
    assert answered(lm, engine="reference").tokens == answered(labkit.load("tiny-llama")).tokens
