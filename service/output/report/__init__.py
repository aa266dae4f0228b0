"""The report of an experiment: one self-contained page, or the same in Markdown.

`contents` gathers everything from the store, with the plots of `service.output.plots`; `page` writes it
as HTML or Markdown. Only `gather` reads anything.
"""

from service.output.report.contents import ReportContents, gather
from service.output.report.page import ReportPage, html, markdown

__all__ = ["ReportContents", "ReportPage", "gather", "html", "markdown"]
