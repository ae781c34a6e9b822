"""The built site in a real browser: nothing goes wrong on any page, on a wide and on a phone-wide window."""

import re
import time

import pytest
from testing.website import browser

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
ASK = """(query => {
  document.querySelector('.md-search-result__list').replaceChildren();
  const input = document.querySelector('.md-search__input');
  input.value = query;
  input.dispatchEvent(new KeyboardEvent('keyup'));
})"""

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
def site(site_folder):
    """The folder and the address of the built site."""
    with browser.served(site_folder) as address:
        yield site_folder, address


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


def test_quoted_messages_wrap_on_a_phone(window, site):
    _, address = site
    window.open(f"{address}/troubleshooting.html", WIDTHS[1])
    blocks = window.value(
        "[...document.querySelectorAll('pre > code')].map(each => each.scrollWidth - each.clientWidth)"
    )
    assert len(blocks) > 30 and not any(blocks)


# Of each query, a page that has to be among the first three.
QUERIES = {
    "GPUs": "how_to/several_gpus.html",
    "NaN": "how_to/debug.html",
    "Please wrap optimizers with TowerOptimizer": "troubleshooting.html",
    "SessionRunHook": "tensorflow_names.html",
    "TowerOptimizer": "reference/replicate.html",
    "ValueError": "troubleshooting.html",
    "batch norm": "how_to/batch_norm_and_dropout.html",
    "clip gradients": "how_to/clip_gradients.html",
    "custom hook": "how_to/custom_hook.html",
    "data parallel": "how_to/several_gpus.html",
    "early stopping": "reference/hooks.html",
    "est.Hook": "reference/hooks.html",
    "export": "reference/export.html",
    "get_variable": "reference/model_fn.html",
    "gradient accumulation": "how_to/gradient_accumulation.html",
    "install cuda": "how_to/install.html",
    "keras": "explanation/which_library.html",
    "learning rate schedule": "reference/train.html",
    "mixed precision": "how_to/half_precision.html",
    "multi gpu": "how_to/several_gpus.html",
    "out of memory": "troubleshooting.html",
    "pandas": "how_to/tables.html",
    "pdb": "how_to/debug.html",
    "pmap": "how_to/from_jit_loop.html",
    "read_history": "reference/summaries.html",
    "resume": "how_to/exact_resume.html",
    "s3": "how_to/object_store.html",
    "safetensors": "reference/estimator.html",
    "slurm": "many_hosts.html",
    "tensorboard": "how_to/look_into_a_run.html",
    "tf.train.AdamOptimizer": "tensorflow_names.html",
    "tower": "reference/glossary.html",
    "onnx": "reference/export.html",
    "jupyter": "how_to/look_into_a_run.html",
    "progress bar": "how_to/look_into_a_run.html",
    "custom training loop": "reference/functions.html",
    "callback": "how_to/custom_hook.html",
    "class weights": "reference/losses.html",
    "confusion matrix": "reference/metrics.html",
    "transfer learning": "how_to/fine_tune.html",
    "freeze layers": "how_to/fine_tune.html",
    "save best checkpoint": "tutorial/training_for_real.html",
    "weight decay mask": "how_to/fine_tune.html",
}


def test_the_search_leads_to_the_page(window, site):
    """It is one page, which indexes the site once, and is asked one query after the other."""
    _, address = site
    first, *others = QUERIES
    window.open(f"{address}/index.html?q={first.replace(' ', '+')}", WIDTHS[0])
    found = {first: found_pages(window, address)}
    for query in others:
        window.value(f"{ASK}({query!r})")
        found[query] = found_pages(window, address)
    assert not {query: pages for query, pages in found.items() if QUERIES[query] not in pages[:3]}


def found_pages(window, address):
    deadline = time.monotonic() + 20
    while not (results := window.value(RESULTS)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return list(dict.fromkeys(re.split("[?#]", result.removeprefix(f"{address}/"))[0] for result in results))
