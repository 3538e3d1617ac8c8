"""The picture of the results page shows the stored comparison, and every set that was measured."""

from __future__ import annotations

import pytest

from labkit.bench.stored import mask_effects
from scripts import draw_headline

CUT = "field-notes/ner"  # measured with fewer examples, too


def test_the_picture_is_of_the_stored_results():
    assert draw_headline.PICTURE.read_text(encoding="utf-8") == draw_headline.drawn(), "scripts/draw_headline.py"


def test_every_difference_of_its_arms_is_drawn():
    drawn = draw_headline.drawn()
    for condition in mask_effects():
        if condition["model"] != draw_headline.MODEL or draw_headline.SETS[condition["name"]][1]:
            continue
        for arm in condition["arms"]:
            if arm["name"] in draw_headline.ARMS and "difference" in arm:
                low, high = (f"{arm['difference'][end]:.1f}".replace("-", "\N{MINUS SIGN}") for end in ("low", "high"))
                assert f"[{low}, {high}]" in drawn, (condition["name"], arm["name"])


def test_a_set_that_was_measured_twice_is_an_error(monkeypatch):
    monkeypatch.setattr(draw_headline, "mask_effects", lambda: mask_effects() * 2)
    with pytest.raises(SystemExit, match="measured twice with gemma3-270m, lora and as many steps"):
        draw_headline.drawn()


def test_a_set_that_was_also_learned_for_longer_is_drawn_with_the_steps_of_both(monkeypatch):
    stored = mask_effects()
    once = [each for each in stored if each["model"] == draw_headline.MODEL and each["name"] in ("wikigold/ner", CUT)]
    longer = [each | {"arms": [one | {"steps": 1600} for one in each["arms"]]} for each in once]
    longer = [each | {"sizes": [size | {"steps": 500} for size in each["sizes"]]} for each in longer]
    monkeypatch.setattr(draw_headline, "mask_effects", lambda: [*longer, *stored])
    drawn = draw_headline.drawn()
    label = "Wikigold: 1,006 examples to learn from"
    assert drawn.index(f"{label}, 200 steps") < drawn.index(f"{label}, 1,600 steps")
    fewest = next(each for each in once if each["name"] == CUT)["sizes"][0]
    label = f"Field Notes: {fewest['size']} examples to learn from"
    assert all(f"{label}, {steps:.0f} steps" in drawn for steps in (fewest["steps"], 500))
    alike = [each | {"sizes": one["sizes"]} for each, one in zip(longer, once, strict=True)]
    monkeypatch.setattr(draw_headline, "mask_effects", lambda: [*alike, *stored])
    with pytest.raises(SystemExit, match="63 steps: measured twice"):
        draw_headline.drawn()


def test_a_set_that_was_measured_and_has_no_name_is_an_error(monkeypatch):
    monkeypatch.setattr(draw_headline, "SETS", {"wikigold/ner": ("Entities", None)})
    with pytest.raises(SystemExit, match=r"field-notes/ner.*: measured, and without a name in SETS"):
        draw_headline.drawn()
