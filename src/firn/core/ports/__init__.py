"""The seams between packages. Each has a second, small implementation in the tests.

Values and opaque handles (rows, cursors) cross these boundaries; other stateful objects do not. Each
port is the type of something: of a parameter, a field or a result.
"""

from firn.core.ports.admin import CacheAdmin, SlicedQuery
from firn.core.ports.cache import Cursor, EngineCache, EngineLoad, NullCursor
from firn.core.ports.engine import Delivery, Embedder, Engine, EngineHealth, Publish, Recorder
from firn.core.ports.runner import (
    MAX_STEP_TOKENS,
    At,
    LayerCache,
    LiveRow,
    ReadChunk,
    Restored,
    RowView,
    Runner,
    TakenTokens,
)
from firn.core.ports.text import Pictures, Tokenizer

__all__ = [
    "MAX_STEP_TOKENS",
    "At",
    "CacheAdmin",
    "Cursor",
    "Delivery",
    "Embedder",
    "Engine",
    "EngineCache",
    "EngineHealth",
    "EngineLoad",
    "LayerCache",
    "LiveRow",
    "NullCursor",
    "Pictures",
    "Publish",
    "ReadChunk",
    "Recorder",
    "Restored",
    "RowView",
    "Runner",
    "SlicedQuery",
    "TakenTokens",
    "Tokenizer",
]
