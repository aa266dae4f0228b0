"""The report of an experiment: one self-contained page, or the same in Markdown.

`contents` answers from the store what the sections ask for, with the plots of `service.output.plots`;
`page` writes them as HTML or Markdown.
"""

from service.output.report.contents import ReportContents
from service.output.report.page import ReportPage, html, markdown

__all__ = ["ReportContents", "ReportPage", "html", "markdown"]
