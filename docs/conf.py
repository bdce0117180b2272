"""Sphinx's settings: `make docs` builds `build/docs`."""

from __future__ import annotations

import lazy_tensor

project = "lazy-tensor"
author = "The lazy-tensor authors"
version = release = lazy_tensor.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
html_theme = "furo"
html_title = "lazy-tensor"
autodoc_typehints = "none"  # they stand in the signatures
autodoc_member_order = "bysource"
autodoc_default_options = {"inherited-members": False}
default_role = "code"
suppress_warnings = [
    "myst.xref_missing"
]  # links into the sources are right on the repository's page
