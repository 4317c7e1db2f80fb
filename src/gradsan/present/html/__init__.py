"""Report as one HTML file that needs no network; it is complete without its script, which adds interaction."""

from gradsan.present.html._page import render_fragment, render_html

__all__ = ["render_fragment", "render_html"]
