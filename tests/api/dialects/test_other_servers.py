"""Options of other servers: honoured, or refused with the way to get the same here; none is dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firn.api.dialects import discover
from firn.core.errors import InvalidValue
from firn.core.values import Chat, GenerateRequest, Grammar, Namespace

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LARK = "start: /[a-z]+/"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "hi"},
}
OPENAI = ("/v1/chat/completions", "/v1/completions")
OLLAMA = ("/api/chat", "/api/generate")


def call(path: str, **options: Any) -> Any:
    dialect = next(d for d in discover() if d.path == path)
    return dialect.decode({**ROUTES[path], **options}, namespace=Namespace("test"))


def request(path: str, **options: Any) -> GenerateRequest:
    made: GenerateRequest = call(path, **options).requests[0]
    return made


# --- constrained output ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("option", "kind", "text"),
    [
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"guided_grammar": LARK}, "lark", LARK),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
        ({"structured_outputs": {"grammar": LARK}}, "lark", LARK),
        ({"json_schema": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"grammar": LARK}, "lark", LARK),
        ({"regex": "a+"}, "regex", "a+"),
        ({"regex_pattern": "a+"}, "regex", "a+"),
        ({"ebnf": LARK}, "lark", LARK),
        ({"grammar_string": LARK}, "lark", LARK),
    ],
)
def test_each_name_for_constrained_output_is_honoured(
    path: str, option: dict[str, Any], kind: str, text: str
) -> None:
    made = call(path, **option)
    grammar = made.requests[0].grammar
    assert isinstance(grammar, Grammar)
    assert (grammar.kind, grammar.text) == (kind, text)
    assert made.ignored == ()


@pytest.mark.parametrize(
    ("option", "param"),
    [
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": []}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ],
)
def test_what_cannot_be_honoured_is_named(option: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        call("/v1/chat/completions", **option)
    assert caught.value.param == param


def test_forms_that_ask_for_nothing_pass() -> None:
    """Clients with a form for llama.cpp send every field of it."""
    empty = {"grammar": "", "json_schema": None, "guided_json": None, "structured_outputs": {}}
    made = call("/v1/chat/completions", response_format={"type": "text"}, **empty)
    assert made.requests[0].grammar is None
    assert made.ignored == ()


# --- other names for what firn has -----------------------------------------------------------


@pytest.mark.parametrize("path", OPENAI)
def test_other_names_mean_the_same(path: str) -> None:
    made = call(path, repeat_penalty=1.25, n_predict=7, cache_prompt=False, stop_token_ids=[3, 5])
    asked = made.requests[0]
    assert asked.sampling.repetition_penalty == 1.25
    assert asked.max_tokens == 7
    assert not asked.cache.read
    assert asked.stop_tokens == (3, 5)
    assert made.ignored == ()
    assert request(path, n_predict=-1).max_tokens is None
    assert request(path, max_tokens=3, n_predict=7).max_tokens == 3
    both = request(path, repetition_penalty=1.5, repeat_penalty=1.25)
    assert both.sampling.repetition_penalty == 1.5


@pytest.mark.parametrize(
    "name", ["thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"]
)
def test_other_names_of_the_thinking_budget(name: str) -> None:
    assert request("/v1/chat/completions", **{name: 9}).reasoning.budget_tokens == 9
    assert request("/v1/chat/completions", **{name: -1}).reasoning.budget_tokens is None


def test_reasoning_as_an_object() -> None:
    asked = request("/v1/chat/completions", reasoning={"enabled": False, "max_tokens": 5})
    assert (asked.reasoning.enabled, asked.reasoning.budget_tokens) == (False, 5)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("option", "enabled", "budget"),
    [
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, True, 7),
        ({"thinking": {"type": "auto"}}, None, None),
        ({"think": False}, False, None),
        ({"think": False, "enable_thinking": True}, True, None),
    ],
)
def test_thinking_as_other_servers_ask_for_it(
    path: str, option: dict[str, Any], enabled: bool | None, budget: int | None
) -> None:
    made = call(path, **option)
    asked = made.requests[0].reasoning
    assert (asked.enabled, asked.budget_tokens) == (enabled, budget)
    assert made.ignored == ()


@pytest.mark.parametrize(
    ("path", "option"),
    [
        ("/v1/completions", {"think": True}),
        ("/v1/completions", {"thinking": {"type": "disabled"}}),
        ("/v1/completions", {"thinking_token_budget": 5}),
        ("/v1/completions", {"include_reasoning": False}),
        ("/v1/responses", {"include_reasoning": False}),
    ],
)
def test_thinking_is_asked_for_where_it_has_a_place(path: str, option: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        call(path, **option)
    assert caught.value.param in option


def test_documents_are_variables_of_the_template() -> None:
    source = request("/v1/chat/completions", documents=[{"text": "a"}]).source
    assert isinstance(source, Chat)
    assert source.template_kwargs["documents"] == [{"text": "a"}]


@pytest.mark.parametrize("path", ROUTES)
def test_salts_are_told_apart_however_they_are_given(path: str) -> None:
    given: list[dict[str, Any]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"},
        {"cache_salt": "a", "extra_key": "a"}, {"cache_salt": "a\", \"b"},
    ]  # fmt: skip
    salts = {request(path, **salt).cache_salt for salt in given}
    assert len(salts) == len(given)
    for wrong in ("", 5, ["a"], "a" * 1025):
        with pytest.raises(InvalidValue, match="cache_salt"):
            call(path, cache_salt=wrong)


# --- what firn lacks -------------------------------------------------------------------------

LACKED: list[tuple[str, Any, Any]] = [
    ("mirostat", 0, 2), ("typical_p", 1.0, 0.5), ("tfs_z", 1, 0.9), ("xtc_probability", 0.0, 0.5),
    ("dry_multiplier", 0, 0.8), ("dynatemp_range", 0, 1), ("top_n_sigma", -1.0, 1),
    ("samplers", None, ["top_k"]), ("use_beam_search", False, True), ("length_penalty", 1.0, 2),
    ("min_tokens", 0, 5), ("allowed_token_ids", None, [1]), ("bad_words", [], ["no"]),
    ("logits_processors", None, ["x"]), ("custom_logit_processor", None, "x"),
    ("skip_special_tokens", True, False), ("include_stop_str_in_output", False, True),
    ("no_stop_trim", False, True), ("stop_regex", None, "a+"), ("prompt_logprobs", None, 1),
    ("return_token_ids", False, True), ("return_tokens_as_token_ids", None, True),
    ("truncate_prompt_tokens", None, 10), ("add_generation_prompt", True, False),
    ("mm_processor_kwargs", {}, {"fps": 1}), ("lora_path", None, "x"), ("adapters", None, "x"),
    ("lora", [], [{"id": 0}]), ("session_params", None, {"id": "x"}), ("n_probs", 0, 5),
    ("role_mapping", None, {"user": "U"}), ("t_max_predict_ms", 0, 100),
    ("modalities", ["text"], ["text", "audio"]), ("audio", None, {"voice": "alloy"}),
    ("web_search_options", None, {}), ("separate_reasoning", True, False),
    ("reasoning_format", "auto", "none"), ("parse_tool_calls", True, False),
    ("guided_whitespace_pattern", None, " "), ("return_hidden_states", False, True),
    ("watermarking", None, True), ("logprob_token_ids", None, [1]),
    ("return_prompt_token_ids", False, True), ("return_token_offsets", False, True),
    ("return_assistant_tokens_mask", False, True), ("return_sampling_mask", False, True),
    ("return_meta_info", False, True), ("response_fields", [], ["content"]), ("n_cmpl", 1, 2),
    ("generation_prompt", "", "Sure:"), ("input_ids", None, [1, 2]), ("custom_params", {}, {"a": 1}),
    ("vllm_xargs", None, {"a": 1}), ("video_config", {}, {"fps": 1}), ("max_dynamic_patch", None, 4),
    ("min_dynamic_patch", None, 1), ("use_audio_in_video", False, True),
    ("reasoning_budget_message", "", "Stop."), ("stream_reasoning", True, False),
    ("spaces_between_special_tokens", True, False), ("adaptive_target", -1, 0.5), ("top_a", 0, 0.2),
    ("smoothing_factor", 0, 0.3), ("dynamic_temperature", False, True), ("cfg_scale", 1, 1.5),
    ("guidance_scale", 1.0, 2), ("negative_prompt", "", "no"), ("banned_tokens", [], [1]),
    ("banned_strings", [], ["no"]), ("t_max_prompt_ms", -1, 100), ("prompt_embeds", None, "x"),
    ("task", None, "query"), ("format", "", "json"), ("options", {}, {"num_predict": 5}),
    ("raw", False, True), ("previous_input_messages", None, [HI[0]]),
    ("enable_response_messages", False, True), ("grammar_triggers", [], [{"value": "x"}]),
]  # fmt: skip


@pytest.mark.parametrize("path", [*OPENAI, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(("name", "off", "on"), LACKED)
def test_what_firn_lacks_is_refused_unless_it_asks_for_nothing(
    path: str, name: str, off: Any, on: Any
) -> None:
    assert call(path, **{name: off}).ignored == ()
    with pytest.raises(InvalidValue) as caught:
        call(path, **{name: on})
    assert caught.value.param == name


@pytest.mark.parametrize("path", OLLAMA)
def test_ollamas_options_are_named_with_their_place(path: str) -> None:
    assert call(path, options={"mirostat": 0, "typical_p": 1, "mirostat_tau": 5}).ignored == ()
    with pytest.raises(InvalidValue) as caught:
        call(path, options={"mirostat": 1})
    assert caught.value.param == "options.mirostat"
    with pytest.raises(InvalidValue) as caught:
        call(path, template="{{ .Prompt }}")
    assert caught.value.param == "template"
    assert call(path, options={"num_ctx": 8192}).ignored == ("options.num_ctx",)


@pytest.mark.parametrize(
    ("path", "options", "penalty"),
    [
        ("/v1/chat/completions", {"repeat_last_n": 64}, {"repeat_penalty": 1.1}),
        ("/v1/completions", {"frequency_context_size": 20}, {"frequency_penalty": 0.5}),
        ("/v1/messages", {"repeat_last_n": 64}, {"presence_penalty": 0.5}),
    ],
)
def test_how_far_a_penalty_looks_matters_only_with_a_penalty(
    path: str, options: dict[str, Any], penalty: dict[str, Any]
) -> None:
    assert call(path, **options).ignored == ()
    with pytest.raises(InvalidValue, match="whole context"):
        call(path, **options, **penalty)
    call(path, **dict.fromkeys(options, -1), **penalty)


def test_how_far_ollamas_penalty_looks() -> None:
    assert call("/api/chat", options={"repeat_last_n": 64}).ignored == ()
    with pytest.raises(InvalidValue) as caught:
        call("/api/chat", options={"repeat_last_n": 64, "repeat_penalty": 1.1})
    assert caught.value.param == "options.repeat_last_n"


def test_a_least_length_holds_if_nothing_ends_a_reply() -> None:
    """As load generators ask for replies of one length."""
    asked = {"min_tokens": 5, "max_tokens": 5, "ignore_eos": True}
    assert call("/v1/chat/completions", **asked).ignored == ()


@pytest.mark.parametrize(
    ("path", "name", "value", "instead"),
    [
        ("/v1/chat/completions", "max_output_tokens", 5, "max_tokens"),
        ("/v1/chat/completions", "stop_sequences", ["a"], "stop"),
        ("/v1/completions", "tools", [{}], "/v1/chat/completions"),
        ("/v1/responses", "max_tokens", 5, "max_output_tokens"),
        ("/v1/responses", "response_format", {"type": "json_object"}, "text.format"),
        ("/v1/messages", "stop", "a", "stop_sequences"),
        ("/v1/messages", "response_format", {"type": "json_object"}, "output_config.format"),
    ],
)
def test_an_option_of_another_api_is_told_its_name_here(
    path: str, name: str, value: Any, instead: str
) -> None:
    with pytest.raises(InvalidValue, match=instead) as caught:
        call(path, **{name: value})
    assert caught.value.param == name


# --- unknown names ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
def test_unknown_members_of_firns_own_objects_are_refused(path: str) -> None:
    with pytest.raises(InvalidValue, match="cache has read, ttl and write") as caught:
        call(path, cache={"read": False, "wirte": False})
    assert caught.value.param == "cache.wirte"
    with pytest.raises(InvalidValue) as caught:
        call(path, sparse_prefill={"keep": 0.5, "kep": 0.1})
    assert caught.value.param == "sparse_prefill.kep"


@pytest.mark.parametrize("path", ROUTES)
def test_all_that_has_no_effect_is_listed(path: str) -> None:
    made = call(path, priority=5, user="me" if path in OPENAI else None, nothing=None)
    assert made.ignored == ("priority",)
    if path in OPENAI:
        nested = call(path, stream=True, stream_options={"include_usage": True, "fast": 1})
        assert nested.ignored == ("stream_options.fast",)
