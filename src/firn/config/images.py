"""Settings for pictures in prompts. Users see them called images, as in the APIs."""

from __future__ import annotations

from dataclasses import dataclass

from firn.config.options import option


@dataclass(frozen=True, slots=True)
class ImagesConfig:
    allow_image_urls: bool = option(
        False,
        "Fetch images that requests name by URL (https, public addresses only). Otherwise "
        "they must be sent as data URLs.",
    )
    allow_plain_http_images: bool = option(False, "With --allow-image-urls: fetch http URLs too.")
    image_fetch_timeout_s: float = option(
        10.0, "Seconds that fetching an image may take.", low=0.1, high=600
    )
    max_image_mb: int = option(20, "Largest image file, in MiB.", low=1, high=1024)
    max_image_megapixels: float = option(
        50.0, "Largest image, in millions of pixels.", low=0.01, high=1000
    )
    image_feature_cache_mb: int = option(
        256,
        "Memory for what the vision tower has computed from images, in MiB.",
        low=0,
        high=1 << 20,
    )
