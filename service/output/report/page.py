"""The report as one HTML file with styles, script and plotly inside.

A content security policy in the page forbids the network and any script but the three in it, by their
hashes: whatever a user named an experiment stays text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

import jinja2

from service.domain.formats import utc
from service.output.plots.plot import Plot
from service.output.report.contents import ReportContents
from service.output.report.sections import Block, Bullets, Code, Paragraph, Table, sections

_FOLDER = files("service.output.report")


@dataclass(frozen=True, slots=True)
class ReportPage:
    """A finished page; `policy` is its content security policy, for the server's header."""

    text: str
    policy: str


def html(contents: ReportContents) -> ReportPage:
    parts = sections(contents)
    plots = [block for part in parts for block in part.blocks if isinstance(block, Plot)]
    drawn = [{"id": plot.id, "data": plot.data, "layout": plot.layout} for plot in plots]
    data = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = (_plotly(), _read("page.js")) if drawn else ()
    policy = _policy(scripts)
    names = ", ".join(experiment.name for experiment in contents.run_table.experiments)
    text = _template().render(
        title=names,
        made=utc(contents.made_at_s),
        sections=parts,
        kind=lambda block: type(block).__name__,
        data=data,
        scripts=scripts,
        style=_read("page.css"),
        policy=policy,
    )
    return ReportPage(text, policy)


def _policy(scripts: tuple[str, ...]) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes or chr(39) + 'none' + chr(39)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_read("page.html.j2"))


@functools.cache
def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """Not kept: a process that made one report may make no other."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def markdown(contents: ReportContents) -> str:
    names = ", ".join(experiment.name for experiment in contents.run_table.experiments)
    lines = [f"# {_inline(names)}", "", f"Generated {utc(contents.made_at_s)}."]
    for section in sections(contents):
        written = [line for block in section.blocks for line in _block(block)]
        if written:
            lines += ["", f"## {section.title}", *written]
    return "\n".join(lines) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Plot):
        return
    yield ""
    if isinstance(block, Paragraph):
        yield f"**{_inline(block.text)}**" if block.strong else _inline(block.text)
    elif isinstance(block, Bullets):
        yield from (f"- {_inline(item)}" for item in block.items)
    elif isinstance(block, Code):
        fence = "```"
        while fence in block.text:
            fence += "`"
        yield from (fence, block.text, fence)
    elif isinstance(block, Table):
        yield "| " + " | ".join(_cell(heading) for heading in block.headings) + " |"
        marks = ["--:" if number in block.numbers else "---" for number in range(len(block.headings))]
        yield "|" + "|".join(marks) + "|"
        yield from ("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in block.rows)


def _inline(text: str) -> str:
    """Names of users cannot open a tag; stars and underscores stay readable."""
    return " ".join(text.split()).replace("<", "&lt;").replace(" *", " \\*")


def _cell(text: str) -> str:
    return _inline(text).replace("|", "\\|")
