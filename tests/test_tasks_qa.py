"""Extractive question answering: windows, decoding, the task, and the official scores."""

import itertools
import string

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import PreTrainedConfig
from transformers.modeling_outputs import QuestionAnsweringModelOutput

import labkit
from labkit.datasets.evidence import INSTRUCTION, MARKS
from labkit.datasets.examples import Answer, Question
from labkit.errors import DataError, ModelError
from labkit.models.gguf import build_tokenizer
from labkit.models.special_tokens import add_tokens
from labkit.models.tiny import build_tiny_tokenizer
from labkit.tasks import base, qa, qa_scores

MAT = "The cat sat on the mat."  # The| cat| sat| on| the| mat|. : 7 tokens
TINY = build_tiny_tokenizer()


def asked(context, *answers, question="Who?", id="q"):
    """A question whose answers are texts (their first occurrence) or (start, end)."""
    spans = [(context.index(a), context.index(a) + len(a)) if isinstance(a, str) else a for a in answers]
    return Question(id, question, context, tuple(Answer(context[a:b], a) for a, b in spans))


def gemma_like():
    """A small tokenizer of Gemma's kind: a space is ▁, runs of spaces are tokens, unknown characters become bytes."""
    kinds = {
        3: ["<pad>", "<eos>", "<bos>", "<unk>"],
        4: ["  ", "   "],
        6: [f"<0x{byte:02X}>" for byte in range(256)],
        1: ["▁t", "he", "▁the", "▁c", "at", "▁cat", "▁", "\n", "\n\n", *string.ascii_lowercase, "é", "😀", "▁😀"],
    }
    fields = {"model": "llama", "tokens": sum(kinds.values(), []), "token_type": [k for k in kinds for _ in kinds[k]]}
    special = {"padding": 0, "eos": 1, "bos": 2, "unknown": 3}
    fields |= {f"{name}_token_id": id for name, id in special.items()} | {"add_bos_token": True}
    return build_tokenizer({f"tokenizer.ggml.{name}": value for name, value in fields.items()}, 1024)


TOKENIZERS = {"gemma-like": gemma_like(), "gpt2-mini": labkit.load("gpt2-mini", device="cpu").tokenizer}


def perfect(windows):
    """Logits that are highest at the targets; beyond the window is padding, which must not matter."""
    width = max(len(window.ids) for window in windows) + 3
    logits = np.zeros((2, len(windows), width), dtype=np.float32)
    for row, window in enumerate(windows):
        logits[0, row, window.start] = logits[1, row, window.end] = 10.0
        logits[:, row, len(window.ids) :] = np.inf
    return logits


@pytest.fixture
def lm():
    torch.manual_seed(0)
    return labkit.load("tiny-gpt2", task="qa", device="cpu")


def test_windows_by_hand():
    # bos W h o ? \n [4 tokens of the context] eos; the next window starts 2 tokens later
    rows = qa.windows(TINY, [asked(MAT, "the mat")], max_length=11, doc_stride=2)
    assert [TINY.decode(row.ids) for row in rows] == [
        "<bos>Who?\nThe cat sat on<eos>",
        "<bos>Who?\n sat on the mat<eos>",
        "<bos>Who?\n the mat.<eos>",
    ]
    assert [(row.start, row.end, row.null) for row in rows] == [(10, 10, 10), (8, 9, 10), (6, 7, 9)]
    assert rows[2].offsets == [*[None] * 6, (14, 18), (18, 22), (22, 23), None]
    rows = qa.windows(TINY, [asked(MAT, "cat", "mat")], max_length=11, doc_stride=4, order="question-last")
    assert [TINY.decode(row.ids) for row in rows] == ["<bos>The cat sat on\nWho?<eos>", "<bos> the mat.\nWho?<eos>"]
    assert [(row.start, row.end, row.null) for row in rows] == [(2, 2, 10), (9, 9, 9)]  # the first answer is the target
    bare = build_tiny_tokenizer()
    bare.bos_token = bare.eos_token = None
    (row,) = qa.windows(bare, [asked(MAT)])
    assert bare.decode(row.ids) == f"Who?\n{MAT}\n" and row.start == row.end == row.null == len(row.ids) - 1


def test_long_questions_are_cut_and_they_and_lost_answers_are_counted():
    messages = []
    long, short = asked(MAT, question="abcdefghijkl"), asked(MAT, MAT, question="abcdefgh")
    rows = qa.windows(TINY, [long, short], max_length=16, doc_stride=9, log=messages.append)
    assert [row.ids for row in rows[:2]] == [row.ids for row in rows[2:]] and len(rows) == 4
    assert all(row.start == row.end == row.null for row in rows) and len(messages) == 2


