"""Extractive question answering: windows, decoding, and the official scores."""

import itertools
import re
import string
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import labkit
from labkit.datasets import embedded
from labkit.datasets.evidence import CRITERIA, INSTRUCTION, MARKS
from labkit.datasets.examples import Answer, Question
from labkit.errors import DataError, ModelError
from labkit.models.gguf import build_tokenizer
from labkit.models.tiny import build_tiny_tokenizer
from labkit.tasks import qa, qa_frames, qa_scores
from labkit.tasks.special_tokens import add_tokens
from labkit.training import Rows

MAT = "The cat sat on the mat."  # The| cat| sat| on| the| mat|. : 7 tokens
QUIET = {"say": lambda text: None}


def asked(context, *answers, question="Who?", id="q"):
    """A question whose answers are texts (their first occurrence) or (start, end)."""
    spans = [(context.index(a), context.index(a) + len(a)) if isinstance(a, str) else a for a in answers]
    return Question(id, question, context, tuple(Answer(context[a:b], a) for a, b in spans))


@cache
def tokenizer_of(kind):
    if kind == "tiny":
        return build_tiny_tokenizer()
    if kind == "gpt2-mini":
        return labkit.load("gpt2-mini", device="cpu").tokenizer
    return gemma_like()


def gemma_like():
    """Gemma's kind of tokenizer, small: a space is ▁, runs of spaces are tokens, what is unknown falls into bytes."""
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


def perfect(windows):
    """Logits that say what the targets say."""
    logits = []
    for side in ("start", "end"):
        logits.append([np.zeros(len(window.ids), dtype=np.float32) for window in windows])
        for row, window in zip(logits[-1], windows, strict=True):
            row[getattr(window, side)] = 10.0
    return logits


def noise(windows, seed=0):
    draw = np.random.default_rng(seed)
    return [[draw.normal(size=len(w.ids)).astype(np.float32) for w in windows] for _ in range(2)]


# -- windows -----------------------------------------------------------------------------------------------------------


def test_a_context_cut_into_windows_by_hand():
    # bos W h o ? \n [4 tokens of the context] eos; the next window starts 2 tokens later
    tokenizer, question = build_tiny_tokenizer(), asked(MAT, "the mat")
    rows = qa.windows(tokenizer, [question], max_length=11, doc_stride=2)
    texts = [tokenizer.decode(row.ids) for row in rows]
    assert texts == [
        "<bos>Who?\nThe cat sat on<eos>",
        "<bos>Who?\n sat on the mat<eos>",
        "<bos>Who?\n the mat.<eos>",
    ]
    assert [len(row.ids) for row in rows] == [11, 11, 10]
    assert [(row.start, row.end, row.null) for row in rows] == [(10, 10, 10), (8, 9, 10), (6, 7, 9)]
    assert rows[0].offsets == (None,) * 6 + ((0, 3), (3, 7), (7, 11), (11, 14)) + (None,)
    assert rows[2].offsets == (None,) * 6 + ((14, 18), (18, 22), (22, 23)) + (None,)


def test_the_question_after_the_context_by_hand():
    tokenizer = build_tiny_tokenizer()
    rows = qa.windows(tokenizer, [asked(MAT, "cat", "mat")], max_length=11, doc_stride=4, order="question-last")
    assert [tokenizer.decode(row.ids) for row in rows] == [
        "<bos>The cat sat on\nWho?<eos>",
        "<bos> the mat.\nWho?<eos>",
    ]
    assert [(row.start, row.end, row.null) for row in rows] == [(2, 2, 10), (9, 9, 9)]  # the first answer is the target
    assert rows[1].offsets == (None, (14, 18), (18, 22), (22, 23)) + (None,) * 6


