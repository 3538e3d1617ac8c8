"""The boxes of the notebooks: what they accept, what they show without a script, and where the tour uses them."""

import json
import re

import pytest

from labkit import notebooks
from labkit.errors import DataError
from labkit.learner import predict


def test_without_a_script_the_question_and_the_choices_are_shown_and_the_answer_is_folded():
    box = predict("Is 1 < 2?", choices=["<b>yes</b>", "no & never"], answer="<b>yes</b>", why="2 - 1 > 0")
    page = box._repr_html_()
    shown, folded = re.fullmatch(r"(.*)<details><summary>Answer</summary>(.*)</details>.*", page, re.S).groups()
    assert "Is 1 &lt; 2?" in shown and "<li>&lt;b&gt;yes&lt;/b&gt;</li><li>no &amp; never</li>" in shown
    assert folded == "<p>&lt;b&gt;yes&lt;/b&gt;</p><p>2 - 1 &gt; 0</p>"
    assert "Is 1 < 2?" in repr(box) and "no & never" in repr(box) and "2 - 1 > 0" not in repr(box)
    assert "<p>Three.</p></details>" in predict("How many?", answer="Three.")._repr_html_()
    assert "<details" not in predict("How many?")._repr_html_()


@pytest.mark.parametrize("answer", [None, "Yes", ""])
def test_an_answer_that_is_not_one_of_the_choices_is_refused(answer):
    with pytest.raises(DataError, match="is not one of"):
        predict("Is 1 < 2?", choices=["yes", "no"], answer=answer)


@pytest.mark.parametrize("path", notebooks.list_notebooks(), ids=lambda path: path.stem)
def test_in_the_tour_the_answer_cannot_be_read_before_the_box_is_used(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    boxes = [number for number, cell in enumerate(cells) if re.match(r"predict\(", "".join(cell["source"]))]
    assert boxes
    for number in boxes:
        box = eval("".join(cells[number]["source"]), {"predict": predict})  # the answer is one of the choices
        assert box.answer
        assert cells[number]["metadata"]["jupyter"]["source_hidden"]
        assert cells[number + 1]["metadata"]["jupyter"]["outputs_hidden"]
