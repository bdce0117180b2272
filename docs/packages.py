"""Draws `docs/packages.svg`, the packages of the code and their imports: `python docs/packages.py`.

In: the imports in the sources. Out: a box for each package with its files, in columns by folder; an
arrow to each package that it imports and that no other arrow leads to.
`tests/docs/test_packages.py` compares the picture with the sources.
"""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = Path(__file__).with_name("packages.svg")
FOLDERS = ("sharding", "lazy_tensor", "dispatch", "kernels")
"""Each may import those behind it."""
WIDTH, GAP, LINE = 205, 30, 14
LETTERS = 31  # on a line

Package = tuple[str, str]
"""A folder and a package in it, "" for the files that lie in none."""
Graph = dict[Package, set[Package]]


def sources() -> Iterator[tuple[Package, Path]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield package_of(path), path


def package_of(path: Path) -> Package:
    first, *inner = path.relative_to(ROOT).parent.parts
    if first == "lazy_tensor" and inner and inner[0] in FOLDERS:
        return inner[0], ""  # the `__init__.py` of a folder at the root
    return first, inner[0] if inner else ""


def imports() -> Graph:
    """The packages that each package imports, but for what only type checkers see."""
    files = dict.fromkeys(package for package, _ in sources())
    found: Graph = {package: set() for package in files}
    for package, path in sources():
        tree = ast.parse(path.read_text())
        tree.body = [one for one in tree.body if not _is_for_types(one)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lazy_tensor"):
                found[package] |= {_imported(f"{node.module}.{name.name}") for name in node.names}
    return {package: others - {package} for package, others in found.items()}


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _imported(name: str) -> Package:
    _, first, *inner = name.split(".")
    folder, parts = (first, inner) if first in FOLDERS else ("lazy_tensor", [first, *inner])
    is_package = bool(parts) and (ROOT / folder / parts[0]).is_dir()
    return folder, parts[0] if is_package else ""


def ordered(folder: str, graph: Graph) -> list[Package]:
    """The packages of a folder, each above those that it imports; files in none are the last.
    StopIteration if they import each other."""
    left = sorted(package for package in graph if package[0] == folder and package[1])
    found: list[Package] = []
    while left:
        found.append(next(one for one in left if not any(one in graph[other] for other in left)))
        left.remove(found[-1])
    return [*found, (folder, "")]


def reduced(packages: list[Package], graph: Graph) -> list[tuple[Package, Package]]:
    """Arrows downward, without those that others lead along."""
    place = {package: i for i, package in enumerate(packages)}
    below = {a: {b for b in graph[a] if b in place and place[b] > place[a]} for a in packages}
    reach: dict[Package, set[Package]] = {}
    for package in reversed(packages):
        reach[package] = below[package].union(*(reach[other] for other in below[package]))
    return [
        (a, b)
        for a in packages
        for b in sorted(below[a], key=place.__getitem__)
        if not any(b in reach[other] for other in below[a] - {b})
    ]


def picture() -> str:
    graph = imports()
    names: dict[Package, list[str]] = defaultdict(list)
    for package, path in sources():
        if path.stem != "__init__":
            names[package].append(path.stem)
    shapes: list[str] = []
    lowest = 0
    for column, folder in enumerate(FOLDERS):
        left = GAP + column * (WIDTH + GAP)
        shapes.append(_text(left, 30, folder, size=16, weight=600))
        packages, y = ordered(folder, graph), 46
        spans: dict[Package, tuple[int, int]] = {}
        for package in packages:
            lines = textwrap.wrap(" ".join(names[package]), LETTERS)
            height = 26 + LINE * len(lines)
            spans[package] = y, y + height
            shapes.append(
                f'<rect x="{left}" y="{y}" width="{WIDTH}" height="{height}" rx="6" '
                'fill="#f5f7fa" stroke="#8795a8"/>'
            )
            title = f"{package[1]}/" if package[1] else "(the folder itself)"
            shapes.append(_text(left + 8, y + 18, title, size=13, weight=600))
            for i, line in enumerate(lines):
                shapes.append(_text(left + 8, y + 34 + LINE * i, line, size=11))
            y += height + 22
        for n, (a, b) in enumerate(reduced(packages, graph)):
            begin, end = spans[a][1], spans[b][0]
            if packages.index(b) == packages.index(a) + 1:
                x = left + WIDTH // 2
                shapes.append(_arrow(f"M{x} {begin}V{end - 2}"))
            else:
                side, out = left + WIDTH, left + WIDTH + 6 + 5 * (n % 4)
                shapes.append(_arrow(f"M{side} {begin - 8}H{out}V{end + 12}H{side + 2}"))
        lowest = max(lowest, y)
    for column in range(len(FOLDERS) - 1):
        x = GAP + column * (WIDTH + GAP) + WIDTH
        shapes.append(_arrow(f"M{x - 90} 25H{x + GAP - 6}"))
    width, height = GAP + len(FOLDERS) * (WIDTH + GAP), lowest
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif">\n<defs><marker id="a" viewBox="0 0 8 8" refX="7" '
        'refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" '
        f'fill="#5d6b7d"/></marker></defs>\n<rect width="{width}" height="{height}" fill="#fff"/>\n'
    )
    return head + "\n".join(shapes) + "\n</svg>\n"


def _text(x: int, y: int, text: str, *, size: int, weight: int = 400) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="#1c2430">'
        f"{text}</text>"
    )


def _arrow(path: str) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="#5d6b7d" stroke-width="1.2" marker-end="url(#a)"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
