"""The boxes of the notebooks: what they accept, what they show without a script, and where the tour uses them."""

import json
import re
from html.parser import HTMLParser

import pytest

from labkit import notebooks
from labkit.errors import DataError
from labkit.learner import predict


class Outside(HTMLParser):
    """The text of a page by the tag that it is in; what is in `<details>`, apart from its summary, goes to "folded"."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.texts = [], {}
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open.pop() != tag:
            pass

    def handle_data(self, data):
        folded = "details" in self.open and "summary" not in self.open
        if data.strip() and self.open:
            self.texts.setdefault("folded" if folded else self.open[-1], []).append(data.strip())


def test_without_a_script_the_question_and_the_choices_are_shown_and_the_answer_is_folded():
    box = predict("Is 1 < 2?", choices=["<b>yes</b>", "no & never"], answer="<b>yes</b>", why="2 - 1 > 0")
    bundle = box._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}  # no widget, so nothing that can fail to load
    texts = Outside(bundle["text/html"]).texts
    assert texts["p"] == ["Is 1 < 2?"]
    assert texts["li"] == ["<b>yes</b>", "no & never"]
    assert texts["summary"] == ["Answer"]
    assert texts["folded"] == ["<b>yes</b>", "2 - 1 > 0"]
    assert "Is 1 < 2?" in bundle["text/plain"] and "no & never" in bundle["text/plain"]
    assert "2 - 1 > 0" not in bundle["text/plain"]


def test_a_box_for_a_text_folds_its_answer_and_a_box_without_an_answer_folds_nothing():
    assert Outside(predict("How many?", answer="Three.")._repr_mimebundle_()["text/html"]).texts["folded"] == ["Three."]
    assert "<details" not in predict("How many?")._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize("answer", [None, "Yes", ""])
def test_an_answer_that_is_not_one_of_the_choices_is_refused(answer):
    with pytest.raises(DataError, match="not one of the choices"):
        predict("Is 1 < 2?", choices=["yes", "no"], answer=answer)


@pytest.mark.parametrize("path", notebooks.list_notebooks(), ids=lambda path: path.stem)
def test_in_the_tour_the_answer_cannot_be_read_before_the_box_is_used(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    boxes = [number for number, cell in enumerate(cells) if re.match(r"predict\(", "".join(cell["source"]))]
    assert len(boxes) >= 2
    for number in boxes:
        box = eval("".join(cells[number]["source"]), {"predict": predict})  # the answer is one of the choices
        assert box.answer
        assert cells[number]["metadata"]["jupyter"]["source_hidden"]
        assert cells[number + 1]["metadata"]["jupyter"]["outputs_hidden"]
