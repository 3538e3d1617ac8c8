"""Forest plots and curves put every number where it belongs, say it in words, and refuse what has no meaning."""

import math
import re
import statistics
from xml.etree import ElementTree

import numpy as np
import pytest

from labkit.errors import LabkitError, MaskError
from labkit.viz.effects import effect_curves_svg, effects_svg
from labkit.viz.saving import save
from labkit.viz.svg import Svg

SVG = "{http://www.w3.org/2000/svg}"
T = 4.302653  # within which Student's distribution of 2 degrees of freedom lies with 95 %, from tables
BLUE, VERMILION = "#0072B2", "#D55E00"
GROUPS = {
    "wnut17/ner (n = 1,287)": {
        "bidirectional": (3.2, 1.1, 5.3),
        "mntp:200": (6.4, 4.0, 9.25),
        "right-to-left": (-4.5, -7.0, -2.0),
        "next:200": (0.4, -1.5, 2.0),
    },
    "xquad/qa": {"unmask:middle-third": (2.5, None, None), "bidirectional": (-0.5, -1.25, 0.0)},
}
CURVES = {
    "bidirectional after mntp": {0: [58.0, 57.0, 59.5], 50: [62.0, 63.0, 61.0], 800: [66.0, 67.0, 66.4]},
    "causal": {0: [61.0, 60.0, 62.0], 200: [62.0, 63.0, 61.5]},
}


def elements(picture, tag):
    return list(ElementTree.fromstring(picture).iter(f"{SVG}{tag}"))


def texts(picture):
    return ["".join(element.itertext()) for element in elements(picture, "text")]


def rows(picture):
    """`{(group, arm): its <g>}` in the order in which they are drawn, by the words said on hovering."""
    found = {}
    for g in elements(picture, "g"):
        group, _, rest = g.find(f"{SVG}title").text.rpartition(": ")[0].rpartition(", ")
        found[group, rest] = g
    return found


def row(picture, arm):
    return next(g for g in elements(picture, "g") if f", {arm}: " in g.find(f"{SVG}title").text)


def centre(g):
    """The middle of the mark of a row, which is drawn after its interval."""
    circle = g.find(f"{SVG}circle")
    if circle is not None:
        return float(circle.get("cx"))
    return float(re.match(r"M(-?[\d.]+) ", g.findall(f"{SVG}path")[-1].get("d")).group(1))


def interval(g):
    path = next((p.get("d") for p in g.findall(f"{SVG}path") if "H" in p.get("d")), None)
    return path and tuple(map(float, re.match(r"M(-?[\d.]+) [\d.]+H(-?[\d.]+)", path).groups()))


def vertical(picture, **wanted):
    """The x of the vertical lines that look so."""
    wanted = {key.replace("_", "-"): value for key, value in wanted.items()}
    lines = [p for p in elements(picture, "path") if all(p.get(key) == value for key, value in wanted.items())]
    return [float(re.match(r"M([\d.]+) \d+V", p.get("d")).group(1)) for p in lines if "V" in p.get("d")]


# ---------------------------------------------------------------------------------------------------- forest plots
def test_every_group_and_arm_has_its_row_with_its_numbers():
    picture = effects_svg(GROUPS)
    assert isinstance(picture, Svg)
    shown = texts(picture)
    assert set(GROUPS) <= set(shown)
    for arms in GROUPS.values():
        assert set(arms) <= set(shown)
    assert {"+3.2 [1.1, 5.3]", "−4.5 [−7.0, −2.0]", "+0.4 [−1.5, 2.0]", "+2.5", "−0.5 [−1.2, 0.0]"} <= set(shown)
    assert list(rows(picture)) == [(group, arm) for group, arms in GROUPS.items() for arm in arms]
    assert "difference to causal, points of F1" in shown


def test_marks_and_interval_ends_lie_on_the_line_through_zero_and_the_claims():
    picture = effects_svg(GROUPS, marks=(5.0, 10.0))
    (zero,) = set(vertical(picture, stroke_width="2", stroke="#222222"))
    claims = sorted(set(vertical(picture, stroke_dasharray="4 4")))
    assert claims[1] - zero == pytest.approx(2 * (claims[0] - zero), abs=0.05)
    pixel = (claims[1] - zero) / 10  # pixels of a point
    for group, arms in GROUPS.items():
        for arm, (value, low, high) in arms.items():
            g = rows(picture)[group, arm]
            assert centre(g) == pytest.approx(zero + value * pixel, abs=0.05)
            if low is not None:
                assert interval(g) == pytest.approx((zero + low * pixel, zero + high * pixel), abs=0.05)
            else:
                assert interval(g) is None


