"""The seams between packages. Each has a second, small implementation in the tests.

Values and opaque handles (rows, cursors) cross these boundaries; other stateful objects do not. A
port has at most eight methods. Where one implementation serves several callers, each caller has a
port of its own, and the whole (`Runner`, `PrefixCache`) is their sum.
"""

from firn.core.ports.admin import CacheAdmin, PrefixAdmin, SlicedQuery, TreeAdmin
from firn.core.ports.cache import (
    CacheTimings,
    CacheUpkeep,
    Cursor,
    EngineLoad,
    PrefixCache,
    RequestCache,
)
from firn.core.ports.engine import Delivery, Embedder, Engine, EngineHealth, Publish, Recorder
from firn.core.ports.runner import (
    MAX_STEP_TOKENS,
    At,
    DecodeRunner,
    LayerCache,
    LiveRow,
    PickedToken,
    PrefillRunner,
    Restored,
    RowView,
    Runner,
)
from firn.core.ports.text import ChatTemplate, Pictures, Tokenizer, Vocabulary

__all__ = [
    "MAX_STEP_TOKENS",
    "At",
    "CacheAdmin",
    "CacheTimings",
    "CacheUpkeep",
    "ChatTemplate",
    "Cursor",
    "DecodeRunner",
    "Delivery",
    "Embedder",
    "Engine",
    "EngineHealth",
    "EngineLoad",
    "LayerCache",
    "LiveRow",
    "PickedToken",
    "Pictures",
    "PrefillRunner",
    "PrefixAdmin",
    "PrefixCache",
    "Publish",
    "Recorder",
    "RequestCache",
    "Restored",
    "RowView",
    "Runner",
    "SlicedQuery",
    "Tokenizer",
    "TreeAdmin",
    "Vocabulary",
]
