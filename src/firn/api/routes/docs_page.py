"""/docs: the routes of /openapi.json as one plain page.

FastAPI's own page loads scripts from the internet, and stays empty on a machine that is offline.
This one is rendered on the server and has no scripts at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response

from firn.core.bounds import INT_MAX

CURL_KEY = " -H 'authorization: Bearer KEY'"
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1rem; margin: 2rem 0 0; border-top: 1px solid #8884; padding-top: 1rem }
code, pre { font: 13px/1.5 ui-monospace, monospace }
pre { overflow-x: auto; background: #8881; padding: .5rem }
p { margin: .25rem 0 }
td { vertical-align: top; padding: 0 1rem 0 0 }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_docs(app: FastAPI) -> None:
    async def docs(request: Request) -> Response:
        page = render(app.openapi(), base_url=str(request.base_url).rstrip("/"))
        return Response(page, media_type="text/html; charset=utf-8", headers=HEADERS)

    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)


def render(spec: Mapping[str, Any], *, base_url: str) -> str:
    """The page for this OpenAPI description. base_url: of the server, for the examples."""
    curl = f"curl{CURL_KEY if 'security' in spec else ''} {base_url}"
    title = escape(f"{spec['info']['title']} {spec['info']['version']}")
    routes = [
        _route(method.upper(), path, operation, curl)
        for path, methods in sorted(spec["paths"].items())
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        f'<p>For programs: <a href="/openapi.json">/openapi.json</a>.</p>'
        f"{''.join(routes)}</body></html>"
    )


def _route(method: str, path: str, operation: Mapping[str, Any], curl: str) -> str:
    head = f"<h2><code>{method} {escape(path)}</code></h2><p>{escape(operation.get('summary', ''))}</p>"
    rows = "".join(
        _row(f"{parameter['name']} ({parameter['in']})", parameter.get("schema", {}), parameter)
        for parameter in operation.get("parameters", ())
    )
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    if schema is None:
        return f"{head}{_table(rows)}"
    rows += "".join(
        _row(name, member, {"required": name in schema.get("required", ())})
        for name, member in schema.get("properties", {}).items()
    )
    return f"{head}{_example(curl + path, schema)}{_table(rows)}"


def _example(curl: str, schema: Mapping[str, Any]) -> str:
    if "example" not in schema:
        return ""
    body = json.dumps(schema["example"], ensure_ascii=False).replace("'", "'\\''")
    command = f"{curl} \\\n  -H 'content-type: application/json' \\\n  -d '{body}'"
    return f"<pre>{escape(command)}</pre>"


def _table(rows: str) -> str:
    return f"<details><summary>Parameters</summary><table>{rows}</table></details>" if rows else ""


def _row(name: str, schema: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    notes = "; ".join((*(["required"] if about.get("required") else []), *_notes(schema)))
    kinds = " or ".join(_kinds(schema))
    cells = (f"<code>{escape(name)}</code>", escape(kinds), escape(notes))
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The JSON types that a value may have."""
    if "enum" in schema:
        return [json.dumps(value) for value in schema["enum"] if value is not None]
    kinds = schema.get("type")
    if kinds is None:
        options = [*schema.get("oneOf", ()), *schema.get("anyOf", ())]
        return list(dict.fromkeys(kind for option in options for kind in _kinds(option)))
    return [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null"]


def _notes(schema: Mapping[str, Any]) -> Iterator[str]:
    if "description" in schema:
        yield schema["description"]
    for key, text in (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
    ):
        if key in schema and abs(schema[key]) < INT_MAX:
            yield f"{text} {schema[key]:g}"
