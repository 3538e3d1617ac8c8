"""Pictures of depth show every layer, say it in words, and refuse what they cannot show."""

from xml.etree import ElementTree

import pytest
import torch

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, MASKED
from labkit.viz.layers import layer_types_svg, layer_values_svg

SVG = "{http://www.w3.org/2000/svg}"
GEMMA = (["sliding_attention"] * 5 + ["full_attention"]) * 3


def test_strip_has_one_bar_per_layer_in_the_colour_of_its_type():
    picture = layer_types_svg(GEMMA)
    bars = [r for r in ElementTree.fromstring(picture).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    assert [bar.get("fill") for bar in bars] == [ALLOWED if t == "full_attention" else MASKED for t in GEMMA]
    assert picture.alt == "18 layers: global 5, 11, 17; local 0-4, 6-10, 12-16."


@pytest.mark.parametrize("types", [[], ["sliding_attention", "chunked_attention"]])
def test_strip_refuses_what_it_cannot_show(types):
    with pytest.raises(MaskError, match="layer_types_svg takes a list"):
        layer_types_svg(types)


@pytest.mark.parametrize("tokens", [["a", "<b>"], [f"t{i}" for i in range(20)]])
def test_values_say_each_cell_and_the_largest(tokens):
    values = torch.zeros(3, len(tokens))
    values[2, 1] = 0.25
    picture = layer_values_svg(values, tokens, "before and after", "change")
    root = ElementTree.fromstring(picture)  # well-formed, whatever the tokens hold
    cells = list(root.iter(f"{SVG}path"))
    assert len(cells) == values.numel()
    darkest = min(cells, key=lambda cell: cell.get("fill"))
    assert darkest.find(f"{SVG}title").text == f'layer 2, "{tokens[1]}": change 0.250'
    assert picture.alt.endswith(f'The largest change is 0.25, in layer 2 at "{tokens[1]}".')


@pytest.mark.parametrize("values", [torch.zeros(2, 3), -torch.ones(2, 2), torch.full((2, 2), torch.nan)])
def test_values_refuse_wrong_shapes_and_numbers(values):
    with pytest.raises(MaskError, match="values"):
        layer_values_svg(values, ["a", "b"], "title", "change")
