"""Messages to prompts, and tokens to text, reasoning and tool calls. Pure: no mlx, no threads.

prompt/    messages -> a prompt's tokens
reply/     a reply's tokens -> events
calls/     tool calls in a reply's text; parsers/ has one file for each format
grammar/   which replies are valid, as grammars
"""
