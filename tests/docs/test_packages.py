"""The picture of the packages shows the imports that the sources have."""

import runpy
from pathlib import Path

PACKAGES = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "packages.py"))


def test_the_picture_is_as_the_sources():
    shown = PACKAGES["PICTURE"].read_text()
    assert shown == PACKAGES["picture"](), "python docs/packages.py draws it anew"


def test_arrows_that_others_lead_along_are_left_out():
    a, b, c = packages = [("x", "a"), ("x", "b"), ("x", "c")]
    graph = {a: {b, c}, b: {c}, c: {a}}
    assert PACKAGES["reduced"](packages, graph) == [(a, b), (b, c)]
