"""The dashboard at /: a few files, read once, with headers that let them reach only this server.

A browser gets the page. A client that asks for JSON, or for nothing in particular, is a program and gets
name and version. The files are the same for everybody; the page asks for its data with the user's key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from firn import __version__
from firn.api.http.errors import HttpFault
from firn.api.http.layers import PAGE_FILES

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No inline scripts or styles, nothing loaded from or sent to elsewhere, no frame in another page."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    kind: str
    tag: str
    """The ETag: a browser that has this content need not load it again."""

    def response(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.kind, headers=headers)


def read_files() -> Mapping[str, PageFile]:
    """The files of the page, by path relative to its folder."""
    files: dict[str, PageFile] = {}
    folders = [("", resources.files("firn") / "dashboard")]
    while folders:
        prefix, folder = folders.pop()
        for entry in folder.iterdir():
            suffix = entry.name.rpartition(".")[2]
            if entry.is_dir():
                folders.append((f"{prefix}{entry.name}/", entry))
            elif suffix in TYPES:
                body = entry.read_bytes()
                tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
                files[prefix + entry.name] = PageFile(body, TYPES[suffix], tag)
    return files


def add_page(app: FastAPI, *, shown: bool) -> None:
    """Add /, and the page's files below /page/. If not `shown`, / returns only name and version."""
    files = read_files() if shown else {}

    async def root(request: Request) -> Response:
        page = files.get("index.html")
        if page is not None and wants_page(request.headers.get("accept", "")):
            response = page.response(request)
        else:
            identity = {"name": "firn", "version": __version__, "api": "/v1", "docs": "/docs"}
            response = JSONResponse(identity)
        response.headers["vary"] = "accept"
        return response

    async def api(request: Request) -> Response:
        """The address of the API, opened in a browser."""
        if not files or not wants_page(request.headers.get("accept", "")):
            return await root(request)
        up = "../" if request.url.path.endswith("/") else "./"
        return RedirectResponse(up, headers={"vary": "accept"})

    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise HttpFault(404, f"There is no {request.method} {request.url.path} here.")
        return files[name].response(request)

    schema: dict[int | str, dict[str, Any]] = {
        200: {
            "description": "Name and version; in a browser, the dashboard.",
            "content": {"text/html": {"schema": {"type": "string"}}},
        }
    }
    for method in ("GET", "HEAD"):  # agents and load balancers probe with HEAD
        add = partial(app.add_api_route, methods=[method])
        add(
            "/",
            root,
            summary="Name and version; in a browser, the dashboard",
            responses=schema,
            include_in_schema=method == "GET",
        )
        for path in ("/v1", "/v1/"):
            add(
                path,
                api,
                summary="Name and version; a browser is led to the dashboard",
                responses=schema,
                include_in_schema=method == "GET",
            )
        add(PAGE_FILES + "{name:path}", file, include_in_schema=False)


def wants_page(accept: str) -> bool:
    """Whether a browser asks: it wants text/html first, while programs want JSON or anything."""
    kinds = [kind.partition(";")[0].strip().lower() for kind in accept.split(",")]
    html, json = (kinds.index(k) if k in kinds else None for k in ("text/html", "application/json"))
    return html is not None and (json is None or html < json)