@pytest.mark.parametrize(("room", "stride", "starts"), [
    (7, 1, [0]), (8, 3, [0]), (6, 6, [0, 6]), (6, 1, [0, 1]), (3, 2, [0, 2, 4]), (3, 100, [0, 3, 6]),
    (1, 1, [0, 1, 2, 3, 4, 5, 6]),
])  # fmt: skip
def test_windows_start_a_stride_apart_and_reach_the_end(room, stride, starts):
    rows = qa.windows(build_tiny_tokenizer(), [asked(MAT, question="?")], max_length=4 + room, doc_stride=stride)
    held = [[offset for offset in row.offsets if offset] for row in rows]
    edges = [0, 3, 7, 11, 14, 18, 22, 23]
    assert held == [list(zip(edges[s : s + room], edges[s + 1 : s + room + 1], strict=False)) for s in starts]


def test_rows_without_bos_or_eos():
    tokenizer = build_tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    (row,) = qa.windows(tokenizer, [asked(MAT)])
    assert tokenizer.decode(row.ids) == f"Who?\n{MAT}\n"
    assert row.start == row.end == row.null == len(row.ids) - 1


def test_special_tokens_in_a_text_are_text():
    tokenizer = build_tiny_tokenizer()
    context = "The <eos> and the <bos> token."
    (row,) = qa.windows(tokenizer, [asked(context, "<eos>", question="<pad>?")])
    assert row.ids.count(tokenizer.eos_token_id) == row.ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.pad_token_id not in row.ids
    assert qa.decode([row], *perfect([row]), [asked(context)])[0].text == "<eos>"


def test_a_long_question_is_cut_at_its_end_and_counted():
    said = []
    long, short = asked(MAT, question="abcdefghijkl"), asked(MAT, question="abcdefgh")
    rows = qa.windows(build_tiny_tokenizer(), [long, short], max_length=16, doc_stride=9, say=said.append)
    assert len(rows) == 4 and [row.ids for row in rows[:2]] == [row.ids for row in rows[2:]]
    assert said == ["1 of 2 questions have more than 8 tokens and were cut at their end"]


def test_an_answer_that_no_window_holds_is_counted():
    said = []
    rows = qa.windows(build_tiny_tokenizer(), [asked(MAT, MAT)], max_length=11, doc_stride=2, say=said.append)
    assert all(row.start == row.end == row.null for row in rows)
    assert len(said) == 1 and said[0].startswith("1 answers are in no window whole")


class Slow:
    is_fast = False


