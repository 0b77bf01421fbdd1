"""How the page's files are served: what may be had, under which headers, and that it needs nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from qengine.server.pages import FILES, router

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def client():
    app = FastAPI()
    app.include_router(router)
    return TestClient(app)


def test_the_page(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>qengine</title>" in answer.text


@pytest.mark.parametrize("path", ["/", "/page/js/app.js", "/page/css/base.css"])
def test_headers(client, path):
    headers = client.get(path).headers
    policy = [part.split() for part in headers["content-security-policy"].split(";")]
    assert ["default-src", "'self'"] in policy
    assert ["require-trusted-types-for", "'script'"] in policy
    assert not {"'unsafe-inline'", "'unsafe-eval'", "*", "data:"} & {word for part in policy for word in part}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_unchanged_files_are_not_sent_again(client):
    first = client.get("/page/js/app.js")
    again = client.get("/page/js/app.js", headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert client.get("/page/js/app.js", headers={"If-None-Match": '"other"'}).content == first.content


def test_head(client):
    answer = client.head("/")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 1000


@pytest.mark.parametrize(
    "name", ["nothing.js", "../pages.py", "%2e%2e/pages.py", "js/../../pages.py", "js", "", "/etc/passwd"]
)
def test_nothing_else_is_served(client, name):
    assert client.get(f"/page/{name}").status_code == 404


def test_all_that_the_page_names_is_there():
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', FILES["index.html"].content.decode()))
    for name, file in FILES.items():
        if name.startswith("js/"):
            named |= {f"js/{other}" for other in re.findall(r'from "\./([^"]+)"', file.content.decode())}
    assert named
    assert named - set(FILES) == set()


def test_nothing_is_fetched_from_elsewhere():
    for name, file in FILES.items():
        if not name.startswith("vendor/"):
            addresses = re.findall(rb"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", file.content)
            assert [address for address in addresses if address != b"http://www.w3.org/2000/svg"] == [], name


def test_no_inline_scripts_or_styles():
    html = FILES["index.html"].content.decode()
    assert "<style" not in html
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"\s(on\w+|style)=", html)


def test_vendored_files_are_those_of_the_list():
    command = [sys.executable, str(ROOT / ".ci" / "vendor_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
