"""What travels between a check and an answer; what a check says; and that no print, error, loop or side effect of an
answer reaches the notebook."""

import math
import random

import numpy as np
import pytest
import torch

from labkit import masks
from labkit.course import wire
from labkit.course.answers import LocalAnswer
from labkit.course.exercises import NAMES, Assignment, assignment, exercise
from labkit.course.judging import judged
from labkit.course.mistakes import Mistake, NotBegun, expect_all, expect_equal, expect_number, expect_tensor
from labkit.course.variant import Variant
from labkit.errors import CourseError


# ------------------------------------------------------------------------------------------------ what travels
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        math.inf,
        "ä\n",
        [1, [2.0, None]],
        (1, (2,)),
        {1, 2},
        {"a": (1, 2), 3: "b"},
        {(1, 2): {"x": [True]}},
    ],
    ids=repr,
)
def test_plain_values_come_back_as_they_were(value):
    found = wire.loads(wire.dumps(value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_tensors_come_back_to_the_bit(dtype, shape):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    found = wire.loads(wire.dumps(tensor))
    assert found.dtype == dtype and found.shape == tensor.shape and torch.equal(found, tensor)


def test_a_view_a_gradient_an_array_and_a_mask_come_back():
    tensor = torch.arange(12.0, requires_grad=True).view(3, 4).T[1:]
    assert torch.equal(wire.loads(wire.dumps(tensor)), tensor.detach())
    array = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1]
    assert np.array_equal(wire.loads(wire.dumps(array)), array)
    mask = masks.segments([0, 0, 1, 1], fuse_from=3) & ~masks.sliding_window(1)
    assert wire.loads(wire.dumps(mask)) == mask


@pytest.mark.parametrize(
    "value",
    [object(), len, b"bytes", torch.zeros(2, dtype=torch.complex64), np.array(["a"])],
    ids=["object", "function", "bytes", "complex", "text"],
)
def test_what_cannot_travel_is_refused_by_its_kind(value):
    with pytest.raises(CourseError, match="cannot be judged"):
        wire.dumps(value)


def test_what_is_too_large_or_too_deep_is_refused():
    deep = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(CourseError, match="nested"):
        wire.dumps(deep)
    with pytest.raises(CourseError, match="too large"):
        wire.dumps(torch.zeros(10**7))
    for many in (set(range(10**5)), dict.fromkeys(range(10**5))):
        with pytest.raises(CourseError, match="too large"):
            wire.dumps(many)
    with pytest.raises(CourseError):
        wire.loads('{"$": "set", "items": [' + ",".join(map(str, range(10**5))) + "]}")


@pytest.mark.parametrize(
    "text", ["", "{}", '{"$": "code"}', '{"$": "tensor", "dtype": "object"}', '{"$": "mask", "tree": 3}']
)
def test_foreign_text_is_no_value(text):
    with pytest.raises(CourseError):
        wire.loads(text)


# --------------------------------------------------------------------------------------------- what a check says
def test_a_wrong_cell_is_named_and_a_suspect_speaks():
    wanted = torch.eye(3).bool()
    with pytest.raises(Mistake) as caught:
        expect_tensor(
            ~wanted, wanted, "the mask", {"turned": wanted.flip(0), "inverted": ~wanted}, names=("query", "key")
        )
    assert caught.value.expected == "the mask to be True at query 0, key 0"
    assert caught.value.came == "False there; 9 of 9 cells differ" and caught.value.likely == "inverted"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "is there a return"),
        ("text", "a str"),
        (torch.zeros(2, 3), "shape (2, 3)"),
        (torch.eye(3), "real numbers"),
        (torch.eye(3).long(), "whole numbers"),
    ],
)
def test_a_wrong_kind_or_shape_is_said(found, words):
    with pytest.raises(Mistake) as caught:
        expect_tensor(found, torch.eye(3).bool(), "the mask")
    assert words in caught.value.came


def test_nested_lists_count_as_a_tensor_and_nan_only_as_nan():
    expect_tensor([[True, False]], torch.tensor([[True, False]]), "it")
    expect_tensor(torch.tensor([math.nan]), torch.tensor([math.nan]), "it")
    with pytest.raises(Mistake):
        expect_tensor(torch.tensor([math.nan]), torch.tensor([0.0]), "it")
    with pytest.raises(Mistake):
        expect_tensor(torch.tensor([0.0]), torch.tensor([math.inf]), "it")


def test_numbers_and_plain_values():
    expect_number(torch.tensor(2.0), 2.0, "it")
    expect_equal([1, "a"], [1, "a"], "it")
    for wrong in (2.1, True, "2", None, math.nan):
        with pytest.raises(Mistake):
            expect_number(wrong, 2.0, "it")
    with pytest.raises(Mistake):
        expect_equal(1, True, "it")


# --------------------------------------------------------------------------------------------- answers in a notebook
def asked(function, *arguments, seconds=0.5):
    return LocalAnswer("f", function, "a1", seconds)(*arguments)


def test_an_answer_gets_a_copy_and_its_prints_stay_out(capsys):
    def spoils(tensor, numbers):
        print("noise")
        tensor.zero_()
        numbers.clear()
        return tensor

    tensor, numbers = torch.ones(2), [1]
    assert asked(spoils, tensor, numbers).tolist() == [0, 0]
    assert tensor.tolist() == [1, 1] and numbers == [1] and capsys.readouterr().out == ""


def test_an_answer_leaves_the_generators_and_the_default_dtype_as_they_were():
    def draws():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        torch.set_default_dtype(torch.float64)
        return float(torch.rand(1) + random.random() + np.random.rand())

    before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    asked(draws)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1:] == (
        random.getstate(),
        torch.get_default_dtype(),
    )


