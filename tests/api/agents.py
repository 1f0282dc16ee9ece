"""Conversations as coding agents send them, turn by turn, modelled on their traffic.

Each agent is a list of bodies; a body holds the whole conversation so far, as its API requires.
"""

from __future__ import annotations

import json
from typing import Any

Body = dict[str, Any]
EPHEMERAL = {"type": "ephemeral"}
LONG = "\n".join(f"{i:>6}\tdef function_{i}(x): return x + {i}" for i in range(40))
ENVIRONMENT = "Working directory: /repo\nIs directory a git repo: Yes\nPlatform: linux"


def parameters(**properties: Any) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


READ = parameters(file_path={"type": "string", "description": "Absolute path."})
BASH = parameters(command={"type": "string"})
EDIT = parameters(
    file_path={"type": "string"}, old_string={"type": "string"}, new_string={"type": "string"}
)

# --- Claude Code: Anthropic's messages -----------------------------------------------------


def reminder(text: str) -> dict[str, Any]:
    return {"type": "text", "text": f"<system-reminder>\n{text}\n</system-reminder>"}


def claude_code() -> list[Body]:
    def body(stamp: str, *messages: Any) -> Body:
        return {
            "model": "claude-sonnet-4-5-20250929",
            "max_tokens": 200,
            "stream": True,
            "temperature": 1,
            "metadata": {"user_id": "user_0_account__session_1"},
            "thinking": {"type": "enabled", "budget_tokens": 31999},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={stamp};"},
                {
                    "type": "text",
                    "text": "You are Claude Code, Anthropic's official CLI for Claude.",
                    "cache_control": EPHEMERAL,
                },
                {
                    "type": "text",
                    "text": f"Help users with software tasks.\n<env>\n{ENVIRONMENT}\n</env>",
                    "cache_control": EPHEMERAL,
                },
            ],
            "tools": [
                {"name": "Bash", "description": "Runs a command.", "input_schema": BASH},
                {"name": "Read", "description": "Reads a file.", "input_schema": READ},
                {
                    "name": "Edit",
                    "description": "Edits a file.",
                    "input_schema": EDIT,
                    "cache_control": EPHEMERAL,
                },
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            ],
            "messages": list(messages),
        }

    first = {
        "role": "user",
        "content": [
            reminder("# claudeMd\nBe careful with main.py."),
            {"type": "text", "text": "fix the bug in main.py", "cache_control": EPHEMERAL},
        ],
    }
    calls = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Look at both.", "signature": "c2lnbmVk"},
            {"type": "text", "text": "I'll look at the files."},
            tool_use("1", "Read", file_path="/repo/main.py"),
            tool_use("2", "Bash", command="pytest -q"),
        ],
    }
    results = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": LONG},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "is_error": True,
                "content": [{"type": "text", "text": "Exit code 1\n1 failed"}],
                "cache_control": EPHEMERAL,
            },
            reminder("The TODO list is empty."),
        ],
    }
    done = {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"},
            {"type": "text", "text": "The bug is in function_7."},
        ],
    }
    after = {"role": "user", "content": "and now commit it"}
    return [
        body("a1", first),
        body("b2", first, calls, results),
        body("c3", first, calls, results, done, after),
    ]


def tool_use(number: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments}


# --- OpenCode: OpenAI's chat ---------------------------------------------------------------


def opencode() -> list[Body]:
    def body(*messages: Any) -> Body:
        tools = [("read", "Reads a file.", READ), ("bash", "Runs a command.", BASH)]
        return {
            "model": "fake",
            "max_tokens": 200,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "reasoning_effort": "medium",
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "tools": [
                {
                    "type": "function",
                    "function": {"name": name, "description": text, "parameters": schema},
                }
                for name, text, schema in tools
            ],
            "messages": [
                {"role": "system", "content": "You are opencode, an agent in a terminal."},
                {"role": "system", "content": f"<env>\n{ENVIRONMENT}\n</env>"},
                *messages,
            ],
        }

    first = {"role": "user", "content": [{"type": "text", "text": "what does main.py do?"}]}
    calls = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Read it first.",
        "tool_calls": [
            function_call("1", "read", file_path="/repo/main.py"),
            function_call("2", "bash", command="wc -l main.py"),
        ],
    }
    results = [
        {"role": "tool", "tool_call_id": "call_1", "content": LONG},
        {"role": "tool", "tool_call_id": "call_2", "content": "40 main.py"},
    ]
    late = {"role": "developer", "content": "The user has switched to plan mode."}
    done = {"role": "assistant", "content": [{"type": "text", "text": "It adds numbers."}]}
    after = [{"role": "user", "content": "thanks."}, {"role": "user", "content": "plan a test"}]
    return [
        body(first),
        body(first, calls, *results),
        body(first, calls, *results, done, *after),
        body(first, calls, *results, done, *after, late),
    ]


def function_call(number: str, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


# --- Codex: OpenAI's responses -------------------------------------------------------------


def codex() -> list[Body]:
    def body(*items: Any) -> Body:
        return {
            "model": "fake",
            "instructions": "You are Codex, a coding agent running in a terminal.",
            "input": list(items),
            "tools": [
                {
                    "type": "function",
                    "name": "shell",
                    "description": "Runs a shell command.",
                    "strict": False,
                    "parameters": parameters(
                        command={"type": "array", "items": {"type": "string"}},
                        timeout_ms={"type": "number"},
                    ),
                },
                {
                    "type": "custom",
                    "name": "apply_patch",
                    "description": "Edits files.",
                    "format": {
                        "type": "grammar",
                        "syntax": "lark",
                        "definition": 'start: "*** Begin Patch" LF',
                    },
                },
                {
                    "type": "namespace",
                    "name": "multi_agent_v1",
                    "description": "Tools for sub-agents.",
                    "tools": [
                        {
                            "type": "function",
                            "name": "spawn_agent",
                            "description": "Starts an agent.",
                            "strict": False,
                            "parameters": parameters(message={"type": "string"}),
                        }
                    ],
                },
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "client_metadata": {"x-codex-installation-id": "0199-machine"},
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199-session",
            "text": {"verbosity": "medium"},
            "max_output_tokens": 200,
        }

    def said(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    first = [
        said("developer", "<permissions>read-only sandbox</permissions>"),
        said("user", f"<environment_context>\n{ENVIRONMENT}\n</environment_context>"),
        said("user", "make the tests pass"),
    ]
    arguments = json.dumps({"command": ["bash", "-lc", "pytest -q"], "timeout_ms": 1000})
    turn = [
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Run the tests."}],
            "content": None,
            "encrypted_content": "gAAAAABo-of-another-server",
        },
        {"type": "function_call", "name": "shell", "arguments": arguments, "call_id": "call_1"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": json.dumps({"output": LONG, "metadata": {"exit_code": 1}}),
        },
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_2",
            "name": "apply_patch",
            "input": "*** Begin Patch\n*** Update File: main.py\n+x = 1\n*** End Patch\n",
        },
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Success."},
    ]
    done = [said("assistant", "The tests pass now."), said("user", "explain the change")]
    return [body(*first), body(*first, *turn), body(*first, *turn, *done)]


AGENTS: dict[str, tuple[str, list[Body]]] = {
    "claude code": ("/v1/messages", claude_code()),
    "opencode": ("/v1/chat/completions", opencode()),
    "codex": ("/v1/responses", codex()),
}
