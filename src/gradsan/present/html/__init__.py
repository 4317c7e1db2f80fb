"""Report as one HTML file that needs no network: the page is whole without its script, which adds what moves."""

from gradsan.present.html._page import render_fragment, render_html

__all__ = ["render_fragment", "render_html"]
