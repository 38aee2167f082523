"""From the bytes of an image file to a tensor of red, green and blue bytes, whatever the file's own colour model.

What becomes of the unusual ones is a promise (docs/how-to/own-images.md): 16-bit grey is scaled to 8 bits, palettes
and CMYK are converted, transparent pixels show white, and the orientation that a camera noted is applied.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ermoe.errors import UserError

# The content decides, whatever a file is called: among all that PIL knows are formats that start another program
# (PostScript) or were never meant to be read from strangers.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
LARGEST_IMAGE = 2**28
"""Bytes of an image file."""
_MOST_PIXELS = 2**26  # of which a few bytes can declare any number
# What PIL warns of is decoded or refused all the same; its own limit of pixels is higher.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decode(data: bytes, name: str) -> Tensor:
    """An encoded image as uint8 (3, H, W); ``name`` is for messages.

    >>> buffer = io.BytesIO()
    >>> Image.new("CMYK", (4, 3)).save(buffer, "JPEG")
    >>> decode(buffer.getvalue(), "white.jpg").shape
    torch.Size([3, 3, 4])
    """
    if not data:
        raise UserError(f"{name} is empty (0 bytes): replace or remove it")
    try:
        image = _rgb(open_image(data, name), name)
    except UserError:
        raise
    except UnidentifiedImageError as problem:
        raise UserError(
            f"{name} cannot be decoded: whatever its name says, it is none of {', '.join(_FORMATS)}; "
            "replace or remove it"
        ) from problem
    except Exception as problem:  # decoders of damaged files raise nearly everything: OSError, SyntaxError, EOFError, …
        raise UserError(f"{name} cannot be decoded: {problem}; replace or remove it") from problem
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def open_image(data: bytes, name: str) -> Image.Image:
    """The image of a file in one of the formats that may come from anywhere, not decoded yet; the one place for it."""
    image = Image.open(io.BytesIO(data), formats=_FORMATS)
    width, height = image.size
    if width * height > _MOST_PIXELS:
        raise UserError(
            f"{name} has {width:,} × {height:,} pixels, more than {_MOST_PIXELS / 1e6:.0f} million: scale it down first"
        )
    return image


def _rgb(image: Image.Image, name: str) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image), name)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _eight_bits(value_HW: np.ndarray, name: str) -> np.ndarray:
    """16-bit values 0 … 65535 as 0 … 255; anything beyond that range has no agreed white."""
    low, high = value_HW.min(), value_HW.max()
    if value_HW.dtype.kind == "f" or low < 0 or high > 65535:
        raise UserError(
            f"{name} has pixels from {low} to {high} in {value_HW.dtype}, and nobody agrees how to see that as 8 bits: "
            "convert it first"
        )
    return np.rint(value_HW / 257).astype(np.uint8)
