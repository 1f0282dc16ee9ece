"""What the rest of firn knows about the loaded model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model's properties. Complete when built, never changed."""

    name: str
    path: str
    architecture: str
    fingerprint: bytes
    context_length: int
    vocab_size: int
    dtype: str
    weights_nbytes: int
    layer_kinds: tuple[str, ...]
    batchable: bool
    unbatchable_why: str | None
    vision: bool = False
    whole_pictures: bool = False
    """Whether a picture's tokens attend to each other: see Prompt."""
    generates: bool = True
    """False: it only makes embeddings."""
    created: int = 0
    n_embeddings: int = 0
    """Rows of the embedding table: ids at or above this must not be read. 0: the same as the
    vocabulary's size."""

    @property
    def n_ids(self) -> int:
        """Every id of a prompt is below this."""
        return self.n_embeddings or self.vocab_size


@dataclass(frozen=True, slots=True)
class Reranker:
    """The two tokens with which a model says whether a document answers a query."""

    yes: int
    no: int
