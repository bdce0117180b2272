"""Monte Carlo: the price of an Asian call option, from a million simulated paths of a share.

    python examples/monte_carlo.py

prints ten prices, eagerly and lazily. Both sides draw the same random numbers.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext

import torch
from torch import Tensor

import lazy_tensor

SPOT, STRIKE, RATE, VOLATILITY, YEARS = 100.0, 105.0, 0.03, 0.25, 1.0
"""The share's price at first, the option's strike price, rate and volatility per year, and the
option's years."""


def price(n_paths: int = 1_000_000, n_dates: int = 4) -> Tensor:
    """The discounted mean of `max(mean of the share over the dates - strike, 0)`, a 0-dim tensor.

    The share follows a geometric Brownian motion. Each random number is used with both signs, which
    halves the variance (antithetic variates: Glasserman, Monte Carlo Methods in Financial
    Engineering, 4.2).
    """
    # `up` and `down` are logarithms of the share's price over `SPOT`, with either sign
    dt = YEARS / n_dates
    drift, deviation = (RATE - VOLATILITY**2 / 2) * dt, VOLATILITY * math.sqrt(dt)
    up, down = torch.zeros(n_paths // 2), torch.zeros(n_paths // 2)
    total_up, total_down = torch.zeros(n_paths // 2), torch.zeros(n_paths // 2)
    for _ in range(n_dates):
        z = torch.randn(n_paths // 2)
        up, down = up + (drift + deviation * z), down + (drift - deviation * z)
        total_up, total_down = total_up + up.exp(), total_down + down.exp()
    payoffs = [(SPOT * total / n_dates - STRIKE).relu() for total in (total_up, total_down)]
    return math.exp(-RATE * YEARS) * (payoffs[0] + payoffs[1]).mean() / 2


def main() -> None:
    for name, mode in ("eager", nullcontext), ("lazy", lazy_tensor.lazy_mode):
        torch.manual_seed(0)
        for _ in range(10):
            began = time.perf_counter()
            with mode():
                value = price().item()
            print(f"{name}: {value:.4f} in {(time.perf_counter() - began) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
