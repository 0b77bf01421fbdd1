"""Markdown as it is meant, and hostile Markdown made harmless."""

import pytest
from fake_chat import Answer
from page_actions import ask, idle

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked=1'>",
    "<svg onload='window.hacked=1'></svg>",
    "<iframe src='javascript:window.hacked=1'></iframe>",
    "<details open ontoggle=window.hacked=1>",
    "<style>body{display:none}</style>",
    "[click](javascript:window.hacked=1)",
    "[click](JaVaScRiPt&colon;window.hacked=1)",
    "[click](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[click](vbscript:msgbox)",
    "![x](javascript:window.hacked=1)",
    '![x](https://evil.example/x.png"onerror="window.hacked=1)',
    "![track me](https://evil.example/pixel.png)",
    "<a href='https://a.example' onclick='window.hacked=1'>x</a>",
    "[ref]\n\n[ref]: javascript:window.hacked=1",
    '```"><script>window.hacked=1</script>\ncode\n```',
    '```x"onclick="window.hacked=1\ncode\n```',
    "| a |\n|:-:|\n| <b onmouseover=window.hacked=1>b</b> |",
    '<https://a.example/"onmouseover="window.hacked=1>',
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hacked=1>",
    "<form action='https://evil.example'><input name=q></form>",
    "# <a id=message name=message>clobber</a>",
]


def show(page, server, text, step=None):
    step = step or len(text)
    server.answers.append(Answer([text[i : i + step] for i in range(0, len(text), step)]))
    ask(page, "Show it")
    idle(page)
    page.locator(".message-note").last.wait_for()
    return page.locator(".message.assistant .text").last


def test_hostile_markdown_is_harmless(page, server):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    answer = show(page, server, "\n\n".join(HOSTILE), step=11)
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None
    tags = set(answer.evaluate("node => [...node.querySelectorAll('*')].map((item) => item.localName)"))
    assert not tags & {"script", "img", "iframe", "style", "form", "input", "math", "details", "object", "b"}
    for attribute in answer.evaluate(
        "node => [...node.querySelectorAll('*')].flatMap((item) => item.getAttributeNames())"
    ):
        assert not attribute.startswith("on")
        assert attribute not in ("style", "id", "name", "src")
    for address in answer.evaluate("node => [...node.querySelectorAll('a')].map((item) => item.href)"):
        assert address.startswith(("https://", "http://", "mailto:"))
    assert not [url for url in asked if not url.startswith(server.url)]
    assert "<script>window.hacked = 1</script>" in answer.inner_text()


def test_the_page_itself_takes_no_html(page):
    """Were Markdown to let something through, the policy would stop it."""
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } }"
    )
    assert refused
    page.evaluate("""() => {
        const script = document.createElement('script');
        try { script.textContent = 'window.hacked = 1'; document.body.append(script); } catch {}
    }""")
    assert page.evaluate("window.hacked") is None


def test_links_open_elsewhere_without_an_opener(page, server):
    link = show(page, server, "See [the docs](https://docs.example/a) or https://b.example").locator("a")
    assert link.count() == 2
    for item in link.all():
        assert item.get_attribute("target") == "_blank"
        assert {"noopener", "noreferrer"} <= set(item.get_attribute("rel").split())


def test_blocks(page, server):
    text = "# Title\n\n1. one\n   - inner\n2. two\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n> quoted\n\n**bold** `code`"
    answer = show(page, server, text, step=3)
    assert answer.locator("h4").inner_text() == "Title"
    assert answer.locator("ol > li").count() == 2
    assert answer.locator("ol ul > li").inner_text() == "inner"
    assert answer.locator("td").all_inner_texts() == ["1", "2"]
    assert answer.locator("td").nth(1).evaluate("node => getComputedStyle(node).textAlign") in ("end", "right")
    assert answer.locator("blockquote").inner_text() == "quoted"
    assert answer.locator("strong").inner_text() == "bold"


@pytest.mark.parametrize("scheme", ["https", "http"])
def test_code_is_copied(new_page, server, scheme):
    page = new_page(permissions=["clipboard-read", "clipboard-write"])
    if scheme == "http":  # on plain http from another computer there is no clipboard API
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    code = 'def f():\n    return "<b>"\n'
    answer = show(page, server, f"Here:\n\n```python\n{code}```\n", step=5)
    assert answer.locator(".code-bar").inner_text().startswith("python")
    answer.get_by_role("button", name="Copy code").click()
    answer.get_by_text("Copied").wait_for()
    if scheme == "https":
        assert page.evaluate("navigator.clipboard.readText()") == code
    else:
        page.get_by_role("textbox", name="Message", exact=True).press("Control+v")
        assert page.get_by_role("textbox", name="Message", exact=True).input_value() == code


def test_earlier_blocks_stay_while_the_text_grows(page, server):
    """A selection, or a focused button, in what is already there must not be torn away."""
    server.answers.append(Answer(["First paragraph.\n\n", *["more "] * 50], pause=0.01))
    ask(page, "Go on")
    page.get_by_text("more more").wait_for()
    page.evaluate("document.querySelector('.markdown > p').marked = true")
    idle(page)
    assert page.evaluate("document.querySelector('.markdown > p').marked") is True


def test_a_user_message_is_plain_text(page, server):
    ask(page, "<img src=x onerror=window.hacked=1> **not bold**", "An answer.")
    message = page.locator(".message.user .text")
    assert message.inner_text() == "<img src=x onerror=window.hacked=1> **not bold**"
    assert message.locator("*").count() == 0
