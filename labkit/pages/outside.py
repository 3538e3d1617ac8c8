"""What a piece of HTML would fetch from elsewhere: scripts, styles, pictures; not the links that wait for a click."""

from __future__ import annotations

import re
from html.parser import HTMLParser

FETCHED = {  # element -> the attribute whose address a browser fetches by itself
    "audio": "src",
    "embed": "src",
    "feimage": "href",
    "iframe": "src",
    "image": "href",
    "img": "src",
    "input": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "track": "src",
    "use": "href",
    "video": "src",
}
ADDRESS = r"(?:https?:)?//[^\s\"')]+"
IN_STYLES = re.compile(rf"(?:url\(|@import)\s*[\"']?({ADDRESS})", re.IGNORECASE)
IN_SCRIPTS = re.compile(rf"\b(?:import|from)\s*\(?\s*[\"']({ADDRESS})", re.IGNORECASE)


def addresses(html: str) -> list[str]:
    """The addresses of other machines that a browser showing `html` asks, each once, in order."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return list(dict.fromkeys(reader.found))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in {FETCHED.get(tag), "xlink:href" if tag in ("image", "use", "feimage") else None} - {None}:
            if re.match(ADDRESS, (given.get(name) or "").strip(), re.IGNORECASE):
                self.found.append(given[name].strip())
        self.found += IN_STYLES.findall(given.get("style") or "")
        self.inside = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        if tag == self.inside:
            self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.found += IN_STYLES.findall(data)
        elif self.inside == "script":
            self.found += IN_SCRIPTS.findall(data)
