"""Runs three programs eagerly, lazily and with torch.compile. From a checkout:

    python -m lazy_tensor.examples.race

In: scenes (programs) and sides (ways to run one). Out: a table while they run, and an image with
the step times. Each side runs in a process of its own. `make demo` runs this.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lazy_tensor.cli.errors import BAD_REQUEST, INTERRUPTED, CommandError
from lazy_tensor.examples.race.scenes import SCENES, SIDES
from lazy_tensor.examples.race.turn import Results, Turn, prepare, run_turn

if TYPE_CHECKING:
    from lazy_tensor.examples.race.screen import Screen


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0 on success, 2 (and a line on stderr) for a request that can't be met,
    and 130 after Ctrl-C."""
    try:
        return run(parser().parse_args(argv))
    except CommandError as error:
        print(f"race: {error}", file=sys.stderr)
        return BAD_REQUEST
    except KeyboardInterrupt:
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lazy_tensor.examples.race",
        description="Run three programs eagerly, lazily and with torch.compile.",
    )
    add = parser.add_argument
    add("--scene", action="append", choices=SCENES, help="a scene to run (default: all)")
    add(
        "--sides",
        nargs="+",
        choices=SIDES,
        help="who runs each scene (default: eager, and those that gain most there)",
    )
    add("--no-compile", action="store_true", help="leave torch.compile out")
    usual = ", ".join(f"{scene.seconds:g}" for scene in SCENES.values())
    add("--seconds", type=positive, help=f"seconds a side (default: {usual})")
    add(
        "--out",
        type=Path,
        default=Path("lazy_tensor_demo.png"),
        help="image to write: step times over time, and the pattern (default: %(default)s)",
    )
    return parser


def positive(text: str) -> float:
    """The number that an option is given, for argparse."""
    # not `<= 0`: nan is no number of seconds either
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return float(text)


def run(args: argparse.Namespace) -> int:
    """0, or 130 after Ctrl-C: the table and the image then show what was done until then."""
    # the server of processes imports PyTorch while the screen is made
    prepare()
    screen = open_screen(args.out)
    results: Results = {
        name: {side: Turn() for side in sides_of(name, args)} for name in args.scene or SCENES
    }
    if not all(results.values()):
        raise CommandError("--no-compile leaves no side to run: name others by --sides")
    # Ctrl-C ends the run, but not the program: what is done is shown
    finished = True
    with screen.live(results):
        try:
            for name, turns in results.items():
                for side in turns:
                    run_side(name, side, args.seconds, results, screen)
        except KeyboardInterrupt:
            finished = False
    screen.end(results, args.out)
    return 0 if finished else INTERRUPTED


def sides_of(scene: str, args: argparse.Namespace) -> list[str]:
    """The sides that run a scene, as the arguments say; [] if --no-compile leaves none."""
    sides = args.sides or SCENES[scene].sides
    return [side for side in sides if not (args.no_compile and side == "torch.compile")]


def run_side(
    scene: str, side: str, seconds: float | None, results: Results, screen: Screen
) -> None:
    """Run a side's turn to its end. `results` and the screen follow it."""

    def show(turn: Turn) -> None:
        results[scene][side] = turn
        screen.update()

    screen.begin(scene, side)
    show(run_turn(SCENES[scene].begin, side, seconds or SCENES[scene].seconds, show))
    screen.done(scene, side)


def open_screen(out: Path) -> Screen:
    """The terminal and the image file. CommandError if the `demo` extra isn't installed, or if
    `out` can't be written."""
    try:
        from lazy_tensor.examples.race.screen import Screen
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'lazy-tensor[demo]'"
        raise CommandError(message) from None
    return Screen(out)


if __name__ == "__main__":
    raise SystemExit(main())
