"""What a check and an answer exchange, what a check says, and what an answer cannot do to the notebook."""

import math
import random

import numpy as np
import pytest
import torch

from labkit.course import answers as wire
from labkit.course import check
from labkit.course.answers import local_answer
from labkit.course.exercises import NAMES, Assignment, assignment, exercise
from labkit.course.judging import judged
from labkit.course.mistakes import Mistake, NotBegun, clean, expect_all, expect_equal, expect_number, expect_tensor
from labkit.course.variant import Variant
from labkit.errors import CourseError

VALUES = [None, True, 3, 2.5, math.inf, "ä\n", [1, [2.0, None]], (1, (2,)), {1, 2}]
VALUES += [{"a": (1, 2), 3: "b"}, {(1, 2): {"x": []}}]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_as_they_were(value):
    back = wire.loads(wire.dumps(value))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_tensors_come_back_to_the_bit(dtype, shape):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    back = wire.loads(wire.dumps(tensor))
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)


def test_a_view_with_gradients_and_an_array_come_back_as_tensors():
    tensor = torch.arange(12.0, requires_grad=True).view(3, 4).T[1:]
    assert torch.equal(wire.loads(wire.dumps(tensor)), tensor.detach())
    array = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1]
    assert np.array_equal(wire.loads(wire.dumps(array)).numpy(), array)


DEEP = []
for _ in range(10_000):
    DEEP = [DEEP]
REFUSED = [
    object(), len, b"bytes", torch.zeros(2, dtype=torch.complex64), np.array(["a"]), DEEP, torch.zeros(10**7),
    set(range(10**5)), dict.fromkeys(range(10**5)),
]  # fmt: skip
FOREIGN = ["", "{}", '{"$": "code"}', '{"$": "tensor", "dtype": "object"}', "[" * 10**5]
COLLIDING = '{"$": "set", "items": [' + ",".join(map(str, range(10**5))) + "]}"


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_cannot_be_judged_is_refused(value):
    with pytest.raises(CourseError):
        wire.dumps(value)


@pytest.mark.parametrize("text", [*FOREIGN, COLLIDING], ids=range(len(FOREIGN) + 1))
def test_foreign_text_is_no_value(text):
    with pytest.raises(CourseError):
        wire.loads(text)


# ------------------------------------------------------------------------------------------------ what a check says
def test_a_wrong_cell_is_named_and_a_suspect_explains_it():
    wanted = torch.eye(3).bool()
    suspects = {"turned": wanted.flip(0), "inverted": ~wanted}
    with pytest.raises(Mistake) as caught:
        expect_tensor(~wanted, wanted, "the mask", suspects, names=("query", "key"))
    assert "query 0, key 0" in caught.value.expected and "9 of 9" in caught.value.came
    assert caught.value.likely == "inverted"


@pytest.mark.parametrize("wrong", [None, "text", torch.zeros(2, 3), torch.eye(3), torch.eye(3).long(), math.nan])
def test_a_wrong_kind_or_shape_is_a_mistake(wrong):
    with pytest.raises(Mistake):
        expect_tensor(wrong, torch.eye(3).bool(), "the mask")


def test_numbers_lists_and_nan():
    expect_tensor([[True, False]], torch.tensor([[True, False]]), "it")
    expect_tensor(torch.tensor([math.nan]), torch.tensor([math.nan]), "it")
    expect_number(torch.tensor(2.0), 2.0, "it")
    expect_equal([1, "a"], [1, "a"], "it")
    for value, wanted in ((math.nan, 0.0), (0.0, math.inf)):
        with pytest.raises(Mistake):
            expect_tensor(torch.tensor([value]), torch.tensor([wanted]), "it")
    for wrong in (2.1, True, "2", None, math.nan):
        with pytest.raises(Mistake):
            expect_number(wrong, 2.0, "it")
    with pytest.raises(Mistake):
        expect_equal(1, True, "it")


def test_cases_are_asked_in_a_drawn_order_and_the_first_as_given_is_told():
    asked, orders = [], set()

    def ask(name):
        asked.append(name)
        if name in "bd":
            raise Mistake("x", name)

    for seed in range(9):
        with pytest.raises(Mistake) as caught:
            expect_all("abcde", ask, random.Random(seed))
        assert caught.value.came == "b" and sorted(asked) == list("abcde")
        orders.add(tuple(asked))
        asked.clear()
    assert len(orders) > 1


def test_texts_of_strangers_are_cut_and_inert():
    assert clean("a\x1b[2J\ud800\u202eb") == "a?[2J??b" and clean("é\n→") == "é\n→"
    assert len(clean("x" * 10**7)) < 700 and len(clean("\n" * 10**5).splitlines()) < 30


# --------------------------------------------------------------------------------------------- answers in a notebook
def asked(function, *arguments, seconds=0.5):
    return local_answer("f", function, "a1", seconds)(*arguments)


