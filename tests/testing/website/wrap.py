"""Wraps the prose of Markdown at 80 columns; code, tables, headings and pictures stay as they are.

python tests/testing/website/wrap.py                  # the pages of the site, examples/README.md
python tests/testing/website/wrap.py docs/how_to      # files, or folders with pages
"""

import itertools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs", ROOT / "examples" / "README.md"
WIDTH = 80
GENERATED = {"coverage.md", "coverage_rows.md", "tensorflow_names.md"}
ITEM = re.compile(r"^(?P<indent> *)(?P<mark>[-*+] +|\d+\. +)(?=\S)")
STAYS = re.compile(r"^ *(#|\||!\[|<|:::|>|---|\[\^?[\w-]+\]:|\?\?\?|!!!)|^ *$|^ {4,}options:")
WORD = re.compile(r"(?:`+[^`]+`+|\[[^\]]*\]\([^)]*\)|\S)+")
LOOKS_LIKE_A_MARK = re.compile(r"^(?:[-*+#|>=!]+|\d+[.)])$|^[#|>]|^!\[|^---|^:::|^<")


def wrapped(text: str) -> str:
    """The page with its prose wrapped; wrapping it again changes nothing."""
    lines, result, block, is_code = text.split("\n"), [], [], False

    def flush() -> None:
        result.extend(wrapped_block(block))
        block.clear()

    for line in lines:
        is_fence = line.lstrip().startswith("```")
        if is_fence or is_code or STAYS.match(line):
            flush()
            result.append(line)
            is_code ^= is_fence
        else:
            if ITEM.match(line):
                flush()
            block.append(line)
    flush()
    return "\n".join(result)


def wrapped_block(lines: list[str]) -> list[str]:
    """A paragraph, or an item of a list."""
    if not lines or any(line.endswith(("  ", "\\")) for line in lines):
        return lines
    first = ITEM.match(lines[0])
    head = first[0] if first else " " * (len(lines[0]) - len(lines[0].lstrip()))
    rest = " " * len(head)
    words = WORD.findall(" ".join([lines[0][len(head) :], *(line.strip() for line in lines[1:])]))
    rows, row = [], head + words[0]
    for word in words[1:]:
        if len(row) + 1 + len(word) > WIDTH and not LOOKS_LIKE_A_MARK.match(word):
            rows.append(row)
            row = rest + word
        else:
            row += f" {word}"
    return [*rows, row]


def pages(*paths: pathlib.Path) -> list[pathlib.Path]:
    files = itertools.chain.from_iterable(sorted(path.rglob("*.md")) if path.is_dir() else [path] for path in paths)
    return [path for path in files if path.name not in GENERATED]


if __name__ == "__main__":
    for page in pages(*map(pathlib.Path, sys.argv[1:] or PAGES)):
        text = page.read_text(encoding="utf-8")
        if wrapped(text) != text:
            page.write_text(wrapped(text), encoding="utf-8")
            print(page)
