"""The page against the real server, over a tiny model with random weights."""

import json
import time

import pytest
from http_server import running
from page_actions import ask, box, idle, messages, open_settings, until


def never_ends(route):
    """Have the model go on where it would end by itself, which a random one does when it likes."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))


def slow_down(engine):
    """Some 100 steps a second: a test has time to look, and to press a key."""
    step = engine.step

    def slow_step():
        time.sleep(0.01)
        return step()

    engine.step = slow_step


@pytest.fixture(scope="module")
def real():
    with running() as made:
        yield made


@pytest.fixture
def page(new_page, real):
    return new_page(real.url)


def set_fields(page, **values):
    open_settings(page)
    for label, value in values.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)


def test_a_conversation(page, real):
    set_fields(page, Max_tokens="12", Seed="3")
    page.route("**/v1/chat/completions", never_ends)
    ask(page, "Hello")
    page.get_by_text("12 tokens").wait_for()
    idle(page)
    page.get_by_role("button", name="Answer again").click()
    page.get_by_text("2/2").wait_for()
    idle(page)
    second = messages(page)[-1]
    page.get_by_role("button", name="Version before").click()
    assert messages(page)[-1] == second  # the same seed
    page.get_by_role("tab", name="Live").click()
    until(lambda: page.locator("#requests tr.state-length").count() >= 2)
    assert page.locator("#requests tr").first.locator("td").first.inner_text().endswith("→ 12")
    for name in ("Weights", "Cache"):
        assert "iB" in page.get_by_role("meter", name=name).get_attribute("aria-valuetext")


def test_stop_frees_the_blocks(page, real):
    before = real.free_blocks()
    set_fields(page, Max_tokens="400")
    page.route("**/v1/chat/completions", never_ends)
    real.call(slow_down)
    ask(page, "Go on and on")
    until(lambda: page.locator(".message.assistant > .text").inner_text() != "")
    page.keyboard.press("Escape")
    page.locator(".message-note").filter(has_text="Stopped.").wait_for()
    real.wait_idle()
    assert real.free_blocks() == before
    real.call(lambda engine: vars(engine).pop("step"))
    page.get_by_role("tab", name="Live").click()
    until(lambda: page.locator("#requests tr").first.get_attribute("class") == "state-abort")


def test_continue(page, real):
    set_fields(page, Max_tokens="8", Temperature="0")
    page.route("**/v1/chat/completions", never_ends)
    ask(page, "Hello")
    page.get_by_text("8 tokens").wait_for()
    first = messages(page)[-1][1]
    page.get_by_role("button", name="Continue").click()
    idle(page)
    assert page.locator(".notice").count() == 0
    until(lambda: len(messages(page)[-1][1]) > len(first))


def test_a_prompt_too_long(page, real):
    ask(page, "word " * 2000)
    page.get_by_text("The conversation is too long").wait_for()
    page.get_by_role("button", name="New conversation").last.click()
    assert box(page).input_value() == ""


def test_a_server_with_a_key(new_page):
    with running(api_key="secret") as real:
        page = new_page(real.url)
        page.get_by_role("dialog").get_by_label("Key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        page.get_by_text("Ready").wait_for()
        ask(page, "Hello")
        page.locator(".message-note").wait_for()
        assert messages(page)[-1][0] == "assistant"
