"""A page for each example, with its output and its source.

The output is what `tests/testing/website/example_outputs.py` has kept in examples/output/, and for notebooks what they
contain; the page above all is examples/README.md.
"""

import ast
import json
import pathlib
import re

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
SOURCE = re.compile(r"\]\(((?:ports/|notebooks/)?\w+)\.(?:py|ipynb)\)")


def sources() -> list[pathlib.Path]:
    found = [path for pattern in ("*.py", "ports/*.py", "notebooks/*.ipynb") for path in sorted(EXAMPLES.glob(pattern))]
    return [path for path in found if path.stem[0] != "_"]


def name(source: pathlib.Path) -> str:
    return f"examples/{source.relative_to(EXAMPLES).with_suffix('.md').as_posix()}"


def fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def script(source: pathlib.Path) -> str:
    text = source.read_text(encoding="utf-8")
    about = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    output = EXAMPLES / "output" / f"{source.stem}.txt"
    shown = [fenced(output.read_text(encoding="utf-8"), "text")] if output.exists() else []
    path = source.relative_to(EXAMPLES).as_posix()
    return "\n\n".join([f"# {path}", about, *shown, f"`examples/{path}`:", fenced(text, "python")])


def notebook(source: pathlib.Path) -> str:
    parts = []
    for cell in json.loads(source.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else fenced(text, "python"))
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(fenced("".join(output["text"]), "text"))
            elif "image/png" in output.get("data", {}):
                encoded = "".join(output["data"]["image/png"].split())
                parts.append(f'<img alt="What the cell above shows" src="data:image/png;base64,{encoded}">')
    path = f"`examples/{source.relative_to(EXAMPLES).as_posix()}`"
    return "\n\n".join([*parts, f"This page is the notebook {path}."])


def groups() -> list[str | dict[str, list[str]]]:
    """The pages by what they show, as the sections of examples/README.md have them."""
    _, *sections = re.split(r"^## ", (EXAMPLES / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages = {each.partition("\n")[0]: [f"examples/{path}.md" for path in SOURCE.findall(each)] for each in sections}
    return ["examples/index.md", *({title: named} for title, named in pages.items())]


def pages() -> dict[str, str]:
    index = SOURCE.sub(r"](\1.md)", (EXAMPLES / "README.md").read_text(encoding="utf-8")).replace("](../docs/", "](../")
    texts = {name(source): (notebook if source.suffix == ".ipynb" else script)(source) for source in sources()}
    return {"examples/index.md": index} | texts
