"""The normal form: what every API dialect decodes to, and what the engine is given.

All frozen. A dialect builds a `GenerateRequest`; `text.prompt` turns its messages into a `Prompt`;
the session passes a `Job` to the engine.
"""

from firn.core.values.job import Job, Namespace, RequestId, ServedRequest, Usage
from firn.core.values.key_tokens import (
    NARROW,
    PACKED_DTYPE,
    WIDE,
    KeyTokens,
    PackedTokens,
    unpacked,
)
from firn.core.values.messages import (
    Chat,
    DocumentPart,
    Grammar,
    Message,
    MessagePart,
    OtherPart,
    PicturePart,
    RelaxedSchema,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from firn.core.values.model import ModelInfo
from firn.core.values.prompt import (
    IN_ORDER,
    PictureSpan,
    Positions,
    PreparedPicture,
    Prompt,
    TokenArray,
)
from firn.core.values.request import (
    EFFORTS,
    PLAIN_DEFAULTS,
    CacheControl,
    Defaults,
    FillInMiddle,
    GenerateRequest,
    RawText,
    RawTokens,
    Reasoning,
    Sampling,
    Source,
)

__all__ = [
    "EFFORTS",
    "IN_ORDER",
    "NARROW",
    "PACKED_DTYPE",
    "PLAIN_DEFAULTS",
    "WIDE",
    "CacheControl",
    "Chat",
    "Defaults",
    "DocumentPart",
    "FillInMiddle",
    "GenerateRequest",
    "Grammar",
    "Job",
    "KeyTokens",
    "Message",
    "MessagePart",
    "ModelInfo",
    "Namespace",
    "OtherPart",
    "PackedTokens",
    "PicturePart",
    "PictureSpan",
    "Positions",
    "PreparedPicture",
    "Prompt",
    "RawText",
    "RawTokens",
    "Reasoning",
    "RelaxedSchema",
    "RequestId",
    "Role",
    "Sampling",
    "ServedRequest",
    "Source",
    "TextPart",
    "TokenArray",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolMode",
    "Usage",
    "unpacked",
]
