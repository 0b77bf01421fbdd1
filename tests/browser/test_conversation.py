"""Sending, stopping, editing, answering again, and what a reload keeps."""

import pytest
from fake_chat import Answer
from page_actions import answered, ask, box, idle, messages, until

SLOW = {"pieces": ["word "], "endless": True, "pause": 0.01}


def roles(server):
    return [(message["role"], message["content"]) for message in server.last["messages"]]


def test_a_conversation(page, server):
    server.answers.append(Answer(["Paris", " it ", "is."]))
    ask(page, "What is the capital of France?", "Paris it is.")
    assert server.last["model"] == server.models[0]
    assert server.last["stream"] is True
    ask(page, "Thanks", "An answer.")
    assert roles(server) == [
        ("user", "What is the capital of France?"),
        ("assistant", "Paris it is."),
        ("user", "Thanks"),
    ]
    assert [role for role, _ in messages(page)] == ["user", "assistant"] * 2
    assert "2 tokens" in page.locator(".message-note").last.inner_text()


def test_text_appears_while_it_comes(page, server):
    server.answers.append(Answer(**SLOW))
    ask(page, "Go on")
    answer = page.locator(".message.assistant .text")
    until(lambda: answer.inner_text().count("word") > 3)
    early = answer.inner_text().count("word")
    until(lambda: answer.inner_text().count("word") > early + 3)


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_request_on_the_server(page, server, how):
    server.answers.append(Answer(**SLOW))
    ask(page, "Go on")
    page.get_by_text("word word").wait_for()
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    until(lambda: server.aborted == 1)
    idle(page)
    kept = messages(page)[-1][1]
    assert "Stopped." in page.locator(".message-note").inner_text()
    page.wait_for_timeout(150)
    assert messages(page)[-1][1] == kept


def test_a_stopped_answer_is_continued(page, server):
    server.answers.append(Answer(["Once upon "], pause=0.02, finish="length"))
    ask(page, "A tale", "Once upon")
    server.answers.append(Answer(["a time."]))
    page.get_by_role("button", name="Continue").click()
    answered(page, "Once upon a time.")
    assert server.last["continue_final_message"] is True
    assert server.last["add_generation_prompt"] is False
    assert roles(server)[-1] == ("assistant", "Once upon ")


def test_edit_and_resend(page, server):
    ask(page, "First", "An answer.")
    ask(page, "Second", "An answer.")
    page.locator(".message.user").first.hover()
    page.get_by_role("button", name="Edit and send again").first.click()
    field = page.get_by_role("textbox", name="Edit the message")
    assert field.input_value() == "First"
    server.answers.append(Answer(["Another one."]))
    field.fill("First, changed")
    field.press("Enter")
    answered(page, "Another one.")
    assert roles(server) == [("user", "First, changed")]
    assert messages(page) == [("user", "First, changed"), ("assistant", "Another one.")]
    page.get_by_role("button", name="Version before").click()
    assert [text for _, text in messages(page)] == ["First", "An answer.", "Second", "An answer."]


def test_an_edit_can_be_left(page, server):
    ask(page, "First", "An answer.")
    box(page).press("ArrowUp")
    page.keyboard.type(" and more")
    page.keyboard.press("Escape")
    assert messages(page)[0] == ("user", "First")
    assert len(server.requests) == 1


def test_an_edit_takes_the_place_of_an_answer_under_way(page, server):
    server.answers.append(Answer(**SLOW))
    ask(page, "Go on")
    page.get_by_text("word word").wait_for()
    box(page).press("ArrowUp")
    page.keyboard.type(" and on")
    page.keyboard.press("Enter")
    answered(page, "An answer.")
    assert server.aborted == 1
    assert messages(page) == [("user", "Go on and on"), ("assistant", "An answer.")]


def test_an_edit_is_not_lost_when_an_answer_fails(page, server):
    server.answers.append(Answer(["word "] * 30, pause=0.02, break_off=True))
    ask(page, "Go on")
    page.get_by_text("word word").wait_for()
    box(page).press("ArrowUp")
    page.keyboard.type(" and")
    page.locator(".notice").wait_for()
    page.keyboard.type(" on")
    assert page.get_by_role("textbox", name="Edit the message").input_value() == "Go on and on"


