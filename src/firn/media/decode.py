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
from PIL import ExifTags, Image, UnidentifiedImageError

from firn.media.headers import SEVERAL_PICTURES, Undecodable, check, one_line

Pixels = npt.NDArray[np.uint8]
"""(height, width, 3)."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
SHOWN_FORMATS = "PNG, JPEG, WebP, GIF, BMP or TIFF"
MAX_SIDE = 65_535
"""Of a JPEG file, the longest there is. Pillow keeps a pointer for every row."""
BAND_PIXELS = 1 << 20
"""How many are converted at a time: a large picture takes the memory of its file's pixels and of the
result's, not of every form in between, and no conversion holds the GIL for long."""
DAMAGE = (
    OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError,
    ZeroDivisionError, NotImplementedError, MemoryError, struct.error, zlib.error,
)  # fmt: skip
"""The exceptions that Pillow's decoders raise for damaged files."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
"""By the orientation in Exif data."""
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
            return _to_rgb(_upright(image))
    except UnidentifiedImageError as e:
        raise Undecodable(f"is not a {SHOWN_FORMATS} file") from e
    except Image.DecompressionBombError as e:
        raise Undecodable("has more pixels than can be decoded; send a smaller one") from e
    except DAMAGE as e:
        raise Undecodable(f"is damaged: {one_line(e)}") from e


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


def _upright(image: Image.Image) -> Image.Image:
    """As `ImageOps.exif_transpose`, which also rewrites the metadata: in 18 MB of it, for a second
    without the GIL being released."""
    image.load()  # a PNG may have its Exif data behind its pixels
    turn = TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Pixels:
    width, height = image.size
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    n_rows = max(BAND_PIXELS // width, 1)
    for top in range(0, height, n_rows):
        bottom = min(top + n_rows, height)
        pixels[top:bottom] = _band(image.crop((0, top, width, bottom)))
    return pixels


def _band(image: Image.Image) -> Pixels:
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
    """Scales 16-bit grey values: Pillow's own conversion clips everything above 255."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise Undecodable("has values beyond 16 bits")
    grey = (values / 257.0).round().astype(np.uint8)
    return np.repeat(grey[:, :, np.newaxis], 3, axis=2)
