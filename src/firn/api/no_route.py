"""What a client is told whose path is no route here: most often its base URL is a little off.

Clients of OpenAI's API want an address that ends in /v1, those of Anthropic's and Ollama's want
one that does not.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import BaseRoute, Match

SEVERAL_MODELS = ("/api/pull", "/api/delete", "/api/copy", "/api/create")


def no_route(routes: list[BaseRoute], request: Request) -> str:
    method, path = request.method, request.url.path
    missing = f"There is no {method} {path} here"
    for meant in _spellings(path):
        if meant != path and _is_served(routes, request, meant):
            return f"{missing}; {meant} is: check the base URL that the client was given."
    if path in SEVERAL_MODELS:
        return f"{missing}: this server serves one model. One with --models-dir downloads others."
    return f"{missing}."


def _spellings(path: str) -> list[str]:
    """The path with one slash between words, below one /v1 or none."""
    words = [word for word in path.split("/") if word]
    while words[:1] == ["v1"]:
        words = words[1:]
    rest = "/" + "/".join(words)
    return ["/v1" + rest, rest]


def _is_served(routes: list[BaseRoute], request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path, "raw_path": path.encode()}
    return any(route.matches(scope)[0] is Match.FULL for route in routes)