def test_colour_and_shape_say_on_which_side_of_zero_an_interval_lies():
    picture = effects_svg({"g": {"a": (1.0, 0.1, 2.0), "b": (-1.0, -2.0, -0.1), "c": (1.0, -0.1, 2.0), "d": (1, 0, 2)}})
    above, below, both, touching = (row(picture, arm) for arm in "abcd")
    assert above.find(f"{SVG}circle").get("fill") == BLUE
    fills = [g.findall(f"{SVG}path")[-1].get("fill") for g in (below, both, touching)]
    assert fills[0] == VERMILION and fills[1] == fills[2] and fills[1] not in (BLUE, VERMILION)
    shapes = [g.findall(f"{SVG}path")[-1].get("d").partition("m")[2] for g in (below, both, touching)]
    assert shapes[0] != shapes[1] == shapes[2]
    said = [g.find(f"{SVG}title").text.rpartition(", ")[2] for g in (above, below, both)]
    assert said == ["above zero", "below zero", "may be zero"]


def test_one_seed_has_a_hollow_mark_and_no_interval():
    picture = effects_svg({"one": {"bidirectional": (2.5, None, None)}})
    g = row(picture, "bidirectional")
    assert g.find(f"{SVG}circle").get("fill") == "#FFFFFF" and not g.findall(f"{SVG}path")
    assert "no interval (one seed)" in texts(picture) and "interval above zero" not in texts(picture)
    assert "bidirectional +2.5 (no interval)" in picture.alt


def test_the_text_equivalent_holds_every_row():
    alt = effects_svg(GROUPS, unit="points of accuracy", reference="as built", marks=(5, -10)).alt
    assert alt.startswith("Difference to as built in points of accuracy, with 95 % intervals. wnut17/ner (n = 1,287): ")
    assert "mntp:200 +6.4 [4.0, 9.2] (above zero); right-to-left −4.5 [−7.0, −2.0] (below zero);" in alt
    assert "xquad/qa: unmask:middle-third +2.5 (no interval);" in alt and alt.endswith("Dashed lines at +5, −10.")


def test_the_heading_and_the_axis_name_what_is_compared_and_in_which_unit():
    shown = texts(effects_svg(GROUPS, unit="points of accuracy", reference="the mean of single prompts"))
    assert shown[0].startswith("Difference to the mean of single prompts, points of accuracy, with 95 % intervals")
    assert "difference to the mean of single prompts, points of accuracy" in shown
    assert not any("causal" in text or "F1" in text for text in shown)


def test_a_bound_beside_zero_is_not_written_as_zero():
    shown = texts(effects_svg({"g": {"a": (3.0, 0.04, 6.0), "b": (2.0, -0.003, 4.0)}}))
    assert "+3.0 [0.04, 6.0]" in shown and "+2.0 [−0.003, 4.0]" in shown


def test_one_huge_interval_is_cut_with_arrows_and_leaves_the_others_their_room():
    arms = {f"arm {i}": (1.0 + i, 0.5 + i, 1.5 + i) for i in range(4)}
    usual = interval(row(effects_svg({"g": arms}), "arm 0"))
    picture = effects_svg({"g": arms | {"few runs": (2.0, -90.0, 94.0)}})
    same = interval(row(picture, "arm 0"))
    assert same[1] - same[0] > 0.8 * (usual[1] - usual[0])
    low, high = interval(row(picture, "few runs"))
    assert 0 < low < same[0] and high < 800
    assert "+2.0 [−90.0, 94.0]" in texts(picture)
    assert "arrow" in texts(picture)[0] and "arrow" not in texts(effects_svg({"g": arms}))[0]