def test_an_error_a_loop_and_a_stub_are_told_apart():
    def breaks():
        return [][1]

    def loops():
        while True:
            try:
                while True:
                    pass
            except Exception:  # what a student may write: it must not swallow the time limit
                continue

    def stub():
        raise NotImplementedError("a1_causal_mask")

    with pytest.raises(Mistake, match="IndexError"):
        asked(breaks)
    with pytest.raises(Mistake, match="within 0.5 seconds"):
        asked(loops)
    for nothing in (stub, None, ...):
        with pytest.raises(NotBegun):
            asked(nothing)
    with pytest.raises(Mistake, match="to be a function"):
        asked(3)
    with pytest.raises(Mistake, match="cannot be judged"):
        asked(object)


def test_what_ends_the_process_is_a_mistake_here():
    with pytest.raises(Mistake, match="SystemExit"):
        asked(exit)


def test_a_later_part_that_is_not_begun_leaves_the_points_of_the_first():
    of = Assignment("a1", "Test", 60)

    @of.exercise("a1_f", "F", answer="f", points=2, difficulty=1, minutes=5)
    def first(answer, variant):
        expect_equal(answer(1), 1, "f(1)")

    @of.also("a1_f", points=1)
    def second(answer, variant):
        answer(2)

    def f(n):
        if n == 2:
            raise NotImplementedError
        return n

    found = judged(of.exercises["a1_f"], LocalAnswer("f", f, "a1"), Variant(), hidden=False)
    assert (found.status, found.points, found.failed) == ("partly", 2, ("second",)) and "second" in found.message


def test_cases_are_asked_in_a_drawn_order_and_the_first_mistake_as_given_is_told():
    asked_for = []

    def ask(name):
        asked_for.append(name)
        if name in "bd":
            raise Mistake("x", name)

    orders = set()
    for seed in range(9):
        with pytest.raises(Mistake) as caught:
            expect_all("abcde", ask, random.Random(seed))
        assert caught.value.came == "b"
        orders.add(tuple(asked_for))
        asked_for.clear()
    assert len(orders) > 1 and all(sorted(order) == list("abcde") for order in orders)


# ----------------------------------------------------------------------------------------- exercises and variants
def test_parts_give_their_points_apart_and_a_hidden_one_only_when_it_is_asked_for():
    of = Assignment("a1", "Test", 60)

    @of.exercise("a1_double", "Double", answer="double", points=2, difficulty=1, minutes=5)
    def small(answer, variant):
        expect_equal(answer(2), 4, "double(2)")

    @of.also("a1_double", points=3, hidden=True)
    def large(answer, variant):
        n = variant.whole("large", 100, 10**6)
        expect_equal(answer(n), 2 * n, f"double({n})")

    def double(n):
        return 4 if n == 2 else 0

    answer = LocalAnswer("double", double, "a1")
    seen, graded = (judged(of.exercises["a1_double"], answer, Variant(), hidden=hidden) for hidden in (False, True))
    assert (seen.status, seen.points, seen.out_of) == ("right", 2, 2)
    assert (graded.status, graded.points, graded.out_of, graded.failed) == ("partly", 2, 5, ("large",))


def test_graders_ask_in_several_rounds_that_differ():
    of, seen = Assignment("a1", "Test", 60), []

    @of.exercise("a1_any", "Any", answer="f", points=1, difficulty=1, minutes=5)
    def any_number(answer, variant):
        seen.append(variant.whole("n", 0, 10**9))

    judged(of.exercises["a1_any"], LocalAnswer("f", len, "a1"), Variant(), hidden=True)
    assert len(set(seen)) == len(seen) == 3


def test_a_secret_draws_its_own_and_the_same_again():
    one, same, other = Variant.of("one"), Variant.of("one"), Variant.of("other")
    assert one == same and one.key != other.key and Variant.of(None).public
    assert one.seed("x") == same.seed("x") != other.seed("x") and one.seed("x") != one.seed("y")
    assert Variant().choose("x", "abc") == "a"
    assert {Variant.of(str(i)).choose("x", "abc") for i in range(30)} == set("abc")
    with pytest.raises(CourseError, match="empty"):
        Variant.of(" ")


def test_what_graders_ask_cannot_be_drawn_from_what_students_have():
    secret = Variant.of("one")
    shown = Variant(secret.key)
    assert shown.key == secret.key and secret.salt not in shown.key and shown != secret
    assert [secret.choose(str(i), range(99)) for i in range(9)] == [shown.choose(str(i), range(99)) for i in range(9)]
    assert all(secret.another_round(i).seed("x") != shown.another_round(i).seed("x") for i in range(3))


def test_unknown_names_are_refused_with_the_closest():
    with pytest.raises(CourseError, match=", ".join(NAMES)):
        assignment("a9")
    with pytest.raises(CourseError, match="a1_causal_mask"):
        exercise("a1_casual_mask")


def test_the_better_track_counts():
    of = Assignment("a1", "Test", 60)
    for name, track in (("a1_all", None), ("a1_left", "left"), ("a1_right", "right")):
        of.exercise(name, name, answer=name, points=2, difficulty=1, minutes=5, track=track)(
            lambda answer, variant: None
        )
    assert of.points == 4 and of.tracks == ["left", "right"]
    assert of.best({"a1_all": 1, "a1_left": 2, "a1_right": 1}) == 3
    assert of.best({"a1_left": 1, "a1_right": 2}) == 2
