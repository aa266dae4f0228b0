"""The vendored libraries work under the policy of the pages, which the `page` fixture checks."""

from __future__ import annotations

from playwright.sync_api import Page

from tests.browser.conftest import ready

COUNTER = """async () => {
    const { html, render, useState } = await import("/static/vendor/preact.js");
    const Counter = () => {
        const [count, setCount] = useState(0);
        const more = () => setCount(count + 1);
        return html`<button style=${{ color: "rgb(1, 2, 3)" }} onClick=${more}>${count} of ${"<b>"}</button>`;
    };
    render(html`<${Counter} />`, document.getElementById("main"));
}"""
EDITOR = """async () => {
    const { EditorState, EditorView, lineNumbers, yaml } = await import("/static/vendor/codemirror.js");
    const host = document.createElement("div");
    document.getElementById("main").replaceChildren(host);
    const root = host.attachShadow({ mode: "open" });
    const state = EditorState.create({ doc: "name: a\\n", extensions: [lineNumbers(), yaml()] });
    const view = new EditorView({ state, root, parent: root });
    view.focus();
    return getComputedStyle(view.scrollDOM).display;
}"""
LINES = """async () => {
    const { default: uPlot } = await import("/static/vendor/uplot.js");
    const main = document.getElementById("main");
    main.replaceChildren();
    const series = [{}, { label: "loss", stroke: "rgb(255, 0, 0)", width: 4 }];
    const [data, size] = [[[0, 1, 2], [1, 1, 1]], { width: 400, height: 200 }];
    await new Promise(drawn => new uPlot({ ...size, series, hooks: { draw: [drawn] } }, data, main));
    const canvas = main.querySelector("canvas");
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const place = [...pixels.keys()].filter(at => at % 4 === 0);
    return place.filter(at => pixels[at] > 200 && pixels[at + 1] < 60 && pixels[at + 3] > 200).length;
}"""


def test_preact_draws_text_as_text_and_follows_state(page: Page, site: str) -> None:
    page.goto(site)
    ready(page)
    page.evaluate(COUNTER)
    button = page.get_by_role("button", name="0 of <b>")
    assert button.evaluate("node => getComputedStyle(node).color") == "rgb(1, 2, 3)"
    button.click()
    assert page.get_by_role("button", name="1 of <b>").is_visible()


def test_codemirror_has_its_styles_in_a_shadow_root(page: Page, site: str) -> None:
    page.goto(site)
    ready(page)
    assert page.evaluate(EDITOR) == "flex"
    page.keyboard.type("# ")
    assert page.get_by_text("# name: a").is_visible()


def test_uplot_draws_a_line(page: Page, site: str) -> None:
    page.goto(site)
    ready(page)
    assert page.evaluate(LINES) > 500