def test_twelve_groups_of_eight_arms_stay_apart_and_inside_the_picture():
    groups = {
        f"condition {i}": {f"unmask:middle-third-number-{j}-of-8": (j - 3.0, j - 5.5, j + 1.5) for j in range(8)}
        for i in range(12)
    }  # fmt: skip
    picture = effects_svg(groups, marks=(5.0, 10.0))
    wide, high = (int(elements(picture, "svg")[0].get(side)) for side in ("width", "height"))
    names = [t for t in elements(picture, "text") if (t.text or "").startswith("unmask")]
    heights = sorted(int(name.get("y")) for name in names)
    assert len(names) == 96 and min(np.diff(heights)) >= 16 and heights[-1] < high and wide <= 820
    for g in rows(picture).values():
        name_ends = 20 + len(g.find(f"{SVG}text").text) * 7
        assert name_ends < interval(g)[0] and interval(g)[1] < wide - 130


def test_names_are_escaped_and_control_characters_do_no_harm():
    picture = effects_svg({'<b>&"': {'<i>&"\x00': (1.0, 0.5, 1.5)}}, unit="<u>", reference="a&b")
    assert '<b>&"' in texts(picture) and any(text.startswith('<i>&"') for text in texts(picture))
    assert "<b>" not in picture and "<i>" not in picture and "a&b" in picture.alt
    curves = effect_curves_svg({'<i>&"\x1b': {1: [1.0, 2.0]}}, "<x>", "y\ud800", '<b>&"')
    assert '<b>&"' in texts(curves) and "<x>" in texts(curves) and "<b>" not in curves


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "at least one condition"),
        ({"g": {}}, "condition 'g' needs"),
        ({"g": {"a": (math.nan, 0.0, 1.0)}}, "arm 'a' of 'g' must be a finite number, not nan"),
        ({"g": {"a": (0.5, 0.0, math.inf)}}, "finite"),
        ({"g": {"a": (0.5, 1.0, 0.0)}}, "from 1 to 0"),
        ({"g": {"a": (0.5, None, 1.0)}}, "one end of an interval"),
        ({"g": {"a": (0.5, 1.0)}}, "must be \\(difference, low, high\\)"),
        ({"g": {"causal": (0.0, 0.0, 0.0)}}, "is the reference"),
    ],
)
def test_effects_without_meaning_are_refused(groups, message):
    with pytest.raises(MaskError, match=message) as raised:
        effects_svg(groups)
    assert isinstance(raised.value, LabkitError)


def test_a_mark_that_is_no_number_is_refused():
    with pytest.raises(MaskError, match="a mark must be a finite number"):
        effects_svg(GROUPS, marks=(math.nan,))


# ---------------------------------------------------------------------------------------------------------- curves
def lines(picture):
    """The points of the mean lines, in pixels, in the order of the arms."""
    paths = [p.get("d") for p in elements(picture, "path") if p.get("stroke-width") == "2.5"]
    return [[tuple(map(float, point.split())) for point in d[1:].split("L")] for d in paths]


def whiskers(g):
    """(x, low, high) of the intervals of an arm, in pixels."""
    drawn = [re.match(r"M([\d.]+) ([\d.]+)V([\d.]+)", p.get("d")) for p in g.findall(f"{SVG}path")]
    return [tuple(map(float, match.groups())) for match in drawn if match]


def seeds(g):
    """(x, y) of the single seeds, in pixels."""
    path = next(p.get("d") for p in g.findall(f"{SVG}path") if p.get("stroke-linecap") == "round")
    return [tuple(map(float, point.split())) for point in re.findall(r"M([\d. ]+)h0", path)]


@pytest.mark.parametrize("log_x", [False, True])
def test_means_lie_on_one_scale_and_arms_need_not_share_their_x(log_x):
    curves = {name: {x + 10: scores for x, scores in points.items()} for name, points in CURVES.items()}
    drawn = lines(effect_curves_svg(curves, "steps", "test F1", log_x=log_x))
    assert [len(points) for points in drawn] == [3, 2]
    pixels = np.array([y for points in drawn for _, y in points])
    means = np.array([np.mean(scores) for points in curves.values() for scores in points.values()])
    slope, start = np.polyfit(means, pixels, 1)
    assert slope < 0 and np.abs(slope * means + start - pixels).max() < 0.05
    scale = math.log if log_x else float
    slopes = []
    for (name, points), line in zip(curves.items(), drawn, strict=True):
        given, at = [scale(x) for x in points], [x for x, _ in line]
        slope, start = np.polyfit(given, at, 1)
        assert np.abs(slope * np.array(given) + start - at).max() < 0.05, name
        slopes.append(slope)
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-3) and slopes[0] > 0


