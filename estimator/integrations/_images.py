"""Images of summaries as pictures of pillow, which other libraries take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


def as_picture(image: np.ndarray) -> Image:
    """Converts a uint8 array of shape `(height, width, channels)`."""
    from PIL import Image

    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
