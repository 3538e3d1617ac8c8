"""The picture of the objectives shows what labkit.objectives really asks: inputs, targets and mask of each."""

from xml.etree import ElementTree

import pytest
import torch

from labkit import objectives, viz
from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, MASKED
from labkit.viz.svg import INK

SVG = "{http://www.w3.org/2000/svg}"
TOKENS = ["the", "cat", "sat", "on", "a", "mat"]
WORDS = [*TOKENS, "[M]"]
N = len(TOKENS)


def plain(name, example):
    """An Example of labkit.objectives as plain values."""
    targets = [None if t == objectives.IGNORE else WORDS[t] for t in example.targets.tolist()]
    inputs = [WORDS[i] for i in example.inputs.tolist()]
    return {"name": name, "inputs": inputs, "targets": targets, "cells": example.mask.dense(N).tolist()}


@pytest.fixture(scope="module")
def examples():
    ids = torch.arange(N)
    corruption = objectives.Corruption(mask_id=N, vocab_size=N + 1, rate=0.3, protected=(N,), replace=(1.0, 0.0))

    def rng():
        return torch.Generator().manual_seed(1)

    return [
        plain("next <token>", objectives.next_token(ids)),
        plain("MLM", objectives.masked_lm(ids, corruption, rng())),
        plain("MNTP", objectives.mntp(ids, corruption, rng())),
        plain("prefix-LM", objectives.prefix_lm(ids, 3)),
        plain("hybrid", objectives.hybrid_lm(ids, 3, corruption, rng())),
    ]


def boxes(picture):
    """`(text, fill, x)` of every token in a box."""
    found = []
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        found.append((text.text, rect.get("fill"), int(rect.get("x"))))
    return found


def arrows(picture):
    """Where each arrow begins and ends: 0 = upright, above 0 = to the right."""
    paths = [p.get("d") for p in ElementTree.fromstring(picture).iter(f"{SVG}path") if p.get("stroke-width") == "1.6"]
    return [int(d.split()[-2]) - int(d[1:].split()[0]) for d in paths]


def test_every_input_and_every_counted_target_is_drawn_and_hidden_tokens_are_marked(examples):
    for example in examples:
        drawn = boxes(viz.objectives_svg(TOKENS, [example]))
        asked = [target for target in example["targets"] if target is not None]
        assert sorted(text for text, *_ in drawn) == sorted(example["inputs"] + asked)
        hidden = [text for text, fill, _ in drawn if fill == INK]
        assert hidden == ["[M]"] * example["inputs"].count("[M]")


def test_a_target_stands_under_the_position_whose_logits_must_name_it(examples):
    mntp = examples[2]
    drawn = boxes(viz.objectives_svg(TOKENS, [mntp]))
    inputs = [x for text, fill, x in drawn if fill in ("#FFFFFF", INK)]
    targets = {x: text for text, fill, x in drawn if fill not in ("#FFFFFF", INK)}
    assert [targets.get(x) for x in sorted(inputs)] == mntp["targets"]


def test_arrows_lead_to_the_token_that_is_meant(examples):
    upright = {
        example["name"]: [way == 0 for way in arrows(viz.objectives_svg(TOKENS, [example]))] for example in examples
    }
    counted = {example["name"]: sum(t is not None for t in example["targets"]) for example in examples}
    assert {name: len(ways) for name, ways in upright.items()} == counted
    assert all(upright["MLM"]) and not any(upright["MNTP"] + upright["next <token>"] + upright["prefix-LM"])


def test_positions_that_do_not_count_show_a_dash(examples):
    for example in examples:
        texts = [t.text for t in ElementTree.fromstring(viz.objectives_svg(TOKENS, [example])).iter(f"{SVG}text")]
        assert texts.count("-") == example["targets"].count(None)


def test_the_mask_is_drawn_cell_by_cell(examples):
    picture = viz.objectives_svg(TOKENS, examples)
    cells = [r for r in ElementTree.fromstring(picture).iter(f"{SVG}rect") if r.get("fill") in (ALLOWED, MASKED)]
    said = [may for example in examples for row in example["cells"] for may in row]
    assert [cell.get("fill") == ALLOWED for cell in cells] == said


def test_the_text_equivalent_tells_each_objective(examples):
    alt = viz.objectives_svg(TOKENS, examples[:3]).alt
    assert alt.startswith('next <token>: reads the cat sat on a mat. Position 0 must name "cat", 1 must name "sat",')
    assert "21 of 36 cells allowed, 0 in the future. MLM: reads" in alt
    assert alt.endswith("36 of 36 cells allowed, 15 in the future.") and "(hidden: " in alt


@pytest.mark.parametrize("n", [4, 10])
@pytest.mark.parametrize("panels", [3, 5])
def test_pictures_stay_small_and_hold_everything(n, panels):
    tokens = ["<tok>&"] * n
    example = {"name": "x", "inputs": tokens, "targets": [*tokens[1:], None], "cells": torch.ones(n, n).bool()}
    picture = viz.objectives_svg(tokens, [example] * panels)
    root = ElementTree.fromstring(picture)
    wide, high = int(root.get("width")), int(root.get("height"))
    assert wide <= 1000 and high <= 190 * panels and len(picture) < 150_000
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x + w <= wide and y + h <= high


EXAMPLE = {"name": "x", "inputs": TOKENS, "targets": [None] * N, "cells": torch.ones(N, N).bool()}
CANNOT_BE_SHOWN = {
    "no sentence": lambda: viz.objectives_svg([], [EXAMPLE]),
    "no examples": lambda: viz.objectives_svg(TOKENS, []),
    "an example without a mask": lambda: viz.objectives_svg(TOKENS, [{k: EXAMPLE[k] for k in ("name", "inputs")}]),
    "too few inputs": lambda: viz.objectives_svg(TOKENS, [EXAMPLE | {"inputs": TOKENS[1:]}]),
    "too many targets": lambda: viz.objectives_svg(TOKENS, [EXAMPLE | {"targets": TOKENS * 2}]),
    "a mask of another sentence": lambda: viz.objectives_svg(TOKENS, [EXAMPLE | {"cells": torch.ones(2, 2).bool()}]),
    "a mask of weights": lambda: viz.objectives_svg(TOKENS, [EXAMPLE | {"cells": torch.rand(N, N)}]),
}


@pytest.mark.parametrize("make", CANNOT_BE_SHOWN.values(), ids=CANNOT_BE_SHOWN.keys())
def test_what_cannot_be_shown_is_refused_with_a_sentence(make):
    with pytest.raises(MaskError) as refusal:
        make()
    assert len(str(refusal.value).split()) >= 6
