"""Paraphrase fusion on tiny models: methods, engines, batches, and every refusal."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit import fusion
from labkit.errors import FusionError
from labkit.fusion import fast as fast_engine
from labkit.fusion.decoding import Answer, Decoding
from labkit.fusion.fast import FastEngine
from labkit.fusion.generation import _elected
from labkit.fusion.layout import Segment, prompts, token_ids
from labkit.fusion.methods import method_named

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


def plain(lm, text):
    """The first logits of a text as the model itself reads it, pieces tokenised one by one."""
    ids = lm.tokenizer("")["input_ids"][:1] + [
        token for piece in text for token in lm.tokenizer(piece, add_special_tokens=False)["input_ids"]
    ]
    with torch.no_grad():
        return lm.model(torch.tensor([ids])).logits[:, -1]


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", fusion.METHODS)
def test_all_engines_agree(name, method):
    lm = labkit.load(name)
    fast, dense, cacheless = (answered(lm, method, engine) for engine in ("fast", "dense", "cacheless"))
    assert gap(fast.first_logits, dense.first_logits) < TOLERANCE
    assert gap(cacheless.first_logits, dense.first_logits) < TOLERANCE
    assert fast.tokens == dense.tokens == cacheless.tokens
    assert (fast.engine, dense.engine) == ("fast", "reference (dense)")
    assert cacheless.engine == "reference (dense, without cache)"
    assert fast.first_logits.shape == (3, lm.model.config.vocab_size)


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_the_flex_reference_agrees_and_says_that_it_was_used(name):
    lm = labkit.load(name)
    before = lm.model.config._attn_implementation
    flex, fast = answered(lm, engine="reference"), answered(lm)
    assert gap(flex.first_logits, fast.first_logits) < TOLERANCE and flex.tokens == fast.tokens
    assert flex.engine == "reference (flex)"
    assert lm.model.config._attn_implementation == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2"])
def test_the_compiled_flex_reference_agrees(name):
    lm = labkit.load(name, device="cuda")
    flex, fast = answered(lm, engine="reference"), answered(lm)
    assert gap(flex.first_logits, fast.first_logits) < TOLERANCE and flex.tokens == fast.tokens
    assert flex.engine == "reference (flex, compiled)"


@pytest.mark.parametrize("method", ["isolate", "fuse"])
def test_a_long_paraphrase_beside_a_short_one_needs_no_more_positions_than_its_own(method):
    lm = labkit.load("tiny-gpt2")  # 1,024 learned positions
    questions = [["the word of it " * 180, "the cat sat"]]
    length = len(lm.tokenizer(questions[0][0])["input_ids"])
    assert length < 1024 < 2 * length
    fast, dense = (answered(lm, method, engine, questions, prefix="") for engine in ("fast", "dense"))
    assert gap(fast.first_logits, dense.first_logits) < TOLERANCE and fast.tokens == dense.tokens


def test_every_submodule_is_in_the_mode_it_was_in():
    lm = labkit.load("tiny-llama")
    lm.model.train()
    lm.model.model.layers[0].eval()
    modes = [module.training for module in lm.model.modules()]
    answered(lm)
    assert [module.training for module in lm.model.modules()] == modes


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["fast", "dense"])
def test_one_paraphrase_is_the_plain_prompt_in_every_method(name, engine):
    lm, text = labkit.load(name), QUESTIONS[0][0]
    expected = plain(lm, [PREFIX, text + "\n", "word:"])
    for method in set(fusion.METHODS) - {"weighted", "confidence-average", "confidence-max"}:
        assert gap(answered(lm, method, engine, [[text]]).first_logits, expected) < TOLERANCE, method
    weighed = answered(lm, "weighted", engine, [[text]], weights=[[7.0]])
    assert gap(weighed.first_logits, expected) < TOLERANCE
    log_probs = expected.log_softmax(-1)
    averaged = answered(lm, "confidence-average", engine, [[text]]).first_logits
    assert torch.allclose(averaged, log_probs, atol=1e-4)
    highest = answered(lm, "confidence-max", engine, [[text]]).first_logits
    assert torch.allclose(highest, log_probs + log_probs.max(), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_concat_is_the_plain_prompt_with_all_paraphrases(name):
    lm, texts = labkit.load(name), QUESTIONS[2]
    expected = plain(lm, [PREFIX, *(text + "\n" for text in texts), "word:"])
    assert gap(answered(lm, "concat", questions=[texts]).first_logits, expected) < TOLERANCE


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("copies", [2, 5])
def test_copies_are_one_to_ten_digits_in_double_precision(name, copies):
    lm, text = labkit.load(name, dtype="float64"), QUESTIONS[0][0]  # longer than the tiny models' window
    expected = plain(lm, [PREFIX, text + "\n", "word:"])
    for engine in ("fast", "dense"):
        assert gap(answered(lm, "fuse", engine, [[text] * copies]).first_logits, expected) < 1e-10


def test_without_the_bias_copies_are_not_one():
    lm, text = labkit.load("tiny-llama", dtype="float64"), QUESTIONS[0][0]
    expected = plain(lm, [PREFIX, text + "\n", "word:"])
    assert gap(answered(lm, "isolate+restart", questions=[[text] * 5]).first_logits, expected) > 1e-4


@pytest.mark.parametrize("method", ["fuse", "isolate+restart", "logit-average", "logit-max", "confidence-average"])
def test_the_order_of_the_paraphrases_does_not_matter(method):
    lm = labkit.load("tiny-gemma3")
    here, there = (answered(lm, method, questions=[texts]) for texts in (QUESTIONS[2], QUESTIONS[2][::-1]))
    assert gap(here.first_logits, there.first_logits) < TOLERANCE and here.tokens == there.tokens


@pytest.mark.parametrize("method", ["concat", "isolate"])
def test_the_order_matters_where_positions_go_on(method):
    lm = labkit.load("tiny-llama")
    here, there = (answered(lm, method, questions=[texts]) for texts in (QUESTIONS[2], QUESTIONS[2][::-1]))
    assert gap(here.first_logits, there.first_logits) > 1e-3


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", fusion.METHODS)
def test_a_batch_is_its_questions_one_by_one(name, method):
    lm = labkit.load(name)
    together = answered(lm, method)
    for number, question in enumerate(QUESTIONS):
        given = {"weights": [WEIGHTS[number]]} if method == "weighted" else {}
        alone = answered(lm, method, questions=[question], **given)
        assert gap(alone.first_logits, together.first_logits[number : number + 1]) < TOLERANCE
        assert alone.tokens[0] == together.tokens[number]


def test_questions_in_several_batches_are_those_of_one():
    lm = labkit.load("tiny-llama")
    one, several = answered(lm), answered(lm, batch_size=1)
    assert one.tokens == several.tokens and gap(one.first_logits, several.first_logits) < TOLERANCE


def test_segments_read_in_several_forward_passes_are_those_of_one(monkeypatch):
    lm = labkit.load("tiny-gemma3")
    one = answered(lm)
    monkeypatch.setitem(fast_engine.TOKENS_AT_ONCE, "cpu", 40)
    assert gap(answered(lm).first_logits, one.first_logits) < TOLERANCE


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(lengths=LENGTHS, begin=st.integers(0, 50), slots=st.integers(1, 400))
def test_rows_hold_every_segment_once_and_no_more_than_fits(lengths, begin, slots):
    placed, at = [], 7
    for length in lengths:
        placed.append((Segment(tuple(range(length)), 0), at))
        at += length
    batches = list(fast_engine._batches(placed, begin, slots))
    held = [each for batch in batches for row in batch for each in row]
    assert sorted(held, key=lambda pair: pair[1]) == placed
    for batch in batches:
        longest = max(len(segment.ids) for row in batch for segment, _ in row)
        assert max(map(fast_engine._length, [[segment for segment, _ in row] for row in batch])) == longest
        assert len(batch) == 1 or len(batch) * (begin + longest) <= slots
        source, to = fast_engine._slots(batch, longest)
        assert len({*source}) == len(source) == len(to) and max(source) < len(batch) * longest
        assert all(fast_engine._length([s for s, _ in a]) + len(b[0][0].ids) > longest for a, b in pairwise(batch))


def test_segments_of_one_length_have_rows_of_their_own_and_others_leave_no_padding():
    def rows(*lengths: int) -> list[list[int]]:
        (batch,) = fast_engine._batches([(Segment(tuple(range(each)), 0), 0) for each in lengths], 96, 8192)
        return [[len(segment.ids) for segment, _ in row] for row in batch]

    assert rows(24, 24, 24) == [[24], [24], [24]]
    assert rows(8, 16, 24, 32, 40) == [[40], [32, 8], [24, 16]]


@pytest.mark.parametrize("name", EXACT)
def test_segments_that_share_a_row_are_what_they_are_alone(name):
    lm = labkit.load(name, dtype="float64")
    words = "one two three four five six seven eight nine ten".split()
    texts = [" ".join(words[:count]) for count in (10, 7, 3, 2, 1)]
    begins, (ids,), cue = token_ids(lm.tokenizer, [texts], PREFIX, "word:", "\n")
    made = prompts(method_named("fuse"), begins, [ids], cue)
    (batch,) = fast_engine._batches([(segment, 0) for segment in made.rows[0].segments], len(begins), 8192)
    assert len(batch) < len(texts)  # or nothing is shown
    engine = FastEngine(lm.model, made)
    with torch.no_grad():
        prefix = engine._read_prefix()
        cache, _ = engine._read_segments([[segment for segment, _ in row] for row in batch], prefix)
        for number, row in enumerate(batch):
            at = len(begins)
            for segment, _ in row:
                alone, _ = engine._read_segments([[segment]], prefix)
                end = at + len(segment.ids)
                for shared, own in zip(cache.layers, alone.layers, strict=True):
                    assert gap(shared.keys[number : number + 1, :, at:end], own.keys[:, :, len(begins) :]) < 1e-12
                    assert gap(shared.values[number : number + 1, :, at:end], own.values[:, :, len(begins) :]) < 1e-12
                at = end


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_side_of_the_tokenizer_changes_nothing(side):
    lm = labkit.load("tiny-gemma3")
    expected = answered(lm)
    lm.tokenizer.padding_side = side
    assert torch.equal(answered(lm).first_logits, expected.first_logits)


@pytest.mark.parametrize("name", EXACT)
def test_a_prefix_read_once_is_the_prefix_read_with_each_paraphrase(name):
    lm = labkit.load(name, dtype="float64")
    begins, (ids,), cue = token_ids(lm.tokenizer, [QUESTIONS[2]], PREFIX, "word:", "\n")
    for method in ("fuse", "logit-average"):
        shared = FastEngine(lm.model, prompts(method_named(method), begins, [ids], cue))
        repeated = FastEngine(lm.model, prompts(method_named(method), (), [[begins + each for each in ids]], cue))
        with torch.no_grad():
            assert gap(shared.start(), repeated.start()) < 1e-10


def test_uniform_weights_are_fuse_and_a_great_weight_is_that_paraphrase_alone():
    lm = labkit.load("tiny-llama", dtype="float64")
    question = [
        "the cat sat on the mat",
        "the mat sat on the cat",
    ]  # of one length, so that the cue stands at the same position
    lengths = {len(lm.tokenizer(text + "\n", add_special_tokens=False)["input_ids"]) for text in question}
    assert len(lengths) == 1
    uniform = answered(lm, "weighted", questions=[question], weights=[[3.0, 3.0]])
    assert gap(uniform.first_logits, answered(lm, questions=[question]).first_logits) < 1e-10
    one = answered(lm, "weighted", questions=[question], weights=[[1.0, 1e14]])
    assert gap(one.first_logits, answered(lm, "single", questions=[question[1:]]).first_logits) < 1e-10


def test_averages_over_rows_are_those_of_single_answers():
    lm = labkit.load("tiny-gpt2")
    question = QUESTIONS[2]
    apart = torch.cat([answered(lm, "single", questions=[[text]]).first_logits for text in question])
    expected = {"logit-average": apart.mean(0), "logit-max": apart.max(0).values}
    probs = apart.softmax(-1)
    sure = probs.max(-1, keepdim=True).values
    expected["confidence-average"] = (sure / sure.sum() * probs.log()).sum(0)
    expected["confidence-max"] = (probs * sure).max(0).values.log()
    for method, wanted in expected.items():
        got = answered(lm, method, questions=[question]).first_logits[0]
        assert torch.allclose(got, wanted, atol=1e-4), method


def test_hidden_average_of_the_last_layer_is_the_logits_of_the_mean_state():
    lm = labkit.load("tiny-llama", dtype="float64")
    question, states = QUESTIONS[2], []
    handle = lm.model.model.layers[-1].register_forward_hook(lambda module, args, out: states.append(out[0, -1]))
    last = []
    for text in question:
        answered(lm, "single", questions=[[text]], max_new_tokens=1)
        last.append(states[-1])  # at the cue
    handle.remove()
    with torch.no_grad():
        wanted = lm.model.lm_head(lm.model.model.norm(torch.stack(last).mean(0)))
    got = answered(lm, "hidden-average", questions=[question], layer=1).first_logits[0]
    assert gap(got, wanted) < 1e-10


def test_majority_vote_takes_what_most_paraphrases_say():
    lm = labkit.load("tiny-llama")
    question = ["the cat sat", "the cat sat", "look at the past and the future"]
    said = [answered(lm, "single", questions=[[text]]).texts[0] for text in question]
    assert said[0] != said[2]
    result = answered(lm, "majority-vote", questions=[question])
    assert result.texts == [said[0]]
    assert sorted(result.votes[0].values()) == [1, 2]
    assert answered(lm).votes is None


def test_votes_are_compared_as_scores_compare_and_by_all_of_an_answer_with_a_stop_of_its_own():
    def elected(texts, **settings):
        answers = [Answer([1, 2], text, -1.0) for text in texts]
        return _elected(answers, Decoding(**settings))

    winner, votes = elected(["", "?", "The The", "Paris", " paris."])
    assert (winner.text, votes) == ("Paris", {"": 1, "?": 1, "the the": 1, "paris": 2})
    assert elected(["a\nx", "a\ny"])[1] == {"a": 2}  # an article alone is compared as it is
    assert elected(["1. b\nx", "1. b\ny"], stop=("##",))[1] == {"1 b x": 1, "1 b y": 1}


def test_the_model_is_as_it_was_after_an_exception(monkeypatch):
    from labkit.fusion.proofs import _state

    lm = labkit.load("tiny-gemma3")
    lm.model.train()
    before = _state(lm.model)

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    for engine in ("fast", "reference"):
        with monkeypatch.context() as patched:
            patched.setattr("labkit.fusion.decoding.combine", broken)
            with pytest.raises(RuntimeError, match="out of memory"):
                answered(lm, "hidden-average", engine)
        assert _state(lm.model) == before


def test_an_exception_within_the_model_takes_the_hook_of_hidden_average_along():
    from labkit.fusion.proofs import _state

    lm = labkit.load("tiny-llama")
    handle = lm.model.lm_head.register_forward_pre_hook(lambda *args: 1 / 0)
    before = _state(lm.model)
    for engine in ("fast", "reference", "dense"):
        with pytest.raises(ZeroDivisionError):
            answered(lm, "hidden-average", engine)
        assert _state(lm.model) == before
    handle.remove()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"questions": []}, "there is none"),
        ({"questions": [["a"], []]}, "question 1 has no paraphrase"),
        ({"questions": ["a b"]}, "question 0 is a text"),
        ({"questions": [["a", " "]]}, "paraphrase 1 of question 0 is empty"),
        ({"method": "fusion"}, "'fusion'; choose one of single, concat"),
        ({"engine": "slow"}, "'slow'; choose one of fast"),
        ({"cue": ""}, "the cue is empty"),
        ({"weights": [[1.0], [1.0], [1.0]]}, "takes no weights"),
        ({"method": "weighted", "weights": None}, "needs a weight for each paraphrase"),
        ({"method": "weighted", "weights": [[1.0, 1.0]]}, "weights for 1 questions, and 3"),
        ({"method": "weighted", "weights": [[1.0], [1.0], [1.0] * 3]}, "question 0 has 2 paraphrases and 1 weights"),
        ({"method": "weighted", "weights": [[1.0, 0.0], [1.0], [1.0] * 3]}, "must be a positive number"),
        ({"method": "weighted", "weights": [[1.0, math.nan], [1.0], [1.0] * 3]}, "must be a positive number"),
        ({"layer": 1}, "averages no layer"),
        ({"method": "hidden-average", "layer": 2}, "no layer 2: the model has layers 0 to 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": 2**62}, "the seed is 4611686018427387904; it must be from 0"),
        ({"seed": -1}, "the seed is -1; it must be from 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 1000}, "1,0.. tokens, and the model has 1,024 positions"),
        ({"questions": [["the word of it " * 300] * 2], "method": "concat"}, "a method that restarts positions"),
        ({"temperature": 0.5}, "has no effect unless tokens are drawn"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": True, "num_beams": 2}, "beam search draws no tokens"),
        ({"stop": ("\n", "")}, "an empty text was given as a stop"),
    ],
)
def test_what_cannot_be_is_one_clear_error(wrong, told):
    lm = labkit.load("tiny-llama")
    with pytest.raises(FusionError, match=told):
        answered(lm, **wrong)


def test_a_prompt_beyond_the_memory_is_refused_and_new_tokens_and_beams_count(monkeypatch):
    lm, needed = labkit.load("tiny-llama"), {}
    monkeypatch.setattr("labkit.decoder.limits.available_bytes", lambda device: 1000)
    for name, more in (("plain", {}), ("longer", {"max_new_tokens": 500}), ("beams", {"num_beams": 4})):
        with pytest.raises(FusionError, match="take a smaller batch_size") as refused:
            answered(lm, **more)
        needed[name] = int(re.search(r"of ([\d,]+) tokens", str(refused.value))[1].replace(",", ""))
    assert needed["longer"] == needed["plain"] + 3 * 495 and needed["beams"] == 4 * needed["plain"]


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple])
def test_weights_may_be_an_array(kind):
    lm = labkit.load("tiny-llama")
    given = fusion.generate(lm, QUESTIONS[:1], "weighted", weights=[kind([2.0, 1.0])], max_new_tokens=2)
    assert given.tokens == fusion.generate(lm, QUESTIONS[:1], "weighted", weights=[[2.0, 1.0]], max_new_tokens=2).tokens


def test_a_configuration_that_says_bidirectional_is_refused():
    for name, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        lm = labkit.load("tiny-llama")
        setattr(lm.model.config, name, value)
        with pytest.raises(FusionError, match="its configuration says that it is bidirectional"):
            answered(lm)


def test_a_result_equals_itself_and_no_other():
    lm = labkit.load("tiny-llama")
    one, other = answered(lm), answered(lm)
    assert one == one and one != other


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(FusionError, match="without a tokenizer"):
        answered(replace(labkit.load("tiny-llama"), tokenizer=None))


def test_a_bidirectional_model_is_refused_and_a_causal_one_again_is_not():
    lm = labkit.load("tiny-llama")
    expected = answered(lm).tokens
    labkit.to_bidirectional(lm.model)
    with pytest.raises(FusionError, match="call labkit.to_causal first"):
        answered(lm)
    labkit.to_causal(lm.model)
    assert answered(lm).tokens == expected


def test_a_model_that_counts_its_own_positions_is_refused():
    from transformers import BloomConfig, BloomForCausalLM

    lm = labkit.load("tiny-llama")
    bloom = BloomForCausalLM(BloomConfig(vocab_size=lm.model.config.vocab_size, hidden_size=32, n_layer=2, n_head=2))
    with pytest.raises(FusionError, match="BloomForCausalLM cannot be fused: it holds no decoder that labkit knows"):
        answered(replace(lm, model=bloom.eval()))
    lm.model.config.alibi = True
    with pytest.raises(FusionError, match="LlamaForCausalLM cannot be fused: its positions are counted along the row"):
        answered(lm)


def test_a_model_whose_attention_takes_no_numbers_is_sent_to_the_reference():
    lm = labkit.load("tiny-llama", attn="flex_attention")
    for engine in ("fast", "dense"):
        with pytest.raises(FusionError, match="load (it|the model) with attn='sdpa'"):
            answered(lm, engine=engine)
    assert answered(lm, engine="reference").tokens == answered(labkit.load("tiny-llama")).tokens
