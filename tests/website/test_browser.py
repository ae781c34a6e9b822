"""The built site in a real browser: nothing goes wrong on any page, on a wide and on a phone-wide window."""

import time

import pytest
from testing.website import browser
from testing.website.build import build

WIDTHS = 1280, 390
WRONG = """(() => {
  const width = document.documentElement.clientWidth, wrong = [];
  if (document.documentElement.scrollWidth > width)
    wrong.push(`scrolls sideways: ${document.documentElement.scrollWidth} of ${width} pixels`);
  for (const each of document.images)
    if (!each.complete || !each.naturalWidth) wrong.push(`lacks the picture ${each.src}`);
  return wrong;
})()"""
RESULTS = "[...document.querySelectorAll('.md-search-result__item > a')].map(each => each.href)"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        browser.executable() is None, reason=f"there is no Chromium on the PATH, called {', '.join(browser.NAMES)}"
    ),
]


@pytest.fixture(scope="module")
def window():
    with browser.opened(browser.executable()) as window:
        yield window


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder and the address of the built site."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    with browser.served(folder) as address:
        yield folder, address


def test_no_page_has_an_error_a_missing_picture_or_scrolls_sideways(window, site):
    folder, address = site
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
    assert len(pages) > 40
    wrong = []
    for page in pages:
        window.open(f"{address}/{page}", WIDTHS[0])
        for width in WIDTHS:
            window.resize(width)
            wrong += [f"{page}, {width} pixels wide: {each}" for each in window.value(WRONG)]
        wrong += [f"{page}: {each}" for each in window.errors]
    assert not wrong, "\n".join(wrong)


def test_what_is_wrong_with_a_page_is_seen(window, tmp_path):
    page = "<img src=lost.png><div style='width: 600px'>wide</div><script>console.error('a'); b()</script>"
    (tmp_path / "page.html").write_text(f"<!doctype html>{page}")
    with browser.served(tmp_path) as address:
        window.open(f"{address}/page.html", 390)
        assert window.value(WRONG) == ["scrolls sideways: 608 of 390 pixels", f"lacks the picture {address}/lost.png"]
        errors = "\n".join(window.errors)
    assert "a\n" in errors and "ReferenceError: b is not defined" in errors and "404" in errors


@pytest.mark.parametrize(
    "query, page",
    [
        ("tf.train.AdamOptimizer", "tensorflow_names.html"),
        ("Please wrap optimizers with TowerOptimizer", "troubleshooting.html"),
        ("gradient accumulation", "how_to/gradient_accumulation.html"),
        ("read_history", "reference/summaries.html"),
    ],
)
def test_the_search_leads_to_the_page(window, site, query, page):
    _, address = site
    window.open(f"{address}/index.html?q={query.replace(' ', '+')}", WIDTHS[0])
    deadline = time.monotonic() + 20
    while not (results := window.value(RESULTS)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert any(f"{address}/{page}" in result for result in results[:5]), results
