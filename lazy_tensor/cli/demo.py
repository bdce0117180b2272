"""`python -m lazy_tensor demo`: a training run, eager and lazy side by side, and its costs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import lazy_tensor
from lazy_tensor.cli import summary
from lazy_tensor.cli.errors import INTERRUPTED, CommandError
from lazy_tensor.cli.gpt import SIZES
from lazy_tensor.cli.probe import Probe, probe
from lazy_tensor.cli.race import Race, settle_torch
from lazy_tensor.cli.sides import SIDES, Options
from lazy_tensor.cli.text import batches, load_text
from lazy_tensor.cli.training import Recipe
from lazy_tensor.dispatch import settings
from lazy_tensor.kernels import available_backends

if TYPE_CHECKING:
    from lazy_tensor.cli.screen import Screen

PROBE_STEPS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--model", choices=SIZES, default="small", help=f"size of the GPT {default}")
    add("--steps", type=positive, default=100, help=f"training steps of each side {default}")
    add("--batch", type=positive, default=8, help=f"samples in a batch {default}")
    add("--dropout", type=probability, default=0.0, help=f"dropout probability {default}")
    add("--seed", type=int, default=0, help=f"seed of weights, batches and dropout {default}")
    add("--text", metavar="FILE", help="text to train on (default: Python's standard library)")
    add("--device", default="cpu", help=f"device to train on {default}")
    add("--backend", help="what compiles the lazy side's kernels (default: the setting in force)")
    add(
        "--compile",
        choices=("background", "blocking", "off"),
        help="whether the lazy side waits for its kernels (default: the setting in force)",
    )
    add("--wrap", action="store_true", help="wrap the model instead of entering lazy_mode")
    add("--compare-compile", action="store_true", help="race torch.compile as well")
    add("--no-memory", action="store_true", help="skip the processes that measure memory")
    add(
        "--out",
        type=Path,
        default=Path("lazy_tensor_demo.png"),
        help=f"image to write: losses and step times {default}",
    )


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def probability(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return float(text)


def run(args: argparse.Namespace) -> int:
    """0, or 130 if Ctrl-C cut the run short: the table and the image then cover the steps done."""
    screen = open_screen(args.out)
    recipe, options, names = request_of(args)
    context = recipe.model_config.context
    stream = batches(load_text(recipe.text, context), recipe.batch, context, recipe.seed)
    settle_torch(recipe, len(names), next(stream))

    race = Race([SIDES[name](recipe, options) for name in names])
    screen.headline(headline(recipe))
    lazy_tensor.reset_stats()
    finished = run_race(race, islice(stream, recipe.steps), screen, recipe)
    counters = summary.counter_rows(lazy_tensor.stats())
    if not race.n_rounds:
        return INTERRUPTED

    measure_memory = finished and not args.no_memory
    probes = probe_sides(names, race, recipe, options, screen) if measure_memory else {}
    rows = summary.rows(race.histories, probes, recipe.batch * context)
    screen.table(list(race.histories), rows, counters)
    screen.save_plot(race.histories, args.out, headline(recipe))
    return 0 if finished else INTERRUPTED


def open_screen(out: Path) -> Screen:
    """The terminal and the image file; CommandError without the `demo` extra or for a bad `out`."""
    try:
        from lazy_tensor.cli.screen import Screen
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'lazy-tensor[demo]'"
        raise CommandError(message) from None
    return Screen(out)


def request_of(args: argparse.Namespace) -> tuple[Recipe, Options, list[str]]:
    """Recipe, the lazy side's options, names of the sides; CommandError for what can't run here."""
    check_device(args.device)
    check_backend(args.backend or settings.current().backend, torch.device(args.device).type)
    chosen = {"backend": args.backend, "compile": args.compile}
    options = {name: value for name, value in chosen.items() if value is not None}
    recipe = Recipe(
        size=args.model,
        steps=args.steps,
        batch=args.batch,
        device=args.device,
        seed=args.seed,
        dropout=args.dropout,
        text=args.text,
    )
    names = ["eager", "wrap" if args.wrap else "lazy"]
    return recipe, options, [*names, "compile"] if args.compare_compile else names


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        reason = str(error).splitlines()[0]
        raise CommandError(f"--device {device} can't be used: {reason}") from None


def check_backend(backend: str, device_type: str) -> None:
    reasons = {"auto": None, **available_backends(device_type)}
    if backend not in reasons:
        raise CommandError(f"backend {backend!r} is not one of {', '.join(reasons)}")
    if reasons[backend] is not None:
        raise CommandError(f"backend {backend!r} can't be used: {reasons[backend]}")


def headline(recipe: Recipe) -> str:
    config = recipe.model_config
    return (
        f"byte-level GPT '{recipe.size}': {config.n_layers} layers, {config.width} wide, "
        f"batch {recipe.batch} of {config.context} bytes; "
        f"torch {torch.__version__}, {recipe.device}, {torch.get_num_threads()} threads"
    )


def run_race(
    race: Race, stream: Iterator[tuple[Tensor, Tensor]], screen: Screen, recipe: Recipe
) -> bool:
    """Run the rounds under a progress bar; False if Ctrl-C ended them."""
    tokens_per_step = recipe.batch * recipe.model_config.context
    try:
        with screen.step_bar(recipe.steps, tokens_per_step) as bar:
            for tokens, targets in stream:
                race.run_round(tokens, targets)
                bar.advance(race.histories)
    except KeyboardInterrupt:
        return False
    return True


def probe_sides(
    names: list[str], race: Race, recipe: Recipe, options: Options, screen: Screen
) -> dict[str, Probe]:
    """A probe of each side under its name in the table; those done so far if Ctrl-C ends them."""
    short = dataclasses.replace(recipe, steps=PROBE_STEPS)
    probes: dict[str, Probe] = {}
    try:
        for name, title in zip(names, race.histories, strict=True):
            with screen.waiting(f"measuring the memory of {title} alone"):
                probes[title] = probe(name, short, options)
    except KeyboardInterrupt:
        pass
    return probes
