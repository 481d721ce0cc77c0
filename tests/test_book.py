"""The built site in a real browser: whole on a phone and on a desk, light and dark, with no other host.

`make test` builds the site first. Needs Chromium: on the path, or named by the variable CHROMIUM.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Route, sync_playwright

HTML = Path(__file__).parents[1] / "_build" / "html"
FOLDERS = (HTML / "book", HTML / "notebooks")
PAGES = sorted(p.relative_to(HTML).as_posix() for folder in FOLDERS for p in folder.glob("*.html"))
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--no-sandbox",  # root, as in a container, may not use it
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

# What sticks out of the screen to the right, unless it lies in a box of its own that scrolls sideways.
TOO_WIDE = """
[...document.querySelectorAll("article *")].filter(element => {
  if (element.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let box = element.parentElement; box.tagName != "ARTICLE"; box = box.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return false;
  return true;
}).map(element => element.outerHTML.slice(0, 80))
"""

pytestmark = [
    pytest.mark.book,
    pytest.mark.skipif(not PAGES, reason="the site is not built: `make book`"),
]
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: no page of the site was looked at in a browser"
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(HTML))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A browser window that notes all that goes wrong in it."""

    def __init__(self, context: BrowserContext, site: str) -> None:
        self.site, self.problems = site, list[str]()
        self.page: Page = context.new_page()
        self.page.route("**/*", self._request)
        self.page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        self.page.on("console", self._console)

    def _request(self, route: Route) -> None:
        if route.request.url.startswith(self.site):
            route.continue_()
        else:
            self.problems.append(f"outside: {route.request.url}")
            route.abort()

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.problems.append(f"console: {message.text} {message.location.get('url')}")

    def go(self, path: str) -> Page:
        self.page.goto(self.site + path, wait_until="networkidle")
        return self.page


@pytest.fixture
def visit(browser: Browser, site: str) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    yield Visit(context, site)
    context.close()


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("path", PAGES)
def test_page_is_whole(browser: Browser, site: str, path: str, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    visit = Visit(context, site)
    page = visit.go(path)
    broken = page.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
    too_wide = page.evaluate(TOO_WIDE)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    context.close()
    assert (visit.problems, broken, too_wide) == ([], [], [])
    assert (sum(ground[:3]) < 200) == (scheme == "dark")


@needs_chromium
def test_search_finds_a_term(visit: Visit) -> None:
    page = visit.go("search.html?q=checkpoint")
    page.wait_for_selector("#search-results li")
    assert page.locator("#search-results li").count() >= 2
    assert visit.problems == []


@needs_chromium
def test_console_blocks_copy_commands_without_their_prompt(visit: Visit) -> None:
    page = visit.go("book/how_to_use.html")
    block = page.locator("div.highlight", has_text="ridethrough report").first
    block.hover()
    block.locator("button.copybtn").click()
    copied = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert copied and all(line.startswith("ridethrough ") for line in copied)


@needs_chromium
def test_cells_copy_their_code(visit: Visit) -> None:
    page = visit.go("notebooks/00_check_your_machine.html")
    block = page.locator("div.cell_input div.highlight", has_text="check_versions(").first
    block.hover()
    block.locator("button.copybtn").click()
    assert "check_versions(" in page.evaluate("navigator.clipboard.readText()")


@needs_chromium
def test_front_door_leads_to_the_front_page(visit: Visit) -> None:
    page = visit.go("")
    page.wait_for_url("**/book/intro.html")
    assert page.locator("h1").first.inner_text().startswith("Ridethrough")


class Links(HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.anchors, self.loads = list[str](), set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("script", "img", "link", "iframe", "source") and (
            to := values.get("src") or values.get("href")
        ):
            self.loads.append(to)


@pytest.fixture(scope="module")
def pages() -> dict[str, Links]:
    return {path.relative_to(HTML).as_posix(): Links(path.read_text()) for path in HTML.rglob("*.html")}


def test_every_internal_link_leads_somewhere(pages: dict[str, Links]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(urljoin(f"http://site/{path}", link))
            if url.netloc != "site":
                continue
            target = unquote(url.path).lstrip("/")
            known = target in pages and (not url.fragment or unquote(url.fragment) in pages[target].anchors)
            if not known and not (target not in pages and (HTML / target).is_file()):
                dead.append(f"{path}: {link}")
    assert not dead


def test_nothing_is_loaded_from_elsewhere(pages: dict[str, Links]) -> None:
    assert not [f"{path}: {to}" for path, page in pages.items() for to in page.loads if urlsplit(to).netloc]
