"""Sphinx's settings: `make docs` builds `build/docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lazy_tensor

project = "lazy-tensor"
author = copyright = "The lazy-tensor authors"
version = release = lazy_tensor.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
nb_execution_mode = "off"  # tests/docs/test_tutorial.py runs the notebook
myst_heading_anchors = 3
html_theme = "furo"
html_title = "lazy-tensor"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
autodoc_typehints = "none"  # they stand in the signatures
autodoc_member_order = "bysource"
autodoc_default_options = {"inherited-members": False}
default_role = "code"

RESULTS = Path(__file__).parents[1] / "benches" / "results"


def setup(app: Any) -> None:
    app.connect("source-read", with_results)


def with_results(app: Any, page: str, source: list[str]) -> None:
    """Add the pages of `benches/results` to our page `results`, and lead links to them there.

    Sphinx has only pages below its own folder; on the repository's page the links are right as they
    are.
    """
    if page == "results":
        source[0] += "".join(map(result, sorted(RESULTS.glob("*.md"))))
    source[0] = re.sub(r"\]\(\.\./benches/results/(\w+)\.md\)", r"](#result-\1)", source[0])


def result(path: Path) -> str:
    """The text of a page of results as a section that a link can lead to."""
    text = re.sub("^#", "##", path.read_text(), flags=re.MULTILINE)
    return f"\n(result-{path.stem})=\n\n{text.replace('](../../', '](../')}"
