"""Loss curves hold every mean and band, say them in words, mark a step, and refuse what does not fit together."""

import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from labkit import viz
from labkit.errors import MaskError

SVG = "{http://www.w3.org/2000/svg}"
STEPS = [0, 50, 100]
ARMS = {"as built": [[4.4, 4.2, 4.16], [4.6, 4.2, 4.18]], "un<masked>": [[4.5, 2.0, 0.02], [4.5, 3.0, 0.06]]}
FLOOR = math.log(64)
SAMPLES = {"as built": ["zq ml", "the a the", "the cat & the dog"], "un<masked>": ["zq", "the the", "the " * 200]}


def texts(picture):
    return ["".join(element.itertext()) for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def curves(picture):
    """The points of each mean line, in pixels."""
    lines = [p for p in ElementTree.fromstring(picture).iter(f"{SVG}path") if p.get("stroke-width") == "2.5"]
    return [[tuple(map(float, point.split())) for point in line.get("d")[1:].split("L")] for line in lines]


def test_lines_run_through_the_means_on_one_linear_scale():
    built, unmasked = curves(viz.leak_curves_svg(STEPS, ARMS, FLOOR))
    assert [x for x, _ in built] == [x for x, _ in unmasked]
    pixels = np.array([y for _, y in built + unmasked])
    losses = np.concatenate([np.mean(losses, axis=0) for losses in ARMS.values()])
    slope, start = np.polyfit(losses, pixels, 1)
    assert slope < 0 and np.abs(slope * losses + start - pixels).max() < 0.2  # pixels


def test_the_band_reaches_from_the_lowest_to_the_highest_seed():
    picture = viz.leak_curves_svg(STEPS, {"one": [[3.0, 2.0, 1.0], [3.0, 1.0, 0.5]]})
    (mean,) = curves(picture)
    band = next(p for p in ElementTree.fromstring(picture).iter(f"{SVG}path") if p.get("fill-opacity"))
    points = [tuple(map(float, point.split())) for point in band.get("d")[1:-1].split("L")]
    assert points[0] == points[-1] == mean[0]  # the seeds agree there
    upper, lower = points[1][1], points[-2][1]
    assert upper < mean[1][1] < lower and mean[1][1] == pytest.approx((upper + lower) / 2, abs=0.11)


def test_names_and_last_losses_stand_at_the_ends_and_the_floor_has_its_name():
    picture = viz.leak_curves_svg(STEPS, ARMS, FLOOR)
    shown = texts(picture)
    assert {"as built 4.17", "un<masked> 0.04", "ln V = 4.16", "training step"} <= set(shown)
    assert 'stroke-dasharray="6 4"' in picture
    assert "ln V" not in viz.leak_curves_svg(STEPS, ARMS)


def test_labels_of_curves_that_end_together_do_not_overlap():
    arms = {f"arm {i}": [[4.0, 3.0, 1.0 + i / 1000]] for i in range(6)}
    for losses in (arms, {name: [[1.0, 0.5, 0.0]] for name in arms}):
        root = ElementTree.fromstring(viz.leak_curves_svg(STEPS, losses))
        heights = sorted(int(t.get("y")) for t in root.iter(f"{SVG}text") if "".join(t.itertext()).startswith("arm"))
        assert len(heights) == 6 and min(np.diff(heights)) >= 16


def test_the_marked_step_carries_each_arms_loss():
    picture = viz.leak_curves_svg(STEPS, ARMS, FLOOR, at=50)
    shown = texts(picture)
    assert {"step 50", "4.20", "2.50", "as built", "un<masked>"} <= set(shown)
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in ElementTree.fromstring(picture).iter(f"{SVG}circle")]
    assert dots == [points[1] for points in curves(picture)]
    assert "At step 50: as built 4.20, un<masked> 2.50." in picture.alt


def test_the_text_equivalent_tells_beginning_end_and_floor():
    alt = viz.leak_curves_svg(STEPS, ARMS, FLOOR, "the floor of chance").alt
    assert alt.startswith("Loss in nats per token from training step 0 to 100, mean of 2 seeds, band from the lowest")
    assert "as built: 4.50 at first, 4.17 at the end." in alt and "The floor, the floor of chance, is 4.16." in alt
    assert "one seed" in viz.leak_curves_svg(STEPS, {"a": [[1.0, 1.0, 1.0]]}).alt


