"""The result of `explain`: its values, and their forms as text and as a page."""

from __future__ import annotations

import dataclasses

from replicate.explain._data import StepData
from replicate.explain._html import as_page
from replicate.explain._text import as_text


@dataclasses.dataclass(frozen=True)
class Explanation(StepData):
    """One training step of a replicated model_fn. `print` shows it as text, `html` as a page.

    It has the attributes of `StepData`.
    """

    def __str__(self) -> str:
        return as_text(self)

    def html(self) -> str:
        """The same as one page with a picture, which needs nothing but itself."""
        return as_page(self)
