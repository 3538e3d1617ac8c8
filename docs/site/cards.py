"""Cards of the glossary: where a page first uses one of its words, the word leads to its entry and shows it.

The entries are the paragraphs `**Word.** meaning [01]` of docs/glossary.md, with a target before each or not. A card
opens under the pointer and with the keyboard; it is part of the page, so it needs no script and no request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes

GLOSSARY = "docs/glossary"
ENTRY = re.compile(r"^(\(term-[\w-]+\)=\n)?\*\*(?P<word>[^*]+)\.\*\* (?P<meaning>.+?)(?: \[[\d, ]+\])?$", re.S)
FORMS = {"Key, query, value": ("keys and values", "queries and keys"), "Head": ("attention head",)}  # in running text
NOT_IN = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.math, nodes.raw, nodes.image)


@dataclass(frozen=True)
class Entry:
    """A word of the glossary; `forms` are what it is called in running text."""

    word: str
    meaning: str
    forms: tuple[str, ...]

    @property
    def anchor(self) -> str:
        return "term-" + re.sub(r"\W+", "-", self.word.lower()).strip("-")


def entries(glossary: str) -> Iterator[Entry]:
    """The entries of the glossary, given as Markdown."""
    return filter(None, map(_entry, glossary.split("\n\n")))


def _entry(block: str) -> Entry | None:
    found = ENTRY.match(block.strip())
    if found is None:
        return None
    forms = FORMS.get(found["word"]) or tuple(found["word"].split(", or "))
    return Entry(found["word"], " ".join(found["meaning"].split()), forms)


def with_anchors(glossary: str) -> str:
    """The glossary with a target before each entry, for cards to lead to."""
    blocks = glossary.split("\n\n")
    return "\n\n".join(f"({found.anchor})=\n{block}" if (found := _entry(block)) else block for block in blocks)


class Words:
    """Finds the words of the glossary in text."""

    def __init__(self, found: list[Entry]) -> None:
        self.of_form = {form.lower(): entry for entry in found for form in entry.forms}
        forms = sorted(self.of_form, key=len, reverse=True)
        self.pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, forms))})(s?)(?![\w-])", re.IGNORECASE)

    def first(self, text: str, seen: set[str]) -> tuple[int, int, Entry] | None:
        """The first word in `text` that is not among the `seen`: where it begins, where it ends, and its entry."""
        for found in self.pattern.finditer(text):
            entry = self.of_form[found[1].lower()]
            if entry.word not in seen:
                return found.start(), found.end(), entry
        return None


def put_cards(app: Any, doctree: nodes.document, page: str) -> None:
    """Replace the first use of each word on `page`; glossary, change log and the reference are left as they are."""
    if page == GLOSSARY or page.startswith("api/") or page in ("CHANGELOG", "LICENSE"):
        return
    words: Words = app.env.labkit_words
    home = app.builder.get_relative_uri(page, GLOSSARY)
    seen: set[str] = set()
    for text in list(doctree.findall(nodes.Text)):
        if not _is_prose(text):
            continue
        parts: list[nodes.Node] = []
        rest = str(text)
        while found := words.first(rest, seen):
            begin, end, entry = found
            seen.add(entry.word)
            parts += [nodes.Text(rest[:begin]), _card(rest[begin:end], entry, home)]
            rest = rest[end:]
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(rest)])


def _is_prose(text: nodes.Text) -> bool:
    above = text.parent
    inside = False
    while above is not None:
        if isinstance(above, NOT_IN):
            return False
        inside = inside or isinstance(above, nodes.paragraph)
        above = above.parent
    return inside


class Card(nodes.Element):
    """A word with its entry; the word is its only text, so that a search finds the page by what is written there."""


def _card(shown: str, entry: Entry, home: str) -> Card:
    return Card("", nodes.Text(shown), entry=entry, link=f"{home}#{entry.anchor}")


def open_card(self: Any, card: Card) -> None:
    self.body.append(
        f'<span class="labkit-term"><a href="{card["link"]}" aria-describedby="card-{card["entry"].anchor}">'
    )


def close_card(self: Any, card: Card) -> None:
    entry = card["entry"]
    meaning = escape(re.sub(r"[`*]", "", entry.meaning))
    self.body.append(
        f'</a><span role="tooltip" class="labkit-card" id="card-{entry.anchor}">'
        f"<strong>{escape(entry.word)}.</strong> {meaning}</span></span>"
    )


def read_glossary(app: Any, *_: Any) -> None:
    """Before pages are written: the words, from the glossary as it was gathered."""
    app.env.labkit_words = Words(list(entries((Path(app.srcdir) / f"{GLOSSARY}.md").read_text(encoding="utf-8"))))


def setup(app: Any) -> dict[str, bool]:
    app.add_node(Card, html=(open_card, close_card))
    app.connect("builder-inited", read_glossary)
    app.connect("doctree-resolved", put_cards)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
