"""A table of verdicts says each cell by word, sign and colour, says itself in words, and refuses ragged rows."""

from xml.etree import ElementTree

import pytest

from labkit.errors import MaskError
from labkit.viz.grid import ALLOWED, DISAGREES, MASKED
from labkit.viz.verdicts import NOTHING, verdicts_svg

ROWS = {
    "right": ["bidirectional", "bidirectional"],
    "flips": ["bidirectional", "causal"],
    "<leaks>": ["pads & co", "—"],
}
COLUMNS = ["sdpa\nno padding", "sdpa\npadded row"]


def elements(picture, tag):
    return list(ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}" + tag))


def test_each_cell_carries_its_word_its_sign_and_its_colour():
    picture = verdicts_svg(ROWS, COLUMNS)
    texts = [element.text for element in elements(picture, "text")]
    assert texts.count("bidirectional") == 3 and texts.count("causal") == 1 and texts.count("pads & co") == 1
    assert texts.count(NOTHING) == 1 and texts.count("!") == 1
    fills = [element.get("fill") for element in elements(picture, "rect")]
    assert [fills.count(colour) for colour in (ALLOWED, MASKED, DISAGREES)] == [3, 1, 1]
    squares = [path for path in elements(picture, "path") if "l10 10" not in path.get("d")]
    assert len(squares) == 3 and len(elements(picture, "path")) == 4


def test_everything_lies_inside_the_picture():
    picture = verdicts_svg({**ROWS, "a rather long name of a recipe": ["other", "NaN"]}, COLUMNS)
    width, height = (int(ElementTree.fromstring(picture).get(side)) for side in ("width", "height"))
    for rect in elements(picture, "rect"):
        x, y, w, h = (int(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height


def test_the_text_equivalent_holds_every_row():
    alt = verdicts_svg(ROWS, COLUMNS).alt
    assert alt.startswith("A table of 3 rows; columns: sdpa no padding, sdpa padded row.")
    assert "flips: bidirectional, causal." in alt and "<leaks>: pads & co, —." in alt


@pytest.mark.parametrize("rows", [{}, {"short": ["causal"]}, {"text": "ab"}])
def test_what_is_no_table_is_refused(rows):
    with pytest.raises(MaskError, match="verdicts_svg takes a dictionary|needs one word for each of the 2 columns"):
        verdicts_svg(rows, COLUMNS)
