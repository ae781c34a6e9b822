"""Shows the `>>>` examples of docstrings as code, which Markdown would take for quotations, and links their names.

The handler of mkdocstrings loads it as an extension (mkdocs.yml).
"""

import pathlib
import re
import runpy

import griffe

link = runpy.run_path(str(pathlib.Path(__file__).with_name("cross_references.py")))["link"]
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)
BETWEEN = re.compile(r"^ *```\n\n *```pycon\n(?= *>>>)", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring, with fences around its examples; those that follow each other are one block."""
    text = EXAMPLE.sub(lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", text)
    return BETWEEN.sub("\n", text)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = link(fenced(obj.docstring.value))
