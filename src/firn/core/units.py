"""Units of memory in bytes, and of time in seconds."""

import math
import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


FOREVER = math.inf
UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_S = 10 * 365 * 86400.0
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_PARTS = re.compile(rf"(?:{_PART.pattern})+")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def seconds(value: object) -> float:
    """The duration in seconds; FOREVER if negative or over MAX_S. Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _bounded(value)
    if type(value) is not str:
        raise ValueError("must be a number of seconds or a text like '30m'")
    text = value.strip().lower()
    if _NUMBER.fullmatch(text):
        return _bounded(float(text))
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    # As a whole first: to search a long number for units takes time by the square of its length.
    if not _PARTS.fullmatch(rest):
        raise ValueError("must be a number of seconds or a text like '30m'")
    parts = _PART.findall(rest)
    return _bounded(sign * sum(float(number) * UNITS_S[unit] for number, unit in parts))


def _bounded(given_s: float) -> float:
    """Compares before converting: an integer may be too large to become a float."""
    if isinstance(given_s, float) and math.isnan(given_s):
        raise ValueError("must be a number of seconds or a text like '30m'")
    return FOREVER if given_s < 0 or given_s > MAX_S else float(given_s)
