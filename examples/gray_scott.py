"""Gray-Scott: two substances react and diffuse, and form patterns.

    python examples/gray_scott.py

counts the steps done in ten seconds, eagerly and lazily. The model is from J. E. Pearson, Complex
Patterns in a Simple System (doi:10.1126/science.261.5118.189).
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import Tensor

import lazy_tensor

FEED, KILL = 0.035, 0.06


def laplacian(z: Tensor) -> Tensor:
    """The five-point stencil on a torus; `z` and the result have shape `(rows, columns)`."""
    return z.roll(1, 0) + z.roll(-1, 0) + z.roll(1, 1) + z.roll(-1, 1) - 4 * z


def step(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The concentrations `u` and `v` one unit of time later."""
    reaction = u * v * v
    return (
        u + 0.16 * laplacian(u) - reaction + FEED * (1 - u),
        v + 0.08 * laplacian(v) + reaction - (FEED + KILL) * v,
    )


def start(n_rows: int = 1000, n_columns: int = 1000) -> tuple[Tensor, Tensor]:
    """`u` is 1 everywhere and `v` 0, but for small squares at random places, where they react."""
    generator = torch.Generator().manual_seed(0)
    u, v = torch.ones(n_rows, n_columns), torch.zeros(n_rows, n_columns)
    n_squares = n_rows * n_columns // 4000
    rows = torch.randint(0, n_rows - 8, (n_squares,), generator=generator)
    columns = torch.randint(0, n_columns - 8, (n_squares,), generator=generator)
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        u[row : row + 8, column : column + 8] = 0.5
        v[row : row + 8, column : column + 8] = 0.25
    return u, v


def main() -> None:
    for name, mode in ("eager", nullcontext), ("lazy", lazy_tensor.lazy_mode):
        u, v = start()
        n_steps, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < 10:
            with mode():
                u, v = step(u, v)
            n_steps += 1
        print(f"{name}: {n_steps} steps in {elapsed:.0f} s")


if __name__ == "__main__":
    main()
