"""Reads a page as a browser would: that its elements nest, its words, its figures."""

import json
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """Checks that elements nest, and keeps what the tests look at."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def figures(self) -> dict[str, dict]:
        return json.loads(next(code for attrs, code in self.scripts if attrs.get("id") == "figures"))