@pytest.mark.parametrize(("changes", "message"), [
    ({"tokenizer": Slow()}, "Slow is a slow tokenizer"),
    ({"order": "context-first"}, "question-last"),
    ({"doc_stride": 0}, "doc_stride is 0"),
    ({"max_length": 6}, "6: beside the 3 tokens of question 'q' and 3 others there is no room"),
    ({"max_length": 1025}, "the model takes 1,024"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_input_that_makes_no_rows_is_one_clear_error(changes, message):
    arguments = {"tokenizer": build_tiny_tokenizer(), "questions": [asked(MAT)], **QUIET} | changes
    with pytest.raises(DataError, match=message):
        qa.windows(arguments.pop("tokenizer"), arguments.pop("questions"), **arguments)


def test_the_smallest_room_holds_one_token():
    rows = qa.windows(build_tiny_tokenizer(), [asked(MAT)], max_length=8, doc_stride=5)
    assert len(rows) == 7 and all(len(row.ids) == 8 for row in rows)


def test_a_batch_is_padded_on_the_right_and_masked():
    rows = qa.windows(build_tiny_tokenizer(), [asked(MAT, "the mat")], max_length=11, doc_stride=2)
    items = [Rows(3, rows.__getitem__)[k] for k in (1, 2)]
    batch = qa.Collator(pad_id=99)(items)
    assert batch["input_ids"].tolist() == [list(rows[1].ids), [*rows[2].ids, 99]]
    assert batch["attention_mask"].tolist() == [[1] * 11, [1] * 10 + [0]]
    assert batch["start_positions"].tolist() == [8, 6] and batch["end_positions"].tolist() == [9, 7]
    model = labkit.load("tiny-gpt2", task="question-answering", device="cpu").model
    alone = [model(**qa.Collator(0)([item])).loss for item in items]
    assert_close(model(**qa.Collator(0)(items)).loss, torch.stack(alone).mean())


# -- there and back ----------------------------------------------------------------------------------------------------

PIECES = st.one_of(
    st.sampled_from(["the", "cat", " the", " cat", "The", "\n", "\n\n", "  ", "   ", " ", "\t", "é", "e\u0301", "😀"]),
    st.sampled_from(
        ["👩\u200d👩\u200d👧", "\u200b", "\ufeff", "\xa0", "\u3000", "𓀀", "don't", "3,5", "<eos>", "日本語"]
    ),
    st.text(max_size=4),
)
CONTEXTS = st.lists(PIECES, min_size=1, max_size=14).map("".join).filter(str.strip)


@pytest.mark.parametrize("kind", ["tiny", "gpt2-mini", "gemma-like"])
@settings(max_examples=45, deadline=None)
@given(context=CONTEXTS, data=st.data(), order=st.sampled_from(qa_frames.ORDERS), room=st.integers(1, 40))
@example(context="  The  cat 😀\n", data=None, order="question-last", room=5)
def test_an_answer_comes_back_from_perfect_logits(kind, context, data, order, room):
    tokenizer = tokenizer_of(kind)
    first, last = (7, 12) if data is None else sorted(data.draw(st.integers(0, len(context))) for _ in range(2))
    answer = context[first:last]
    assume(answer.strip())
    question = asked(context, (first, last), question="?")
    fixed = len(qa.windows(tokenizer, [asked("a", question="?")], max_length=64)[0].ids) - 1
    rows = qa.windows(
        tokenizer, [question], max_length=fixed + room, doc_stride=max(1, room // 2), order=order, **QUIET
    )
    (found,) = qa.decode(rows, *perfect(rows), [question], max_answer_tokens=50)
    # by brute force: the fewest tokens of the context that cover the answer
    places = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True)
    places = places["offset_mapping"]
    a, b = first + len(answer) - len(answer.lstrip()), first + len(answer.rstrip())
    covering = [
        (j - i, i, j)
        for i in range(len(places))
        for j in range(i, len(places))
        if set(range(a, b)) <= set(range(places[i][0], places[j][1]))
        and not any(s < b and e > a for s, e in places[:i] + places[j + 1 :])
    ]
    length, i, j = min(covering)
    if length < room and any(places[i] in row.offsets and row.start != row.null for row in rows):
        assert found.text == context[places[i][0] : places[j][1]].strip() and answer.strip() in found.text
        assert found.text == context[found.start : found.end] and found.start <= a < b <= found.end
        if (a == 0 or context[a - 1].isspace()) and (b == len(context) or context[b].isspace()):
            assert (found.start, found.end) == (a, b)  # whole words come back as they are
    else:
        assert length >= min(room, 2) and found.text == "" and (found.start, found.end) == (0, 0)
    for each in found.n_best:
        assert each.text == context[each.start : each.end] == each.text.strip()


@pytest.mark.parametrize("order", qa_frames.ORDERS)
@pytest.mark.parametrize("kind", ["tiny", "gpt2-mini", "gemma-like"])
def test_a_word_of_ten_thousand_characters_hides_no_answer(kind, order):
    context = "cat " + "x" * 10_000 + "  the\u200b mat \n"
    questions = [asked(context, answer, id=answer) for answer in ("cat", "the\u200b mat")]
    rows = qa.windows(tokenizer_of(kind), questions, max_length=256, doc_stride=200, order=order)
    found = qa.decode(rows, *perfect(rows), questions)
    assert [each.text for each in found] == ["cat", "the\u200b mat"]


# -- decoding ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    context=CONTEXTS, seed=st.integers(0, 999), n_best=st.integers(1, 30), longest=st.integers(1, 12),
    room=st.integers(2, 12), order=st.sampled_from(qa_frames.ORDERS),
)  # fmt: skip
@example(context="😀 a", seed=0, n_best=30, longest=12, room=12, order="question-first")  # four tokens, one character
def test_the_n_best_are_those_of_looking_at_every_pair(context, seed, n_best, longest, room, order):
    question = asked(context, question="?")
    rows = qa.windows(
        build_tiny_tokenizer(), [question], max_length=4 + room, doc_stride=max(1, room // 3), order=order
    )
    starts, ends = noise(rows, seed)
    (found,) = qa.decode(rows, starts, ends, [question], n_best=n_best, max_answer_tokens=longest)
    best, nulls = {}, []
    for row, start, end in zip(rows, starts, ends, strict=True):
        nulls.append(float(start[row.null]) + float(end[row.null]))
        for i, j in itertools.combinations_with_replacement(range(len(row.ids)), 2):
            if row.offsets[i] and row.offsets[j] and j < i + longest:
                piece = context[row.offsets[i][0] : row.offsets[j][1]]
                a = row.offsets[i][0] + len(piece) - len(piece.lstrip())
                b = a + len(piece.strip())
                if a < b:
                    best[a, b] = max(best.get((a, b), -np.inf), float(start[i]) + float(end[j]))
    expected = sorted(((score, *span) for span, score in best.items()), reverse=True)[:n_best]
    spans = [each for each in found.n_best if each.text]
    assert [(each.score, each.start, each.end) for each in spans] == expected
    assert found.null_score_diff == pytest.approx(min(nulls) - expected[0][0])
    assert sum(each.probability for each in found.n_best) == pytest.approx(1)
    weights = np.exp([each.score for each in found.n_best])
    assert [each.probability for each in found.n_best] == pytest.approx(list(weights / weights.sum()))
    assert found.best_span == spans[0] and len(found.n_best) == len(spans) + 1
    assert (found.text == "") == (found.null_score_diff > 0)
    assert found.probability == next(e.probability for e in found.n_best if bool(e.text) == bool(found.text))


def test_equal_scores_go_to_the_first_and_shortest_span():
    question = asked(MAT)
    rows = qa.windows(build_tiny_tokenizer(), [question], max_length=11, doc_stride=2)
    flat = [np.zeros(len(row.ids)) for row in rows]
    (found,) = qa.decode(rows, flat, flat, [question], n_best=5)
    assert [each.text for each in found.n_best] == ["The", "The cat", "The cat sat", "The cat sat on", "cat", ""]
    assert found.null_score_diff == 0 and found.text == "The"  # at the threshold an answer is given


def test_the_null_score_is_the_lowest_of_all_windows_and_the_threshold_decides():
    question = asked(MAT)
    rows = qa.windows(build_tiny_tokenizer(), [question], max_length=11, doc_stride=2)
    starts, ends = ([np.zeros(len(row.ids)) for row in rows] for _ in range(2))
    for row, start, end, score in zip(rows, starts, ends, (5.0, 3.0, 4.0), strict=True):
        start[row.null], end[row.null] = score, 0.5
    starts[0][7] = 1.5  # " cat"
    (found,) = qa.decode(rows, starts, ends, [question])
    assert found.text == "" and (found.start, found.end) == (0, 0) and found.null_score_diff == 3.5 - 1.5
    assert found.best_span.text == "cat" and found.n_best[0].text == ""
    assert qa.decode(rows, starts, ends, [question], null_threshold=2.0)[0].text == "cat"
    assert qa.decode(rows, starts, ends, [question], null_threshold=1.99)[0].text == ""


@pytest.mark.parametrize("order", qa_frames.ORDERS)
def test_no_answer_begins_or_ends_in_the_question(order):
    question = asked(MAT, question="The cat sat on the mat?")
    rows = qa.windows(build_tiny_tokenizer(), [question], order=order)
    inside = np.array([offset is not None for offset in rows[0].offsets])
    loud = [np.where(inside, 0.0, 50.0)]  # the head shouts at everything that is not context
    (found,) = qa.decode(rows, loud, loud, [question], null_threshold=1e9, n_best=100)
    assert all(each.score == 0 for each in found.n_best if each.text)
    assert len(found.n_best) == 7 * 8 // 2 + 1 and found.text == "The"


@pytest.mark.parametrize("longest", [1, 2, 7, 100])
def test_an_answer_has_at_most_so_many_tokens(longest):
    question = asked(MAT, MAT)
    rows = qa.windows(build_tiny_tokenizer(), [question])
    (found,) = qa.decode(rows, *perfect(rows), [question], max_answer_tokens=longest, n_best=100)
    spans = {each.text for each in found.n_best if each.text}
    tokens = ["The", " cat", " sat", " on", " the", " mat", "."]
    whole = {"".join(tokens[i : i + n]).strip() for n in range(1, longest + 1) for i in range(len(tokens) - n + 1)}
    assert spans == whole and (MAT in spans) == (longest >= 7)


def test_padding_beyond_a_window_is_not_looked_at():
    questions = [asked(MAT, "cat", id="a"), asked("The cat", "cat", id="b")]
    rows = qa.windows(build_tiny_tokenizer(), questions)
    width = max(len(row.ids) for row in rows) + 3
    padded = [
        np.stack([np.pad(r, (0, width - len(r)), constant_values=np.inf) for r in each]) for each in perfect(rows)
    ]
    assert qa.decode(rows, *padded, questions) == qa.decode(rows, *perfect(rows), questions)


def test_masked_logits_of_the_lowest_float_are_numbers_still():
    question = asked(MAT, "cat")
    rows = qa.windows(build_tiny_tokenizer(), [question])
    low = [np.where(each[0] > 0, each[0], np.finfo(np.float32).min) for each in perfect(rows)]
    with np.errstate(all="raise", under="ignore"):
        (found,) = qa.decode(rows, [low[0]], [low[1]], [question])
    assert found.text == "cat" and found.probability == pytest.approx(1)


def test_logits_that_are_not_finite_are_refused():
    question = asked(MAT)
    rows = qa.windows(build_tiny_tokenizer(), [question], max_length=11, doc_stride=2)
    starts, ends = noise(rows)
    with pytest.raises(DataError, match="'q' are not all finite"):
        qa.decode(rows, starts, [each * np.nan for each in ends], [question])


# -- a model -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def lm():
    torch.manual_seed(0)
    return labkit.load("tiny-gpt2", task="question-answering", device="cpu")


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("order", qa_frames.ORDERS)
def test_a_causal_model_cannot_know_a_question_that_comes_after_the_context(lm, attention, order):
    if attention == "bidirectional":
        labkit.to_bidirectional(lm.model)
    said = []
    for text in ("Who sat on the mat?", "What sat on the mat?"):  # the second has one more letter
        for question in (text, text.replace("mat", "cat")):
            (row,) = qa.windows(lm.tokenizer, [asked(MAT, question=question)], order=order)
            inside = [i for i, offset in enumerate(row.offsets) if offset is not None]
            with torch.no_grad():
                output = lm.model(torch.tensor([row.ids]))
            said.append(torch.stack([output.start_logits[0, inside], output.end_logits[0, inside]]))
    same_length = [(said[0], said[1]), (said[2], said[3])]
    if attention == "causal" and order == "question-last":
        assert all(torch.equal(one, other) for one, other in same_length)
        assert_close(said[0], said[2], rtol=0, atol=1e-4)  # other shapes are summed in another order
    else:
        assert all((one - other).abs().max() > 1e-3 for one, other in same_length)


def test_the_evidence_prompt_by_hand(lm):
    add_tokens(lm.model, lm.tokenizer, MARKS)
    (first,) = qa.windows(lm.tokenizer, [asked(MAT, "cat")], prompt="evidence", order="question-first", max_length=256)
    (last,) = qa.windows(lm.tokenizer, [asked(MAT, "cat")], prompt="evidence", order="question-last", max_length=256)
    head = f"<bos>[INST]{INSTRUCTION}[/INST]"
    assert lm.tokenizer.decode(first.ids) == head + f"[CRITERION]Who?[/CRITERION][POST]{MAT}[/POST]<eos>"
    assert lm.tokenizer.decode(last.ids) == head + f"[POST]{MAT}[/POST][CRITERION]Who?[/CRITERION]<eos>"
    for row in (first, last):
        assert lm.tokenizer.decode(row.ids[row.start : row.end + 1]).strip() == "cat"
        assert row.null == len(row.ids) - 1
        assert [MAT[a:b] for a, b in row.offsets[row.start : row.end + 1]][-1].endswith("t")


def test_a_mark_that_is_no_token_yet_is_asked_for(lm):
    with pytest.raises(DataError, match=r"does not know \[INST\], .*add_tokens"):
        qa.windows(lm.tokenizer, [asked(MAT, "cat")], prompt="evidence")
    with pytest.raises(DataError, match="prompt is 'chat'; choose one of plain, evidence"):
        qa.windows(lm.tokenizer, [asked(MAT, "cat")], prompt="chat")


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("order", qa_frames.ORDERS)
def test_with_the_criterion_last_the_spans_of_a_causal_model_do_not_depend_on_it(lm, attention, order):
    """Of a real post: all eight criteria give a causal model the same scores, to the bit where rows are as long."""
    add_tokens(lm.model, lm.tokenizer, MARKS)
    if attention == "bidirectional":
        labkit.to_bidirectional(lm.model)
    post = embedded.posts("dev")[0].text
    said = []
    for criterion in [*CRITERIA.values(), "having no energy?", "having no energy!"]:
        (row,) = qa.windows(
            lm.tokenizer, [asked(post, question=criterion)], order=order, prompt="evidence", max_length=1024
        )
        inside = [i for i, offset in enumerate(row.offsets) if offset is not None]
        with torch.no_grad():
            output = lm.model(torch.tensor([row.ids]))
        said.append((len(row.ids), torch.stack([output.start_logits[0, inside], output.end_logits[0, inside]])))
    pairs = list(itertools.combinations(said, 2))
    if attention == "causal" and order == "question-last":
        assert all((one - other).abs().max() < 1e-4 for (_, one), (_, other) in pairs)
        alike = [torch.equal(one, other) for (length, one), (same, other) in pairs if length == same]
        assert any(alike) and all(alike)  # rows of other lengths are summed in another order
    else:
        assert all((one - other).abs().max() > 1e-3 for (_, one), (_, other) in pairs)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_predictions_are_those_of_one_window_at_a_time(name, capsys):
    torch.manual_seed(0)
    lm = labkit.load(name, task="question-answering", device="cpu")
    labkit.to_bidirectional(lm.model.train())
    lengths = [3, 1, 9, 2, 30]
    questions = [asked(MAT * n, "mat", question="Who" + "?" * min(n, 9), id=str(n)) for n in lengths]
    shape = {"max_length": 60, "doc_stride": 30, "order": "question-last"}
    rows = qa.windows(lm.tokenizer, questions, **shape)
    lm.model.eval()
    with torch.no_grad():
        outputs = [lm.model(torch.tensor([row.ids])) for row in rows]
    logits = [[output[f"{side}_logits"][0].numpy() for output in outputs] for side in ("start", "end")]
    expected = qa.decode(rows, *logits, questions, n_best=3, null_threshold=-1.0)
    lm.model.train()
    for given_as, batch_size in ((lm, 4), (lm.model, 1)):
        found = qa.predict(
            given_as, lm.tokenizer, questions, batch_size=batch_size, n_best=3, null_threshold=-1.0, **shape
        )
        assert [each.id for each in found] == [str(n) for n in lengths]
        assert [each.text for each in found] == [each.text for each in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.probability == pytest.approx(theirs.probability, rel=1e-4)
            assert mine.null_score_diff == pytest.approx(theirs.null_score_diff, abs=1e-4)
    assert lm.model.training and capsys.readouterr().err == ""


def test_a_model_in_bfloat16_answers(lm):
    questions = [asked(MAT, "cat")]
    (exact,) = qa.predict(lm, lm.tokenizer, questions, null_threshold=1e9)
    (rounded,) = qa.predict(lm.model.bfloat16(), lm.tokenizer, questions, null_threshold=1e9)
    assert rounded.null_score_diff == pytest.approx(exact.null_score_diff, abs=0.2) and rounded.text in MAT


def test_a_model_without_the_head_is_refused():
    lm = labkit.load("tiny-gpt2", device="cpu")
    with pytest.raises(ModelError, match="task='question-answering'"):
        qa.predict(lm, lm.tokenizer, [asked(MAT)])
    with pytest.raises(DataError, match="batch size"):
        qa.predict(lm, lm.tokenizer, [asked(MAT)], batch_size=0)


def test_a_model_learns_a_few_answers_by_heart(lm):
    context = "The cat sat on the mat. The river had more money than the bank."
    questions = [
        asked(context, "cat", question="cat?", id="1"),
        asked(context, "the bank", question="bank?", id="2"),
        asked(context, question="king?", id="3"),
    ]
    batch = qa.Collator(0)([{"row": 0, "ids": row} for row in qa.windows(lm.tokenizer, questions)])
    optimizer = torch.optim.AdamW(lm.model.train().parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        lm.model(**batch).loss.backward()
        optimizer.step()
    found = qa.predict(lm, lm.tokenizer, questions)
    assert [each.text for each in found] == ["cat", "the bank", ""]
    assert qa_scores.scores(questions, found)["exact_match"] == 100


# -- scores ------------------------------------------------------------------------------------------------------------


def squad_1_1(predictions, golds):
    """(exact match, F1) in percent, from the description of SQuAD 1.1's script; every question has answers."""

    def words(text):
        kept = "".join(sign for sign in text.lower() if sign not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", kept).split()

    def overlap(one, other):
        rest, hits = list(other), 0
        for word in one:
            if word in rest:
                rest.remove(word)
                hits += 1
        return 2 * hits / (len(one) + len(other)) if hits else 0.0  # = 2pr / (p + r)

    exact = [max(words(said) == words(gold) for gold in all_) for said, all_ in zip(predictions, golds, strict=True)]
    overlaps = [
        max(overlap(words(said), words(g)) for g in all_) for said, all_ in zip(predictions, golds, strict=True)
    ]
    return 100 * sum(exact) / len(exact), 100 * sum(overlaps) / len(overlaps)


def prediction(id, text, diff=0.0, best=None):
    span = qa.Candidate(best or text or "x", 0, 1, 0.0, 0.5)
    return qa.Prediction(id, text, 0, len(text), 0.5, (span, qa.Candidate("", 0, 0, diff, 0.5)), diff)


@pytest.mark.parametrize(("text", "normal"), [
    ("The  Cat!", "cat"), ("a-an-the", "aanthe"), ("an apple, a day", "apple day"), ("U.S.", "us"), ("the", ""),
    ("theatre", "theatre"), ("“The” cat", "“ ” cat"), ("naïve\u00a0A\tb", "naïve b"), ("$1,200.50", "120050"),
])  # fmt: skip
def test_answers_are_normalised_as_squad_does(text, normal):
    assert qa_scores.normalize(text) == normal


def test_scores_of_single_answers_by_hand():
    assert qa_scores.exact_match("the Cat.", ["dog", "cat"]) == 100 and qa_scores.exact_match("cats", ["cat"]) == 0
    assert qa_scores.f1("the black cat", ["a cat", "black cat sat down"]) == pytest.approx(100 * 2 / 3)
    assert qa_scores.f1("cat cat", ["cat"]) == pytest.approx(100 * 2 / 3)  # a word counts as often as it is there
    assert qa_scores.f1("", []) == qa_scores.exact_match("", []) == 100
    assert qa_scores.f1("cat", []) == qa_scores.f1("", ["cat"]) == 0
    assert qa_scores.exact_match("", ["the", "cat"]) == 0  # an answer of which nothing is left does not count


FILLERS = ("a", "the", "an", "The,", "-")
WORDS = st.lists(st.sampled_from([*FILLERS, "cat", "Cat.", "mat", "é", "3.5"]), max_size=5)
GOLDS = st.lists(WORDS.filter(lambda words: not set(words) <= set(FILLERS)), min_size=1, max_size=3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(WORDS, GOLDS), min_size=1, max_size=6))
def test_scores_are_those_of_squad_1_1_where_every_question_has_an_answer(rows):
    rows = [(" ".join(said), [" ".join(gold) for gold in golds]) for said, golds in rows]
    questions = [Question(str(i), "?", "", tuple(Answer(g, 0) for g in golds)) for i, (_, golds) in enumerate(rows)]
    found = qa_scores.scores(questions, [prediction(str(i), said) for i, (said, _) in enumerate(rows)])
    exact, overlap = squad_1_1(*zip(*rows, strict=True))
    assert found == {"exact_match": pytest.approx(exact), "f1": pytest.approx(overlap), "n": len(rows)}


def test_scores_with_unanswerable_questions_by_hand():
    questions = [asked(MAT, "cat", id="a"), asked(MAT, "the mat", id="b"), asked(MAT, id="c"), asked(MAT, id="d")]
    answers = [prediction("d", "cat"), prediction("c", ""), prediction("b", "on the mat"), prediction("a", "cat")]
    overlap = 100 * 2 / 3  # "on mat" against "mat"
    assert qa_scores.scores(questions, answers) == {
        "exact_match": 50, "f1": pytest.approx((100 + overlap + 100) / 4), "n": 4,
        "HasAns_exact_match": 50, "HasAns_f1": pytest.approx((100 + overlap) / 2), "HasAns_n": 2,
        "NoAns_exact_match": 50, "NoAns_f1": 50, "NoAns_n": 2,
    }  # fmt: skip
    assert "HasAns_n" not in qa_scores.scores(questions[2:], answers[:2])


def official_threshold(rows):
    """`find_best_thresh`, from its description: rows of (has an answer, F1 of the best span, null score difference)."""
    score = best = sum(not has for has, _, _ in rows)
    threshold = 0.0
    for has, overlap, diff in sorted(rows, key=lambda row: row[2]):
        score += overlap if has else -1
        if score > best:
            best, threshold = score, diff
    return threshold, 100 * best / len(rows)


SPANS = st.tuples(st.booleans(), st.sampled_from(["cat", "the mat", "sat", "on the mat"]), st.integers(-5, 5))


@settings(max_examples=50, deadline=None)
@given(st.lists(SPANS, min_size=1, max_size=8), st.booleans())
@example([(True, "cat", -1), (False, "sat", -1), (True, "sat", 2)], False)
@example([(True, "the mat", -1), (True, "cat", 0)], True)  # the second adds nothing: the threshold stays at the first
def test_the_best_threshold_gives_its_f1_and_none_gives_more(rows, distinct):
    if distinct:
        rows = [(has, text, diff + i / 10) for i, (has, text, diff) in enumerate(rows)]
    questions = [asked(MAT, *["the mat"] * has, id=str(i)) for i, (has, _, _) in enumerate(rows)]
    given_ = [prediction(str(i), "", float(diff), best=text) for i, (_, text, diff) in enumerate(rows)]

    def at(threshold):
        told = [prediction(p.id, "" if p.null_score_diff > threshold else p.best_span.text) for p in given_]
        return qa_scores.scores(questions, told)["f1"]

    threshold, f1 = qa_scores.best_threshold(questions, given_)
    assert at(threshold) == pytest.approx(f1)
    assert f1 == pytest.approx(max(at(t) for t in [-9.0, *(p.null_score_diff for p in given_)]))
    if distinct:
        golds = [["the mat"] if has else [] for has, _, _ in rows]
        scored = [(r[0], qa_scores.f1(r[1], g) / 100, float(r[2])) for r, g in zip(rows, golds, strict=True)]
        official = official_threshold(scored)
        assert f1 == pytest.approx(official[1])
        assert threshold == official[0] or f1 == pytest.approx(at(-99.0))  # none is answered: the official one says 0


def test_the_baseline_takes_the_sentence_with_most_words_of_the_question():
    context = (
        "\n It rained. The cat sat on the mat! The ferry left at noon, and the cat was on it. \n\n Nobody saw it\n"
    )
    for question, sentence in {
        "When did the ferry leave?": "The ferry left at noon, and the cat was on it.",
        "What sat on a mat?": "The cat sat on the mat!",
        "Who saw?": "Nobody saw it",
        "cat cat cat": "The cat sat on the mat!",  # a word counts once, and the first of equals is taken
        "Zebra?": "It rained.",
    }.items():
        found = qa_scores.lexical_overlap(asked(context, question=question))
        assert found == sentence and found in context
