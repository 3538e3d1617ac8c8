"""Greedy, sampled and beam decoding, against transformers' own generate() and against counting."""

import pytest
import torch

import labkit
from labkit import fusion
from labkit.fusion.decoding import Answer, AnswerText, Decoding, decode
from labkit.fusion.engine import FastEngine
from labkit.fusion.generation import _elect
from labkit.fusion.layout import prompts, token_ids
from labkit.fusion.methods import METHODS
from labkit.fusion.reference import ReferenceEngine

TEXTS = ["the cat sat on the mat", "money and the bank of the river", "look at the past", "you can see it", "Paris is"]
NAMES = ("tiny-gpt2", "tiny-llama", "tiny-gemma3")


def ids_of(lm, text):
    begins, ((ids,),), cue = token_ids(lm.tokenizer, [[text]], "", "word:", "\n")
    return torch.tensor([[*begins, *ids, *cue]])


def lively(name):
    """In float64, without ties; tiny-gemma3 with a head of its own, as with its embedding it repeats one token."""
    lm = labkit.load(name, dtype="float64")
    if name == "tiny-gemma3":
        weight = lm.model.get_output_embeddings().weight
        drawn = 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
        lm.model.get_output_embeddings().weight = torch.nn.Parameter(drawn)
    return lm


def written(lm, text, **settings):
    """What transformers' own generate() writes behind the prompt, up to its first end token, that one included."""
    ids = ids_of(lm, text)
    out = lm.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
    tokens, ends = out[0, ids.shape[1] :].tolist(), lm.model.generation_config.eos_token_id
    ended = [place for place, token in enumerate(tokens, 1) if token in (ends if isinstance(ends, list) else [ends])]
    return tokens[: ended[0]] if ended else tokens


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_beams", [1, 2, 4])
@pytest.mark.parametrize("ending", [False, True])
def test_one_paraphrase_is_written_as_generate_writes_it(name, num_beams, ending):
    lm, settings = lively(name), {"max_new_tokens": 8, "num_beams": num_beams}
    if ending:
        lm.model.generation_config.eos_token_id = sorted({written(lm, text, max_new_tokens=8)[2] for text in TEXTS})
    greedy = [written(lm, text, max_new_tokens=8) for text in TEXTS]
    expected = [written(lm, text, **settings) for text in TEXTS]
    assert (expected == greedy) == (num_beams == 1)
    assert (min(map(len, expected)) < 8) == ending
    assert fusion.generate(lm, [[text] for text in TEXTS], "single", cue="word:", **settings).tokens == expected


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["fuse", "logit-average", "hidden-average"])
@pytest.mark.parametrize("engine", ["fast", "dense"])
def test_beams_of_copies_are_the_beams_of_one(method, engine):
    lm, text = lively("tiny-gemma3"), TEXTS[0]
    settings = {"max_new_tokens": 6, "num_beams": 4}
    expected = written(lm, text, **settings)
    assert expected != written(lm, text, max_new_tokens=6)
    one = fusion.generate(lm, [[text]], "single", cue="word:", **settings)
    copies = fusion.generate(lm, [[text] * 3, [text]], method, engine, cue="word:", **settings)
    assert one.tokens == [expected] and copies.tokens == [expected] * 2
    assert copies.log_probs == pytest.approx([one.log_probs[0]] * 2, abs=1e-3)


def test_beams_that_all_end_at_once_give_the_answer_that_generate_gives():
    lm = labkit.load("tiny-llama", dtype="float64")
    questions = [[text] for text in TEXTS]
    scores = fusion.generate(lm, questions[:1], "single", cue="word:", max_new_tokens=1).first_logits[0]
    ends = scores.topk(4).indices.tolist()  # all that two beams look at
    lm.model.generation_config.eos_token_id = ends
    got = fusion.generate(lm, questions, "single", cue="word:", max_new_tokens=6, num_beams=2)
    assert got.tokens[0] == written(lm, TEXTS[0], max_new_tokens=6, num_beams=2)
    alone = [
        fusion.generate(lm, [q], "single", cue="word:", max_new_tokens=6, num_beams=2).tokens[0] for q in questions
    ]
    assert got.tokens == alone


def test_as_many_beams_as_tokens_find_the_likeliest_fused_answer_of_all():
    lm = lively("tiny-llama")
    begins, ids, cue = token_ids(lm.tokenizer, [TEXTS[:3]], "", "word:", "\n")
    engine = ReferenceEngine(lm.model, prompts(METHODS["fuse"], begins, ids, cue), rendering="dense")
    with torch.no_grad():
        first = engine.start().log_softmax(-1)[0]  # (vocab,)
        engine.select([0] * len(first))
        second = engine.step(torch.arange(len(first))).log_softmax(-1)  # (vocab, vocab)
    sums = first[:, None] + second
    best = divmod(int(sums.argmax()), len(first))
    settings = {"cue": "word:", "max_new_tokens": 2}
    found = fusion.generate(lm, [TEXTS[:3]], num_beams=len(first), **settings)
    greedy = fusion.generate(lm, [TEXTS[:3]], **settings)
    assert found.tokens == [list(best)] != greedy.tokens
    assert found.log_probs[0] == pytest.approx(float(sums.max()), abs=1e-6) and found.log_probs > greedy.log_probs


def test_the_log_probability_is_that_of_the_tokens_read_by_the_model():
    lm, text = labkit.load("tiny-gpt2"), TEXTS[0]
    got = fusion.generate(lm, [[text]], "single", cue="word:", max_new_tokens=4)
    ids = torch.cat([ids_of(lm, text), torch.tensor([got.tokens[0]])], 1)
    with torch.no_grad():
        log_probs = lm.model(ids).logits.log_softmax(-1)[0]
    begin = ids.shape[1] - 5
    expected = sum(float(log_probs[begin + i, token]) for i, token in enumerate(got.tokens[0]))
    assert got.log_probs[0] == pytest.approx(expected, abs=1e-4)


