"""Random programs: each a list of Python lines, drawn by hypothesis while eager PyTorch runs them.

In: hypothesis's choices. Out: `Program`. Each line is drawn knowing what the lines before gave, so
that most run, and is kept too where eager refuses it: lazy execution must refuse it alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

MAX_NUMEL = 512

Draw = Callable[[Any], Any]
T = TypeVar("T")


def eager_names() -> dict[str, Any]:
    """What a program's lines can name; the lazy sides put their own `wrap` and `flush` here."""
    return {
        "torch": torch,
        "F": torch.nn.functional,
        "seen": [],
        "wrap": lambda x: x,
        "flush": lambda: None,
        "materialize": lambda x: x.detach().clone(),
    }


@dataclass(frozen=True)
class Program:
    """`lines` of Python over the names of `eager_names`; `seed` goes to `torch.manual_seed`."""

    lines: tuple[str, ...]
    seed: int = 0

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Writer:
    """A program being drawn: its lines, and eager's tensors after them."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.names = eager_names()
        self.lines: list[str] = []
        self.count = 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.names.items() if isinstance(v, torch.Tensor)}

    def choose(self, *options: T) -> T:
        chosen: T = self.draw(st.sampled_from(options))
        return chosen

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def chance(self, one_in: int) -> bool:
        return self.integer(1, one_in) == one_in

    def pick(self, accept: Callable[[torch.Tensor], bool] = lambda t: True) -> str | None:
        """The name of a tensor that `accept` likes; None if there is none. Recent ones first."""

        def is_liked(tensor: torch.Tensor) -> bool:
            try:
                return accept(tensor)
            except RuntimeError:  # a view that autograd refuses to tell about
                return False

        found = [name for name, tensor in self.tensors.items() if is_liked(tensor)]
        return self.choose(*found[::-1]) if found else None

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def add(self, line: str) -> None:
        """Run the line eagerly and keep it, unless it makes tensors that are too large."""
        before = dict(self.names)
        n_seen = len(self.names["seen"])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, self.names)
        except Exception:
            if self.integer(1, 4) > 1:  # most refused lines are dull
                return
        if any(t.numel() > MAX_NUMEL for t in self.tensors.values()):
            self.names = before
            del self.names["seen"][n_seen:]
            return
        self.lines.append(line)


Production = Callable[[Writer], str | None]


@st.composite
def programs(
    draw: Draw, productions: dict[Production, int], inputs: Production, max_lines: int = 24
) -> Program:
    """Programs of `productions`, each with a weight, over a few tensors that `inputs` makes."""
    writer = Writer(draw)
    seed = writer.integer(0, 9)
    torch.manual_seed(seed)
    for _ in range(writer.integer(1, 4)):
        line = inputs(writer)
        if line is not None:
            writer.add(line)
    weighted = [p for p, weight in productions.items() for _ in range(weight)]
    for _ in range(writer.integer(1, max_lines)):
        line = draw(st.sampled_from(weighted))(writer)
        if line is not None:
            writer.add(line)
    return Program(tuple(writer.lines), seed)
