"""Decodes a picture file to RGB pixels, or reports why it cannot. Pure.

The pixels are what a viewer would show: upright, transparency over white, 16-bit values scaled.
Structure and size are checked before any pixel is decoded.
"""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from firn.media.headers import SEVERAL_PICTURES, Undecodable, check, one_line

Pixels = npt.NDArray[np.uint8]
"""(height, width, 3)."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
SHOWN_FORMATS = "PNG, JPEG, WebP, GIF, BMP or TIFF"
MAX_SIDE = 65_535
"""Of a JPEG file, the longest there is. Pillow keeps a pointer for every row."""
SLICE_PIXELS = 1 << 20
DAMAGE = (
    OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError,
    ZeroDivisionError, NotImplementedError, MemoryError, struct.error, zlib.error,
)  # fmt: skip
"""The exceptions that Pillow's decoders raise for damaged files."""
WHITE = (255, 255, 255, 255)
PLAIN_MODES = frozenset({"1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})
ALPHA_MODES = frozenset({"RGBA", "RGBa", "LA", "La", "PA"})
WIDE_MODES = frozenset({"I", "I;16", "I;16L", "I;16B", "I;16N"})


def decode(data: bytes, *, max_pixels: int) -> Pixels:
    """Raises Undecodable."""
    check(data)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check(image, max_pixels)
            rgb = _to_rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as e:
        raise Undecodable(f"is not a {SHOWN_FORMATS} file") from e
    except Image.DecompressionBombError as e:
        raise Undecodable("has more pixels than can be decoded; send a smaller one") from e
    except DAMAGE as e:
        raise Undecodable(f"is damaged: {one_line(e)}") from e
    return np.ascontiguousarray(rgb)


def _check(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise Undecodable("has no pixels")
    if width * height > max_pixels:
        raise Undecodable(
            f"has {width} x {height} pixels; the limit is {max_pixels / 1e6:g} million"
        )
    if max(width, height) > MAX_SIDE:
        raise Undecodable(f"is {width} x {height} pixels; no side may be over {MAX_SIDE}")
    # A camera's MPO file has several views of one scene; the first is the picture. The structure
    # check has already counted the frames of GIF and TIFF files: a decoder would take longer.
    if image.format in ("PNG", "WEBP") and getattr(image, "is_animated", False):
        raise Undecodable(SEVERAL_PICTURES)


def _to_rgb(image: Image.Image) -> Pixels:
    mode = image.mode
    if mode in WIDE_MODES:
        return _from_wide(image)
    if mode in ALPHA_MODES or "transparency" in image.info:
        coloured = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), coloured)
    elif mode not in PLAIN_MODES:
        raise Undecodable(f"has pixels in a mode that is not supported ({mode}); send it as RGB")
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def _from_wide(image: Image.Image) -> Pixels:
    """Scales 16-bit grey values: Pillow's own conversion clips everything above 255.

    In slices, because numbers of 64 bits take eight times the memory of a large picture.
    """
    values = np.asarray(image)
    flat, grey = values.reshape(-1), np.empty(values.size, dtype=np.uint8)
    for start in range(0, len(flat), SLICE_PIXELS):
        piece = flat[start : start + SLICE_PIXELS].astype(np.int64)
        if piece.min() < 0 or piece.max() > 65535:
            raise Undecodable("has values beyond 16 bits")
        grey[start : start + SLICE_PIXELS] = (piece / 257.0).round()
    return np.repeat(grey.reshape(*values.shape, 1), 3, axis=2)
