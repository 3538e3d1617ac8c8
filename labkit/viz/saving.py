"""Writing a figure to a file: a page that needs no network, a drawing, or an image; with its text equivalent inside."""

from __future__ import annotations

import struct
import zlib
from html import escape
from pathlib import Path

from labkit.errors import MaskError, MissingPackageError
from labkit.viz.svg import Svg
from labkit.viz.text_figures import TextFigure
from labkit.writing import write_whole

SCALE = 2  # pixels of a PNG for each pixel of the figure: sharp in print and on dense screens
INSTALL = (
    "PNG and SVG of an interactive figure are drawn by a browser: pip install kaleido, and install Chromium or Chrome "
    "(Debian and Ubuntu: apt-get install chromium). A page, figure.html, needs neither"
)


def save(figure, path: str | Path) -> Path:
    """Write a figure of `labkit.viz` to `path`, as its ending says, and return the path. Whole or not at all.

    * `.html`: a page that works without a network, as interactive as in the notebook.
    * `.svg`: a drawing, for documents. Static pictures are drawings already; a plotly figure needs kaleido.
    * `.png`: an image of a plotly figure, twice as fine as on the screen. Needs kaleido.

    Raises:
        MaskError: another ending, a folder that does not exist, or something that is no figure of labkit.
        MissingPackageError: kaleido or its browser is missing; the message says what to install.
    """
    path = Path(path)
    writer = {".html": _page, ".svg": _drawing, ".png": _image}.get(path.suffix.lower())
    if writer is None:
        raise MaskError(f"a figure is written as .html, .svg or .png, and {path.name!r} ends in none of them")
    if not path.parent.is_dir():
        raise MaskError(f"there is no folder {str(path.parent)!r} to write {path.name!r} into")
    content = writer(figure)
    write_whole(path, content)
    return path


# ------------------------------------------------------------------------------------------------------------ forms
def _page(figure) -> bytes:
    alt, dark, ink = _alt(figure), False, ""
    if isinstance(figure, (Svg, TextFigure)):
        drawn = str(figure)
    else:
        import plotly.io

        options = {"include_plotlyjs": True, "full_html": False, "config": {"displaylogo": False, "responsive": False}}
        drawn = f'<div role="img" aria-label="{escape(alt)}">{plotly.io.to_html(figure, **options)}</div>'
        dark = figure.layout.meta.get("theme") == "dark"
        ink = f";background:{figure.layout.template.layout.paper_bgcolor}"
    scheme = "light dark" if isinstance(figure, TextFigure) else "dark" if dark else "light"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(alt.partition(':')[0][:80])}</title>"
        f"<style>:root{{color-scheme:{scheme}}}body{{margin:16px{ink};font:14px/1.5 sans-serif}}figure{{margin:0}}"
        "figcaption{max-width:820px;margin-top:12px}</style></head>\n"
        f"<body><figure>{drawn}\n<figcaption>{escape(alt)}</figcaption></figure></body></html>\n"
    ).encode()


def _drawing(figure) -> bytes:
    if isinstance(figure, Svg):
        return figure.encode()
    alt = _alt(figure)
    drawn = _rendered(figure, "svg").decode()
    start = drawn.index("<svg") + len("<svg")
    inside = drawn.index(">", start) + 1
    label = f' role="img" aria-label="{escape(alt)}"'
    return f"{drawn[:start]}{label}{drawn[start:inside]}<title>{escape(alt)}</title>{drawn[inside:]}".encode()


def _image(figure) -> bytes:
    """A PNG with the text equivalent as its "Description"."""
    alt, png = _alt(figure), _rendered(figure, "png")
    words = b"iTXt" + b"Description\0\0\0\0\0" + alt.encode()
    chunk = struct.pack(">I", len(words) - 4) + words + struct.pack(">I", zlib.crc32(words))
    end = 8 + 25  # the signature and the header chunk come first
    return png[:end] + chunk + png[end:]


def _rendered(figure, form: str) -> bytes:
    if isinstance(figure, (Svg, TextFigure)):
        others = ".svg or .html" if isinstance(figure, Svg) else ".html"
        raise MaskError(f"this picture is not drawn by plotly: save it as {others}")
    try:
        import kaleido
    except ImportError as missing:
        raise MissingPackageError(f"kaleido is not installed. {INSTALL}.") from missing
    layout = figure.layout
    size = {"format": form, "width": layout.width, "height": layout.height, "scale": SCALE if form == "png" else 1}
    try:
        return kaleido.calc_fig_sync(figure.to_dict(), opts=size, kopts={"mathjax": False})  # mathjax would be fetched
    except Exception as error:
        if "hrome" not in type(error).__name__:
            raise
        raise MissingPackageError(f"kaleido found no browser that it can start ({error}). {INSTALL}.") from error


def _alt(figure) -> str:
    if isinstance(figure, (Svg, TextFigure)):
        return figure.alt
    from labkit.viz.figures import alt_text

    if not hasattr(figure, "layout"):
        raise MaskError(f"save takes a figure made by labkit.viz, not {type(figure).__name__}")
    return alt_text(figure)
