"""What a user does on the page, and what is to be seen on it."""

from __future__ import annotations

import time


def box(page):
    """The message box."""
    return page.get_by_role("textbox", name="Message", exact=True)


def ask(page, text, answer=None):
    """Send a message; with `answer`, wait until that text is shown and the answer has ended."""
    box(page).fill(text)
    box(page).press("Enter")
    if answer is not None:
        answered(page, answer)


def answered(page, text):
    """Wait until the last answer has this text in it and has ended."""
    page.locator(".message.assistant > .text").last.filter(has_text=text).wait_for()
    idle(page)


def idle(page):
    """Wait until no answer is under way."""
    page.get_by_role("button", name="Send", exact=True).wait_for()


def messages(page):
    """(role, text) of each message that is shown."""
    found = page.locator("#messages > li").all()
    return [
        ("user" if "user" in item.get_attribute("class") else "assistant", item.locator("> .text").inner_text())
        for item in found
    ]


def open_settings(page):
    """Show the settings."""
    page.get_by_role("tab", name="Settings").click()


def until(condition, seconds=15.0):
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come about"
        time.sleep(0.02)
