"""Runs over seeds: means and Student intervals by hand, every seed shown, seeds paired, misfits refused."""

import math

import numpy as np
import pytest

from labkit import viz
from labkit.errors import MaskError
from labkit.viz.intervals import mean_interval, student_t

STEPS = [0, 10, 20]
RUNS = {"causal": [[4.0, 3.0, 2.0], [4.0, 3.0, 3.0], [4.0, 3.0, 4.0]], "<b>": [[4.0, 2.0, 1.0]]}


def lines(figure, thick=True):
    return [t for t in figure.data if t.type == "scatter" and t.line.width and (t.line.width > 2) == thick]


# ------------------------------------------------------------------------------------------------------- intervals
@pytest.mark.parametrize(  # from printed tables
    ("degrees", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_student_t_agrees_with_the_printed_table(degrees, t):
    assert student_t(degrees) == pytest.approx(t, abs=6e-4)


def test_an_interval_worked_by_hand():
    # 2, 3, 4: mean 3, standard deviation 1, so 4.303 * 1 / sqrt(3) = 2.484
    mean, half = mean_interval(np.array([2.0, 3.0, 4.0]))
    assert mean == 3 and half == pytest.approx(2.484, abs=1e-3)
    assert mean_interval(np.array([5.0])) == (5.0, None)


# ---------------------------------------------------------------------------------------------------------- curves
def test_runs_are_drawn_as_mean_interval_and_single_seeds():
    figure = viz.runs_figure(RUNS, STEPS, "validation loss")
    causal, other = lines(figure)
    assert list(causal.x) == STEPS and list(causal.y) == [4, 3, 3] and list(other.y) == [4, 2, 1]
    band = figure.data[0]
    half = 4.303 / math.sqrt(3)
    assert list(band.x) == STEPS + STEPS[::-1]
    assert list(band.y) == pytest.approx([4, 3, 3 + half, 3 - half, 3, 4], abs=1e-3)
    assert [list(line.y) for line in lines(figure, thick=False)] == RUNS["causal"]
    assert [line.name for line in lines(figure)] == ["causal (n = 3)", "&lt;b&gt; (one seed)"]
    assert figure.layout.yaxis.title.text == "validation loss"


def test_runs_differ_in_colour_in_dash_and_in_sign():
    figure = viz.runs_figure({f"run {i}": [[1.0, 2.0, i]] for i in range(6)}, STEPS)
    for look in ({t.line.color for t in lines(figure)}, {t.line.dash for t in lines(figure)}):
        assert len(look) == 6
    assert len({t.marker.symbol for t in lines(figure)}) == 6


def test_the_alt_text_says_where_each_run_begins_and_ends():
    alt = viz.alt_text(viz.runs_figure(RUNS, STEPS, "loss"))
    assert alt.startswith("Loss from training step 0 to 20, mean over seeds")
    assert "causal (n = 3): 4 ± 0 at first, 3.0 ± 2.5 at the end." in alt
    assert "<b> (one seed): 4 at first, 1 at the end." in alt
    assert ", one seed. " in viz.alt_text(viz.runs_figure({"a": [[1.0, 2.0, 3.0]]}, STEPS))


def test_leak_curves_stand_over_their_floor():
    figure = viz.leak_curves_figure(STEPS, {"as built": RUNS["causal"], "unmasked": RUNS["<b>"]}, math.log(64))
    floor = next(shape for shape in figure.layout.shapes if shape.type == "line")
    assert floor.y0 == floor.y1 == math.log(64)
    assert [a.text for a in figure.layout.annotations] == ["ln V = 4.16"]
    assert figure.layout.yaxis.range[0] == 0  # nothing below the floor is cut off
    assert "The floor, ln V, is 4.16" in viz.alt_text(figure)
    without = viz.leak_curves_figure(STEPS, {"as built": RUNS["causal"]})
    assert not without.layout.shapes and "floor" not in viz.alt_text(without)


def test_curves_of_the_svg_and_of_plotly_run_through_the_same_means():
    arms = {"as built": [[4.4, 4.2, 4.16], [4.6, 4.2, 4.18]]}
    (line,) = lines(viz.leak_curves_figure(STEPS, arms))
    assert list(line.y) == pytest.approx([4.5, 4.2, 4.17])
    assert "4.17 at the end" in viz.leak_curves_svg(STEPS, arms).alt


# ---------------------------------------------------------------------------------------------------------- scores
def parts(figure, axis):
    traces = [trace for trace in figure.data if trace.xaxis == axis]
    return [t for t in traces if t.mode == "markers"], [t for t in traces if t.mode == "markers+text"]


def test_scores_show_every_seed_the_mean_and_its_interval():
    figure = viz.scores_figure({"causal": [2.0, 3.0, 4.0], "other": [5.0]}, "F1")
    points, means = parts(figure, "x")
    assert [list(t.x) for t in points] == [[2, 3, 4], [5]]
    assert [t.x[0] for t in means] == [3, 5]
    assert means[0].error_x.array[0] == pytest.approx(2.484, abs=1e-3) and means[1].error_x.array is None
    assert list(points[0].y) == ["causal (n = 3)"] * 3
    assert "causal (n = 3): 3.0 ± 2.5." in viz.alt_text(figure) and "one seed: no interval" in viz.alt_text(figure)


def test_differences_are_paired_seed_by_seed():
    # 1.5, 2, 2.5 for seeds that had 1, 2, 3: differences 0.5, 0, -0.5, whose standard deviation is 0.5
    figure = viz.scores_figure({"first": {0: 1.0, 1: 2.0, 2: 3.0}, "second": {2: 2.5, 0: 1.5, 7: 9.0, 1: 2.0}})
    points, means = parts(figure, "x2")
    assert [list(t.x) for t in points] == [[0.5, 0.0, -0.5]]  # in the order of the first run's seeds; 7 has no partner
    assert means[0].x[0] == 0 and means[0].error_x.array[0] == pytest.approx(4.303 * 0.5 / math.sqrt(3), abs=1e-3)
    assert "second minus first, seed by seed (n = 3): " in viz.alt_text(figure)
    low, high = figure.layout.xaxis2.range
    assert low < -1.2 and high > 1.2  # the whole interval, and 0


def test_what_a_constant_gain_is_worth_shows_only_in_the_differences():
    figure = viz.scores_figure({"first": [1.0, 5.0, 9.0], "second": [1.5, 5.5, 9.5]})
    _, (difference,) = parts(figure, "x2")
    assert difference.x[0] == 0.5 and difference.error_x.array[0] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "scores",
    [{"a": [1.0, 2.0], "b": [1.0, 2.0, 3.0]}, {"a": {0: 1.0}, "b": [1.0]}, {"a": {0: 1.0}, "b": {1: 1.0}}],
    ids=["lists of different length", "seeds named on one side", "no seed in common"],
)
def test_seeds_that_do_not_match_are_not_paired(scores):
    assert parts(viz.scores_figure(scores), "x2") == ([], [])


# ------------------------------------------------------------------------------------------------------- bad input
CANNOT_BE_SHOWN = {
    "no run": lambda: viz.runs_figure({}, STEPS),
    "one seed without its list": lambda: viz.runs_figure({"a": [1.0, 2.0, 3.0]}, STEPS),
    "too few values": lambda: viz.runs_figure({"a": [[1.0, 2.0]]}, STEPS),
    "seeds of different length": lambda: viz.runs_figure({"a": [[1.0, 2.0, 3.0], [1.0]]}, STEPS),
    "no seed": lambda: viz.runs_figure({"a": []}, STEPS),
    "divergence": lambda: viz.leak_curves_figure(STEPS, {"a": [[1.0, float("inf"), 3.0]]}),
    "steps backwards": lambda: viz.runs_figure({"a": [[1.0, 2.0]]}, [2, 1]),
    "one step": lambda: viz.runs_figure({"a": [[1.0]]}, [1]),
    "an infinite floor": lambda: viz.leak_curves_figure(STEPS, RUNS, float("inf")),
    "no scores": lambda: viz.scores_figure({}),
    "a run without scores": lambda: viz.scores_figure({"a": []}),
    "a score in words": lambda: viz.scores_figure({"a": ["good"]}),
    "a single number": lambda: viz.scores_figure({"a": 1.0}),
    "a score that is NaN": lambda: viz.scores_figure({"a": [1.0, float("nan")]}),
}


@pytest.mark.parametrize("make", CANNOT_BE_SHOWN.values(), ids=CANNOT_BE_SHOWN.keys())
def test_what_cannot_be_shown_is_refused_with_a_sentence(make):
    with pytest.raises(MaskError) as refusal:
        make()
    assert len(str(refusal.value).split()) >= 6
