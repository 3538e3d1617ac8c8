"""Which paraphrase each generated token looks at: held against closed forms and transformers' own attention."""

import numpy as np
import pytest
import torch

import labkit
from labkit import fusion
from labkit.errors import FusionError
from labkit.fusion.looks import looks
from labkit.fusion.proofs import _state

NAMES = ("tiny-gpt2", "tiny-llama", "tiny-gemma2", "tiny-gemma3")
PREFIX = "the token of the model is past. "
QUESTION = ["the cat sat", "the mat sat on one", "look at the past and the future"]
CUE = "word:"
JOINED = [name for name, method in fusion.METHODS.items() if method.joined]


def seen(lm, paraphrases=QUESTION, method="fuse", **settings):
    given = {"weights": [1.0, 2.0, 3.0]} if method == "weighted" else {}
    return looks(lm, paraphrases, method, **({"prefix": PREFIX, "cue": CUE, "max_new_tokens": 4} | given | settings))


def ids_of(lm, text):
    return lm.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", JOINED)
def test_attention_of_each_generated_token_sums_to_1(name, method):
    lm = labkit.load(name)
    found = seen(lm, method=method)
    pieces = [QUESTION[0]] if method == "single" else QUESTION
    bos = lm.tokenizer("")["input_ids"]
    context = len(bos) + len(ids_of(lm, PREFIX)) + sum(len(ids_of(lm, text + "\n")) for text in pieces)
    assert found.weights.shape == (4, context + len(ids_of(lm, CUE)))
    assert len(found.context_tokens) == len(found.segments) == found.weights.shape[1]
    assert np.allclose(found.weights.sum(1) + found.before, 1, atol=1e-5)
    assert found.before[0] == 0, "before the first token there is none"
    assert found.share.shape == (4, len(pieces)) and (found.share > 0).all()
    assert np.allclose(found.share_among_paraphrases.sum(1), 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["single", "concat", "isolate", "isolate+restart", "fuse"])
