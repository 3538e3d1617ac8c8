"""What a check and an answer exchange, what a check says, and what an answer cannot do to the notebook."""

import math

import numpy as np
import pytest
import torch

from labkit.course import check
from labkit.course.answers import dumps, loads, local_answer
from labkit.course.exercises import NAMES, Assignment, assignment
from labkit.course.mistakes import (
    Mistake,
    NotBegun,
    clean,
    expect,
    expect_equal,
    expect_tensor,
    lacks_cells,
    not_finite,
)
from labkit.course.variant import Variant
from labkit.errors import CourseError

# ------------------------------------------------------------------------------------------------------- what travels
DEEP = []
for _ in range(10_000):
    DEEP = [DEEP]
REFUSED = [object(), b"bytes", {1: "key"}, torch.zeros(2, dtype=torch.complex64), np.array(["a"]), DEEP]
REFUSED += [torch.zeros(10**6)]
FOREIGN = ["", '{"$": "load", "items": "a file"}', '{"$": "float32", "items": [[1], 2]}', "[" * 10**5]


@pytest.mark.parametrize("value", [None, True, 3, math.inf, "ä\n", [1, [2.0, None]], (1, (2,)), {"a": (1,)}], ids=repr)
def test_plain_values_come_back_as_they_were(value):
    back = loads(dumps(value))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_tensors_and_arrays_come_back_to_the_bit(dtype, shape):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    tensor = tensor.mT if tensor.ndim > 1 else tensor  # not contiguous
    back = loads(dumps(tensor))
    assert back.dtype == dtype and torch.equal(back, tensor)
    array = tensor.float().numpy()
    assert np.array_equal(loads(dumps(array)).numpy(), array)


