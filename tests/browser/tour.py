"""A walk through every page, tab and dialog of the application, in whichever browser."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import axe_playwright_python
from playwright.sync_api import Page

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
SIZES = {"wide": (1440, 900), "narrow": (360, 740)}
OF_COLOURS = ("color-contrast", "link-in-text-block")
"""Rules whose findings depend on the colour scheme."""
_PATIENCE_S = 60.0
_SETTLED = """() =>
  document.readyState === "complete" &&
  !document.querySelector("[aria-busy=true], figure:not([data-drawn])") &&
  (!document.getElementById("pages") || Boolean(document.querySelector("main[aria-busy=false]")))
"""
_LAID_OUT = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
_WITHOUT_AXE = "() => !window.axe"
_FINDINGS = """async rules => {
  const chosen = rules.length ? { runOnly: { type: "rule", values: rules } } : {};
  const { violations } = await window.axe.run(document, { resultTypes: ["violations"], ...chosen });
  return violations.flatMap(({ id, impact, nodes }) =>
    nodes.map(node => `${id} (${impact}): ${node.html.slice(0, 160)}`));
}"""
_WIDER = "() => document.documentElement.scrollWidth > innerWidth"
_LINKS = "() => [...document.querySelectorAll('main nav a[href]')].map(each => each.getAttribute('href'))"
_NOTHING_SENT = """() => {
  const { fetch } = window;
  const refused = () => Promise.reject(new Error("Nothing is sent here."));
  window.fetch = (url, options) => ((options?.method ?? "GET") === "GET" ? fetch(url, options) : refused());
}"""
_OPEN = "[...document.querySelectorAll('dialog[open], :popover-open, .menu[open]')].at(-1)"
_NAMED = f"""
  const open = {_OPEN} ?? document.querySelector("main");
  const name = each => (each.ariaLabel || each.textContent).trim();
  const all = [...open.querySelectorAll("button, [role=menuitem], summary")];
"""
_BUTTONS = f"""() => {{
  {_NAMED}
  const row = each => [...(each.closest("tbody")?.rows ?? [])].indexOf(each.closest("tr"));
  const offered = each => !each.disabled && each.checkVisibility() && each.closest("form") === null;
  return all.filter(each => offered(each) && row(each) < 2).map(name);
}}"""
_CLICK = f"wanted => {{ {_NAMED} all.find(each => name(each) === wanted)?.click(); }}"
_TYPED = "key => document.body.dispatchEvent(new KeyboardEvent('keydown', { bubbles: true, ...key }))"
_KEYS = ({"key": "k", "ctrlKey": True}, {"key": "?"})
"""That may open something on every page."""
_OPENED = f"""() => {{
  const open = {_OPEN};
  const title = node => node.querySelector("h2, summary")?.textContent ?? node.ariaLabel ?? node.textContent;
  return open && title(open).trim();
}}"""


class Surface(Protocol):
    """A tab of a browser."""

    def open(self, url: str) -> None: ...
    def evaluate(self, function: str, argument: Any = None) -> Any: ...
    def resize(self, width: int, height: int) -> None: ...
    def prefer(self, scheme: str) -> None: ...
    def problems(self, origin: str) -> list[str]: ...
    def screenshot(self, path: Path) -> None: ...


class Chromium:
    """A tab of Playwright's as a surface."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._problems: list[str] = []
        page.on("pageerror", lambda error: self._problems.append(str(error)))
        page.on("console", self._said)

    def _said(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self._problems.append(message.text)

    def open(self, url: str) -> None:
        self._page.goto(url)

    def evaluate(self, function: str, argument: Any = None) -> Any:
        return self._page.evaluate(function, argument)

    def resize(self, width: int, height: int) -> None:
        self._page.set_viewport_size({"width": width, "height": height})

    def prefer(self, scheme: str) -> None:
        self._page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]

    def problems(self, origin: str) -> list[str]:
        found, self._problems = self._problems, []
        return found

    def screenshot(self, path: Path) -> None:
        self._page.screenshot(path=path, full_page=True)


