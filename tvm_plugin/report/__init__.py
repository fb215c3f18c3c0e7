"""What a tuning run did: as data (`RunSummary`), as text (`kernel_table`), as one page (`write_html`)."""

from .html import render_html, write_html
from .summary import KernelRow, RunSummary, with_records
from .table import kernel_table

__all__ = ["KernelRow", "RunSummary", "kernel_table", "render_html", "with_records", "write_html"]
