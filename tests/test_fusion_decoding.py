"""Greedy, sampled and beam decoding, against transformers' own generate() and against counting."""

import pytest
import torch

import labkit
from labkit import fusion
from labkit.fusion.decoding import Decoding, _Text, decode
from labkit.fusion.fast import FastEngine
from labkit.fusion.layout import prompts, token_ids
from labkit.fusion.methods import method_named

TEXTS = ["the cat sat on the mat", "money and the bank of the river", "look at the past", "you can see it", "Paris is"]
NAMES = ("tiny-gpt2", "tiny-llama", "tiny-gemma3")


def ids_of(lm, text):
    begins, ((ids,),), cue = token_ids(lm.tokenizer, [[text]], "", "word:", "\n")
    return torch.tensor([[*begins, *ids, *cue]])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_beams", [1, 2, 4])
def test_one_paraphrase_is_written_as_generate_writes_it(name, num_beams):
    lm = labkit.load(name)
    got = fusion.generate(lm, [[text] for text in TEXTS], "single", cue="word:", max_new_tokens=8, num_beams=num_beams)
    for text, tokens in zip(TEXTS, got.tokens, strict=True):
        ids = ids_of(lm, text)
        written = lm.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, num_beams=num_beams, do_sample=False
        )
        ends = set(got.tokens[0]) & {lm.tokenizer.eos_token_id}
        assert tokens == written[0, ids.shape[1] :].tolist()[: len(tokens)] and (len(tokens) == 8 or ends is not None)


@pytest.mark.parametrize("method", ["fuse", "logit-average", "hidden-average"])
@pytest.mark.parametrize("engine", ["fast", "dense"])
def test_beams_of_copies_are_the_beams_of_one(method, engine):
    lm, text = labkit.load("tiny-gemma3"), TEXTS[1]
    settings = {"cue": "word:", "max_new_tokens": 6, "num_beams": 3}
    one = fusion.generate(lm, [[text]], "single", **settings)
    copies = fusion.generate(lm, [[text] * 3, [text]], method, engine, **settings)
    assert copies.tokens == [one.tokens[0]] * 2
    assert copies.log_probs == pytest.approx([one.log_probs[0]] * 2, abs=1e-3)


def test_beams_that_all_end_at_once_give_the_answer_that_generate_gives():
    lm = labkit.load("tiny-llama", dtype="float64")
    questions = [[text] for text in TEXTS]
    scores = fusion.generate(lm, questions[:1], "single", cue="word:", max_new_tokens=1).first_logits[0]
    ends = scores.topk(4).indices.tolist()  # all that two beams look at
    lm.model.generation_config.eos_token_id = ends
    got = fusion.generate(lm, questions, "single", cue="word:", max_new_tokens=6, num_beams=2)
    ids = ids_of(lm, TEXTS[0])
    written = lm.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, num_beams=2, do_sample=False
    )
    assert got.tokens[0] == written[0, ids.shape[1] :].tolist()
    alone = [
        fusion.generate(lm, [q], "single", cue="word:", max_new_tokens=6, num_beams=2).tokens[0] for q in questions
    ]
    assert got.tokens == alone


def test_the_paraphrases_of_a_vote_draw_for_themselves():
    lm = labkit.load("tiny-llama")
    settings = {"cue": "word:", "max_new_tokens": 6, "do_sample": True, "temperature": 3.0}
    result = fusion.generate(lm, [[TEXTS[0]] * 5], "majority-vote", **settings)
    assert len(result.votes[0]) > 1


def test_more_beams_find_an_answer_at_least_as_likely():
    lm = labkit.load("tiny-llama")
    found = [
        fusion.generate(lm, [TEXTS[:3]], cue="word:", max_new_tokens=6, num_beams=beams).log_probs[0] / 6
        for beams in (1, 8)
    ]
    assert found[1] >= found[0] - 1e-6


def test_the_log_probability_is_that_of_the_tokens_read_by_the_model():
    lm, text = labkit.load("tiny-gpt2"), TEXTS[0]
    got = fusion.generate(lm, [[text]], "single", cue="word:", max_new_tokens=4)
    ids = torch.cat([ids_of(lm, text), torch.tensor([got.tokens[0]])], 1)
    with torch.no_grad():
        log_probs = lm.model(ids).logits.log_softmax(-1)[0]
    begin = ids.shape[1] - 5
    wanted = sum(float(log_probs[begin + i, token]) for i, token in enumerate(got.tokens[0]))
    assert got.log_probs[0] == pytest.approx(wanted, abs=1e-4)


def test_drawn_answers_are_repeatable_differ_by_seed_and_do_not_depend_on_the_batch():
    lm, questions = labkit.load("tiny-llama"), [[text] for text in TEXTS]
    settings = {"cue": "word:", "max_new_tokens": 8, "do_sample": True, "temperature": 3.0}
    first = fusion.generate(lm, questions, **settings).tokens
    assert fusion.generate(lm, questions, **settings).tokens == first
    assert fusion.generate(lm, questions, batch_size=2, **settings).tokens == first
    assert fusion.generate(lm, questions, seed=1, **settings).tokens != first


def test_drawing_from_one_token_is_greedy():
    lm, questions = labkit.load("tiny-llama"), [TEXTS[:2]]
    greedy = fusion.generate(lm, questions, cue="word:", max_new_tokens=6).tokens
    drawn = fusion.generate(lm, questions, cue="word:", max_new_tokens=6, do_sample=True, top_k=1)
    assert drawn.tokens == greedy


def test_tokens_are_drawn_as_often_as_they_are_probable():
    lm = labkit.load("tiny-llama")
    begins, ids, cue = token_ids(lm.tokenizer, [TEXTS[:2]], "", "word:", "\n")
    made = prompts(method_named("fuse"), begins, ids * 400, cue)
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


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_the_length_penalty_is_that_of_generate(penalty):
    lm = labkit.load("tiny-llama", dtype="float64")
    ids = ids_of(lm, TEXTS[1])
    plain = fusion.generate(lm, [[TEXTS[1]]], "single", cue="word:", max_new_tokens=8).tokens[0]
    lm.model.generation_config.eos_token_id = [plain[1]]
    settings = {"max_new_tokens": 8, "num_beams": 3, "length_penalty": penalty}
    got = fusion.generate(lm, [[TEXTS[1]]], "single", cue="word:", **settings).tokens[0]
    written = lm.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
    assert got == written[0, ids.shape[1] :].tolist()[: len(got)]


class Letters:
    """A tokenizer whose ids are the numbers of letters."""

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("written", "answer"),
    [(" Paris\nQuestion", " Paris"), ("\n\n Paris \nLyon", "\n\n Paris "), ("\n", None), ("Paris", None), (" ", None)],
)
def test_an_answer_ends_with_its_first_line_that_is_not_empty(written, answer):
    text, ids = _Text(Letters(), set(), Decoding(first_line=True)), list(map(ord, written))
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
