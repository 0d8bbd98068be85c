"""The system's Chromium, driven over its debugging protocol, and what a page may not do in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["CONTRASTS", "Shown", "chromium", "shown"]

#: Under which name systems have it, Debian's first.
_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: The contrast of every text with what is behind it, WCAG 2.2 (1.4.3): [ratio, needed, text].
CONTRASTS = """() => {
  const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (node) => {
    for (let n = node; n; n = n.parentElement) {
      const c = parse(getComputedStyle(n).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [NaN, NaN, NaN];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement, style = getComputedStyle(node);
    if (!text.data.trim() || !node.checkVisibility() || ["SCRIPT", "STYLE", "NOSCRIPT", "OPTION"].includes(node.tagName)) continue;
    if (node.closest(":disabled")) continue;
    const [a, b] = [luminance(parse(style.color)), luminance(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    found.push([ratio, large ? 3 : 4.5, text.data.trim()]);
  }
  return found;
}"""  # noqa: E501


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip: precconv[test])")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])  # root has no sandbox
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Shown:
    """A page as it is open, and what it did that it should not."""

    tab: Any
    trouble: list[str] = field(default_factory=list)

    def texts(self, selector: str) -> list[str]:
        return [str(text).strip() for text in self.tab.locator(selector).all_inner_texts()]

    def sorts(self) -> dict[str, str]:
        """What the headers of the table say, but for those that are not sorted by."""
        pairs = self.tab.evaluate(
            "[...document.querySelectorAll('#rows th[aria-sort]')].map("
            "(th) => [th.firstChild.dataset.sort, th.getAttribute('aria-sort')])"
        )
        return {key: order for key, order in pairs if order != "none"}

    def names(self) -> list[str]:
        return self.texts("#rows tbody th")

    def ms(self, action: str) -> float:
        """How long some JavaScript keeps the page busy, until it is drawn."""
        drawn = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
        timed = f"const t = performance.now(); {action}; await {drawn}; return performance.now() - t;"
        return float(self.tab.evaluate(f"async () => {{ {timed} }}"))


@contextmanager
def shown(browser: Any, path: Path, text: str, *, width: int = 1280, **options: Any) -> Iterator[Shown]:
    """Open a page; at the end it must have caused no trouble."""
    path.write_text(text, "utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    try:
        tab = context.new_page()
        found = Shown(tab)
        _watch(tab, found.trouble, path.as_uri())
        tab.goto(path.as_uri())
        tab.wait_for_selector("main[aria-busy=false]", timeout=60_000)
        yield found
        assert found.trouble == []
    finally:
        context.close()


def _watch(tab: Any, trouble: list[str], own: str) -> None:
    def ask(request: Any) -> None:
        if request.url != own:
            trouble.append(f"asks: {request.url}")

    def close(dialog: Any) -> None:
        trouble.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    tab.on("console", lambda message: trouble.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    tab.on("dialog", close)
    tab.on("request", ask)
