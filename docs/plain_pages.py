"""Writes the pages of the site as plain Markdown, which any builder reads that has mkdocstrings.

`python docs/plain_pages.py FOLDER` makes FOLDER/docs and FOLDER/mkdocs.yml: `zensical build -f FOLDER/mkdocs.yml`.
MkDocs needs no folder: it calls `on_config` and `on_files` (`hooks:` in mkdocs.yml).
"""

import pathlib
import re
import shutil
import sys
import tomllib

import cross_references
import example_pages
import text_pages
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
INCLUDE = re.compile(r"^<!-- include: (?P<path>\S+) -->$", re.MULTILINE)
LEFT_OUT = {"README.md", "coverage_rows.md"}
WEIGHTS = {  # in the search, by the beginning of a path: how-to pages come before examples, which repeat their words
    "coverage.md": 0.2,
    "results.md": 0.3,
    "reference/index.md": 0.5,
    "examples/": 0.2,
    "how_to/": 2.0,
    "tensorflow_names.md": 4.0,
    "from_caffe2.md": 0.5,
    "troubleshooting.md": 2.0,
    "reference/": 1.5,
}


def included(match: re.Match[str]) -> str:
    return (ROOT / match["path"]).read_text(encoding="utf-8").strip("\n").replace("](../docs/", "](")


def settings() -> dict:
    """Those of mkdocs.yml, with the addresses of pyproject.toml and the pages of examples."""
    found = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    next(entry for entry in found["nav"] if "Examples" in entry)["Examples"] = example_pages.groups()
    return found | {"site_url": urls.get("Documentation", ""), "repo_url": urls.get("Source", "")}


def texts() -> dict[str, str]:
    """The text of every page, and of the files that show it without HTML."""
    found = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
    pages = {path: INCLUDE.sub(included, text) for path, text in found.items() if path not in LEFT_OUT}
    pages |= example_pages.pages()
    plain = text_pages.pages(pages, settings())
    for path, text in pages.items():
        weight = next((weight for start, weight in WEIGHTS.items() if path.startswith(start)), 1.0)
        pages[path] = f"---\nsearch:\n  boost: {weight}\n---\n\n{cross_references.link(text)}"
    return pages | plain


def write(folder: pathlib.Path) -> None:
    config = settings()
    del config["hooks"], config["exclude_docs"]
    handler = next(each["mkdocstrings"] for each in config["plugins"] if "mkdocstrings" in each)["handlers"]["python"]
    handler["paths"] = [str(ROOT / path) for path in handler["paths"]]
    handler["options"]["extensions"] = [str(ROOT / path) for path in handler["options"]["extensions"]]
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
    for path, text in texts().items():
        (folder / "docs" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "docs" / path).write_text(text, encoding="utf-8")
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def on_config(config) -> None:
    found = settings()
    config.nav, config.site_url, config.repo_url = found["nav"], found["site_url"], found["repo_url"]


def on_files(files, config) -> None:
    from mkdocs.structure.files import File

    for path, text in texts().items():
        if old := files.get_file_from_path(path):
            files.remove(old)
        files.append(File.generated(config, path, content=text))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
