"""Attention of generated tokens to paraphrases, against closed forms and transformers' own attention."""

import numpy as np
import pytest
import torch

import labkit
from labkit import fusion
from labkit.errors import DataError
from labkit.fusion.looks import looks

NAMES = ("tiny-gpt2", "tiny-llama", "tiny-gemma2", "tiny-gemma3")
QUESTION = ["the cat sat", "the mat sat on one", "look at the past and the future"]
LONG = "look at the past and the future of the word that you can not see"  # longer than the tiny models' window
PROMPT = {"prefix": "the token of the model is past. ", "cue": "word:"}


def seen(lm, paraphrases=QUESTION, **settings):
    if "tokens" not in settings:
        settings["tokens"] = fusion.generate(lm, [paraphrases], max_new_tokens=4, **PROMPT).tokens[0]
    return looks(lm, paraphrases, **PROMPT | settings)


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_transformers_and_copies_share_them(name):
    lm = labkit.load(name, attn="eager")
    tokens = fusion.generate(lm, [[LONG]], max_new_tokens=4, **PROMPT).tokens[0]
    prompt = lm.tokenizer("")["input_ids"][:1] + [
        token
        for piece in (PROMPT["prefix"], LONG + "\n", PROMPT["cue"])
        for token in lm.tokenizer(piece, add_special_tokens=False)["input_ids"]
    ]
    with torch.no_grad():
        maps = lm.model(torch.tensor([prompt + tokens[:-1]]), output_attentions=True).attentions
    expected = torch.stack(maps)[:, 0, :, len(prompt) - 1 :, : len(prompt)].numpy()  # (layers, heads, new, context)
    backend = "eager" if name == "tiny-gemma2" else "sdpa"
    lm.model.set_attn_implementation(backend)
    one, copies = seen(lm, [LONG], tokens=tokens), seen(lm, [LONG] * 3, tokens=tokens)
    assert np.allclose(one.weights, expected.mean((0, 1)), atol=1e-5)
    assert np.allclose(seen(lm, [LONG], tokens=tokens, layer=1, head=2).weights, expected[1, 2], atol=1e-5)
    assert np.allclose(copies.share, one.share / 3, atol=1e-5)
    assert copies.segments.count(0) == copies.segments.count(2) == one.segments.count(0)
    assert lm.model.config._attn_implementation == backend


def test_the_shares_follow_the_order_of_the_paraphrases_and_figures_contain_them():
    lm = labkit.load("tiny-llama")
    result, tokens = seen(lm), fusion.generate(lm, [QUESTION], max_new_tokens=4, **PROMPT).tokens[0]
    assert np.allclose(result.share, seen(lm, QUESTION[::-1], tokens=tokens).share[:, ::-1], atol=1e-5)
    alone = result.among_paraphrases()
    assert np.allclose(alone.share, result.share / result.share.sum(1, keepdims=True))
    for looked, columns in ((result, slice(1, 4)), (alone, slice(None))):
        weights, shares = looked.figure("a title").data
        assert np.allclose(weights.z, looked.weights, atol=6e-5)
        assert np.allclose(shares.z[:, columns], looked.share, atol=6e-5)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"tokens": [1], "layer": 2}, "a layer from 0 to 1"),
        ({"tokens": [1], "head": 99}, "a head to"),
        ({"tokens": []}, "at least one generated token"),
        ({"tokens": [1] * 1100}, "the model has 1,024 positions"),
        ({"tokens": [1], "paraphrases": []}, "at least one"),
    ],
)
def test_invalid_arguments_are_refused(invalid, message):
    with pytest.raises(DataError, match=message):
        seen(labkit.load("tiny-llama"), **invalid)
