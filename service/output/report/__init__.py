"""The report of an experiment: one self-contained page, or the same in Markdown.

`contents` answers from the store what the sections ask for, with the plots of `service.output.plots`.
The page has styles, script and plotly inside. A content security policy in it forbids the network and any
script but the three in it, by their hashes: whatever a user named an experiment stays text.
"""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from service.domain.formats import utc
from service.output.plots.plot import Plot
from service.output.report.contents import ReportContents
from service.output.report.sections import Block, ReportSection, sections
from service.output.templates import template

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
    scripts: tuple[str, ...] = ()
    if drawn:  # plotly is not kept: a process that made one report may make no other.
        plotly = files("plotly") / "package_data" / "plotly.min.js"
        scripts = (plotly.read_text(encoding="utf-8"), _read("page.js"))
    policy = _policy(scripts)
    style = _read("page.css")
    text = _rendered("html", contents, parts, data=data, scripts=scripts, style=style, policy=policy)
    return ReportPage(text, policy)


def markdown(contents: ReportContents) -> str:
    written = []
    for section in sections(contents):
        blocks: list[Block] = [block for block in section.blocks if not isinstance(block, Plot)]
        if blocks:
            written.append(replace(section, blocks=blocks))
    return _rendered("md", contents, written, fence=_fence)


def _fence(text: str) -> str:
    """More backticks than the text has in a row, at least three."""
    return "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", text))])


def _rendered(form: str, contents: ReportContents, parts: Sequence[ReportSection], **more: Any) -> str:
    return template(f"report/page.{form}.j2").render(
        title=", ".join(experiment.name for experiment in contents.run_table.experiments),
        made=utc(contents.made_at_s),
        sections=parts,
        kind=lambda block: type(block).__name__,
        **more,
    )


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
def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
