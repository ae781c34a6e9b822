"""The pages as text for programs that read: `llms.txt`, which lists them, and `how_to/install.md.txt` for each.

A page of the reference has the signatures and docstrings of its names.
"""

import itertools
import pathlib
import re
from collections.abc import Iterator

import griffe

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAME = re.compile(r"^::: (?P<name>\S+)\n(?: +.*\n)*", re.MULTILINE)
MARKUP = re.compile(r"\[([^]]*)\]\([^)]*\)|^!.*$|`", re.MULTILINE)
FENCE = re.compile(r"```.*?```", re.DOTALL)


def documented(name: str, obj: griffe.Object, level: int = 3) -> str:
    """A name, its signature and its docstring, then those of its methods."""
    parts = [f"{'#' * level} {name}"]
    function = obj.members.get("__init__", obj) if obj.is_class else obj
    if function.is_function:
        parts.append(f"```python\n{function.signature(name=obj.name)}\n```")
    if obj.docstring:
        parts.append(obj.docstring.value)
    if obj.is_class:
        methods = [each for each in obj.members.values() if each.name[0] != "_" and each.docstring]
        parts += [documented(f"{name}.{each.name}", each, level + 1) for each in methods]
    return "\n\n".join(parts)


def first_sentence(text: str) -> str:
    """The first sentence of a page below its title."""
    paragraphs = [
        each for each in FENCE.sub("", text).split("\n\n") if each.strip() and each.strip()[0] not in "#<|:!>-"
    ]
    plain = " ".join(MARKUP.sub(r"\1", paragraphs[0]).split()) if paragraphs else ""
    return re.split(r"(?<=[.:;!?]) ", plain)[0].rstrip(":;.")


def entries(nav: list, section: str = "") -> Iterator[tuple[str, str | None, str]]:
    """Of each page in the navigation the section, the name and the path."""
    for entry in nav:
        name, target = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(target, list):
            yield from entries(target, f"{section}: {name}" if section else name)
        else:
            yield section, name, target


def index(pages: dict[str, str], settings: dict) -> str:
    """The text of llms.txt."""
    lines = [f"# {settings['site_name']}", "", f"> {settings['site_description']}", ""]
    for section, group in itertools.groupby(entries(settings["nav"]), key=lambda entry: entry[0]):
        lines += ["", f"## {section}", ""] if section else []
        for _, name, path in group:
            name = name or re.search(r"^# (.*)$", pages[path], re.MULTILINE)[1]
            about = first_sentence(pages[path])
            lines.append(f"- [{name}]({settings['site_url']}{path}.txt)" + (f": {about}" if about else ""))
    return "\n".join(lines) + "\n"


def pages(pages: dict[str, str], settings: dict) -> dict[str, str]:
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    for package in ("estimator", "replicate"):
        loader.load(package)

    def reference(match: re.Match[str]) -> str:
        obj = loader.modules_collection[match["name"]]
        return documented(match["name"], obj.final_target if obj.is_alias else obj) + "\n"

    texts = {f"{path}.txt": NAME.sub(reference, text) for path, text in pages.items()}
    return texts | {"llms.txt": index(pages, settings)}
