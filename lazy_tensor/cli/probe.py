"""One side alone in a process of its own: the only way to tell two sides' memory apart.

In: a side's name, a recipe, the lazy options. Out: a `Probe`, passed back as a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from lazy_tensor.cli.race import timed
from lazy_tensor.cli.sides import SIDES, Options
from lazy_tensor.cli.text import batches, load_text
from lazy_tensor.cli.training import Recipe


@dataclass(frozen=True, slots=True)
class Probe:
    """`peak_bytes` is the peak beyond what the process held before it built the model."""

    losses: list[float]
    seconds: list[float]
    peak_bytes: int


def probe(
    side: str, recipe: Recipe, options: Options, env: Mapping[str, str] | None = None
) -> Probe:
    """Run `recipe.steps` steps of `side` in a child process, in environment `env` (None: ours).

    Raises RuntimeError with the child's last words if it fails.
    """
    order = json.dumps([side, dataclasses.asdict(recipe), dict(options)])
    child = subprocess.run(
        [sys.executable, "-m", "lazy_tensor.cli.probe", order],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if child.returncode != 0:
        last_words = "\n".join(child.stderr.strip().splitlines()[-8:])
        raise RuntimeError(f"probe of side {side!r} ended with {child.returncode}:\n{last_words}")
    return Probe(**json.loads(child.stdout.splitlines()[-1]))


def run_side(side: str, recipe: Recipe, options: Options) -> Probe:
    """What the child does."""
    device = torch.device(recipe.device)
    context = recipe.model_config.context
    stream = batches(load_text(recipe.text, context), recipe.batch, context, recipe.seed)
    before = start_peak(device)
    runner = SIDES[side](recipe, options)
    steps = [timed(runner, *batch) for batch in islice(stream, recipe.steps)]
    return Probe(
        losses=[loss for loss, _ in steps],
        seconds=[seconds for _, seconds in steps],
        peak_bytes=max(0, peak_bytes(device) - before),
    )


def start_peak(device: torch.device) -> int:
    """Forget the peak so far where the system can; the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes(device)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss: it survives exec, so it holds the peak of the parent, which ran both sides.
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    side, recipe, options = json.loads(sys.argv[1])
    print(json.dumps(dataclasses.asdict(run_side(side, Recipe(**recipe), options))))


if __name__ == "__main__":
    main()
