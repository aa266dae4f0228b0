"""The report in Markdown: the same words and tables; plots are in the page."""

from __future__ import annotations

from collections.abc import Iterator

from service.domain.formats import utc
from service.output.report.contents import Contents
from service.output.report.sections import Block, Bullets, Code, Paragraph, Plot, Table, sections


def markdown(contents: Contents) -> str:
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
