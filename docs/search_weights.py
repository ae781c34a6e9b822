"""Weighs the pages in the search: how-to pages come before examples, which repeat their words.

MkDocs calls `on_page_markdown` for each page (`hooks:` in mkdocs.yml).
"""

from mkdocs.structure.pages import Page

WEIGHTS = {  # by the beginning of a page's path, the first that fits
    "coverage.md": 0.2,
    "results.md": 0.3,
    "reference/index.md": 0.5,
    "examples/": 0.2,
    "how_to/": 2.0,
    "tensorflow_names.md": 3.0,
    "troubleshooting.md": 2.0,
    "reference/": 1.5,
}


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    path = page.file.src_uri
    page.meta["search"] = {"boost": next((weight for start, weight in WEIGHTS.items() if path.startswith(start)), 1.0)}
    return markdown
