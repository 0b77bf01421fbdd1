"""Keyboard alone, screen readers, phone width, light and dark."""

import pytest
from fake_chat import Answer
from page_actions import answered, ask, box, idle, messages, open_settings, until

TEXT = "Words [a link](https://a.example).\n\n```python\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n# Title"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def tab_to(page, name, limit=40):
    """Press Tab until the focus is on a control of this name."""
    for _ in range(limit):
        page.keyboard.press("Tab")
        found = page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText")
        if found.strip() == name:
            return
    raise AssertionError(f"Tab does not reach {name}")


def focused(page):
    return page.evaluate("document.activeElement.id")


def test_keyboard_alone(page, server):
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert focused(page) == "message"
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    answered(page, "An answer.")
    assert server.last["messages"][-1]["content"] == "Hello\nthere"
    assert focused(page) == "message"
    page.keyboard.press("ArrowUp")
    page.keyboard.type("!")
    page.keyboard.press("Enter")
    until(lambda: len(server.requests) == 2)
    idle(page)
    assert server.last["messages"][-1]["content"] == "Hello\nthere!"
    page.keyboard.press("Tab")
    tab_to(page, "Live")
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Settings").get_attribute("aria-selected") == "true"
    for wanted in ("settings", "setting-system", "setting-temperature"):
        page.keyboard.press("Tab")
        assert focused(page) == wanted


def test_the_focus_is_not_lost(page, server):
    ask(page, "Hello", "An answer.")
    page.get_by_role("button", name="Answer again").focus()
    page.keyboard.press("Enter")
    until(lambda: len(server.requests) == 2)
    idle(page)
    assert focused(page) == "message"
    page.get_by_role("button", name="Version before").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.title") == "Version after"
    page.get_by_role("button", name="Edit and send again").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.title") == "Edit and send again"
    page.get_by_role("button", name="Delete: Hello").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.title") == "Delete: Hello"


def test_the_focus_is_seen(page):
    for _ in range(6):
        page.keyboard.press("Tab")
        style = page.evaluate(
            "(({outlineStyle, outlineWidth}) => [outlineStyle, outlineWidth])(getComputedStyle(document.activeElement))"
        )
        assert style[0] != "none", page.evaluate("document.activeElement.outerHTML.slice(0, 120)")
        assert style[1] != "0px"


def test_enter_that_ends_a_composition_does_not_send(page, server):
    box(page).fill("にほん")
    box(page).evaluate("""node => node.dispatchEvent(
        new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true, cancelable: true }))""")
    page.wait_for_timeout(100)
    assert server.requests == []


def test_a_screen_reader_hears_sentences(page, server):
    first = "This is the first sentence of a long answer, which goes on for quite a while until it ends here."
    server.answers.append(Answer([*(first + " And then a short one.").split(" ")], pause=0.005))
    server.answers[0].pieces = [word + " " for word in server.answers[0].pieces]
    page.evaluate("""() => {
        window.heard = [];
        const hear = (change) => change.addedNodes.forEach((node) => window.heard.push(node.textContent));
        const announcer = document.querySelector('#announcer');
        new MutationObserver((changes) => changes.forEach(hear)).observe(announcer, { childList: true });
    }""")
    ask(page, "Go on", "And then a short one.")
    until(lambda: len(page.evaluate("window.heard")) == 3)
    assert page.evaluate("window.heard") == [first, "And then a short one.", "The answer is complete."]
    assert page.locator("#messages").get_attribute("aria-live") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_nothing(new_page, server, violations, scheme, width):
    page = new_page(color_scheme=scheme, reduced_motion="reduce", viewport={"width": width, "height": 800})
    page.get_by_text("Ready").wait_for(state="attached")
    assert violations(page) == []
    server.answers.append(Answer([("It thinks.", ""), TEXT]))
    ask(page, "Show it", "Words")
    page.get_by_text("Reasoning", exact=True).first.click()
    page.locator(".message.user").hover()
    assert violations(page) == []
    server.answers.append(Answer.refusal(429, "too many", retry_after=60))
    ask(page, "Again")
    page.locator(".notice").wait_for()
    assert violations(page) == []
    if width == 360:
        page.get_by_role("button", name="Live view and settings").click()
        assert violations(page) == []
    open_settings(page)
    page.get_by_label("Top p", exact=True).fill("2")
    assert violations(page) == []


def test_the_key_dialog_is_accessible(new_page, server, violations):
    server.api_key = "secret"
    page = new_page()
    page.get_by_role("dialog", name="API key").wait_for()
    assert violations(page) == []
    assert focused(page) == "key"


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


def test_phone_width(new_page, server):
    page = new_page(**PHONE)
    server.answers.append(Answer([TEXT + "\n\n" + "unbreakable" * 20 + "\n\n```\n" + "long " * 60 + "\n```"]))
    ask(page, "x" * 200, "Words")
    assert not overflow(page)
    for element in page.locator("#thread .text, #composer, #top button").all():
        frame = element.bounding_box()
        assert frame["x"] >= 0
        assert frame["x"] + frame["width"] <= 360.5
    page.get_by_role("button", name="Conversations").tap()
    assert page.get_by_role("button", name="New conversation").is_visible()
    assert not overflow(page)
    page.keyboard.press("Escape")
    assert focused(page) == "toggle-sidebar"
    page.get_by_role("button", name="Live view and settings").tap()
    assert page.get_by_role("tab", name="Live").is_visible()
    assert page.locator("#chat").evaluate("node => node.inert")
    assert not overflow(page)
    page.locator("#panel").get_by_role("button", name="Close").tap()
    assert messages(page)[0] == ("user", "x" * 200)


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_and_light(new_page):
    light, dark = new_page(color_scheme="light"), new_page(color_scheme="dark")
    assert background(light) == "rgb(250, 249, 247)"
    assert background(dark) == "rgb(24, 24, 22)"
    for wanted in ("rgb(250, 249, 247)", "rgb(24, 24, 22)"):
        dark.get_by_role("button", name="Colors").click()
        assert background(dark) == wanted
    light.get_by_role("button", name="Colors").click()
    light.get_by_role("button", name="Colors").click()
    light.reload()
    assert background(light) == "rgb(24, 24, 22)"


def test_200_percent_zoom(new_page, server):
    """A window of 1280 pixels at 400 % is 320 wide: nothing is cut off."""
    page = new_page(viewport={"width": 320, "height": 256})
    ask(page, "Hello", "An answer.")
    assert not overflow(page)
    assert box(page).is_visible()
