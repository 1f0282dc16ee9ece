"""The page at / as a program sees it: who gets it, what it may do, what it consists of."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

import firn
from firn.api.http.auth import Keys
from firn.api.observe.dashboard import read_files, wants_page
from firn.api.services import PageOptions
from tests.api.live import Live, serve

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(scope="module")
def keyed() -> Iterator[Live]:
    with serve(keys=Keys(["alice"])) as live:
        yield live


def test_a_browser_gets_the_page_and_a_program_the_name(shared_live: Live) -> None:
    page = httpx.get(shared_live.url, headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert '<script type="module" src="page/app.js">' in page.text
    for headers in ({}, {"accept": "application/json"}, {"accept": "application/json, text/html"}):
        assert httpx.get(shared_live.url, headers=headers).json()["name"] == "firn"
    assert httpx.head(shared_live.url, headers=BROWSER).status_code == 200
    assert "accept" in page.headers["vary"]


@pytest.mark.parametrize("path", ["/v1", "/v1/"])
def test_the_address_of_the_api_opened_in_a_browser_leads_to_the_page(
    keyed: Live, path: str
) -> None:
    page = httpx.get(keyed.url + path, headers=BROWSER, follow_redirects=True)
    assert page.status_code == 200
    assert str(page.url) == f"{keyed.url}/"
    assert httpx.get(keyed.url + path).json()["name"] == "firn"


@pytest.mark.parametrize(
    ("accept", "page"),
    [
        ("text/html", True),
        (BROWSER["accept"], True),
        ("text/html;q=0.9, application/json", True),
        ("application/json, text/html", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_browsers_get_the_page_by_their_accept_header(accept: str, page: bool) -> None:
    assert wants_page(accept) is page


def test_the_page_may_reach_only_this_server(shared_live: Live) -> None:
    for path in ("/", "/page/app.js"):
        headers = httpx.get(f"{shared_live.url}{path}", headers=BROWSER).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_its_files_have_no_inline_script_and_name_no_other_host() -> None:
    files = read_files()
    page = files["index.html"].body.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)
    for name, file in files.items():
        if name.startswith("vendor/"):
            continue
        text = file.body.decode()
        links = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert links <= {"http://www.w3.org/2000/svg"}, name
        assert "innerHTML" not in text
        assert "style=" not in text, f"{name}: the policy has no inline styles"
        for target in re.findall(r"from \"\./([^\"]+)\"", text):
            assert target in files, f"{name} imports {target}"


def test_the_files_are_few_and_small_and_come_with_their_licences() -> None:
    files = read_files()
    assert len(files) <= 20
    assert sum(len(file.body) for file in files.values()) < 150_000
    vendor = firn.__path__[0] + "/dashboard/vendor"
    for name in ("LICENSE-htm.txt", "LICENSE-preact.txt"):
        with open(f"{vendor}/{name}", encoding="utf-8") as licence:
            assert "Copyright" in licence.read()


def test_a_file_that_a_browser_has_is_not_sent_again(shared_live: Live) -> None:
    url = f"{shared_live.url}/page/style.css"
    first = httpx.get(url)
    assert first.headers["content-type"].startswith("text/css")
    again = httpx.get(url, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("/page/", "/page/nothing.js", "/page/vendor/LICENSE-htm.txt", "/page/../auth.py"):
        assert httpx.get(shared_live.url + path).status_code == 404


def test_the_page_needs_no_key_but_its_data_does(keyed: Live) -> None:
    for path in ("/", "/page/app.js"):
        assert httpx.get(keyed.url + path, headers=BROWSER).status_code == 200
    for path in ("/v1/activity", "/v1/models", "/v1/cache/tree"):
        assert httpx.get(keyed.url + path, headers=BROWSER).status_code in (401, 404)
    assert httpx.get(f"{keyed.url}/v1/models").status_code == 401


def test_without_the_dashboard_the_root_gives_name_and_version() -> None:
    with serve(page=PageOptions(served=False)) as live:
        assert httpx.get(live.url, headers=BROWSER).json()["name"] == "firn"
        assert httpx.get(f"{live.url}/page/app.js").status_code == 404
