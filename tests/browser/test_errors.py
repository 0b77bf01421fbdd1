"""What the page says when something fails, and the way out it offers."""

from fake_chat import Answer, serving
from page_actions import answered, ask, box, idle, messages, until


def alert(page):
    return page.locator(".notice[role=alert]")


def test_busy_is_tried_again_by_itself(page, server):
    server.answers.append(Answer.refusal(429, "8 requests are under way", retry_after=1))
    ask(page, "Hello", "An answer.")
    assert len(server.requests) == 2
    assert alert(page).count() == 0
    assert len(messages(page)) == 2


def test_waiting_can_be_called_off(page, server):
    server.answers.append(Answer.refusal(429, "8 requests are under way", retry_after=1))
    ask(page, "Hello")
    alert(page).get_by_text("The server is busy").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_timeout(1300)
    assert len(server.requests) == 1
    page.get_by_role("button", name="Try again").click()
    answered(page, "An answer.")


def test_a_conversation_too_long(page, server):
    message = "the prompt has 9000 tokens, the context is 8192"
    server.answers.append(Answer.refusal(400, message, code="context_length_exceeded"))
    ask(page, "Hello")
    alert(page).get_by_text("The conversation is too long").wait_for()
    assert f"{message.capitalize()}. Start" in alert(page).inner_text()
    page.get_by_role("button", name="Open settings").click()
    assert page.evaluate("document.activeElement.name") == "max_tokens"
    alert(page).get_by_role("button", name="New conversation").click()
    assert messages(page) == []


def test_a_refused_setting_is_shown(page, server):
    server.answers.append(Answer.refusal(400, "top_k=-5 is not allowed", param="top_k"))
    ask(page, "Hello")
    page.get_by_role("button", name="Open settings").click()
    assert page.evaluate("document.activeElement.name") == "top_k"


def test_the_server_fails(page, server):
    server.answers.append(Answer.refusal(500, "an internal error"))
    ask(page, "Hello")
    alert(page).get_by_text("The server failed").wait_for()
    assert "An internal error." in alert(page).inner_text()


def test_an_error_within_the_stream(page, server):
    server.answers.append(Answer(["Half of "], error={"message": "the engine ended"}))
    ask(page, "Hello")
    alert(page).get_by_text("The engine ended.").wait_for()
    assert messages(page)[-1] == ("assistant", "Half of")


def test_the_connection_breaks_off(page, server):
    server.answers.append(Answer(["Half of "], break_off=True))
    ask(page, "Hello")
    alert(page).get_by_text("The answer broke off").wait_for()
    assert messages(page)[-1] == ("assistant", "Half of")
    page.get_by_role("button", name="Try again").click()
    idle(page)
    until(lambda: messages(page)[-1] == ("assistant", "An answer."))


def test_the_server_is_gone_and_comes_back(new_page, server):
    with serving(server.app) as url:
        page = new_page(url)
        page.get_by_text("Ready").wait_for()
    ask(page, "Hello")
    alert(page).get_by_text("The server does not answer").wait_for()
    page.get_by_text("No answer", exact=True).wait_for()
    with serving(server.app, port=int(url.rpartition(":")[2])):
        page.get_by_text("Ready").wait_for()
        page.get_by_role("button", name="Try again").click()
        answered(page, "An answer.")


def test_a_key_is_asked_for(new_page, server):
    server.api_key = "secret"
    page = new_page()
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key", exact=True).fill("wrong")
    dialog.get_by_role("button", name="Use the key").click()
    dialog.get_by_text("The server does not know this key.").wait_for()
    dialog.get_by_label("Key", exact=True).fill("secret")
    dialog.get_by_role("button", name="Use the key").click()
    dialog.wait_for(state="hidden")
    ask(page, "Hello", "An answer.")
    page.reload()
    ask(page, "Still there?", "An answer.")
    kept = page.evaluate("[Object.values(localStorage), Object.values(sessionStorage)].map(String)")
    assert "secret" not in kept[0]
    assert "secret" in kept[1]


def test_the_key_dialog_can_be_left_and_found_again(new_page, server):
    server.api_key = "secret"
    page = new_page()
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_role("button", name="Cancel").click()
    ask(page, "Hello")
    page.get_by_role("button", name="Enter the API key").click()
    dialog.get_by_label("Key", exact=True).fill("secret")
    dialog.get_by_label("Keep it in this browser").check()
    page.keyboard.press("Enter")
    answered(page, "An answer.")
    assert "secret" in page.evaluate("String(Object.values(localStorage))")
    page.get_by_role("tab", name="Settings").click()
    page.get_by_role("button", name="Forget it").click()
    assert "secret" not in page.evaluate("String(Object.values(localStorage))")


def test_full_storage_is_said(page):
    page.evaluate("void (Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); })")
    ask(page, "Hello", "An answer.")
    page.get_by_text("The browser has no room for this conversation").wait_for()
    assert box(page).is_enabled()
