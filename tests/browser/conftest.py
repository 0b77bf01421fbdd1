"""Chromium for the tests of the page. Without Playwright or a Chromium they are skipped, or fail if
QENGINE_REQUIRE_BROWSER=1 (`make test-browser`).

The Chromium is, in this order: QENGINE_CHROMIUM, one that is installed (`apt-get install chromium`), Playwright's own
(`playwright install chromium`).
"""

import os
import shutil

import pytest

pytest.importorskip("fastapi")

from fake_chat import FakeChat, serving

NAMES = ("chromium", "chromium-browser", "google-chrome")


def absent(why):
    if os.environ.get("QENGINE_REQUIRE_BROWSER") == "1":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def browser():
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        absent("no Playwright: pip install 'qengine[browser]'")
    path = os.environ.get("QENGINE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            absent(f"no Chromium: apt-get install chromium, or playwright install chromium ({error.message[:100]})")
        yield chromium
        chromium.close()


@pytest.fixture
def server():
    fake = FakeChat()
    with serving(fake.app) as fake.url:
        yield fake


@pytest.fixture
def new_page(browser, server):
    """Makes pages of one browser context each. Whatever goes wrong in their scripts fails the test."""
    contexts, wrong = [], []

    def make(url=None, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(15_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: "Content Security Policy" in message.text and wrong.append(message.text))
        page.goto(url or server.url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="session")
def violations():
    """What axe-core finds wrong with a page: (rule, impact, where)."""
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        absent("no axe-core: pip install 'qengine[browser]'")

    def run(page):
        found = Axe().run(page).response["violations"]
        return [(item["id"], item["impact"], [node["html"][:120] for node in item["nodes"]]) for item in found]

    return run


@pytest.fixture
def page(new_page):
    return new_page()