def test_samples_stand_below_the_curves_and_keep_the_pictures_of_one_height():
    pictures = [viz.leak_curves_svg(STEPS, ARMS, FLOOR, at=step, samples=SAMPLES) for step in STEPS]
    assert len({re.search(r'height="(\d+)"', picture).group(1) for picture in pictures}) == 1
    assert {"as built writes", "un<masked> writes", "the cat & the dog"} <= set(texts(pictures[2]))
    assert 'as built writes at step 50: "the a the".' in pictures[1].alt
    assert max(map(len, texts(pictures[2]))) < 80  # long texts are cut


def test_many_steps_stay_small_and_control_characters_do_no_harm():
    steps = list(range(500))
    picture = viz.leak_curves_svg(steps, {"a\x00\n": [[5.0] * 500] * 3}, samples={"a\x00\n": ["\x1b[0m\ud800"] * 500})
    ElementTree.fromstring(picture)
    assert len(picture) < 40_000


def test_the_slider_has_a_picture_for_each_step_and_needs_no_network():
    slider = viz.leak_curves_slider(STEPS, ARMS, FLOOR, samples=SAMPLES)
    assert slider.index == 2 and slider.labels == ["step 0", "step 50", "step 100"]
    slider.index = 1
    assert slider.picture == viz.leak_curves_svg(STEPS, ARMS, FLOOR, at=50, samples=SAMPLES)
    assert slider.sentences[1] == "step 50: as built 4.20, un<masked> 2.50."
    for picture, frame in zip(slider.pictures, slider.frames, strict=True):
        assert "\n".join(slider.lines[i] for i in frame) == picture  # what the browser puts together
    assert "http" not in slider._esm and "http" not in slider._css and "import" not in slider._esm


def test_the_slider_sends_what_its_pictures_share_only_once():
    steps = list(range(0, 300, 15))
    slider = viz.leak_curves_slider(steps, {name: [[4.0] * 20] * 3 for name in "abc"}, FLOOR)
    assert len(json.dumps([slider.lines, slider.frames])) < sum(map(len, slider.pictures)) / 2


def test_the_slider_leaves_a_picture_where_widgets_do_not_run():
    slider = viz.leak_curves_slider(STEPS, ARMS, at=50)
    bundle, _ = slider._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["image/svg+xml"] == str(slider.picture)
    assert bundle["text/plain"].startswith("Picture: Loss in nats per token")


CANNOT_BE_SHOWN = {
    "one step": lambda: viz.leak_curves_svg([0], {"a": [[1.0]]}),
    "steps that go back": lambda: viz.leak_curves_svg([0, 2, 1], {"a": [[1.0, 1.0, 1.0]]}),
    "no arms": lambda: viz.leak_curves_svg(STEPS, {}),
    "an arm without seeds": lambda: viz.leak_curves_svg(STEPS, {"a": []}),
    "a curve of another length": lambda: viz.leak_curves_svg(STEPS, {"a": [[1.0, 2.0]]}),
    "one curve without its list": lambda: viz.leak_curves_svg(STEPS, {"a": [1.0, 2.0, 3.0]}),
    "a diverged run": lambda: viz.leak_curves_svg(STEPS, {"a": [[1.0, float("nan"), 2.0]]}),
    "an infinite floor": lambda: viz.leak_curves_svg(STEPS, ARMS, float("inf")),
    "a step that was not measured": lambda: viz.leak_curves_svg(STEPS, ARMS, at=51),
    "samples of a stranger": lambda: viz.leak_curves_svg(STEPS, ARMS, samples={"other": ["", "", ""]}),
    "too few samples": lambda: viz.leak_curves_slider(STEPS, ARMS, samples={"as built": ["one"]}),
    "a slider that begins nowhere": lambda: viz.leak_curves_slider(STEPS, ARMS, at=1),
    "an index without a picture": lambda: setattr(viz.leak_curves_slider(STEPS, ARMS), "index", 3),
}


@pytest.mark.parametrize("make", CANNOT_BE_SHOWN.values(), ids=CANNOT_BE_SHOWN.keys())
def test_what_cannot_be_shown_is_refused_with_a_sentence(make):
    with pytest.raises(MaskError) as refusal:
        make()
    assert len(str(refusal.value).split()) >= 6
