"""Gives the site the addresses that pyproject.toml has: `Source` is linked at the top of each page.

MkDocs calls `on_config` (`hooks:` in mkdocs.yml).
"""

import pathlib
import tomllib

from mkdocs.config.defaults import MkDocsConfig

PYPROJECT = pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml"


def on_config(config: MkDocsConfig) -> None:
    urls = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["urls"]
    config.site_url, config.repo_url = urls.get("Documentation", ""), urls.get("Source", "")
