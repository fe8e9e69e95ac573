"""Take the screenshots of docs/score.md anew, in Chromium: ``python scripts/screenshots.py [NAME ...]``.

Each picture is of a real server under load. ``scripts/install_chromium.sh`` brings Chromium; playwright is in the
development environment. Light and dark stand side by side where a name has both.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

Scheme = Literal["light", "dark"]
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WAIT_MS = 90_000


def mlsys(*words: str) -> None:
    """Run a command of mlsys."""
    subprocess.run([sys.executable, "-m", "mlsys_core", *words], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def server(*words: str) -> Iterator[str]:
    """Serve as a user would; yield the address when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    command = [sys.executable, "-m", "mlsys_core", *words, "--port", str(port), "--log-level", "warning"]
    running = subprocess.Popen(command, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        while running.poll() is None:
            try:
                if httpx.get(url + "/health/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(30)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)


@contextmanager
def opened(browser: Browser, url: str, width: int, height: int, scheme: Scheme) -> Iterator[Page]:
    """Open a server's page."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        device_scale_factor=1.0,
    )
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    page.locator("#state.live").wait_for()
    yield page
    context.close()


def filled(page: Page, num_columns: int) -> None:
    """Wait until the score has so many columns more."""
    deadline_s = time.monotonic() + WAIT_MS / 1000

    def at() -> int:
        return int(page.locator("#scroll").get_attribute("max") or 0)

    goal = at() + num_columns
    while at() < goal:
        assert time.monotonic() < deadline_s, "the score does not fill"
        time.sleep(0.2)


def topped(page: Page) -> None:
    """Show the page from its top, where it is light; from its chat, where it is dark."""
    if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches"):
        page.locator(".chat").scroll_into_view_if_needed()
    else:
        page.evaluate("scrollTo(0, 0)")


def explained(page: Page) -> None:
    """Send load until there are columns enough, stop the page, and have the longest wait explained."""
    page.locator("#load").fill("6")
    page.locator("#waits button").nth(3).wait_for()
    filled(page, 45)
    page.locator("#waits button").first.click()
    page.locator("#load").fill("0")
    page.locator("#why .wait").wait_for()
    page.evaluate("scrollTo(0, 0)")


def chatted(page: Page) -> None:
    """Ask something in the chat, and wait for the answer."""
    page.locator("#chat-input").fill("Name three colours of autumn leaves.")
    page.locator("details summary").click()
    page.locator("#chat-max_tokens").fill("60")
    page.locator("#chat-temperature").fill("0")
    page.locator("details summary").click()
    page.locator("#chat-input").press("Enter")
    page.locator("#chat-note", has_text="tokens, ").wait_for()


def loaded(page: Page) -> None:
    """Send load, and let the score fill."""
    page.locator("#load").fill("6")
    filled(page, 40)
    time.sleep(1.5)
    page.evaluate("scrollTo(0, 0)")


def side_by_side(pictures: list[bytes], name: str) -> None:
    """Write pictures beside each other."""
    images = [Image.open(io.BytesIO(each)).convert("RGB") for each in pictures]
    gap = 16 if len(images) > 1 else 0
    width = sum(image.width for image in images) + gap * (len(images) - 1)
    whole = Image.new("RGB", (width, max(image.height for image in images)), "white")
    left = 0
    for image in images:
        whole.paste(image, (left, 0))
        left += image.width + gap
    path = IMAGES / f"{name}.png"
    whole.quantize(colors=256, method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    print(f"{path.name}: {whole.width} x {whole.height}, {path.stat().st_size / 1024:.0f} KiB")


def take(browser: Browser, url: str, name: str, acts: Sequence[Callable[[Page], None]], **of: Any) -> None:
    """Take one picture for each colour scheme."""
    pictures = []
    for scheme in of.pop("schemes"):
        with opened(browser, url, scheme=scheme, **of) as page:
            for act in acts:
                act(page)
            pictures.append(page.screenshot())
    side_by_side(pictures, name)


def main(names: list[str]) -> None:
    """Take all pictures, or those that are named."""

    def wanted(name: str) -> bool:
        return not names or name in names

    both = ("light", "dark")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        sys.exit("there is no Chromium on PATH: run scripts/install_chromium.sh")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        limits = ["--max-model-len", "1024", "--kv-tokens", "8192"]
        if wanted("score-wide") or wanted("score-phone"):
            with server("orca", "serve", "smollm2-135m-instruct", *limits) as url:
                if wanted("score-wide"):
                    acts = [chatted, explained]
                    take(browser, url, "score-wide", acts, width=1280, height=900, schemes=["light"])
                if wanted("score-phone"):
                    take(browser, url, "score-phone", [chatted, topped], width=390, height=844, schemes=both)
        if wanted("score-cells"):
            mlsys("batchmaker", "save", "g2p-en", f"{folder}/words/g2p-en")
            with server("batchmaker", "serve", f"{folder}/words") as url:
                take(browser, url, "score-cells", [loaded], width=1000, height=620, schemes=["light"])
        if wanted("score-streams"):
            mlsys("batchmaker", "save", "silero-vad", f"{folder}/voices/silero-vad")
            with server("batchmaker", "serve", f"{folder}/voices") as url:
                take(browser, url, "score-streams", [loaded], width=1000, height=620, schemes=["light"])
        if wanted("score-stages"):
            with server("dvabatch", "serve", "all-minilm-l6-v2", "--max-batch", "8") as url:
                take(browser, url, "score-stages", [loaded], width=820, height=620, schemes=both)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