def test_drawn_answers_are_repeatable_differ_by_seed_and_do_not_depend_on_the_batch():
    lm, questions = labkit.load("tiny-llama"), [[text] for text in TEXTS]
    settings = {"cue": "word:", "max_new_tokens": 8, "do_sample": True, "temperature": 3.0}
    first = fusion.generate(lm, questions, **settings).tokens
    assert fusion.generate(lm, questions, **settings).tokens == first
    assert fusion.generate(lm, questions, batch_size=2, **settings).tokens == first
    assert fusion.generate(lm, questions, seed=1, **settings).tokens != first


def test_tokens_are_drawn_as_often_as_they_are_probable():
    lm = labkit.load("tiny-llama")
    begins, ids, cue = token_ids(lm.tokenizer, [TEXTS[:2]], "", "word:", "\n")
    made = prompts(METHODS["fuse"], begins, ids * 400, cue)
    with torch.no_grad():
        engine = FastEngine(lm.model, made)
        answers, scores = decode(
            engine, None, lm.tokenizer, set(), Decoding(1, do_sample=True, temperature=2.0), range(400)
        )
    drawn = torch.bincount(torch.tensor([a.tokens[0] for a in answers]), minlength=scores.shape[1]) / 400
    probs = (scores[0] / 2.0).softmax(-1)
    top = probs.argsort(descending=True)[:5]
    spread = (probs[top] * (1 - probs[top]) / 400).sqrt()
    assert ((drawn[top] - probs[top]).abs() < 4 * spread + 1e-3).all()


def test_an_answer_ends_at_a_stop_and_the_stop_is_not_part_of_it():
    lm = labkit.load("tiny-llama")
    whole = fusion.generate(lm, [[TEXTS[0]]], cue="word:", max_new_tokens=8)
    stop = lm.tokenizer.decode(whole.tokens[0][3:4]).strip()
    assert stop
    stopped = fusion.generate(lm, [[TEXTS[0]]], cue="word:", max_new_tokens=8, stop=stop)
    assert len(stopped.tokens[0]) <= 4 and stopped.tokens[0] == whole.tokens[0][: len(stopped.tokens[0])]
    assert stop not in stopped.texts[0] and whole.texts[0].startswith(stopped.texts[0])


def test_a_stop_that_is_a_special_token_ends_an_answer():
    lm = labkit.load("tiny-llama")
    whole = fusion.generate(lm, [[TEXTS[0]]], cue="word:", max_new_tokens=8).tokens[0]
    lm.tokenizer.add_special_tokens({"additional_special_tokens": [lm.tokenizer.convert_ids_to_tokens(whole[2])]})
    token = lm.tokenizer.convert_ids_to_tokens(whole[2])
    stopped = fusion.generate(lm, [[TEXTS[0]]], cue="word:", max_new_tokens=8, stop=token)
    assert stopped.tokens[0] == whole[: whole.index(whole[2]) + 1] and token not in stopped.texts[0]


def test_the_length_penalty_is_that_of_generate():
    lm = lively("tiny-llama")
    lm.model.generation_config.eos_token_id = [written(lm, TEXTS[2], max_new_tokens=8)[2]]
    expected, got = {}, {}
    for penalty in (0.0, 1.0, 2.0):
        settings = {"max_new_tokens": 8, "num_beams": 3, "length_penalty": penalty}
        expected[penalty] = written(lm, TEXTS[2], **settings)
        got[penalty] = fusion.generate(lm, [[TEXTS[2]]], "single", cue="word:", **settings).tokens[0]
    assert len(expected[0.0]) < len(expected[1.0]) < len(expected[2.0])
    assert got == expected


class Letters:
    """A tokenizer whose ids are the numbers of letters."""

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("written", "answer"),
    [(" Paris\nQuestion", " Paris"), ("\n\n Paris \nLyon", "\n\n Paris "), ("\n", None), ("Paris", None), (" ", None)],
)
def test_an_answer_ends_with_its_first_line_that_is_not_empty(written, answer):
    text, ids = AnswerText(Letters(), set(), Decoding(first_line=True)), list(map(ord, written))
    assert text.of(ids) == (written if answer is None else answer)
    ended = [n for n in range(1, len(ids) + 1) if text.ends(ids[:n])]
    assert ended[:1] == ([] if answer is None else [len(answer) + 1])


def test_an_answer_ends_at_an_end_token_while_others_go_on():
    lm = labkit.load("tiny-llama")
    whole = fusion.generate(lm, [[text] for text in TEXTS], cue="word:", max_new_tokens=8).tokens
    end = whole[0][2]
    lm.model.generation_config.eos_token_id = [end]
    cut = fusion.generate(lm, [[text] for text in TEXTS], cue="word:", max_new_tokens=8).tokens
    for before, after in zip(whole, cut, strict=True):
        length = before.index(end) + 1 if end in before else 8
        assert after == before[:length]


def test_votes_compare_the_first_line_or_with_a_stop_the_whole_answer():
    def elect(texts, whole=False):
        return _elect([Answer([1, 2], text, -1.0) for text in texts], whole)

    winner, votes = elect(["", "?", "The The", "Paris", " paris."])
    assert (winner.text, votes) == ("Paris", {"": 1, "?": 1, "the the": 1, "paris": 2})
    assert elect(["1. b\nx", "1. b\ny"])[1] == {"1 b": 2}
    assert elect(["1. b\nx", "1. b\ny"], whole=True)[1] == {"1 b x": 1, "1 b y": 1}
