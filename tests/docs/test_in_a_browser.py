"""The documentation in a browser, on a phone and on a wide screen, in light and in dark.

One test builds and looks at all of it: under xdist each of several would build it anew.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazy_tensor.dispatch.options import KNOWN

ROOT = Path(__file__).parents[2]
WIDTHS, SCHEMES = (400, 1400), ("light", "dark")
LEAST_CONTRAST = 4.5
"""Of text, by WCAG 2 (level AA)."""

LOOK = """
() => {
  const drawn = element => element.getClientRects().length > 0;
  const style = (element, name) => getComputedStyle(element)[name];
  const papers = element =>
    element ? [...papers(element.parentElement), style(element, "backgroundColor")] : [];
  const texts = "article :is(h1, h2, h3, p, li, td, th, a, code, pre span)";
  const root = document.documentElement;
  const right = element => element.getBoundingClientRect().right;
  const scrolls = element => element.tagName !== "ARTICLE" && (
    (/auto|scroll/.test(style(element, "overflowX")) && right(element) <= root.clientWidth)
    || scrolls(element.parentElement)
  );
  return {
    overflow: root.scrollWidth - root.clientWidth,
    cut: [...document.querySelectorAll("article *")]
      .filter(it => right(it) > root.clientWidth + 1 && !scrolls(it)).map(it => it.outerHTML),
    titles: [...document.querySelectorAll("h1")].filter(drawn).map(it => it.innerText),
    background: papers(document.body),
    texts: [...new Map(
      [...document.querySelectorAll(texts)].filter(it => it.textContent.trim() && drawn(it))
        .map(it => [it.textContent.slice(0, 40), style(it, "color"), papers(it)])
        .map(it => [it.slice(1).join(), it])
    ).values()],
    pictures: [...document.querySelectorAll("article img")]
      .map(it => [it.getAttribute("src"), it.naturalWidth, [style(it, "backgroundColor")]]),
    options: [...document.querySelectorAll("#all-options tbody tr td:first-child")]
      .map(it => it.innerText.trim()),
  };
}
"""
"""What a page looks like. Colors are those of CSS, backgrounds from the page's to the element's; of
texts in the same colors one is given."""

Color = tuple[float, float, float]


def test_every_page_can_be_read(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    built = built_in(tmp_path)
    names = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
    problems: list[str] = []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in SCHEMES:
                page = browser.new_page(
                    viewport={"width": width, "height": 900}, color_scheme=scheme
                )
                asked: list[str] = []
                page.on("request", lambda request, asked=asked: asked.append(request.url))
                page.on("pageerror", lambda error, asked=asked: asked.append(str(error)))
                for name in names:
                    page.goto((built / f"{name}.html").as_uri())
                    where = f"{name}.html, {width} wide, {scheme}"
                    found = page.evaluate(LOOK)
                    problems += [f"{where}: {it}" for it in problems_of(found, name, scheme)]
                problems += [url for url in asked if not url.startswith(("file:", "data:"))]
                page.close()
        browser.close()
    assert not problems, "\n".join(problems)


def built_in(folder: Path) -> Path:
    """The documentation's pages, built as `make docs` builds them."""
    built = folder / "docs"
    subprocess.run(
        [sys.executable, "-m", "sphinx", "--fail-on-warning", "-q", "-d", folder / "trees",
         ROOT / "docs", built],
        cwd=ROOT, check=True, timeout=120,
    )  # fmt: skip
    return built


def problems_of(found: dict[str, Any], name: str, scheme: str) -> Iterator[str]:
    """What a reader would stumble over on a page, as `LOOK` found it."""
    if found["overflow"] > 0:
        yield f"it scrolls sideways by {found['overflow']} px"
    for element in found["cut"]:
        yield f"it cuts {element[:80]}, which doesn't scroll"
    if len(found["titles"]) != 1:
        yield f"its titles are {found['titles']}"
    if (luminance(paper_of(found["background"])) < 0.2) != (scheme == "dark"):
        yield f"its background is {paper_of(found['background'])}"
    for text, color, papers in found["texts"]:
        paper = paper_of(papers)
        if (ratio := contrast(paper_of([*papers, color]), paper)) < LEAST_CONTRAST:
            yield f"{text!r} is {color} on {paper}: its contrast is {ratio:.1f}"
    for source, natural_width, papers in found["pictures"]:
        if not natural_width:
            yield f"the picture {source} is not shown"
        if luminance(paper_of(papers)) < 0.9:
            yield f"the picture {source}, drawn for white paper, is on {papers}"
    if name == "options" and found["options"] != list(KNOWN):
        yield f"its options are {found['options']}"
    if name in ("glossary", "benchmarks") and not found["pictures"]:
        yield "it has no picture"


def paper_of(colors: list[str]) -> Color:
    """The color of layers of CSS colors on black, the lowest first, some of them transparent."""
    red, green, blue = 0.0, 0.0, 0.0
    for color in colors:
        r, g, b, *alpha = (float(part) for part in re.findall(r"[\d.]+", color))
        share = alpha[0] if alpha else 1.0
        red, green, blue = (
            share * new + (1 - share) * old
            for new, old in ((r, red), (g, green), (b, blue))
        )  # fmt: skip
    return red, green, blue


def luminance(color: Color) -> float:
    """Of a color in sRGB, 0 to 1, as WCAG 2 defines it."""
    red, green, blue = (
        c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Color, other: Color) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_wcag():
    white = (255.0, 255.0, 255.0)
    assert contrast((0.0, 0.0, 0.0), white) == pytest.approx(21)
    assert contrast((118.0, 118.0, 118.0), white) == pytest.approx(4.54, abs=0.01)
    assert paper_of(["rgb(0, 0, 0)", "rgba(255, 255, 255, 0.5)"]) == (127.5, 127.5, 127.5)
