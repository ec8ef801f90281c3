"""Tables for a terminal, for Markdown and for a page."""
