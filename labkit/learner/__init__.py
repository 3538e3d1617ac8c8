"""The learner's side of the notebooks: boxes for predictions and explanations, and a record of what has been done.

    from labkit.learner import explain, predict

    predict("00-padding", "Who notices now?")    # before the result: a box to write in
    explain("00-padding")                        # after it: what was predicted, and a box for the reason

What is written is kept in one file on this machine (`labkit.learner.record`) and is sent nowhere; `labkit progress`
shows it. On a page without a kernel the boxes keep what is written in the reader's browser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.learner.boxes import Box

WHY = "Were you right? Say in a sentence why it came out like this."


def predict(name: str, question: str) -> Box:
    """A box for a prediction, to be written before the result is shown.

    Args:
        name: of the prediction, unique in the lab: the notebook's number, a hyphen, and a word or two ("00-padding").
        question: what is to be predicted, in one sentence.

    Raises:
        LearnerError: a name that is not of this form.
    """
    from labkit.learner.boxes import Box

    return Box(name, "predict", question)


def explain(name: str, question: str = WHY) -> Box:
    """What was predicted in the box of this name, and beneath it a box for the explanation.

    Raises:
        LearnerError: a name that is not of the form of `predict`.
    """
    from labkit.learner.boxes import Box

    return Box(name, "explain", question)
