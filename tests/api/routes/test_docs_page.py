"""/docs without internet access: every route is there, nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import shlex
import subprocess

import httpx

from firn.api.http.auth import Keys
from firn.api.routes.docs_page import render
from tests.api.live import Live, serve


def test_the_page_names_every_route(shared_live: Live) -> None:
    spec = httpx.get(f"{shared_live.url}/openapi.json").json()
    page = httpx.get(f"{shared_live.url}/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    shown = re.findall(r"<h2><code>(\w+) (.*?)</code></h2>", page.text)
    described = [(m.upper(), path) for path, methods in spec["paths"].items() for m in methods]
    assert sorted(shown) == sorted(described)
    assert len(shown) > 30


def test_the_page_loads_nothing(shared_live: Live) -> None:
    page = httpx.get(f"{shared_live.url}/docs")
    assert not re.search(r"<script|<link|<img|@import|url\(|\bsrc=", page.text)
    assert re.findall(r'href="([^"]*)"', page.text) == ["/openapi.json"]
    # A browser applies the style only if the policy has its hash.
    (style,) = re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in page.headers["content-security-policy"]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(f"{shared_live.url}/redoc").status_code == 404


def test_its_examples_work_as_they_are() -> None:
    with serve(keys=Keys(["secret"])) as live:
        headers = {"authorization": "Bearer secret"}
        page = httpx.get(f"{live.url}/docs", headers=headers).text
        commands = [
            html.unescape(text) for text in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
        ]
        (chat,) = [c for c in commands if "/v1/chat/completions" in c]
        argv = shlex.split(chat.replace("\\\n", " ").replace("KEY", "secret"))
        answer = subprocess.run([*argv, "-s"], capture_output=True, text=True, check=True)
        assert '"chat.completion"' in answer.stdout


def test_texts_of_a_schema_are_escaped() -> None:
    spec = {
        "info": {"title": "<b>", "version": "1"},
        "paths": {
            "/x/{<i>}": {
                "post": {
                    "summary": "a < b",
                    "requestBody": {
                        "content": {
                            "application/json": {
                                "schema": {
                                    "required": ["t"],
                                    "properties": {
                                        "t": {
                                            "type": ["number", "null"],
                                            "minimum": 0,
                                            "maximum": 2,
                                        },
                                        "k": {"enum": ["a", None], "description": "one & all"},
                                    },
                                    "example": {"t": "it's"},
                                }
                            }
                        }
                    },
                }
            }
        },
    }
    page = render(spec, base_url="http://here")
    assert "<b>" not in page
    assert "<i>" not in page
    assert "a &lt; b" in page
    assert "<td>number</td><td>required; at least 0; at most 2</td>" in page
    assert "<td>&quot;a&quot;</td><td>one &amp; all</td>" in page
    assert html.escape("""-d '{"t": "it'\\''s"}'""") in page