@pytest.mark.parametrize(
    ("function", "value"),
    [*((dumps, value) for value in REFUSED), *((loads, text) for text in FOREIGN)],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_judged_and_foreign_text_are_refused(function, value):
    with pytest.raises(CourseError):
        function(value)


# ------------------------------------------------------------------------------------------------- what a check says
EYE = torch.eye(3).bool()
SUSPECTS = {"turned": EYE.flip(0), "nan": not_finite, "inverted": ~EYE, "missing": lacks_cells(EYE)}
EXPLAINED = [(~EYE, "[0, 0]", "inverted"), (EYE.tril(-1), "[0, 0]", "missing"), (EYE | True, "[0, 1]", None)]
RIGHT_VALUES = [
    (expect_tensor, [[True, False]], torch.tensor([[True, False]])), (expect_tensor, torch.tensor(2.0), 2.0),
    (expect_tensor, 2, 2.0), (expect_equal, torch.tensor([1, 2]), (1, 2)), (expect_equal, [(1, 2)], [[1, 2]]),
]  # fmt: skip
WRONG_VALUES = [(expect_tensor, wrong, 2.0) for wrong in (2.1, True, "2", None, math.nan, math.inf)]
WRONG_VALUES += [(expect_tensor, wrong, EYE) for wrong in (None, "text", torch.zeros(2, 3), EYE.float(), EYE.long())]
WRONG_VALUES += [(expect_equal, 1, True), (expect_equal, None, 1), (expect_tensor, 1.0, torch.tensor(1))]


@pytest.mark.parametrize(("wrong", "cell", "likely"), EXPLAINED)
def test_a_wrong_cell_is_named_and_a_suspect_explains_it(wrong, cell, likely):
    with pytest.raises(Mistake) as caught:
        expect_tensor(wrong, EYE, "the mask", SUSPECTS)
    assert cell in caught.value.expected and caught.value.likely == likely


def test_equal_values_pass_and_other_values_kinds_and_shapes_are_mistakes():
    for comparison, actual, expected in RIGHT_VALUES:
        comparison(actual, expected, "it")
    for comparison, actual, expected in WRONG_VALUES:
        with pytest.raises(Mistake, match="any mistake"):
            comparison(actual, expected, "any mistake", {})


def test_texts_of_strangers_are_cut_and_inert():
    assert clean("a\x1b[2J\ud800\u202eb") == "a?[2J??b" and clean("é\n→") == "é\n→"
    assert len(clean("x" * 10**7)) < 700 and len(clean("\n" * 10**5).splitlines()) < 30


# --------------------------------------------------------------------------------------------- answers in a notebook
def test_an_answer_gets_copies_and_leaves_no_trace(capsys):
    def spoils(tensor, numbers):
        print("noise")
        tensor.zero_()
        numbers.clear()
        torch.manual_seed(1)
        return tensor

    tensor, numbers = torch.ones(2), [1]
    before = torch.get_rng_state()
    assert local_answer("f", spoils, "a1")(tensor, numbers).tolist() == [0, 0]
    assert tensor.tolist() == [1, 1] and numbers == [1] and capsys.readouterr().out == ""
    assert torch.equal(before, torch.get_rng_state())


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


def test_whatever_an_answer_does_is_a_mistake_and_a_stub_is_not_begun():
    for functions, error in (
        ((lambda: [][1], loops, exit, object, 3, not_a_stub), Mistake),
        ((stub, None, ...), NotBegun),
    ):
        for function in functions:
            with pytest.raises(error):
                local_answer("f", function, "a1", seconds=0.5)()


# --------------------------------------------------------------------------------------- exercises, points, variants
@pytest.fixture
def of():
    made = Assignment("a1", "Test", 60)
    made.exercise("a1_f", "F", "f", difficulty=1, minutes=5)
    made.part("a1_f", points=2)(lambda answer, variant: expect_equal(answer(2), 4, "f(2)"))
    return made


def judge(of, function, hidden=True):
    return of.exercises["a1_f"].judge(local_answer("f", function, "a1"), Variant(), hidden=hidden)


def test_parts_give_their_points_apart_and_a_hidden_one_only_where_it_is_asked_for(of):
    @of.part("a1_f", points=3, hidden=True)
    def large(answer, variant):
        n = variant.whole("large", 100, 10**6)
        expect_equal(answer(n), 2 * n, f"f({n})")

    seen, graded = (judge(of, lambda n: 4 if n == 2 else 0, hidden) for hidden in (False, True))
    assert (seen.status, seen.points, seen.out_of) == ("right", 2, 2)
    assert (graded.status, graded.points, graded.out_of, graded.failed) == ("partly", 2, 5, ["large (hidden)"])


def test_a_later_part_that_is_not_begun_leaves_the_points_of_the_first(of):
    of.part("a1_f", points=3)(lambda answer, variant: answer(3))
    outcome = judge(of, lambda n: 4 if n == 2 else stub())
    assert (outcome.status, outcome.points) == ("partly", 2)


@pytest.mark.parametrize(("wrong", "came"), [("bd", "Got:      b"), ("", "")])
def test_cases_are_asked_in_rounds_and_in_a_drawn_order_and_the_first_mistake_counts(of, wrong, came):
    asked = []

    @of.part("a1_f", points=1, cases="abcde")
    def not_wrong(answer, variant, case):
        asked.append((case, variant.whole("n", 0, 10**9)))
        expect(case not in wrong, "another case", case)

    assert came in judge(of, lambda n: 4).message
    rounds = [asked[i : i + 5] for i in range(0, len(asked), 5)]
    assert len(rounds) == len({n for _, n in asked}) == (1 if wrong else 3)
    assert all(sorted(case for case, _ in cases) == list("abcde") for cases in rounds)
    assert wrong or len({tuple(case for case, _ in cases) for cases in rounds}) > 1


def test_an_answer_that_does_not_end_is_asked_once(of):
    asked = []
    of.part("a1_f", points=1, cases="abc")(lambda answer, variant, case: (asked.append(case), answer(case)))
    function = local_answer("f", lambda x: 4 if x == 2 else loops(), "a1", seconds=0.3)
    assert of.exercises["a1_f"].judge(function, Variant(), hidden=True).points == 2 and len(asked) == 1


def test_a_secret_draws_its_own_and_students_cannot_draw_what_graders_ask():
    one, same, other = Variant.of("one"), Variant.of("one"), Variant.of("other")
    assert one == same and one.key != other.key and Variant.of(None).public
    assert one.seed("x") == same.seed("x") != other.seed("x") and one.seed("x") != one.seed("y")
    assert {Variant.of(str(i)).choose("x", "abc") for i in range(30)} == set("abc")
    assert Variant().choose("x", "abc") == "a"
    shown = Variant(one.key)
    assert [one.choose(str(i), range(99)) for i in range(9)] == [shown.choose(str(i), range(99)) for i in range(9)]
    assert one.salt not in shown.key and one.seed("x") != shown.seed("x")


def test_the_track_with_more_points_counts():
    of = Assignment("a1", "Test", 60)
    for name, track, points in (("all", None, 2), ("left", "left", 3), ("right", "right", 2)):
        of.exercise(name, name, name, difficulty=1, minutes=5, track=track)
        of.part(name, points=points)(print)
    assert of.points == 5
    assert of.best({"all": 1, "left": 1, "right": 2}) == 3 and of.best({"all": 0, "left": 1, "right": 0}) == 1


def test_a_notebook_lists_what_was_checked(capsys):
    outcome = check.a1_causal_mask(None)
    assert outcome.status == "not begun" and "a1_causal_mask" in outcome._repr_html_()
    check.progress()
    assert "a1_causal_mask: not begun (0 of 2 points)" in capsys.readouterr().out


def test_unknown_names_and_an_empty_secret_are_refused():
    with pytest.raises(CourseError, match=", ".join(NAMES)):
        assignment("a9")
    with pytest.raises(AttributeError, match="did you mean a1_causal_mask"):
        check.a1_casual_mask(None)
    with pytest.raises(CourseError, match="empty"):
        Variant.of(" ")
