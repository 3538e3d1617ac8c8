"""Figures are written whole or not at all, with their text equivalent inside, and pages need no network."""

import re
import shutil
import struct
import sys
import zlib
from xml.etree import ElementTree

import numpy as np
import pytest

from labkit import viz
from labkit.errors import MaskError, MissingPackageError

TOKENS = ["the", '<b>&"', "bank"]
CAUSAL = np.tri(3, dtype=bool)


@pytest.fixture
def browser():
    pytest.importorskip("kaleido", reason="kaleido is not installed: pip install kaleido")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))):
        pytest.skip("no Chromium on this machine: scripts/install_browser.sh")


def test_a_page_holds_all_that_it_needs(tmp_path):
    figure = viz.mask_figure(CAUSAL, TOKENS, "causal()")
    path = viz.save(figure, tmp_path / "mask.html")
    page = path.read_text(encoding="utf-8")
    assert len(page) > 1_000_000 and "Plotly.newPlot" in page  # plotly.js itself
    assert not re.search(r"<(script|link|img)[^>]+(src|href)\s*=\s*[\"']?http", page)
    alt = "causal(): 3 queries and 3 keys, 6 of 9 cells allowed"
    assert f'role="img" aria-label="{alt}' in page and f"<figcaption>{alt}" in page
    assert "&lt;b&gt;" in page.partition("<figcaption>")[2] and "<title>causal()</title>" in page


def test_a_dark_figure_makes_a_dark_page(tmp_path):
    page = viz.save(viz.in_theme(viz.mask_figure(CAUSAL), "dark"), tmp_path / "m.html").read_text(encoding="utf-8")
    assert "color-scheme:dark" in page and "background:#111111" in page


def test_pictures_and_texts_become_pages_too(tmp_path):
    for figure in (viz.mask_svg(CAUSAL, TOKENS), viz.answer_figure("a cat", [(2, 5, 0.5)])):
        page = viz.save(figure, tmp_path / "f.html").read_text(encoding="utf-8")
        assert str(figure) in page and "<figcaption>" in page and len(page) < 20_000


def test_a_static_picture_is_a_drawing_already(tmp_path):
    picture = viz.mask_svg(CAUSAL, TOKENS)
    assert viz.save(picture, str(tmp_path / "mask.SVG")).read_text(encoding="utf-8") == str(picture)


@pytest.mark.end_to_end
def test_a_drawing_of_a_plotly_figure_carries_its_words(tmp_path, browser):
    figure = viz.mask_figure(CAUSAL, TOKENS)
    root = ElementTree.parse(viz.save(figure, tmp_path / "mask.svg")).getroot()
    assert root.get("role") == "img" and root.get("aria-label") == viz.alt_text(figure)
    assert root[0].tag.endswith("title") and root[0].text == viz.alt_text(figure)
    shown = {"".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert set(TOKENS) <= shown


@pytest.mark.end_to_end
def test_an_image_is_twice_as_fine_as_the_figure_and_carries_its_words(tmp_path, browser):
    figure = viz.mask_figure(CAUSAL, TOKENS)
    png = viz.save(figure, tmp_path / "mask.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (2 * figure.layout.width, 2 * figure.layout.height)
    chunks, place = {}, 8
    while place < len(png):
        length, kind = struct.unpack(">I4s", png[place : place + 8])
        body = png[place + 8 : place + 8 + length]
        assert struct.unpack(">I", png[place + 8 + length : place + 12 + length])[0] == zlib.crc32(kind + body)
        chunks[kind], place = body, place + 12 + length
    assert chunks[b"iTXt"] == b"Description\0\0\0\0\0" + viz.alt_text(figure).encode()


def test_without_kaleido_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(MissingPackageError, match=r"pip install kaleido.*apt-get install chromium"):
        viz.save(viz.mask_figure(CAUSAL), tmp_path / "mask.png")
    assert list(tmp_path.iterdir()) == []


def test_without_a_browser_the_message_says_what_to_install(tmp_path, monkeypatch):
    kaleido = pytest.importorskip("kaleido")

    class ChromeNotFoundError(RuntimeError):
        pass

    def none_found(*args, **kwargs):
        raise ChromeNotFoundError("no Chrome")

    monkeypatch.setattr(kaleido, "calc_fig_sync", none_found)
    with pytest.raises(MissingPackageError, match="apt-get install chromium"):
        viz.save(viz.mask_figure(CAUSAL), tmp_path / "mask.svg")


def test_what_fails_on_the_way_leaves_the_old_file_as_it_was(tmp_path, full_disk):
    path = tmp_path / "mask.svg"
    viz.save(viz.mask_svg(CAUSAL), path)
    before = path.read_bytes()

    with full_disk(after=100), pytest.raises(OSError, match="mask.svg"):
        viz.save(viz.mask_svg(~CAUSAL), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


REFUSED = {
    "an unknown ending": lambda folder: viz.save(viz.mask_svg(CAUSAL), folder / "mask.gif"),
    "no ending": lambda folder: viz.save(viz.mask_svg(CAUSAL), folder / "mask"),
    "a folder that does not exist": lambda folder: viz.save(viz.mask_svg(CAUSAL), folder / "no" / "mask.svg"),
    "a static picture as an image": lambda folder: viz.save(viz.mask_svg(CAUSAL), folder / "mask.png"),
    "a text as a drawing": lambda folder: viz.save(viz.answer_figure("a", []), folder / "text.svg"),
    "something else": lambda folder: viz.save("a figure", folder / "mask.html"),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_written_is_refused_with_a_sentence(make, tmp_path):
    with pytest.raises(MaskError) as refusal:
        make(tmp_path)
    assert len(str(refusal.value).split()) >= 6 and list(tmp_path.iterdir()) == []
