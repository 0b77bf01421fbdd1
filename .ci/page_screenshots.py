"""Take docs/images/page.png and page-dark.png from a running server: `page_screenshots.py [http://127.0.0.1:8000]`.

Needs the extra `browser`, Pillow and a Chromium (see tests/browser/conftest.py). After the conversation others run for
a minute, so that the live view has something to show.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import threading
import time
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string, with one example.",
)
BESIDE = ("Tell me about rivers.", "Tell me about lakes.", "Tell me about seas.", "Tell me about mountains.")
SECONDS = 60


def load(url: str, prompt: str, until: float) -> None:
    """Ask again and again, streamed, until the time is over."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 96, "stream": True}).encode()
    while time.monotonic() < until:
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            answer.read()
        time.sleep(2)


def converse(page: Page) -> None:
    """Two questions, answered."""
    page.get_by_role("tab", name="Settings").click()
    page.get_by_label("Temperature", exact=True).fill("0")
    page.get_by_role("tab", name="Live").click()
    for count, question in enumerate(QUESTIONS, 1):
        page.get_by_role("textbox", name="Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        page.locator(".message-note").nth(count - 1).wait_for(state="attached", timeout=300_000)


def shoot(page: Page, name: str) -> None:
    """Write a picture of the page, in a palette of 256 colors."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


def main() -> None:
    """Both pictures, of one conversation."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--font-render-hinting=none"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": 1280, "height": 800}, device_scale_factor=1.5, color_scheme="light")
        page.goto(url)
        converse(page)
        until = time.monotonic() + SECONDS
        beside = [threading.Thread(target=load, args=(url, prompt, until)) for prompt in BESIDE]
        for thread in beside:
            thread.start()
            time.sleep(SECONDS / 10)
        time.sleep(max(0.0, until - time.monotonic() - 5))
        shoot(page, "page.png")
        page.emulate_media(color_scheme="dark")
        shoot(page, "page-dark.png")
        browser.close()
        for thread in beside:
            thread.join()


if __name__ == "__main__":
    main()