def test_regenerate_keeps_both_answers(page, server):
    ask(page, "Say something", "An answer.")
    server.answers.append(Answer(["Something else."]))
    page.get_by_role("button", name="Answer again").click()
    answered(page, "Something else.")
    assert roles(server) == [("user", "Say something")]
    page.get_by_role("button", name="Version before").click()
    assert messages(page)[-1] == ("assistant", "An answer.")
    ask(page, "Go on from there", "An answer.")
    assert roles(server)[1] == ("assistant", "An answer.")


def test_a_reload_keeps_the_conversation(page, server):
    ask(page, "Remember me", "An answer.")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "Another subject", "An answer.")
    before = messages(page)
    page.reload()
    page.get_by_text("Another subject").last.wait_for()
    assert messages(page) == before
    page.get_by_role("button", name="Remember me", exact=True).click()
    assert messages(page)[0] == ("user", "Remember me")


def test_a_reload_in_mid_answer_keeps_what_had_come(page, server):
    server.answers.append(Answer(**SLOW))
    ask(page, "Go on")
    page.get_by_text("word word word").wait_for()
    page.reload()
    until(lambda: server.aborted == 1)
    page.get_by_text("Interrupted before its end.").wait_for()
    assert "word word word" in messages(page)[-1][1]


def test_two_tabs(page, server):
    """A tab that shows an older state of a conversation does not overwrite it when it closes."""
    ask(page, "From the first tab", "An answer.")
    other = page.context.new_page()
    other.goto(server.url)
    ask(other, "From the second tab", "An answer.")
    until(lambda: len(messages(page)) == 4)
    server.answers.append(Answer(["word "] * 40, pause=0.02))
    ask(other, "And more")
    other.get_by_text("word word").wait_for()
    page.close()
    answered(other, "word")
    other.reload()
    until(lambda: messages(other)[-1][1].count("word") == 40)


def test_damaged_storage_does_not_stop_the_page(page, server):
    page.evaluate("""() => {
        localStorage.setItem('qengine.conversation.a', '{"id": "a", "nodes": [{"id": 1}], "chosen": {}}');
        localStorage.setItem('qengine.conversation.b', 'no JSON');
        localStorage.setItem('qengine.conversation.c', 'null');
    }""")
    page.reload()
    ask(page, "Hello", "An answer.")


def test_delete(page, server):
    ask(page, "Forget me", "An answer.")
    page.get_by_role("button", name="Delete: Forget me").click()
    page.get_by_role("button", name="Keep").click()
    assert messages(page)
    page.get_by_role("button", name="Delete: Forget me").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_text("What would you like to know?").wait_for()
    page.reload()
    page.get_by_text("Conversations are kept in this browser only.").wait_for()
    assert messages(page) == []


def test_reasoning_is_folded_and_not_sent_back(page, server):
    server.answers.append(Answer([("Two and two, ", ""), ("so four.", ""), "It is 4."]))
    ask(page, "2 + 2?", "It is 4.")
    thought = page.get_by_text("Two and two, so four.")
    assert not thought.is_visible()
    page.get_by_text("Reasoning", exact=True).first.click()
    thought.wait_for()
    ask(page, "And 3?", "An answer.")
    assert roles(server)[1] == ("assistant", "It is 4.")


def test_reasoning_that_the_server_leaves_in_the_text_is_folded_too(page, server):
    server.answers.append(Answer(list("<think>\nTwo and two.\n</think>\n\nIt is 4, not <think>.")))
    ask(page, "2 + 2?", "It is 4")
    assert messages(page)[-1] == ("assistant", "It is 4, not <think>.")
    page.get_by_text("Reasoning", exact=True).first.click()
    page.locator(".reasoning").get_by_text("Two and two.", exact=True).wait_for()


def test_a_draft_outlives_a_reload(page):
    box(page).fill("Not sent yet")
    page.reload()
    assert box(page).input_value() == "Not sent yet"


def test_two_conversations_answer_at_once(page, server):
    server.answers.append(Answer(["slow "] * 60, pause=0.02))
    ask(page, "A slow one")
    page.get_by_text("slow slow").wait_for()
    page.get_by_role("button", name="New conversation").click()
    ask(page, "A quick one", "An answer.")
    assert server.aborted == 0
    page.get_by_role("button", name="A slow one", exact=True).click()
    idle(page)
    until(lambda: messages(page)[-1][1].count("slow") == 60)
