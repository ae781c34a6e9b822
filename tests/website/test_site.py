"""The site that MkDocs builds from docs/: names have their place, no page needs a network. MkDocs checks the links."""

import html.parser
import importlib
import importlib.util
import json
import pathlib
import re
import runpy
import urllib.parse

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}
PUBLIC = """
    estimator estimator.experimental estimator.export estimator.feature_column estimator.hooks estimator.image
    estimator.inputs estimator.io estimator.layers estimator.losses estimator.metrics estimator.nn
    estimator.regularizers estimator.renew estimator.seq2seq estimator.summary estimator.testing estimator.trackers
    estimator.train estimator.typing replicate replicate.cross_tower_ops replicate.explain replicate.ray
""".split()


class Page(html.parser.HTMLParser):
    """The title, headings and loaded addresses of a built page."""

    def __init__(self, path):
        super().__init__()
        self.title, self.headings, self.loaded, self._in = "", 0, [], None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self._in = tag
        self.headings += tag == "h1"
        if attrs.get(LOADED.get(tag)) and attrs.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(attrs[LOADED[tag]])

    def handle_data(self, data):
        if self._in == "title":
            self.title += data.strip()


@pytest.fixture(scope="module")
def site(site_folder):
    """The pages of the built site by their paths."""
    return {path: Page(path) for path in site_folder.rglob("*.html")}


def test_every_page_has_a_title_and_one_heading_at_its_top(site):
    assert len(site) > 20
    pages = [page for path, page in site.items() if path.name != "404.html"]
    assert len({page.title for page in pages}) == len(pages) and all(page.title for page in pages)
    assert all(page.headings == 1 for page in pages)


def test_no_page_loads_anything_from_another_host_and_every_picture_is_there(site):
    for path, page in site.items():
        if path.name == "404.html":
            continue
        for address in page.loaded:
            parts = urllib.parse.urlsplit(address[:1000])
            if parts.scheme == "data":  # a picture of a notebook, within the page
                continue
            assert not parts.scheme and not parts.netloc, f"{path} loads {address}"
            assert (path.parent / parts.path).is_file(), f"{path} lacks {address}"
    folder = next(path for path in site if path.name == "404.html").parent
    styles = [*folder.rglob("*.css")]
    assert styles and not any(re.search(r"url\(['\"]?(https?:)?//", style.read_text()) for style in styles)


def test_the_public_modules_are_all_listed_here():
    packages = ("estimator", "replicate")
    listed = {name for name in PUBLIC if name.count(".")}
    own = {
        f"{package}.{name}"
        for package in packages
        for name in importlib.import_module(package).__all__
        if importlib.util.find_spec(f"{package}.{name}")
    }
    assert own <= listed


def test_every_public_name_is_on_exactly_one_page_of_the_reference():
    places = {}
    for path in sorted((DOCS / "reference").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            places.setdefault(name, []).append(path.name)
    top = importlib.import_module("estimator")
    expected = set()
    for name in PUBLIC:
        module = importlib.import_module(name)
        for each in module.__all__:
            if f"{name}.{each}" in PUBLIC and each != "explain":  # a module; `replicate.explain` is a function as well
                continue
            same = name.startswith("estimator.") and getattr(top, each, None) is getattr(module, each)
            both = f"{name}.{each}" == "replicate.explain"
            expected.add(f"estimator.{each}" if same else "replicate.explain.explain" if both else f"{name}.{each}")
    assert set(places) == expected, "Put the names that differ on a page of docs/reference/."
    assert not {name: pages for name, pages in places.items() if len(pages) > 1}


def test_the_figures_are_as_they_are_drawn():
    figures = runpy.run_path(str(DOCS / "figures" / "draw.py"))["FIGURES"]
    assert {path.stem for path in DOCS.glob("figures/*.svg")} == figures.keys()
    for name, drawn in figures.items():
        same = (DOCS / "figures" / f"{name}.svg").read_text(encoding="utf-8") == drawn().svg()
        assert same, "Draw the figures again: python docs/figures/draw.py"


def test_the_site_links_the_addresses_of_pyproject(tmp_path, monkeypatch):
    pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(DOCS)
    import plain_pages

    (tmp_path / "mkdocs.yml").write_text("nav: [Examples: []]")
    monkeypatch.setattr(plain_pages, "ROOT", tmp_path)
    for text, links in (("", ("", "")), ('Source = "a"\nDocumentation = "b"', ("a", "b"))):
        (tmp_path / "pyproject.toml").write_text(f"[project.urls]\n{text}")
        found = plain_pages.settings()
        assert (found["repo_url"], found["site_url"]) == links


@pytest.mark.quick
def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 95
    assert [line for line in text.splitlines() if line.startswith("python3 -m venv")]
    assert all((ROOT / link).exists() for link in re.findall(r"\]\(([^)#:]+)\)", text))


def test_the_results_of_benchmarks_are_on_the_page_and_drawn():
    pytest.importorskip("matplotlib")
    results = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))
    files = sorted(results["FOLDER"].glob("*.json"))
    written = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert written == results["page"](files), "Write it again: python benchmarks/results.py"
    assert {path.stem for path in results["PICTURES"].glob("*.svg")} == {path.stem for path in files}
    for path in files:
        assert "<svg" in results["picture"](json.loads(path.read_text(encoding="utf-8"))["plot"])
