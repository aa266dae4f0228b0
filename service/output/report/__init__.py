"""The report of an experiment: one self-contained page, or the same in Markdown.

The story: `contents` gathers everything that is said from the store's rows, with the figures of
`service.output.figures`, `page` writes the HTML and `text` the Markdown. Only `gather` reads anything.
"""

from service.output.report.contents import Contents, gather
from service.output.report.page import ReportPage, html
from service.output.report.text import markdown

__all__ = ["Contents", "ReportPage", "gather", "html", "markdown"]
