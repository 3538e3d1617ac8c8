"""The boxes in JupyterLab, in a real browser: choosing and writing by keyboard, and a notebook that is opened again."""

import re

import pytest

from labkit.learner import predict
from tests.browser.servers import Notebook, jupyter, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CHOICES = 'predict("Is 1 < 2?", choices=["yes", "no"], answer="yes", why="Because 2 - 1 > 0.")'
TEXT = 'predict("How many?", answer="Three.", why="Count them.")'


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_in_jupyterlab_the_answer_comes_after_the_choice_and_after_the_text(open_page, tmp_path, dark):
    again = CHOICES.replace("1 < 2", "2 > 1")
    write_notebook(tmp_path / "notebooks" / "boxes.ipynb", "from labkit.learner import predict", CHOICES, again, TEXT)
    with jupyter("lab", tmp_path, dark=dark) as lab:
        page = open_page(1280, 1000)
        notebook = Notebook(page, lab, "boxes.ipynb")
        for cell in range(4):
            notebook.run(cell)
        first, second, third = (page.locator(".labkit-box").nth(box) for box in range(3))
        assert not any(word in box.inner_text() for box in (first, third) for word in ("Because", "Three", "Count"))

        first.get_by_role("button", name="no").focus()
        page.keyboard.press("Enter")  # which JupyterLab must not take for a shortcut
        assert first.get_by_role("status").inner_text().split("\n\n") == [
            "✗ Not right. The answer: yes",
            "Because 2 - 1 > 0.",
        ]
        first.get_by_role("button", name="yes").click(force=True)  # the choice stays
        assert "Not right" in first.get_by_role("status").inner_text()
        second.get_by_role("button", name="yes").click()
        assert second.get_by_role("status").inner_text().startswith("✓ Right.")

        written, show = third.get_by_label("How many?"), third.get_by_role("button", name="Show the answer")
        assert show.is_disabled()
        written.click()
        page.keyboard.type("a dozen, dd")  # letters that are shortcuts outside of a text
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        assert re.split(r"\s*\n\s*", third.get_by_role("status").inner_text()) == ["Three.", "Count them."]
        assert written.input_value() == "a dozen, dd"
        assert page.locator(".jp-Notebook .jp-CodeCell").count() == 4  # "dd" has deleted no cell
        page.shoot(f"learner_lab_{'dark' if dark else 'light'}")

        notebook.save()
        notebook.open()  # again, without running a cell
        first.get_by_role("button", name="yes").click()
        assert first.get_by_role("status").inner_text().startswith("✓ Right.")
        assert page.get_by_text("Error displaying").count() == 0
        page.goto("about:blank")  # before its server is stopped


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_without_a_kernel_has_the_same_boxes(open_page, tmp_path, theme):
    boxes = (predict("Is 1 < 2?", choices=["yes", "no"], answer="yes"), predict("How many?", answer="Three."))
    html = "".join(box._repr_html_() for box in boxes)
    colours = "background: #111; color: #ddd" if theme == "dark" else "background: #fff; color: #222"
    (tmp_path / "page.html").write_text(f'<meta charset="utf-8"><body style="{colours}">{html}', encoding="utf-8")
    page = open_page(390, 600, theme)
    page.goto((tmp_path / "page.html").as_uri())
    page.get_by_role("button", name="no").click()
    page.get_by_label("How many?").fill("Two.")
    page.get_by_role("button", name="Show the answer").click()
    page.get_by_text("Three.").wait_for()
    page.shoot(f"learner_page_{theme}")
