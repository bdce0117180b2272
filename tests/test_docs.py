"""Every block of the README and the documentation runs, and prints what stands below it.

The README's run as programs, where a newcomer starts them. Times differ from run to run: of a block
that prints some, all but the numbers is compared.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lazy_tensor
import lazy_tensor.cli.main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS]

# What the README and the documentation take for granted.
PRELUDE = """
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import lazy_tensor

class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

torch.manual_seed(0)
torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
mlp, model, batch = Mlp(), torch.nn.Linear(8, 8), torch.ones(4, 8)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
"""


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Language and text of each."""
    return re.findall(r"```(\w+)\n(.*?)```", page.read_text(), flags=re.DOTALL)


def without_times(printed: str) -> str:
    """What is printed, without the numbers if some are milliseconds."""
    return re.sub(r"[\d.]+", "#", printed) if " ms" in printed else printed


def python_of(page: Path) -> list[tuple[str, str | None]]:
    """Each block of Python, and what it prints if the page says so."""
    blocks = [*blocks_of(page), ("", "")]
    return [
        (code, text if "print(" in code and below == "text" and "..." not in text else None)
        for (language, code), (below, text) in zip(blocks, blocks[1:], strict=False)
        if language == "python"
    ]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_blocks_run_and_print_what_is_below_them(page, tmp_path, monkeypatch):
    if not python_of(page):
        pytest.skip("it has none")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(PRELUDE, names)
    before = lazy_tensor.dispatch.settings.current()
    try:
        for code, expected in python_of(page):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(page), "exec"), names)
            shown = without_times(printed.getvalue())
            assert expected is None or shown == without_times(expected)
    finally:
        lazy_tensor.configure(backend=before.backend, compile=before.compile)
        torch.distributed.destroy_process_group()


def test_install_block_of_the_readme_ends_with_what_was_found(newcomer):
    printed = newcomer.printed.read_text()
    _, installed, doctor = printed.rpartition("Successfully installed lazy-tensor")
    assert installed, printed
    assert torch.__version__ in doctor


def test_doctor_runs_outside_the_checkout_too(newcomer):
    doctor = newcomer.run("python", "-m", "lazy_tensor", "doctor", folder=newcomer.elsewhere)
    assert torch.__version__ in doctor


@pytest.mark.parametrize(
    ("place", "package"), [("checkout", "checkout"), ("elsewhere", "environment")]
)
def test_blocks_of_the_readme_run_as_a_program(newcomer, place, package):
    first, *others = (code for code, _ in python_of(README))  # the first takes nothing for granted
    assert "1501" in first
    # its kernels come elsewhere
    every = 10 if place == "checkout" else 100
    first = first.replace("1501", f"{3 * every + 1}").replace("500", f"{every}")
    line = "=" * 80
    parts = [first, PRELUDE, *others, "print(lazy_tensor.__file__)"]
    folder = getattr(newcomer, place)
    (folder / "my.py").write_text(f"\nprint({line!r})\n".join(parts))
    shown, granted, *more, file = newcomer.run("python", "my.py", folder=folder).split(line + "\n")
    assert Path(file).is_relative_to(getattr(newcomer, package))
    assert granted == ""
    for printed, (_, expected) in zip([shown, *more], python_of(README), strict=True):
        assert expected is None or without_times(printed) == without_times(expected)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_commands_are_there():
    makefile = (ROOT / "Makefile").read_text()
    commands = lazy_tensor.cli.main.parser().format_help()
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(r"(?:`|^)make ([a-z]+)", text, flags=re.MULTILINE):
            assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), (
                f"{page.name}: make {name}"
            )
        for name in re.findall(r"python -m lazy_tensor ([a-z]+)", text):
            assert f" {name} " in commands, f"{page.name}: {name}"
