"""The reader's own text: fields, a button, and the answer below them."""

from labkit import viz
from labkit.errors import DataError
from labkit.viz.text import TextFigure


def answer(text: str, question: str) -> TextFigure:
    if "?" not in question:
        raise DataError("a question ends with <?>")
    return TextFigure(f"<b>{text}: {question}</b>", "the first answer")


def test_the_answer_follows_the_fields_and_an_error_is_shown():
    box = viz.ask(answer, text="A boat.", question="What?")
    bundle = box._repr_mimebundle_()
    assert bundle["text/html"] == "<b>A boat.: What?</b>"  # where widgets cannot run
    assert bundle["text/plain"] == "the first answer"
    box.fields["text"].value = "A dog."
    box.button.click()
    assert box.shown.value == "<b>A dog.: What?</b>"
    box.fields["question"].value = "What"
    box.button.click()
    assert box.shown.value == "<p>a question ends with &lt;?&gt;</p>"
    box.fields["text"].value = " "
    box.button.click()
    assert box.shown.value == "Fill in all fields."