def test_windows_overlap_unless_a_stride_is_chosen():
    assert base.get("qa", max_length=64).doc_stride == 32
    assert base.get("qa").doc_stride == base.get("qa", max_length=64, doc_stride=128).doc_stride == 128


def test_the_evidence_prompt_by_hand(lm):
    add_tokens(lm.model, lm.tokenizer, MARKS)
    head, post, criterion = f"<bos>[INST]{INSTRUCTION}[/INST]", f"[POST]{MAT}[/POST]", "[CRITERION]Who?[/CRITERION]"
    for order, text in (("question-first", criterion + post), ("question-last", post + criterion)):
        (row,) = qa.windows(lm.tokenizer, [asked(MAT, "cat")], prompt="evidence", order=order)
        assert lm.tokenizer.decode(row.ids) == head + text + "<eos>" and row.null == len(row.ids) - 1
        assert lm.tokenizer.decode(row.ids[row.start : row.end + 1]).strip() == "cat"


PIECES = st.one_of(
    st.sampled_from(["the", "cat", " the", " cat", "The", "\n", "\n\n", "  ", "   ", " ", "\t", "é", "e\u0301", "😀"]),
    st.sampled_from(["👩\u200d👩\u200d👧", "\u200b", "\ufeff", "\u3000", "don't", "3,5", "<eos>", "<bos>", "日本"]),
    st.text(max_size=4),
)
CONTEXTS = st.lists(PIECES, min_size=1, max_size=14).map("".join).filter(str.strip)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=45, deadline=None)
@given(context=CONTEXTS, data=st.data(), order=st.sampled_from(qa.ORDERS), room=st.integers(1, 40))
@example(context="  The  cat 😀\n", data=None, order="question-last", room=5)
def test_an_answer_comes_back_from_perfect_logits(kind, context, data, order, room):
    tokenizer = TOKENIZERS[kind]
    first, last = (7, 12) if data is None else sorted(data.draw(st.integers(0, len(context))) for _ in range(2))
    answer = context[first:last]
    assume(answer.strip())
    question = asked(context, (first, last), question="?")
    fixed = len(qa.windows(tokenizer, [asked("a", question="?")], max_length=64)[0].ids) - 1
    rows = qa.windows(tokenizer, [question], max_length=fixed + room, doc_stride=max(1, room // 2), order=order)
    for row in rows:  # special tokens in a text are text
        assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(row.ids[1:-1])
    (prediction,) = qa.decode(rows, *perfect(rows), [question], max_answer_tokens=50)
    a, b = first + len(answer) - len(answer.lstrip()), first + len(answer.rstrip())
    if any(row.start != row.null for row in rows):
        assert prediction.start <= a < b <= prediction.end
        if (a == 0 or context[a - 1].isspace()) and (b == len(context) or context[b].isspace()):
            assert (prediction.start, prediction.end) == (a, b)  # whole words are exact
    else:  # no window has all of the answer
        assert len(rows) > 1 and (prediction.text, prediction.start, prediction.end) == ("", 0, 0)
    for candidate in (prediction, *prediction.n_best):
        assert candidate.text == context[candidate.start : candidate.end] == candidate.text.strip()


@settings(max_examples=40, deadline=None)
@given(
    context=CONTEXTS, seed=st.integers(0, 999), longest=st.integers(1, 12), room=st.integers(2, 12),
    order=st.sampled_from(qa.ORDERS),
)  # fmt: skip
@example(context="😀 a", seed=0, longest=12, room=12, order="question-first")  # four tokens, one character
def test_the_n_best_are_those_of_all_pairs(context, seed, longest, room, order):
    question = asked(context, question="?")
    rows = qa.windows(TINY, [question], max_length=4 + room, doc_stride=max(1, room // 3), order=order)
    rng = np.random.default_rng(seed)
    starts, ends = ([rng.integers(-4, 5, len(row.ids)) / 2 for row in rows] for _ in range(2))  # with equal scores
    (prediction,) = qa.decode(rows, starts, ends, [question], max_answer_tokens=longest)
    best, null_scores = {}, []
    for row, start, end in zip(rows, starts, ends, strict=True):
        null_scores.append(start[row.null] + end[row.null])
        for i, j in itertools.combinations_with_replacement(range(len(row.ids)), 2):
            if row.offsets[i] and row.offsets[j] and j < i + longest:
                piece = context[row.offsets[i][0] : row.offsets[j][1]]
                a = row.offsets[i][0] + len(piece) - len(piece.lstrip())
                b = a + len(piece.strip())
                if a < b:
                    best[a, b] = max(best.get((a, b), -np.inf), start[i] + end[j])
    expected = sorted((-score, *span) for span, score in best.items())[: qa.N_BEST]
    spans = [candidate for candidate in prediction.n_best if candidate.text]
    assert [(-span.score, span.start, span.end) for span in spans] == expected
    assert prediction.best_span == spans[0] and len(prediction.n_best) == len(spans) + 1
    assert prediction.null_score_diff == min(null_scores) + expected[0][0]
    assert (prediction.text == "") == (prediction.null_score_diff > 0)
    for threshold, has_answer in ((prediction.null_score_diff, True), (prediction.null_score_diff - 0.1, False)):
        (other,) = qa.decode(rows, starts, ends, [question], max_answer_tokens=longest, null_threshold=threshold)
        assert (other.text, other.n_best) == (spans[0].text if has_answer else "", prediction.n_best)
    weights = np.exp([candidate.score for candidate in prediction.n_best])
    assert [c.probability for c in prediction.n_best] == pytest.approx(list(weights / weights.sum()))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: qa.windows(TINY, [asked(MAT)], order="context-first"), "choose one of question-first, question-last"),
    (lambda: qa.windows(TINY, [asked(MAT)], prompt="evidence"), r"does not know \[INST\], .*add_tokens"),
    (lambda: qa.windows(TINY, [asked(MAT)], max_length=6), "6: the row of question 'q' has 6 tokens"),
    (lambda: qa.windows(TINY, [asked(" \n")]), "context of question 'q' has no word"),
    (lambda: qa.decode(rows := qa.windows(TINY, [asked(MAT)]), [np.full(20, np.nan)], perfect(rows)[1], [asked(MAT)]),
     "'q' are not all finite"),
    (lambda: base.get("qa", pooling="mean"), "qa has no pooling"),
    (lambda: base.get("quiz"), "choose one of qa, ner, classify, embed"),
    (lambda: base.get("qa").predict(labkit.load("tiny-gpt2", device="cpu").model, TINY, [asked(MAT)], ()),
     "task='question-answering'"),
])  # fmt: skip
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises((DataError, ModelError), match=message):
        call()


def test_the_loss_and_the_predictions_are_those_of_one_window_at_a_time():
    torch.manual_seed(0)
    lm = labkit.load("tiny-gemma3", task="question-answering", device="cpu")
    labkit.to_bidirectional(lm.model.eval())
    questions = [asked(MAT * n, "mat", question="Who" + "?" * min(n, 9), id=str(n)) for n in (3, 1, 9, 2)]
    task = qa.QuestionAnswering(max_length=60, doc_stride=30, order="question-last", null_threshold=-1.0)
    rows = task.rows(lm.tokenizer, questions, ())
    assert len(rows) > len(questions)
    with torch.no_grad():
        outputs = [lm.model(torch.tensor([row.ids])) for row in rows]
    starts, ends = ([output[f"{side}_logits"][0] for output in outputs] for side in ("start", "end"))
    by_hand = [
        -(start.log_softmax(0)[row.start] + end.log_softmax(0)[row.end]) / 2
        for row, start, end in zip(rows, starts, ends, strict=True)
    ]
    assert_close(task.loss(lm.model, task.collate(rows, 0)), torch.stack(by_hand).mean())
    expected = qa.decode(rows, [x.numpy() for x in starts], [x.numpy() for x in ends], questions, null_threshold=-1.0)
    lm.model.train()
    for arguments in ({"batch_size": 4}, {"batch_size": 1, "rows": rows}):
        predictions = task.predict(lm.model, lm.tokenizer, questions, (), **arguments)
        assert [(p.id, p.text) for p in predictions] == [(p.id, p.text) for p in expected]
        for prediction, alone in zip(predictions, expected, strict=True):
            assert prediction.probability == pytest.approx(alone.probability, rel=1e-4)
            assert prediction.null_score_diff == pytest.approx(alone.null_score_diff, abs=1e-4)
    assert lm.model.training


class NeverAnswers(torch.nn.Linear):
    """A model whose logits are highest at "no answer"."""

    config = PreTrainedConfig()

    def forward(self, input_ids, attention_mask):
        logits = (input_ids == TINY.eos_token_id).float()
        return QuestionAnsweringModelOutput(start_logits=logits, end_logits=logits)


def test_the_threshold_is_chosen_on_dev_if_some_questions_have_no_answer():
    answerable = [asked(MAT, "cat", id="a"), asked(MAT, "sat", id="b"), asked(MAT, "mat", id="c")]
    mixed = [*answerable, asked(MAT, id="d")]

    def run(task, questions):
        predictions = task.predict(NeverAnswers(1, 1), TINY, questions, ())
        return [prediction.text for prediction in predictions], task.score(questions, predictions)

    task = base.get("qa")
    assert (task.metric(answerable), task.metric(mixed)) == ("f1", "best_f1")
    texts, scores = run(task, mixed)
    assert texts == [""] * 4 and scores["best_f1"] == scores["f1"] == 25
    tuned = task.tuned(scores)
    assert tuned.metric(mixed) == "f1" and tuned.tuned({}) == tuned and run(tuned, mixed)[0] == [""] * 4
    texts, scores = run(task, answerable)  # without unanswerable questions, it always answers, also after dev
    assert texts == ["The"] * 3 and run(task.tuned(scores), mixed)[0] == ["The"] * 4


def prediction(id, text, diff=0.0, best=None):
    span = qa.Candidate(best or text or "x", 0, 1, 0.0, 0.5)
    return qa.Prediction(id, text, 0, len(text), 0.5, (span, qa.Candidate("", 0, 0, diff, 0.5)), diff)


@pytest.mark.parametrize(
    ("text", "golds", "exact", "overlap"),
    [
        ("The Cat.", ["cat"], 1, 1),  # letters, punctuation and articles do not count
        ("on the mat", ["mat", "a mat at home"], 0, 2 / 3),  # the answer that fits best: mat
        ("cat cat mat", ["cat mat mat"], 0, 2 / 3),  # a word counts as often as it is in both
        ("$1,20 theatre", ["“$120” theatre"], 0, 1 / 2),  # ASCII punctuation only, and "the" only as a word
        ("", ["cat"], 0, 0),
        ("the", ["an"], 1, 1),  # both are empty
    ],
)
def test_scores_of_one_answer_are_those_of_squad_1_1(text, golds, exact, overlap):
    questions = [Question("q", "?", "", tuple(Answer(gold, 0) for gold in golds))]
    scores = qa_scores.scores(questions, [prediction("q", text)])
    assert scores == {"exact_match": 100 * exact, "f1": pytest.approx(100 * overlap), "n": 1}


def test_scores_with_unanswerable_questions_by_hand():
    questions = [asked(MAT, "cat", id="a"), asked(MAT, "the mat", id="b"), asked(MAT, id="c"), asked(MAT, id="d")]
    predictions = [prediction("a", "cat"), prediction("b", "on the mat"), prediction("c", ""), prediction("d", "cat")]
    overlap = 100 * 2 / 3  # "on mat" and "mat"
    assert qa_scores.scores(questions, predictions) == {
        "exact_match": 50, "f1": pytest.approx((100 + overlap + 100) / 4), "n": 4,
        "HasAns_exact_match": 50, "HasAns_f1": pytest.approx((100 + overlap) / 2), "HasAns_n": 2,
        "NoAns_exact_match": 50, "NoAns_f1": 50, "NoAns_n": 2,
    }  # fmt: skip
    assert "HasAns_n" not in qa_scores.scores(questions[2:], predictions[2:])
    assert qa_scores.exact_match("", ["the", "cat"]) == 0  # an answer that normalizes to nothing does not count


SPANS = st.tuples(st.booleans(), st.sampled_from(["cat", "the mat", "sat", "on the mat"]), st.integers(-5, 5))


@settings(max_examples=50, deadline=None)
@given(st.lists(SPANS, min_size=1, max_size=8))
@example([(True, "cat", -1), (False, "sat", -1), (True, "sat", 2)])  # equal scores are answered together
def test_the_best_threshold_gives_its_f1_and_none_gives_more(rows):
    questions = [asked(MAT, *["the mat"] * has, id=str(i)) for i, (has, _, _) in enumerate(rows)]
    predictions = [prediction(str(i), "", float(diff), best=text) for i, (_, text, diff) in enumerate(rows)]

    def at(threshold):
        texts = ["" if p.null_score_diff > threshold else p.best_span.text for p in predictions]
        return qa_scores.scores(questions, [prediction(q.id, t) for q, t in zip(questions, texts, strict=True)])["f1"]

    threshold, f1 = qa_scores.best_threshold(questions, predictions)
    assert at(threshold) == pytest.approx(f1)
    assert f1 == pytest.approx(max(at(t) for t in [-9.0, *(p.null_score_diff for p in predictions)]))


def test_the_baselines():
    context = "\n It rained. The cat sat on the mat! The ferry left, and the cat was on it. \n\n Nobody saw it\n"
    for question, sentence in {
        "When did the ferry leave?": "The ferry left, and the cat was on it.",
        "Who saw?": "Nobody saw it",
        "cat cat cat": "The cat sat on the mat!",  # a word counts once, and the first of equals is taken
        "Zebra?": "It rained.",
    }.items():
        assert qa_scores.lexical_overlap(asked(context, question=question)) == sentence
    questions = [asked(context, "It rained", question="Zebra?"), asked(context, question="Who saw?")]
    assert base.get("qa").baselines([], questions) == {"no_answer": 50, "lexical_overlap": 50}
