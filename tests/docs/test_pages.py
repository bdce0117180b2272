"""What the pages of `docs` lead to."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def pages_of_the_front_page() -> list[str]:
    """The names in its table of contents, in the order of a reader."""
    found = re.search(
        r"```\{toctree\}\n:hidden:\n\n(.*?)\n```", (DOCS / "index.md").read_text(), re.DOTALL
    )
    assert found is not None
    return found[1].splitlines()


def test_the_front_page_has_every_page():
    names = pages_of_the_front_page()
    assert {"index", *names} == {
        path.stem for end in ("md", "ipynb") for path in DOCS.glob(f"*.{end}")
    }
    assert len(names) == len(set(names))


def test_every_page_of_results_is_linked():
    linked = {
        name
        for page in ("benchmarks", "correctness")
        for name in re.findall(r"benches/results/([\w.]+)", (DOCS / f"{page}.md").read_text())
    }
    results = (ROOT / "benches" / "results").iterdir()
    assert {path.name for path in results if path.suffix in (".md", ".png")} <= linked
