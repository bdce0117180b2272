"""Train a byte-level GPT eagerly, lazily, by `replay` and with torch.compile, on the same batches.

    python examples/train_gpt.py --steps 100 --sides eager lazy replay compile

The sides take turns at each step, so that noise of the machine affects all alike. Ctrl-C ends the
program with the table so far.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

import lazy_tensor
from lazy_tensor.examples.gpt import GPT, SIZES, GPTConfig, batches, library_text, train_step

Step = Callable[[Tensor, Tensor], Tensor]
"""From tokens and targets to the loss."""
SIDES: dict[str, Callable[[Step], Step]] = {
    "eager": lambda step: step,
    "lazy": lambda step: lazy_tensor.lazy_mode()(step),
    "replay": lambda step: lazy_tensor.replay(step),
    "compile": lambda step: torch.compile(step),
}


@dataclass
class Run:
    """One side: its step, and the losses and seconds of the steps done."""

    step: Step
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def advance(self, tokens: Tensor, targets: Tensor) -> None:
        # `.item()` waits for the step to be done
        began = time.perf_counter()
        loss = self.step(tokens, targets).item()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss)


def run_of(side: str, config: GPTConfig, device: str) -> Run:
    """A side with a model and an optimizer of its own."""
    # equal weights on all sides
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return Run(SIDES[side](train_step(model, optimizer)))


def table(runs: dict[str, Run]) -> str:
    """A line for each side: its losses, its first step, the median of the last half of its steps,
    and the largest difference of a loss from that of the first side."""
    first = next(iter(runs.values()))
    lines = [f"{'':<8}{'loss':>18}{'first step':>14}{'settled step':>15}{'difference':>13}"]
    for name, run in runs.items():
        difference = max(abs(a - b) for a, b in zip(first.losses, run.losses, strict=True))
        settled = statistics.median(run.seconds[len(run.seconds) // 2 :])
        losses = f"{run.losses[0]:.4f} to {run.losses[-1]:.4f}"
        lines.append(
            f"{name:<8}{losses:>18}{run.seconds[0] * 1e3:>11.1f} ms{settled * 1e3:>12.1f} ms"
            f"{difference:>13.1e}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["eager", "lazy", "replay"])
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    config = SIZES[options.size]
    runs = {side: run_of(side, config, options.device) for side in options.sides}
    stream = batches(library_text(), options.batch, config.context)
    try:
        for i, (tokens, targets) in enumerate(islice(stream, options.steps)):
            for run in runs.values():
                run.advance(tokens.to(options.device), targets.to(options.device))
            if (i + 1) % max(1, options.steps // 10) == 0:
                losses = ", ".join(f"{side} {run.losses[-1]:.4f}" for side, run in runs.items())
                print(f"step {i + 1}: {losses}", flush=True)
    except KeyboardInterrupt:
        pass
    # a step that Ctrl-C cut short was done by some sides only, and is left out
    n_whole = min(len(run.losses) for run in runs.values())
    for run in runs.values():
        del run.losses[n_whole:], run.seconds[n_whole:]
    if n_whole:
        print(table(runs))


if __name__ == "__main__":
    main()
