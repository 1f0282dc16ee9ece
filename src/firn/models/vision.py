"""A vision model on the engine of the text models: pictures are embeddings, the rest is tokens.

What mlx-vlm calls the language model is driven in chunks like any text model. A chunk without pictures
takes the ids alone. For a chunk with some, the embeddings of its text are joined with the features of
its pictures, which the vision tower has made once for each picture, whole; so the result is the same
wherever a chunk cuts a picture. Nothing of a request is kept on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.values import PictureSpan, Prompt
from firn.models.batch import Row
from firn.models.picture import FeatureCache, Features, Picture
from firn.models.vision_gemma import attend_to_whole_pictures, has_whole_pictures
from firn.models.vision_rope import RotaryPositions


class VisionModel:
    """Callable like mlx-lm's models; implements models.inputs.Inputs. Owner: the engine thread."""

    def __init__(self, model: Any, *, feature_nbytes: int) -> None:
        self.model = model
        self.features = FeatureCache(feature_nbytes)
        self._language = model.language_model
        self._rope: RotaryPositions | None = None
        if hasattr(self._language, "get_rope_index"):
            self._rope = RotaryPositions(self._language)
        self.whole_pictures = has_whole_pictures(model)
        if self.whole_pictures:
            attend_to_whole_pictures(model)

    def make_cache(self) -> list[Any]:
        from mlx_vlm.models.cache import make_prompt_cache

        return list(make_prompt_cache(self._language))

    def parameters(self) -> Any:
        return self.model.parameters()

    def named_modules(self) -> list[tuple[str, Any]]:
        """Those of the language model."""
        return list(self._language.named_modules())

    def __call__(self, ids: mx.array, *, cache: list[Any], **inputs: Any) -> mx.array:
        """Logits. Without `inputs` it is text alone, after what the caches hold."""
        out: mx.array = self._language(ids, cache=cache, **self._placed(ids, cache, inputs)).logits
        return out

    def hidden(self, ids: mx.array, cache: list[Any], **inputs: Any) -> mx.array:
        """What the logits are made of, in families that tell: (rows, tokens, width)."""
        more = self._placed(ids, cache, inputs)
        out = self._language(ids, cache=cache, return_hidden=True, skip_logits=True, **more)
        states: mx.array = out.hidden_states[-1]
        return states

    def _placed(self, ids: mx.array, cache: list[Any], inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs with the positions of text, where none are given."""
        if self._rope is None or "position_ids" in inputs:
            return inputs
        return inputs | {"position_ids": self._rope.of_text(cache, ids.shape[1])}

    # --- models.inputs.Inputs --------------------------------------------------------------

    def chunk(self, prompt: Prompt, start: int, end: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._rope is not None:
            found["position_ids"] = self._rope.chunk(prompt, start, end)
        parts = [
            (span, picture)
            for span, picture in zip(prompt.picture_spans, prompt.picture_inputs, strict=True)
            if span.start < end and start < span.end
        ]
        if parts:
            found |= self._with_pictures(prompt, parts, start, end)
        return found

    def step(self, rows: Sequence[Row], width: int = 1) -> dict[str, Any]:
        return {} if self._rope is None else {"position_ids": self._rope.step(rows, width)}

    def shift(self, prompt: Prompt) -> int:
        return 0 if self._rope is None else self._rope.shift(prompt)

    # --- pictures --------------------------------------------------------------------------

    def _with_pictures(
        self, prompt: Prompt, parts: Sequence[tuple[PictureSpan, Picture]], start: int, end: int
    ) -> dict[str, Any]:
        """# [start, ...) text | features | text | features ... | text [..., end)"""
        visual = np.zeros(end - start, dtype=np.bool_)
        ids = prompt.ids[start:end].copy()
        cuts: list[tuple[int, int, Features, int]] = []
        deepstack: list[list[mx.array]] = []
        for span, picture in parts:
            features = self._features_of(span, picture)
            low, high = max(span.start, start), min(span.end, end)
            mask = picture.visual
            visual[low - start : high - start] = mask[low - span.start : high - span.start]
            ids[low - start : high - start] = 0  # a placeholder's id may lie outside the vocabulary
            cuts.append((low - start, high - start, features, low - span.start))
            first = int(mask[: low - span.start].sum())
            last = int(mask[: high - span.start].sum())
            deepstack.append([layer[first:last] for layer in features.deepstack])
        found = self._joined(ids, cuts)
        if deepstack[0]:
            found["visual_pos_masks"] = mx.array(visual)[None]
            found["deepstack_visual_embeds"] = [
                mx.concatenate(list(same)) for same in zip(*deepstack, strict=True)
            ]
        if self.whole_pictures:
            found["mm_token_type_ids"] = mx.array(visual.astype(np.int32))[None]
        return found

    def _joined(
        self, ids: np.ndarray[Any, Any], cuts: Sequence[tuple[int, int, Features, int]]
    ) -> dict[str, Any]:
        text = self.text_features(mx.array(ids.astype(np.int32))[None])
        embeds: list[mx.array] = []
        per_layer: list[mx.array] = []
        at = 0
        for low, high, features, skip in cuts:
            own = slice(skip, skip + high - low)
            embeds += [text.embeds[:, at:low], features.embeds[:, own]]
            if text.per_layer is not None and features.per_layer is not None:
                per_layer += [text.per_layer[:, at:low], features.per_layer[:, own]]
            at = high
        found = {"inputs_embeds": mx.concatenate([*embeds, text.embeds[:, at:]], axis=1)}
        if text.per_layer is not None:
            rest = text.per_layer[:, at:]
            found["per_layer_inputs"] = mx.concatenate([*per_layer, rest], axis=1)
        return found

    def text_features(self, ids: mx.array) -> Features:
        """The embeddings of text as the language model would make them of the ids."""
        out = self.model.get_input_embeddings(input_ids=ids, pixel_values=None)
        return Features(out.inputs_embeds, out.per_layer_inputs)

    def _features_of(self, span: PictureSpan, picture: Picture) -> Features:
        """Runs the vision tower, unless its result for this picture is still held."""
        found = self.features.get(span.digest)
        if found is None:
            found = self.run_tower(picture)
            mx.eval(found.arrays)
            self.features.put(span.digest, found)
        return found

    def run_tower(self, picture: Picture) -> Features:
        ids = mx.array(picture.ids.astype(np.int32))[None]
        out = self.model.get_input_embeddings(
            input_ids=ids, mask=mx.ones_like(ids), **to_mlx(picture)
        )
        if out.inputs_embeds.shape[1] != len(picture.ids):
            raise ValueError("the picture's features and placeholders differ in number")
        own = slice(picture.first, picture.last)
        dtype = self.model.get_input_embeddings(
            input_ids=ids[:, :1], pixel_values=None
        ).inputs_embeds.dtype
        per_layer = None if out.per_layer_inputs is None else out.per_layer_inputs[:, own]
        deep = out.deepstack_visual_embeds
        return Features(
            embeds=out.inputs_embeds[:, own].astype(dtype),
            per_layer=per_layer,
            deepstack=() if deep is None else tuple(deep),
        )


def to_mlx(picture: Picture) -> dict[str, Any]:
    return {
        name: mx.array(value) if isinstance(value, np.ndarray) else value
        for name, value in picture.tensors.items()
    }
