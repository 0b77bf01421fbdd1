"""Settings: what of them reaches a request, what is refused, what is kept; the live view."""

from fake_chat import Answer
from page_actions import ask, idle, open_settings, until

VALUES = {
    "Temperature": "0.5",
    "Max tokens": "64",
    "Top p": "0.9",
    "Top k": "40",
    "Min p": "0.05",
    "Seed": "7",
    "Presence penalty": "0.2",
    "Frequency penalty": "-0.3",
    "Repetition penalty": "1.1",
}
FIELDS = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")


def fill(page, values):
    open_settings(page)
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)


def test_nothing_is_sent_by_default(page, server):
    ask(page, "Hello", "An answer.")
    assert set(server.last) == {"model", "messages", "stream", "stream_options"}


def test_settings_reach_the_request(page, server):
    fill(page, {**VALUES, "System prompt": "Be brief.", "Stop at": "END\n###"})
    page.get_by_label("Reasoning", exact=True).select_option("Off")
    ask(page, "Hello", "An answer.")
    sent = server.last
    assert {name: sent[name] for name in FIELDS} == {
        "temperature": 0.5,
        "max_tokens": 64,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 7,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
    }
    assert sent["repetition_penalty"] == 1.1
    assert sent["stop"] == ["END", "###"]
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def test_settings_are_kept_and_reset(page, server):
    fill(page, {"Temperature": "0.5", "Stop at": "END"})
    page.reload()
    assert page.get_by_label("Temperature", exact=True).input_value() == "0.5"
    page.get_by_role("button", name="Back to the server's defaults").click()
    ask(page, "Hello", "An answer.")
    assert "temperature" not in server.last
    assert "stop" not in server.last


def test_a_value_that_is_not_allowed(page, server):
    fill(page, {"Top p": "1.5"})
    assert page.get_by_label("Top p", exact=True).get_attribute("aria-invalid") == "true"
    page.get_by_text("Give 1 or less.").wait_for()
    ask(page, "Hello")
    assert page.evaluate("document.activeElement.name") == "top_p"
    assert server.requests == []
    assert page.get_by_role("textbox", name="Message", exact=True).input_value() == "Hello"


def test_several_models(new_page, server):
    server.models = ["first", "org/second"]
    page = new_page()
    page.get_by_label("Model", exact=True).select_option("second")
    ask(page, "Hello", "An answer.")
    assert server.last["model"] == "org/second"


def test_the_live_view(page, server):
    live = page.get_by_role("tabpanel", name="Live")
    live.get_by_text("413").first.wait_for()
    assert page.locator("#running").inner_text() == "3"
    assert page.locator("#waiting").inner_text() == "1"
    cache = live.get_by_role("meter", name="Cache")
    assert cache.get_attribute("aria-valuenow") == "40"
    assert cache.get_attribute("aria-valuetext") == "3.2 GiB of 8.0 GiB"
    assert page.locator("#requests tr").count() == 5
    server.stats["tokens_per_s"]["generation"] = 99.5
    until(lambda: page.locator("#rate").inner_text() == "99.5")
    assert "now 99.5, highest 413" in page.get_by_role("img").get_attribute("aria-label")


def test_the_live_view_before_anything_is_known(new_page, server):
    server.stats = {"healthy": True, "memory": {"weights": None, "cache": None, "swap": None}}
    page = new_page()
    page.get_by_text("Ready").wait_for()
    assert page.locator("#rate").inner_text() == "–"
    page.get_by_text("None yet.").wait_for()


def test_an_engine_that_is_not_healthy(page, server):
    page.get_by_text("Ready").wait_for()
    server.stats["healthy"] = False
    page.get_by_text("Not healthy").wait_for()


def test_polling_rests_while_the_page_is_hidden(page, server):
    page.get_by_text("Ready").wait_for()
    asked = []
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.wait_for_timeout(1200)
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1500)
    assert asked == []


def left_below(page):
    """Pixels of the conversation below what is seen."""
    thread = page.locator("#thread")
    return thread.evaluate("node => node.scrollHeight - node.scrollTop - node.clientHeight")


def test_an_answer_in_a_long_conversation_is_followed_until_one_scrolls(page, server):
    server.answers.append(Answer(["A line.\n\n"] * 60))
    ask(page, "Many lines", "A line.")
    until(lambda: left_below(page) < 5)
    server.answers.append(Answer(["More.\n\n"] * 60, pause=0.02))
    ask(page, "More lines")
    page.get_by_text("More.").first.wait_for()
    page.mouse.move(600, 400)
    page.mouse.wheel(0, -600)
    page.get_by_role("button", name="To the end").wait_for()
    idle(page)
    assert left_below(page) > 400
    page.get_by_role("button", name="To the end").click()
    until(lambda: left_below(page) < 5)