@dataclass
class Tour:
    """Looks at pages one after another, and keeps what is wrong with them.

    With SCREENSHOTS set to a folder, it keeps pictures there.
    """

    surface: Surface
    origin: str
    name: str
    looks: Sequence[tuple[str, str]]
    """Colour schemes and sizes in which each page is looked at; with pictures, in all."""
    wrong: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    dialogs: dict[str, str] = field(default_factory=dict)
    """How each was opened, by its title without numbers."""
    _pressed: set[tuple[str, str]] = field(default_factory=set)

    def settle(self) -> None:
        """Waits until the page is drawn."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.surface.evaluate(_SETTLED):
            if time.monotonic() > deadline:
                self.wrong.append("not drawn in a minute")
                return
            time.sleep(0.05)

    def open(self, path: str) -> None:
        self.surface.open(self.origin + path)
        self.settle()

    def walk(self, paths: list[str]) -> None:
        """Visits pages, the tabs that they link to, and what their buttons open."""
        waiting = list(paths)
        while waiting:
            path = waiting.pop(0)
            self.open(path)
            self.seen.append(path)
            self.look(path)
            own = urlsplit(path).path.strip("/").split("/")[:2]
            for link in self.surface.evaluate(_LINKS):
                same = urlsplit(link).path.strip("/").split("/")[:2] == own
                if same and link not in [*self.seen, *waiting]:
                    waiting.append(link)
            self.surface.evaluate(_NOTHING_SENT)
            self.press(path, [])

    def look(self, path: str) -> None:
        """Checks the page as it is."""
        every = tuple(product(("light", "dark"), SIZES))
        for scheme, size in every if os.environ.get("SCREENSHOTS") else self.looks:
            self.surface.prefer(scheme)
            self.surface.resize(*SIZES[size])
            self.surface.evaluate(_LAID_OUT)
            self.settle()
            self.check(f"{path} {scheme} {size}", OF_COLOURS if scheme == "dark" else ())
            if self.surface.evaluate(_WIDER):
                self.wrong.append(f"{path} {scheme} {size}: wider than the screen")
            self.keep(f"{path} {scheme} {size}")
        self.surface.prefer("light")
        self.surface.resize(*SIZES["wide"])
        self.wrong += [f"{path}: {each}" for each in self.surface.problems(self.origin)]

    def check(self, where: str, rules: tuple[str, ...] = ()) -> None:
        if self.surface.evaluate(_WITHOUT_AXE):
            self.surface.evaluate(f"() => {{ {AXE} }}")
        found = self.surface.evaluate(_FINDINGS, list(rules))
        self.wrong += [f"{where}: {each}" for each in found]

    def keep(self, title: str) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w=-]+", "-", title).strip("-") or "list"
            self.surface.screenshot(Path(folder) / f"{self.name}-{name}.png")

    def type(self, path: str) -> None:
        """Looks at what keys open, if anything."""
        for key in _KEYS:
            self.open(path)
            self.surface.evaluate(_TYPED, key)
            title = self.surface.evaluate(_OPENED)
            if title:
                self.dialogs[title] = f"{path}: {key['key']}"
                self.look(f"{path} {title[:40]}")

    def press(self, path: str, before: list[str]) -> None:
        """Presses each button of a page or of what a button opened, unless a page of its kind had it.

        The page is as `before` left it, and is opened again from the second button on.
        """
        self.surface.evaluate(_LAID_OUT)
        self.settle()
        unused = True
        for name in self.surface.evaluate(_BUTTONS):
            kind = (urlsplit(path).path.split("/")[1], re.sub(r"\d+", "#", " > ".join([*before, name])))
            if kind in self._pressed:
                continue
            self._pressed.add(kind)
            if not unused:
                self._at(path, before)
            unused = False
            held = self.surface.evaluate(_OPENED)
            self.surface.evaluate(_CLICK, name)
            self.settle()
            title = self.surface.evaluate(_OPENED)
            if title is None or title == held or re.sub(r"\d+", "#", title) in self.dialogs:
                continue
            self.dialogs[re.sub(r"\d+", "#", title)] = f"{path}: {' > '.join([*before, name])}"
            self.look(f"{path} {title[:40]}")
            if len(before) < 2:
                if self.surface.evaluate(_OPENED) != title:  # Another size closed it.
                    self._at(path, [*before, name])
                self.press(path, [*before, name])

    def _at(self, path: str, pressed: list[str]) -> None:
        self.open(path)
        self.surface.evaluate(_NOTHING_SENT)
        for name in pressed:
            self.surface.evaluate(_CLICK, name)
            self.settle()


def filled(patterns: Iterator[str], values: dict[str, str]) -> list[str]:
    """Addresses of the registered pages; tabs are found on the pages themselves."""
    found = []
    for pattern in patterns:
        if "{tab}" not in pattern:
            assert set(re.findall(r"{(\w+)}", pattern)) <= set(values), f"say how to visit {pattern}"
            found.append(pattern.format_map(values))
    return found
