"""Zensical builds what MkDocs builds: the same pages, words, references, anchors and sections of the search."""

import collections
import html
import html.parser
import json
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("zensical", reason="zensical is not installed; .ci/run installs it")
ROOT = pathlib.Path(__file__).resolve().parents[2]
OWN = {"__skip"}  # the id of Zensical's link to the text


class Article(html.parser.HTMLParser):
    """What stands in a page, without the navigation around it."""

    def __init__(self, text):
        super().__init__()
        self.found, self._inside = collections.Counter(), False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._inside |= tag == "article"
        if self._inside:
            self.found.update((f"{tag} {name}", value) for name, value in attrs if name in ("id", "href", "src"))

    def handle_endtag(self, tag):
        self._inside &= tag != "article"

    def handle_data(self, data):
        if self._inside:
            self.found.update(("word", word) for word in data.split())


def articles(folder):
    pages = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    found = {path: Article(text).found for path, text in pages.items() if path != "404.html"}
    return {path: {each: n for each, n in article.items() if each[1] not in OWN} for path, article in found.items()}


def sections(entries):
    """The words that the search knows of each section."""
    texts = {entry["location"]: f"{entry['title']} {entry['text']}" for entry in entries}
    return {place: {*re.findall(r"\w+", html.unescape(re.sub("<[^>]+>", " ", text)))} for place, text in texts.items()}


@pytest.fixture(scope="module")
def sites(site_folder, tmp_path_factory):
    """The folders that MkDocs and Zensical build."""
    plain = tmp_path_factory.mktemp("plain") / "pages"
    for command in (
        ["docs/plain_pages.py", plain],
        ["-m", "zensical", "build", "--strict", "-f", plain / "mkdocs.yml"],
    ):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, encoding="utf-8")
        assert done.returncode == 0, done.stdout + done.stderr
    return site_folder, plain / "site"


def test_zensical_builds_the_pages_of_mkdocs(sites):
    of_mkdocs, of_zensical = map(articles, sites)
    assert len(of_mkdocs) > 80 and of_mkdocs.keys() == of_zensical.keys()
    for path, article in of_mkdocs.items():
        assert len(article) > 20 and article == of_zensical[path], path


def test_the_search_of_zensical_knows_the_sections_of_mkdocs(sites):
    of_mkdocs = json.loads((sites[0] / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    of_zensical = json.loads((sites[1] / "search.json").read_text(encoding="utf-8"))["items"]
    assert len(of_mkdocs) > 500 and sections(of_mkdocs) == sections(of_zensical)


def test_the_pages_as_text_are_in_both(sites):
    texts = [{path.relative_to(site): path.read_bytes() for path in site.rglob("*.txt")} for site in sites]
    assert texts[0] == texts[1] and len(texts[0]) > 80
    listed = re.findall(r"\]\(([^)]+)\)", texts[0][pathlib.Path("llms.txt")].decode())
    assert {*listed, "llms.txt"} == {path.as_posix() for path in texts[0]}
