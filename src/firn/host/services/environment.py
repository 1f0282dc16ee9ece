"""Which variables of the shell that installs a service the service gets.

Those that decide where models are, how they are downloaded and how MLX computes: without them a
service would download a model again that `firn serve` finds on another disk. FIRN_ variables are not
among them: what a server was told is in its arguments, where `ps` and `status` show it.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES = ("HF_", "MLX_")
DOWNLOADS = frozenset(["HUGGINGFACE_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN", "XDG_CACHE_HOME"])
CERTIFICATES = frozenset(["SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
NAMES = DOWNLOADS | CERTIFICATES | {"OPENBLAS_NUM_THREADS"}
PROXIES = frozenset(["http_proxy", "https_proxy", "all_proxy", "no_proxy"])
"""Read in capitals and in small letters."""


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for the service, in order of their names."""
    return {name: environ[name] for name in sorted(environ) if environ[name] and _is_for(name)}


def _is_for(name: str) -> bool:
    return name.startswith(PREFIXES) or name in NAMES or name.lower() in PROXIES
