"""Attention of generated tokens to paraphrases, against closed forms and transformers' own attention."""

import numpy as np
import pytest
import torch

import labkit
from labkit import fusion
from labkit.errors import DataError
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
    lm.model.train()
    before, result = _state(lm.model), seen(lm, method=method)
    assert _state(lm.model) == before
    pieces = [QUESTION[0]] if method == "single" else QUESTION
    assert result.weights.shape == (4, len(result.context_tokens)) and len(result.segments) == len(
        result.context_tokens
    )
    for number, text in enumerate(pieces):
        assert result.segments.count(number) == len(ids_of(lm, text + "\n"))
    assert result.segments.count("cue") == len(ids_of(lm, CUE))
    assert np.allclose(result.weights.sum(1) + result.before, 1, atol=1e-5) and result.before[0] == 0
    assert result.share.shape == (4, len(pieces)) and (result.share > 0).all()
    assert np.allclose(result.share_among_paraphrases.sum(1), 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["single", "concat", "isolate", "isolate+restart", "fuse"])
def test_with_one_paraphrase_the_weights_are_those_of_transformers(name, method):
    lm = labkit.load(name, attn="eager")
    text = "look at the past and the future of the word that you can not see"  # longer than the tiny models' window
    result = seen(lm, [text], method)
    prompt = lm.tokenizer("")["input_ids"][:1] + [
        token for piece in (PREFIX, text + "\n", CUE) for token in ids_of(lm, piece)
    ]
    row = torch.tensor([prompt + result.generated_ids[:-1]])
    with torch.no_grad():
        maps = torch.stack(lm.model(row, output_attentions=True).attentions)  # (layers, 1, heads, n, n)
    expected = maps.mean((0, 1, 2))[len(prompt) - 1 :].numpy()
    assert np.allclose(result.weights, expected[:, : len(prompt)], atol=1e-5)
    assert np.allclose(result.before, expected[:, len(prompt) :].sum(1), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_chosen_layers_and_heads_are_those_averaged(name):
    lm = labkit.load(name)
    whole = seen(lm)
    tokens, heads = whole.generated_ids, range(lm.model.config.num_attention_heads)
    single = {(i, j): seen(lm, tokens=tokens, layer=i, head=j).weights for i in (0, 1) for j in heads}
    assert np.allclose(np.mean(list(single.values()), 0), whole.weights, atol=1e-6)
    pair = seen(lm, tokens=tokens, layer=[1], head=[0, 1]).weights
    assert np.allclose(pair, (single[1, 0] + single[1, 1]) / 2)


@pytest.mark.parametrize("name", NAMES)
def test_copies_of_a_paraphrase_share_the_attention_of_one(name):
    lm, text = labkit.load(name), QUESTION[2]
    one = seen(lm, [text])
    copies = seen(lm, [text] * 3)
    assert copies.generated_ids == one.generated_ids
    assert np.allclose(copies.share, one.share / 3, atol=1e-5)
    unweighted = seen(lm, [text] * 3, "isolate+restart", tokens=one.generated_ids)
    assert (unweighted.share.sum(1) > copies.share.sum(1) + 1e-3).all()


def test_weights_and_order_of_the_paraphrases_are_those_of_the_shares():
    lm = labkit.load("tiny-llama")
    light = seen(lm, method="weighted", weights=[1.0, 1e-9, 1.0])
    assert (light.share[:, 1] < 1e-6).all() and (light.share[:, [0, 2]] > 1e-3).all()
    assert np.allclose(seen(lm).share, seen(lm, QUESTION[::-1]).share[:, ::-1], atol=1e-5)


def test_figures_contain_the_weights_and_shares():
    result = seen(labkit.load("tiny-llama"))
    tokens, shares = result.figure("a title").data
    assert np.allclose(tokens.z, result.weights, atol=6e-5) and np.allclose(shares.z[:, 1:4], result.share, atol=6e-5)
    tokens, shares = result.figure_of_paraphrases().data
    assert np.allclose(tokens.z.sum(1), 1, atol=2e-3)
    assert np.allclose(shares.z, result.share_among_paraphrases, atol=6e-5)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"method": "logit-average"}, "row of its own.*choose one of single, concat, isolate"),
        ({"method": "fusion"}, "'fusion'; choose one of single"),
        ({"layer": 2}, "no layer 2: the model has layers 0 to 1"),
        ({"layer": []}, "no layer was chosen"),
        ({"head": [0, 99]}, "no head 99"),
        ({"tokens": []}, "there is no generated token"),
        ({"tokens": [1, 10**6]}, "1000000 is not among them"),
        ({"tokens": [1] * 1000}, "the model has 1,024 positions"),
        ({"paraphrases": []}, "has no paraphrase"),
    ],
)
def test_invalid_arguments_are_refused(invalid, message):
    with pytest.raises(DataError, match=message):
        seen(labkit.load("tiny-llama"), **invalid)


def test_a_token_whose_window_ends_before_the_paraphrases_has_no_share_among_them():
    lm = labkit.load("tiny-gemma3")
    local = lm.model.config.layer_types.index("sliding_attention")
    result = seen(lm, cue="word: " * (lm.model.config.sliding_window + 2), layer=local)
    assert not result.share.any()
    with pytest.raises(DataError, match="gives no paraphrase any attention"):
        result.figure_of_paraphrases()