def test_whiskers_are_the_t_interval_of_three_seeds_and_seeds_are_points():
    picture = effect_curves_svg(CURVES, "steps", "test F1")
    (_, y0), (_, y1) = lines(picture)[0][0], lines(picture)[0][2]
    first, last = np.mean(CURVES["bidirectional after mntp"][0]), np.mean(CURVES["bidirectional after mntp"][800])
    slope = (y1 - y0) / (last - first)

    def y(score):
        return y0 + (score - first) * slope

    for g, points in zip(elements(picture, "g"), CURVES.values(), strict=True):
        drawn = whiskers(g)
        assert len(drawn) == len(points)
        for (_, low, high), scores in zip(drawn, points.values(), strict=True):
            half = T * statistics.stdev(scores) / math.sqrt(3)
            assert (low, high) == pytest.approx((y(np.mean(scores) - half), y(np.mean(scores) + half)), abs=0.1)
        first_seeds = seeds(g)
        assert [y for _, y in first_seeds] == pytest.approx([y(s) for s in next(iter(points.values()))], abs=0.1)


def test_one_seed_draws_a_hollow_mark_without_interval():
    picture = effect_curves_svg({"a": {0: [1.0], 5: [2.0]}}, "steps", "F1")
    (g,) = elements(picture, "g")
    assert not whiskers(g) and {c.get("fill") for c in g.findall(f"{SVG}circle")} == {"#FFFFFF"}
    assert "F1 · one seed, no interval" in texts(picture) and "a: 1.00 at 0, 2.00 at 5." in picture.alt
    mixed = effect_curves_svg({"a": {0: [1.0], 5: [2.0, 2.5]}}, "steps", "F1")
    assert len(whiskers(elements(mixed, "g")[0])) == 1 and "hollow: one seed" in mixed.alt


def test_a_single_point_and_equal_scores_can_be_drawn():
    for curves in ({"a": {3: [1.0]}}, {"a": {3: [0.0, 0.0]}, "b": {3: [0.0]}}):
        for log_x in (False, True):
            assert all(
                0 < x < 800 and y > 0
                for line in lines(effect_curves_svg(curves, "x", "y", log_x=log_x))
                for x, y in line
            )


def test_arms_differ_in_colour_dash_or_mark_and_stand_beside_each_other():
    curves = {f"arm {i}": {0: [1.0, 1.1], 50: [2.0, 2.1]} for i in range(12)}
    picture = effect_curves_svg(curves, "steps", "F1")
    looks = set()
    for g in elements(picture, "g"):
        line, mark = g.find(f"{SVG}path"), g[-1]
        shape = mark.tag + mark.get("d", "").partition("m")[2]
        looks.add((line.get("stroke"), line.get("stroke-dasharray"), shape))
    assert len(looks) == 12
    starts = [line[0][0] for line in lines(picture)]
    assert (np.diff(starts) > 1).all() and starts[-1] < lines(picture)[0][1][0]  # beside, and not into the next x


def test_names_at_the_ends_carry_the_last_mean_and_do_not_overlap():
    curves = {f"arm {i}": {0: [1.0], 10 - (i % 2): [2.0 + i / 1000]} for i in range(12)}
    labels = [t for t in elements(effect_curves_svg(curves, "x", "y"), "text") if "".join(t.itertext())[:4] == "arm "]
    heights = sorted(int(t.get("y")) for t in labels)
    assert len(heights) == 12 and min(np.diff(heights)) >= 16 and heights[0] > 0
    assert {"bidirectional after mntp 66.5", "causal 62.2"} <= set(texts(effect_curves_svg(CURVES, "x", "y")))


def test_the_measured_x_stand_at_the_axis_as_far_as_there_is_room():
    shown = texts(effect_curves_svg({"a": {x: [1.0, 2.0] for x in (0, 1, 50, 200, 800)}}, "steps", "F1"))
    assert {"0", "50", "200", "800"} <= set(shown) and shown.count("1") == 0
    shares = texts(effect_curves_svg({"a": {x: [60.0, 62.0] for x in (0, 1 / 3, 2 / 3, 1)}}, "share", "F1"))
    assert {"0", "0.333", "0.667", "1"} <= set(shares)


