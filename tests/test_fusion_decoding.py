"""Greedy and beam decoding, against transformers' own generate() and against enumeration."""

import pytest
import torch

import labkit
from labkit import fusion
from labkit.fusion.decoding import Answer, decode
from labkit.fusion.generation import elect, make_engine
from labkit.fusion.layout import prompts, token_ids
from labkit.fusion.methods import METHODS

TEXTS = ["the cat sat on the mat", "money and the bank of the river", "look at the past", "you can see it", "Paris is"]
NAMES = ("tiny-gpt2", "tiny-llama", "tiny-gemma3")


def lively(name):
    """In float64, without ties; tiny-gemma3 with a head of its own, as with its embedding it repeats one token."""
    lm = labkit.load(name, dtype="float64")
    if name == "tiny-gemma3":
        weight = lm.model.get_output_embeddings().weight
        drawn = 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
        lm.model.get_output_embeddings().weight = torch.nn.Parameter(drawn)
    return lm


def prompt_of(lm, texts):
    prefix, segments, cue = token_ids(lm.tokenizer, [texts], "", "word:")
    return prompts(METHODS["fuse"], prefix, segments, cue)


def written(lm, text, **settings):
    """What transformers' own generate() writes behind the prompt, up to its first end token, that one included."""
    prompt = prompt_of(lm, [text])
    ids = torch.tensor([[*prompt.rows[0].ids.tolist(), *prompt.cue]])
    out = lm.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
    tokens, ends = out[0, ids.shape[1] :].tolist(), lm.model.generation_config.eos_token_id
    ended = [place for place, token in enumerate(tokens, 1) if token in (ends if isinstance(ends, list) else [ends])]
    return tokens[: ended[0]] if ended else tokens


def fused(lm, texts, method="single", **settings):
    return fusion.generate(lm, [[text] for text in texts], method, **{"cue": "word:", "max_new_tokens": 8} | settings)


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_beams", "penalty"), [(1, 1.0), (2, 0.0), (3, 2.0), (4, 1.0)])
@pytest.mark.parametrize("ending", [False, True])
def test_one_paraphrase_is_written_as_generate_writes_it(name, num_beams, penalty, ending):
    lm, settings = lively(name), {"max_new_tokens": 8, "num_beams": num_beams, "length_penalty": penalty}
    if ending:
        lm.model.generation_config.eos_token_id = sorted({written(lm, text, max_new_tokens=8)[2] for text in TEXTS})
    greedy = [written(lm, text, max_new_tokens=8) for text in TEXTS]
    expected = [written(lm, text, **settings) for text in TEXTS]
    assert (expected == greedy) == (num_beams == 1)
    assert penalty == 2.0 or (min(map(len, expected)) < 8) == ending
    assert fused(lm, TEXTS, **settings).tokens == expected


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["fuse", "logit-average", "hidden-average"])
@pytest.mark.parametrize("engine", ["fast", "dense", "cacheless"])
def test_beams_of_copies_are_the_beams_of_one(method, engine):
    lm, text = lively("tiny-gemma3"), TEXTS[0]
    settings = {"max_new_tokens": 6, "num_beams": 4}
    expected = written(lm, text, **settings)
    assert expected != written(lm, text, max_new_tokens=6)
    copies = fusion.generate(lm, [[text] * 3, [text]], method, engine, cue="word:", **settings)
    assert copies.tokens == [expected] * 2


def test_beams_that_all_end_at_once_give_the_answer_that_generate_gives():
    lm, settings = labkit.load("tiny-llama", dtype="float64"), {"max_new_tokens": 6, "num_beams": 2}
    scores = fused(lm, TEXTS[:1]).first_logits[0]
    lm.model.generation_config.eos_token_id = scores.topk(4).indices.tolist()  # all that two beams look at
    assert fused(lm, TEXTS, **settings).tokens == [written(lm, text, **settings) for text in TEXTS]


def test_as_many_beams_as_tokens_find_the_likeliest_fused_answer_of_all():
    lm = lively("tiny-llama")
    engine = make_engine("dense", lm.model, prompt_of(lm, TEXTS[:3]))
    first = engine.start().log_softmax(-1)[0]  # (vocab,)
    engine.select([0] * len(first))
    sums = first[:, None] + engine.step(torch.arange(len(first))).log_softmax(-1)  # (vocab, vocab)
    settings = {"cue": "word:", "max_new_tokens": 2}
    best = fusion.generate(lm, [TEXTS[:3]], num_beams=len(first), **settings)
    greedy = fusion.generate(lm, [TEXTS[:3]], **settings)
    assert best.tokens == [list(divmod(int(sums.argmax()), len(first)))] != greedy.tokens


def test_an_answer_ends_at_a_stop_that_is_not_part_of_it_and_at_an_end_token():
    lm = labkit.load("tiny-llama")
    whole = fused(lm, TEXTS[:1], "fuse")
    tokens = whole.tokens[0]
    stop = lm.tokenizer.decode(tokens[3:4]).strip()
    stopped = fused(lm, TEXTS[:1], "fuse", stop=stop)
    assert len(stopped.tokens[0]) <= 4 and stopped.tokens[0] == tokens[: len(stopped.tokens[0])]
    assert stop not in stopped.texts[0] and whole.texts[0].startswith(stopped.texts[0])
    special = lm.tokenizer.convert_ids_to_tokens(tokens[2])
    lm.tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    assert fused(lm, TEXTS[:1], "fuse", stop=special).tokens[0] == tokens[: tokens.index(tokens[2]) + 1]


@pytest.mark.parametrize(
    ("text", "answer"),
    [(" Paris\nQuestion", " Paris"), ("\n\n Paris \nLyon", "\n\n Paris "), ("\n", "\n"), ("Paris", "Paris")],
)
def test_an_answer_ends_with_its_first_line_that_is_not_empty(text, answer):
    class Letters:
        """A model that writes `text` letter by letter, and a tokenizer whose ids are the numbers of letters."""

        counts, letters = [1], iter(text)

        def step(self, tokens=None):
            return torch.nn.functional.one_hot(torch.tensor([ord(next(self.letters))]), 128).double()

        def decode(self, ids, skip_special_tokens):
            return "".join(map(chr, ids))

        start = step

    ((first,), _) = decode(Letters(), None, Letters(), set(), len(text), first_line=True)
    assert first.text == answer and first.ended == (answer != text)


def test_votes_compare_the_first_line_or_with_a_stop_the_whole_answer():
    def elected(texts, whole=False):
        return elect([Answer((1, 2), text, -1.0) for text in texts], whole)

    winner, votes = elected(["", "?", "The The", "Paris", " paris."])
    assert (winner.text, votes) == ("Paris", {"": 1, "?": 1, "the the": 1, "paris": 2})
    assert elected(["1. b\nx", "1. b\ny"])[1] == {"1 b": 2}
    assert elected(["1. b\nx", "1. b\ny"], whole=True)[1] == {"1 b x": 1, "1 b y": 1}
