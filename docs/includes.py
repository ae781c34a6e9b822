"""Puts files of the repository into pages: `<!-- include: examples/digits.py -->` on a line of its own.

MkDocs calls `on_page_markdown` for each page (`hooks:` in mkdocs.yml). Source is shown as a block of code.
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINE = re.compile(r"^<!-- include: (?P<path>\S+) -->$", re.MULTILINE)
LANGUAGES = {".py": "python", ".txt": "text"}


def content(match: re.Match[str]) -> str:
    path = ROOT / match["path"]
    text = path.read_text(encoding="utf-8").strip("\n")
    if path.suffix == ".md":
        return text.replace("](../docs/", "](")
    return f"```{LANGUAGES[path.suffix]}\n{text}\n```"


def on_page_markdown(markdown: str, **_: object) -> str:
    return LINE.sub(content, markdown)