def test_the_text_equivalent_holds_every_point():
    alt = effect_curves_svg(CURVES, "steps", "test F1", "How long").alt
    assert alt.startswith("How long: test F1 against steps, mean of 3 seeds, dots: single seeds,")
    half = T / math.sqrt(3)
    assert f"62.0 [{62 - half:.1f}, {62 + half:.1f}] at 50, 66.5" in alt and "causal: 61.0 [" in alt


@pytest.mark.parametrize(
    ("curves", "log_x", "message"),
    [
        ({}, False, "at least one arm"),
        ({"a": {}}, False, "arm 'a' has no points"),
        ({"a": {1: []}}, False, "needs a list of scores at x = 1"),
        ({"a": {1: [math.nan]}}, False, "a score of arm 'a' at x = 1 must be a finite number, not nan"),
        ({"a": {math.inf: [1.0]}}, False, "an x of arm 'a' must be a finite number"),
        ({"a": {0: [1.0]}}, True, "use log_x=False"),
    ],
)
def test_curves_without_meaning_are_refused(curves, log_x, message):
    with pytest.raises(MaskError, match=message):
        effect_curves_svg(curves, "x", "y", log_x=log_x)


def test_both_pictures_have_a_white_ground_and_can_be_saved(tmp_path):
    for i, picture in enumerate([effects_svg(GROUPS), effect_curves_svg(CURVES, "x", "y")]):
        ground = elements(picture, "rect")[0]
        assert ground.get("fill") == "#FFFFFF" and ground.get("width") == elements(picture, "svg")[0].get("width")
        assert save(picture, tmp_path / f"{i}.svg").read_text() == str(picture)


def test_an_interval_that_is_given_is_drawn_where_no_seeds_tell_one():
    curves = {"fuse": {1: [30.0], 5: [42.0]}, "concat": {1: [30.0], 5: [25.0]}}
    drawn = effect_curves_svg(curves, "paraphrases", "accuracy", intervals={"fuse": {1: (26.0, 34.0), 5: (38.0, 47.0)}})
    assert "42.0 [38.0, 47.0] at 5" in drawn and "25.0 at 5" in drawn
    assert "whiskers: 95 % interval; hollow: no interval" in drawn and "seed" not in drawn
    plain = effect_curves_svg(curves, "paraphrases", "accuracy")
    assert "one seed, no interval" in plain
    fuse, concat = (g for g in elements(drawn, "g"))
    ends = [
        [float(y) for y in re.match(r"M[\d.]+ ([\d.]+)V([\d.]+)", path.get("d")).groups()]
        for path in fuse.findall(f"{SVG}path")
        if "V" in path.get("d")
    ]
    (low, high), (low_5, high_5) = ends  # one length for one point of accuracy, on the scale that is drawn
    assert (low - high) / 8 == pytest.approx((low_5 - high_5) / 9, abs=0.01)
    assert not [path for path in concat.findall(f"{SVG}path") if "V" in path.get("d")]


@pytest.mark.parametrize(
    ("intervals", "words"),
    [
        ({"fuse": {2: (1.0, 2.0)}}, "arm 'fuse' at x = 2 has no point with one score"),
        ({"max": {1: (1.0, 2.0)}}, "arm 'max' at x = 1 has no point"),
        ({"seeds": {1: (1.0, 2.0)}}, "arm 'seeds' at x = 1 has no point with one score"),
        ({"fuse": {1: (2.0, 1.0)}}, "goes from 2 to 1: the lower end comes first"),
        ({"fuse": {1: (1.0, math.nan)}}, "an end of the interval of arm 'fuse' at x = 1 must be a finite number"),
    ],
)
def test_an_interval_without_its_point_is_refused(intervals, words):
    with pytest.raises(MaskError, match=words):
        effect_curves_svg({"fuse": {1: [1.5]}, "seeds": {1: [1.0, 2.0]}}, "x", "y", intervals=intervals)


def test_small_differences_keep_two_digits_beside_large_ones():
    rows = {
        "nats": {"near": (-0.0223, -0.0377, -0.0058), "next": (-0.0212, -0.0319, -0.01), "far": (0.2114, 0.18, 0.245)}
    }
    alt = effects_svg(rows, unit="nats", reference="baseline").alt
    assert "near −0.022 [−0.038, −0.006]" in alt and "far +0.211 [0.180, 0.245]" in alt
    assert "far +2.1 [1.8, 2.5]" in effects_svg({"points": {"near": (-0.2, -0.4, -0.1), "far": (2.11, 1.8, 2.45)}}).alt
