"""Every Python block of the README and the documentation runs, and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import lazy_tensor
import lazy_tensor.cli.main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


def names_of_a_program() -> dict[str, Any]:
    """What the README takes for granted."""
    model = torch.nn.Linear(8, 8)
    return {
        "__name__": "__main__", "torch": torch, "lazy_tensor": lazy_tensor, "mlp": Mlp(),
        "model": model, "optimizer": torch.optim.AdamW(model.parameters(), fused=True),
        "batch": torch.ones(4, 8),
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_and_print_what_is_below_them(page, tmp_path, monkeypatch):
    blocks = re.findall(r"```(\w+)\n(.*?)```", page.read_text(), flags=re.DOTALL)
    if not any(language == "python" for language, _ in blocks):
        pytest.skip("it has none")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    names = names_of_a_program()
    before = lazy_tensor.dispatch.settings.current()
    try:
        for i, (language, code) in enumerate(blocks):
            if language != "python":
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(page), "exec"), names)
            shown = blocks[i + 1] if i + 1 < len(blocks) else ("", "")
            if "print(" in code and shown[0] == "text" and "..." not in shown[1]:
                assert printed.getvalue() == shown[1]
    finally:
        lazy_tensor.configure(backend=before.backend, compile=before.compile)
        torch.distributed.destroy_process_group()


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