def test_one_paraphrase_is_looked_at_as_transformers_itself_says(name, method):
    lm = labkit.load(name, attn="eager")
    text = "look at the past and the future of the word that you can not see"  # longer than the tiny models' window
    found = seen(lm, [text], method)
    prompt = lm.tokenizer("")["input_ids"][:1] + [
        token for piece in (PREFIX, text + "\n", CUE) for token in ids_of(lm, piece)
    ]
    row = torch.tensor([prompt + found.generated_ids[:-1]])
    with torch.no_grad():
        maps = torch.stack(lm.model(row, output_attentions=True).attentions)  # (layers, 1, heads, n, n)
    expected = maps.mean((0, 1, 2))[len(prompt) - 1 :].numpy()
    assert np.allclose(found.weights, expected[:, : len(prompt)], atol=1e-5)
    assert np.allclose(found.before, expected[:, len(prompt) :].sum(1), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_heads_asked_for_are_those_averaged(name):
    lm = labkit.load(name)
    whole = seen(lm)
    tokens, heads = whole.generated_ids, range(lm.model.config.num_attention_heads)
    one_by_one = [seen(lm, tokens=tokens, layer=i, head=j).weights for i in (0, 1) for j in heads]
    assert np.allclose(np.mean(one_by_one, 0), whole.weights, atol=1e-6)
    assert np.abs(one_by_one[0] - one_by_one[-1]).max() > 1e-4
    assert np.allclose(
        seen(lm, tokens=tokens, layer=[1], head=[0, 1]).weights, np.mean(one_by_one[-len(heads) :][:2], 0)
    )


def test_tokens_of_a_result_are_read_as_they_were_generated():
    lm = labkit.load("tiny-llama")
    result = fusion.generate(lm, [QUESTION], prefix=PREFIX, cue=CUE, max_new_tokens=4)
    found = seen(lm, tokens=result.tokens[0])
    assert found.generated_ids == result.tokens[0] == seen(lm).generated_ids
    other = seen(lm, tokens=[result.tokens[0][0], 5, 6, 7])
    assert np.array_equal(other.weights[0], found.weights[0]), "the first token is chosen before any other is read"
    assert not np.allclose(other.weights[2], found.weights[2])


@pytest.mark.parametrize("name", NAMES)
def test_copies_of_a_paraphrase_are_looked_at_alike_and_together_as_much_as_one(name):
    lm, text = labkit.load(name), QUESTION[2]
    one = seen(lm, [text])
    copies = seen(lm, [text] * 3)
    assert copies.generated_ids == one.generated_ids
    assert np.allclose(copies.share, one.share / 3, atol=1e-5)
    heavy = seen(lm, [text] * 3, "isolate+restart", tokens=one.generated_ids)
    assert (heavy.share.sum(1) > copies.share.sum(1) + 1e-3).all(), "without the bias three copies weigh three times"


def test_a_paraphrase_of_next_to_no_weight_is_hardly_looked_at():
    lm = labkit.load("tiny-gemma3")
    found = seen(lm, method="weighted", weights=[1.0, 1e-9, 1.0])
    assert (found.share[:, 1] < 1e-6).all() and (found.share[:, [0, 2]] > 1e-3).all()


def test_the_order_of_the_paraphrases_is_the_order_of_the_shares():
    lm = labkit.load("tiny-llama")
    here, there = seen(lm), seen(lm, QUESTION[::-1])
    assert here.generated_ids == there.generated_ids
    assert np.allclose(here.share, there.share[:, ::-1], atol=1e-5)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2"])
def test_the_model_is_as_it_was_also_after_an_exception(name):
    lm = labkit.load(name)
    lm.model.train()
    before = _state(lm.model)
    seen(lm)
    assert _state(lm.model) == before
    handle = lm.model.lm_head.register_forward_pre_hook(lambda *args: 1 / 0)
    before = _state(lm.model)
    with pytest.raises(ZeroDivisionError):
        seen(lm, tokens=[1, 2])
    assert _state(lm.model) == before
    handle.remove()


def test_pieces_are_named_and_drawn():
    lm = labkit.load("tiny-llama")
    found = seen(lm)
    kinds = list(dict.fromkeys(found.segments))
    assert kinds == [None, 0, 1, 2, "cue"]
    words = [token for token, kind in zip(found.context_tokens, found.segments, strict=True) if kind == 0]
    assert "".join(words) == "thecatsat⏎"
    tokens, shares = found.figure("a title").data
    assert np.allclose(tokens.z, found.weights, atol=6e-5)
    assert [name.strip("\u200b\u200c") for name in shares.x] == [
        "prefix",
        "paraphrase 0",
        "paraphrase 1",
        "paraphrase 2",
        "cue",
    ]
    assert np.allclose(shares.z[:, 1:4], found.share, atol=6e-5)
    tokens, shares = found.figure_of_paraphrases().data
    assert [name.strip("\u200b\u200c") for name in shares.x] == [
        "paraphrase 0",
        "paraphrase 1",
        "paraphrase 2",
    ] and np.allclose(tokens.z.sum(1), 1, atol=2e-3)
    assert np.allclose(shares.z, found.share_among_paraphrases, atol=6e-5)
    assert "'fuse': 4 generated tokens" in repr(found)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"method": "logit-average"}, "row of its own.*choose one of single, concat, isolate"),
        ({"method": "majority-vote"}, "row of its own"),
        ({"method": "fusion"}, "'fusion'; choose one of single"),
        ({"layer": 2}, "no layer 2: the model has layers 0 to 1"),
        ({"layer": -1}, "no layer -1"),
        ({"layer": []}, "no layer was asked for"),
        ({"head": [0, 99]}, "no head 99"),
        ({"tokens": []}, "no generated token was given"),
        ({"tokens": [1, 10**6]}, "1000000 is not among them"),
        ({"tokens": [1] * 1000}, "reach position 1,0"),
        ({"paraphrases": []}, "has no paraphrase"),
        ({"paraphrases": "the cat"}, "is a text"),
        ({"method": "weighted", "weights": [1.0]}, "3 paraphrases and 1 weights"),
    ],
)
def test_what_cannot_be_looked_at_is_one_clear_error(wrong, told):
    with pytest.raises(FusionError, match=told):
        seen(labkit.load("tiny-llama"), **wrong)


def test_a_token_that_no_window_lets_see_the_paraphrases_has_no_share_among_them():
    lm = labkit.load("tiny-gemma3")
    local = lm.model.config.layer_types.index("sliding_attention")
    long_cue = "word: " * (lm.model.config.sliding_window + 2)
    found = seen(lm, cue=long_cue, layer=local)
    assert not found.share.any()
    with pytest.raises(FusionError, match="gives no paraphrase any attention"):
        found.figure_of_paraphrases()
