"""A vision model on the engine of the text models: pictures are embeddings, the rest is tokens.

What mlx-vlm calls the language model reads prompts in chunks, like any text model. A chunk without
pictures is passed as ids alone. In a chunk with pictures, the embeddings of the text are joined
with the pictures' features. The vision tower computes those once per picture, as a whole, so the
result does not depend on where a chunk cuts a picture. The model keeps no state of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.values import PictureSpan, Prompt
from firn.models.model_arguments import CachesAsTheyAre
from firn.models.vision.gemma import attend_to_whole_pictures, has_whole_pictures
from firn.models.vision.picture import FeatureCache, Features, Picture
from firn.models.vision.rope import RotaryPositions


class VisionModel(CachesAsTheyAre):
    """Callable like mlx-lm's models; implements ModelArguments. Owner: the engine thread."""

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

    def __call__(self, ids: mx.array, *, cache: list[Any], **arguments: Any) -> mx.array:
        """Logits. Without `arguments` the ids are text that follows what the caches hold."""
        placed = self._placed(ids, cache, arguments)
        logits: mx.array = self._language(ids, cache=cache, **placed).logits
        return logits

    def hidden(self, ids: mx.array, cache: list[Any], **arguments: Any) -> mx.array:
        """The last hidden states (rows, tokens, width), in families that return them."""
        placed = self._placed(ids, cache, arguments)
        out = self._language(ids, cache=cache, return_hidden=True, skip_logits=True, **placed)
        states: mx.array = out.hidden_states[-1]
        return states

    def _placed(self, ids: mx.array, cache: list[Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments, with the positions of text if they have none."""
        if self._rope is None or "position_ids" in arguments:
            return arguments
        return arguments | {"position_ids": self._rope.of_text(cache, ids.shape[1])}

    # --- ModelArguments ---------------------------------------------------------------------

    def read_picture(self, prompt: Prompt, index: int) -> bool:
        span, picture = prompt.picture_spans[index], prompt.picture_inputs[index]
        if not self.features.limit_nbytes or span.digest in self.features:
            return False
        self._features_of(span, picture)
        return True

    def chunk(self, prompt: Prompt, start: int, end: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self._rope is not None:
            arguments["position_ids"] = self._rope.chunk(prompt, start, end)
        parts = [
            (span, picture)
            for span, picture in zip(prompt.picture_spans, prompt.picture_inputs, strict=True)
            if span.start < end and start < span.end
        ]
        if parts:
            arguments |= self._with_pictures(prompt, parts, start, end)
        return arguments

    def step(self, positions: Sequence[int], width: int = 1) -> dict[str, Any]:
        return {} if self._rope is None else {"position_ids": self._rope.step(positions, width)}

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
            ids[low - start : high - start] = 0  # a placeholder's id may be outside the vocabulary
            cuts.append((low - start, high - start, features, low - span.start))
            first = int(mask[: low - span.start].sum())
            last = int(mask[: high - span.start].sum())
            deepstack.append([layer[first:last] for layer in features.deepstack])
        arguments = self._joined(ids, cuts)
        if deepstack[0]:
            arguments["visual_pos_masks"] = mx.array(visual)[None]
            arguments["deepstack_visual_embeds"] = [
                mx.concatenate(list(of_layer)) for of_layer in zip(*deepstack, strict=True)
            ]
        if self.whole_pictures:
            arguments["mm_token_type_ids"] = mx.array(visual.astype(np.int32))[None]
        return arguments

    def _joined(
        self, ids: np.ndarray[Any, Any], cuts: Sequence[tuple[int, int, Features, int]]
    ) -> dict[str, Any]:
        """The embeddings of text and pictures, in the order of the tokens."""
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
        joined = {"inputs_embeds": mx.concatenate([*embeds, text.embeds[:, at:]], axis=1)}
        if text.per_layer is not None:
            rest = text.per_layer[:, at:]
            joined["per_layer_inputs"] = mx.concatenate([*per_layer, rest], axis=1)
        return joined

    def text_features(self, ids: mx.array) -> Features:
        """The embeddings that the language model itself would look up for these ids."""
        out = self.model.get_input_embeddings(input_ids=ids, pixel_values=None)
        per_layer = out.per_layer_inputs
        if per_layer is not None:  # those of a picture's id in a text would be another token's
            per_layer = self._language.model.get_per_layer_inputs(ids)
        return Features(out.inputs_embeds, per_layer)

    def _features_of(self, span: PictureSpan, picture: Picture) -> Features:
        """Runs the vision tower, unless its result for this picture is cached."""
        features = self.features.get(span.digest)
        if features is None:
            features = self.run_tower(picture)
            mx.eval(features.arrays)
            self.features.put(span.digest, features)
        return features

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