def test_an_answer_gets_copies_and_leaves_no_trace(capsys):
    def spoils(tensor, numbers):
        print("noise")
        tensor.zero_()
        numbers.clear()
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        torch.set_default_dtype(torch.float64)
        return tensor

    tensor, numbers = torch.ones(2), [1]
    before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    assert asked(spoils, tensor, numbers).tolist() == [0, 0]
    assert tensor.tolist() == [1, 1] and numbers == [1] and capsys.readouterr().out == ""
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_default_dtype())


def loops():
    while True:
        try:
            while True:
                pass
        except Exception:  # what a student may write: it must not swallow the time limit
            continue


def stub():
    raise NotImplementedError("a1_causal_mask")


def not_a_stub():
    return torch.eye(3).bool() @ torch.eye(3).bool()  # torch's own NotImplementedError


@pytest.mark.parametrize("wrong", [lambda: [][1], loops, exit, object, 3, not_a_stub])
def test_whatever_an_answer_does_is_a_mistake(wrong):
    with pytest.raises(Mistake):
        asked(wrong)


@pytest.mark.parametrize("nothing", [stub, None, ...])
def test_a_stub_is_not_begun(nothing):
    with pytest.raises(NotBegun):
        asked(nothing)


# ---------------------------------------------------------------------------------------- exercises, points, variants
def of_two_parts(second, hidden=False):
    of = Assignment("a1", "Test", 60)

    @of.exercise("a1_f", "F", answer="f", points=2, difficulty=1, minutes=5)
    def first(answer, variant):
        expect_equal(answer(2), 4, "f(2)")

    of.also("a1_f", points=3, hidden=hidden)(second)
    return of.exercises["a1_f"]


def test_parts_give_their_points_apart_and_a_hidden_one_only_where_it_is_asked_for():
    def large(answer, variant):
        n = variant.whole("large", 100, 10**6)
        expect_equal(answer(n), 2 * n, f"f({n})")

    answer = local_answer("f", lambda n: 4 if n == 2 else 0, "a1")
    seen, graded = (judged(of_two_parts(large, True), answer, Variant(), hidden=hidden) for hidden in (False, True))
    assert (seen.status, seen.points, seen.out_of) == ("right", 2, 2)
    assert (graded.status, graded.points, graded.out_of, graded.failed) == ("partly", 2, 5, ("large",))


def test_a_later_part_that_is_not_begun_leaves_the_points_of_the_first():
    def f(n):
        if n == 3:
            raise NotImplementedError
        return 4

    outcome = judged(
        of_two_parts(lambda answer, variant: answer(3)), local_answer("f", f, "a1"), Variant(), hidden=False
    )
    assert (outcome.status, outcome.points) == ("partly", 2)


def test_graders_ask_in_several_rounds_that_differ():
    of, seen = Assignment("a1", "Test", 60), []

    @of.exercise("a1_any", "Any", answer="f", points=1, difficulty=1, minutes=5)
    def any_number(answer, variant):
        seen.append(variant.whole("n", 0, 10**9))

    judged(of.exercises["a1_any"], local_answer("f", len, "a1"), Variant(), hidden=True)
    assert len(set(seen)) == len(seen) == 3


def test_a_secret_draws_its_own_and_students_cannot_draw_what_graders_ask():
    one, same, other = Variant.of("one"), Variant.of("one"), Variant.of("other")
    assert one == same and one.key != other.key and Variant.of(None).public
    assert one.seed("x") == same.seed("x") != other.seed("x") and one.seed("x") != one.seed("y")
    assert {Variant.of(str(i)).choose("x", "abc") for i in range(30)} == set("abc") and Variant().choose(
        "x", "abc"
    ) == "a"
    shown = Variant(one.key)
    assert [one.choose(str(i), range(99)) for i in range(9)] == [shown.choose(str(i), range(99)) for i in range(9)]
    assert one.salt not in shown.key and all(
        one.another_round(i).seed("x") != shown.another_round(i).seed("x") for i in range(3)
    )


def test_the_track_with_more_points_counts():
    of = Assignment("a1", "Test", 60)
    for name, track in (("a1_all", None), ("a1_left", "left"), ("a1_right", "right")):
        of.exercise(name, name, answer=name, points=2, difficulty=1, minutes=5, track=track)(print)
    assert of.points == 4 and of.tracks == ["left", "right"]
    assert of.best({"a1_all": 1, "a1_left": 2, "a1_right": 1}) == 3 and of.best({"a1_left": 1, "a1_right": 2}) == 2


def test_progress_in_a5_counts_one_track(monkeypatch):
    monkeypatch.setattr(check, "_outcomes", {})
    for task in assignment("a5").exercises:
        getattr(check, task)(None)
    points = sum(p.points for p in assignment("a5").exercises["a5_segment_mask"].parts if not p.hidden)
    last = check.progress().splitlines()[-1]
    assert "a5 so far" in last and 0 < points < int(last.split()[-1]) <= assignment("a5").points


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        (lambda: assignment("a9"), ", ".join(NAMES)),
        (lambda: exercise("a1_casual_mask"), "a1_causal_mask"),
        (lambda: Variant.of(" "), "empty"),
    ],
)
def test_unknown_names_and_an_empty_secret_are_refused(refuse, words):
    with pytest.raises(CourseError, match=words):
        refuse()
