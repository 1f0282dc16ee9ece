"""Random weights that make a tiny model listen to its context.

A default initialisation attends almost evenly, so far tokens vanish in the average, and with tied
embeddings the model repeats its input. Here attention is sharp, recurrent states fade slowly and
layers outweigh the embedding: a wrong cache block then shows in the logits. Every parameter is
drawn from a key made of its path and the seed, so MLX's global random state is neither read nor
left changed.
"""

import math
import re
import zlib
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

Draw = Callable[[mx.array, mx.array], mx.array]

QUERY_KEY = re.compile(
    r"\.(q_proj|k_proj|q_b_proj|kv_a_proj_with_mqa|qkv_proj|wqkv|Wqkv|W_pack|c_attn|query_key_value"
    r"|query|key|attn_query|attn_key|c_q|c_k|in_proj_qkv)\.weight$"
)
QUERY_KEY_NORM = re.compile(r"\.(q|k|query|key)_(layer)?norm\.weight$|\.[qk]_weight$")
# Far below the layers' outputs: a tied head would otherwise see little but the last token.
EMBEDDING_STD = 0.05
SHARPEN = 2.0


def _normal(like: mx.array, key: mx.array) -> mx.array:
    return mx.random.normal(like.shape, key=key)


def _matrix(init: mx.array, key: mx.array) -> mx.array:
    """Unit gain: the last axis is the input of every linear layer of mlx-lm."""
    return _normal(init, key) / math.sqrt(init.shape[-1])


def _near(init: mx.array, key: mx.array) -> mx.array:
    """Norms, biases and other vectors stay near what the architecture chose."""
    return init + 0.1 * _normal(init, key)


def _constant(value: float) -> Draw:
    return lambda init, key: value + 0.1 * _normal(init, key)


def _uniform(low: float, high: float) -> Draw:
    return lambda init, key: mx.random.uniform(low, high, init.shape, key=key)


def _embedding(init: mx.array, key: mx.array) -> mx.array:
    return EMBEDDING_STD * _normal(init, key)


def _convolution(init: mx.array, key: mx.array) -> mx.array:
    """(channels, kernel, 1): the kernel is the fan-in."""
    return _normal(init, key) / math.sqrt(init.shape[1])


def _signs(init: mx.array, key: mx.array) -> mx.array:
    return mx.where(mx.random.bernoulli(0.5, init.shape, key=key), 1.0, -1.0)


# Two-bit codes are 0..3; scale and bias centre them and give the rows about unit gain.
def _packed_scales(init: mx.array, key: mx.array) -> mx.array:
    return mx.full(init.shape, 0.08)


def _packed_biases(init: mx.array, key: mx.array) -> mx.array:
    return mx.full(init.shape, -1.5 * 0.08)


# The first pattern found in the path decides. The rates make a state fade over about a hundred
# tokens: long enough to be seen far away, short enough to stay bounded.
RULES: tuple[tuple[re.Pattern[str], Draw], ...] = (
    (re.compile(r"\.signs$"), _signs),
    (re.compile(r"\.scales$"), _packed_scales),
    (re.compile(r"\.biases$"), _packed_biases),
    (re.compile(r"\.A_log$"), lambda init, key: mx.log(_uniform(0.5, 1.5)(init, key))),
    (re.compile(r"\.(dt_bias|dt_proj\.bias)$"), _constant(-4.0)),
    (re.compile(r"\.D$"), _constant(0.2)),
    (re.compile(r"\.recurrent_param$"), _constant(-5.0)),
    (re.compile(r"\.w_lora\.lora\.2\.bias$"), _constant(-4.0)),
    (re.compile(r"\.x_[rwkvag]$"), _uniform(0.0, 1.0)),
    (re.compile(r"\.(k_k|k_a|g_norm\.weight)$"), _constant(1.0)),
    (re.compile(r"\.r_k$"), _constant(0.0)),
    # Linear layers draw their biases from the global state, so these must not stay near them.
    (re.compile(r"(?<!norm)(?<!\.ln)(?<!\.ln_[12f])\.bias$"), _constant(0.0)),
    (re.compile(r"(norm\w*|\.ln|\.ln_[12f])\.(weight|bias)$|norm_weight$|\.[qk]_weight$"), _near),
    (re.compile(r"\.conv_[kv]$"), _matrix),
    (re.compile(r"conv\w*\.(conv\.)?weight$"), _convolution),
)


def _draw(path: str, init: mx.array, key: mx.array, *, is_embedding: bool) -> mx.array:
    if not mx.issubdtype(init.dtype, mx.floating):
        return mx.random.randint(0, 1 << 31, init.shape, dtype=init.dtype, key=key)
    if is_embedding:
        return _embedding(init, key)
    for pattern, rule in RULES:
        if pattern.search(path):
            return rule(init, key)
    if init.ndim == 0:
        return init
    return _near(init, key) if init.ndim == 1 else _matrix(init, key)


def _sharpened(path: str, value: mx.array) -> mx.array:
    if QUERY_KEY.search(path):
        return value * SHARPEN
    # Zero-centred norms add one themselves, so adding works for both conventions.
    if QUERY_KEY_NORM.search(path):
        return value + (SHARPEN - 1.0)
    return value


def fill(
    model: nn.Module,
    *,
    seed: int,
    dtype: mx.Dtype,
    gains: dict[str, float],
    sanitize: bool = True,
) -> None:
    """Draw every parameter anew, cast it as mlx-lm's converter would, and evaluate it."""
    embeddings = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    casts = getattr(model, "cast_predicate", lambda path: True)
    drawn: list[tuple[str, mx.array]] = []
    for path, init in tree_flatten(model.parameters()):
        key = mx.random.key(zlib.crc32(f"{seed}/{path}".encode()))
        value = _draw(f".{path}", init, key, is_embedding=path in embeddings)
        value = _sharpened(f".{path}", value)
        for part, gain in gains.items():
            if part in path:
                value = value * gain
        floating = mx.issubdtype(init.dtype, mx.floating)
        cast = dtype if floating and casts(path) else init.dtype
        drawn.append((path, value.astype(cast)))
    # Loading a folder passes the weights through here, and baichuan's changes them: do the same.
    if sanitize and hasattr(model, "sanitize"):
        drawn = list(model.sanitize(dict(drawn)).items())
    model.load_weights(drawn)
    mx.eval(model.parameters())
