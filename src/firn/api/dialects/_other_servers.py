"""Options of other servers (vLLM, SGLang, llama.cpp, LM Studio, mlx-lm, Ollama) that firn lacks. Pure.

Whatever would change a reply is refused, with the way to get it here. Clients send whole forms, so a
value that asks for nothing passes. Whatever else a dialect has not read only concerns how another
server works; the reply's headers name it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from firn.api.http.fields import Fields
from firn.core.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Lacking:
    """instead: what to do here. off: values that ask for nothing; null is always one of them."""

    instead: str
    off: tuple[object, ...] = ()


_SAMPLER = "is not a sampler of firn's; use temperature, top_p, top_k and min_p"
_WINDOW = "penalties here look at the whole context: send -1, or leave the penalties out"
_IDS = "the reply has no token ids; POST its text to /v1/tokenize"
_TEMPLATE = "is up to the model's chat template; use chat_template_kwargs, or /v1/completions"
_ADAPTER = "an adapter is a model of its own here: start the server with --adapter"
_PICTURES = "pictures are prepared as the model's own configuration says"
_WHITESPACE = "whitespace between JSON's tokens is up to firn; write the format as a Lark grammar"

MISSING: Mapping[str, Lacking] = {
    # how tokens are picked
    "mirostat": Lacking(_SAMPLER, (0,)),
    "typical_p": Lacking(_SAMPLER, (1,)),
    "tfs_z": Lacking(_SAMPLER, (1,)),
    "xtc_probability": Lacking(_SAMPLER, (0,)),
    "dry_multiplier": Lacking(_SAMPLER, (0,)),
    "dynatemp_range": Lacking(_SAMPLER, (0,)),
    "top_n_sigma": Lacking(_SAMPLER, (0, -1)),
    "samplers": Lacking(_SAMPLER, ([],)),
    "min_keep": Lacking(_SAMPLER, (0, 1)),
    "adaptive_target": Lacking(_SAMPLER, (-1,)),
    "top_a": Lacking(_SAMPLER, (0,)),
    "smoothing_factor": Lacking(_SAMPLER, (0,)),
    "dynamic_temperature": Lacking(_SAMPLER, (False,)),
    "cfg_scale": Lacking("there is no second, negative prompt", (1,)),
    "guidance_scale": Lacking("there is no second, negative prompt", (1,)),
    "negative_prompt": Lacking("there is no second, negative prompt", ("",)),
    "use_beam_search": Lacking(
        "beams are not supported; ask for n choices and take the best", (False,)
    ),
    "length_penalty": Lacking("needs beams, which are not supported", (1,)),
    "watermarking": Lacking("is not supported", (False,)),
    "repetition_detection": Lacking("is not supported; use repetition_penalty"),
    "logits_processors": Lacking(
        "requests bring no code; use logit_bias, or a Lark grammar", ([],)
    ),
    "custom_params": Lacking("requests bring no code; use logit_bias", ({},)),
    "vllm_xargs": Lacking("requests bring no code; use logit_bias", ({},)),
    "custom_logit_processor": Lacking("requests bring no code; use logit_bias, or a Lark grammar"),
    "allowed_token_ids": Lacking("use response_format: {'type': 'choice' | 'regex' | 'lark'}"),
    "banned_tokens": Lacking("use logit_bias with the ids from /v1/tokenize", ([],)),
    "banned_strings": Lacking("use logit_bias with the ids from /v1/tokenize", ([],)),
    "bad_words": Lacking("use logit_bias with the ids from /v1/tokenize", ([],)),
    "repeat_last_n": Lacking(_WINDOW, (-1,)),
    "repetition_context_size": Lacking(_WINDOW, (-1,)),
    "presence_context_size": Lacking(_WINDOW, (-1,)),
    "frequency_context_size": Lacking(_WINDOW, (-1,)),
    # when a reply ends, and what is shown of it
    "min_tokens": Lacking("use ignore_eos with max_tokens, or forbid the end by logit_bias", (0,)),
    "t_max_predict_ms": Lacking("use max_tokens, or close the connection", (0, -1)),
    "t_max_prompt_ms": Lacking("close the connection if it takes too long", (0, -1)),
    "n_indent": Lacking("use a Lark grammar", (0,)),
    "stop_regex": Lacking("use stop, or response_format: {'type': 'regex'}", ([], "")),
    "include_stop_str_in_output": Lacking(
        "a stop string is never shown; add it yourself", (False,)
    ),
    "no_stop_trim": Lacking("a stop string is never shown; add it yourself", (False,)),
    "skip_special_tokens": Lacking("control tokens are never shown", (True,)),
    "separate_reasoning": Lacking("reasoning is always in reasoning_content", (True,)),
    "reasoning_format": Lacking("reasoning is in reasoning_content", ("auto", "deepseek")),
    "reasoning_budget_message": Lacking("reasoning ends without a message", ("",)),
    "stream_reasoning": Lacking("reasoning is streamed; drop it yourself", (True,)),
    "spaces_between_special_tokens": Lacking("control tokens are never shown", (True,)),
    "include_reasoning": Lacking("reasoning comes with the reply; drop it yourself", (True,)),
    "reasoning_in_content": Lacking("reasoning is always in reasoning_content", (False,)),
    "parse_tool_calls": Lacking("send no tools, or tool_choice none", (True,)),
    "prompt_logprobs": Lacking("use /v1/completions with echo, logprobs and max_tokens 0"),
    "logprob_token_ids": Lacking("use logprobs and top_logprobs"),
    "n_probs": Lacking("use logprobs and top_logprobs", (0,)),
    "post_sampling_probs": Lacking("logprobs are those before sampling", (False,)),
    "return_token_ids": Lacking(_IDS, (False,)),
    "return_tokens_as_token_ids": Lacking(_IDS, (False,)),
    "return_tokens": Lacking(_IDS, (False,)),
    "return_prompt_token_ids": Lacking(_IDS, (False,)),
    "return_prompt_text": Lacking("is not supported", (False,)),
    "return_hidden_states": Lacking("is not supported; /v1/embeddings has vectors", (False,)),
    "return_routed_experts": Lacking("is not supported", (False,)),
    "return_token_offsets": Lacking("is not supported", (False,)),
    "return_assistant_tokens_mask": Lacking("is not supported", (False,)),
    "return_sampling_mask": Lacking("is not supported", (False,)),
    "return_meta_info": Lacking("usage says what a reply took", (False,)),
    "response_fields": Lacking("a reply has all its members; pick them yourself", ([],)),
    "n_cmpl": Lacking("use n", (1,)),
    # what the model reads
    "truncate_prompt_tokens": Lacking("a prompt that is too long is refused; shorten it yourself"),
    "truncation_side": Lacking("a prompt that is too long is refused; shorten it yourself"),
    "add_generation_prompt": Lacking("use continue_final_message, or /v1/completions", (True,)),
    "generation_prompt": Lacking(_TEMPLATE, ("",)),
    "role_mapping": Lacking(_TEMPLATE),
    "task": Lacking(_TEMPLATE),
    "prompt_embeds": Lacking("send text, or token ids, as prompt", ([],)),
    "thinking_token_budget": Lacking("use thinking_budget, in /v1/chat/completions", (-1,)),
    "thinking": Lacking("use reasoning_effort, or /v1/chat/completions"),
    "thinking.clear_thinking": Lacking(_TEMPLATE),
    "think": Lacking("use reasoning_effort, or /v1/chat/completions"),
    "format": Lacking("use response_format", ("",)),
    "options": Lacking("its members belong into the body itself", ({},)),
    "raw": Lacking("use /v1/completions", (False,)),
    "previous_input_messages": Lacking(
        "use previous_response_id, or send the whole conversation as input"
    ),
    "enable_response_messages": Lacking("is not supported", (False,)),
    "input_ids": Lacking("send messages; /v1/completions takes token ids as prompt", ([],)),
    "session_params": Lacking("send the whole conversation: what it shares is reused by itself"),
    "mm_processor_kwargs": Lacking(_PICTURES, ({},)),
    "media_io_kwargs": Lacking(_PICTURES, ({},)),
    "images_config": Lacking(_PICTURES, ({},)),
    "video_config": Lacking(_PICTURES, ({},)),
    "use_audio_in_video": Lacking(_PICTURES, (False,)),
    "min_dynamic_patch": Lacking(_PICTURES),
    "max_dynamic_patch": Lacking(_PICTURES),
    "image_data": Lacking("send pictures as image_url parts of a message", ([],)),
    "lora": Lacking(_ADAPTER, ([],)),
    "lora_path": Lacking(_ADAPTER),
    "adapters": Lacking(_ADAPTER),
    "modalities": Lacking("the model only writes text", (["text"],)),
    "audio": Lacking("the model only writes text"),
    "web_search_options": Lacking("firn searches nothing; give the model a tool for it"),
    # how output is constrained, besides what `other_formats` reads
    "guided_whitespace_pattern": Lacking(_WHITESPACE),
    "structured_outputs.whitespace_pattern": Lacking(_WHITESPACE),
    "structured_outputs.disable_any_whitespace": Lacking(_WHITESPACE, (False,)),
    "structured_outputs.disable_additional_properties": Lacking(
        "set additionalProperties to false in the schema", (False,)
    ),
    "structured_outputs.structural_tag": Lacking("use tools, or a Lark grammar"),
    "structural_tag": Lacking("use tools, or a Lark grammar"),
    "grammar_lazy": Lacking("use tools: a call's grammar applies where the call begins", (False,)),
    "grammar_triggers": Lacking("use tools: a call's grammar applies where the call begins", ([],)),
    "stream_options.continuous_usage_stats": Lacking("usage is in the last event", (False,)),
}
"""By the name of the member; what Ollama has in `options` is listed without that."""

SUBORDINATE = (
    "mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent", "adaptive_decay",
)  # fmt: skip
"""They mean nothing unless the sampler they belong to is on, which is refused."""


def refuse_missing(
    body: Fields, elsewhere: Mapping[str, Lacking] | None = None, *, under: str = ""
) -> None:
    """Raises InvalidValue for an option that firn lacks. To be called when all others were read.

    elsewhere: options that have another name in this API. under: the member in which it keeps options.
    """
    known = {**MISSING, **(elsewhere or {})}
    prefix = f"{under}." if under else ""
    for owner, member in list(body.unread_members()):
        if member in SUBORDINATE:
            owner.skip(member)
        missing = known.get(owner.name(member).removeprefix(prefix))
        if missing is None:
            continue
        value = owner.get(member)
        if value not in missing.off:
            raise InvalidValue(owner.name(member), missing.instead)
