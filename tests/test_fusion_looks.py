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
def test_with_one_paraphrase_the_weights_are_those_of_transformers(name):
    lm = labkit.load(name, attn="eager")
    tokens = fusion.generate(lm, [[LONG]], max_new_tokens=4, **PROMPT).tokens[0]
    prompt = lm.tokenizer("")["input_ids"][:1] + [
        token
        for piece in (PROMPT["prefix"], LONG + "\n", PROMPT["cue"])
        for token in lm.tokenizer(piece, add_special_tokens=False)["input_ids"]
    ]
    with torch.no_grad():
        maps = lm.model(torch.tensor([prompt + tokens[:-1]]), output_attentions=True).attentions
    expected = torch.stack(maps).mean(2)[:, 0, len(prompt) - 1 :, : len(prompt)].numpy()  # (layers, generated, context)
    lm.model.set_attn_implementation("sdpa" if name != "tiny-gemma2" else "eager")
    assert np.allclose(seen(lm, [LONG], tokens=tokens).weights, expected.mean(0), atol=1e-5)
    assert np.allclose(seen(lm, [LONG], tokens=tokens, layer=1).weights, expected[1], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_copies_of_a_paraphrase_share_the_attention_of_one(name):
    lm = labkit.load(name)
    one, copies = seen(lm, [LONG]), seen(lm, [LONG] * 3)
    assert np.allclose(copies.share, one.share / 3, atol=1e-5)
    assert copies.segments.count(0) == copies.segments.count(2) == one.segments.count(0)


def test_heads_average_to_the_whole_and_the_order_of_paraphrases_is_that_of_the_shares():
    lm = labkit.load("tiny-llama")
    whole, tokens = seen(lm), fusion.generate(lm, [QUESTION], max_new_tokens=4, **PROMPT).tokens[0]
    heads = [seen(lm, tokens=tokens, head=j).weights for j in range(lm.model.config.num_attention_heads)]
    assert np.allclose(np.mean(heads, 0), whole.weights, atol=1e-6)
    assert np.allclose(whole.share, seen(lm, QUESTION[::-1], tokens=tokens).share[:, ::-1], atol=1e-5)


def test_figures_contain_the_weights_and_shares():
    result = seen(labkit.load("tiny-llama"))
    tokens, shares = result.figure("a title").data
    assert np.allclose(tokens.z, result.weights, atol=6e-5) and np.allclose(shares.z[:, 1:4], result.share, atol=6e-5)
    tokens, shares = result.figure_of_paraphrases("a title").data
    assert np.allclose(tokens.z.sum(1), 1, atol=2e-3)
    assert np.allclose(shares.z, result.share_among_paraphrases, atol=6e-5)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"tokens": [1], "layer": 2}, "a layer from 0 to 1"),
        ({"tokens": [1], "head": 99}, "a head to"),
        ({"tokens": []}, "at least one generated token"),
        ({"tokens": [1] * 1100}, "the model has 1,024 positions"),
        ({"tokens": [1], "paraphrases": []}, "has no paraphrase"),
    ],
)
def test_invalid_arguments_are_refused(invalid, message):
    with pytest.raises(DataError, match=message):
        seen(labkit.load("tiny-llama"), **invalid)
