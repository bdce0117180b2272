"""The tests that need a GPU, and then measurements: `make gpu`.

    python tests/device/gpu.py [--out FOLDER] [--limit-s SECONDS] [--only NAME...]

Each step is a process with its own time limit. When it ends, a line gives its result. FOLDER
(`build/gpu`) gets it too, in `gpu.md`, and all that the step printed in a file of its own. So a run
that is cut short leaves the results of the steps before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benches"))
HERE = Path(__file__).parent
PROGRAMS = (
    "gpt", "tiny_gpt", "llama", "resnet", "norm_gelu bfloat16", "pointwise 64", "adam_foreach",
    "adam_loop", "residual", "convolution", "norm_gelu float32", "softmax bfloat16",
    "softmax float32", "pointwise bfloat16", "pointwise float32",
)  # fmt: skip
SIDES = ("eager", "lazy", "recorded", "replay", "graphs", "compile")
COMPILED = ("--sides", "lazy", "compile", "--seconds", "0.1")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-rf", "--tb=short")


@dataclass(frozen=True, slots=True)
class Step:
    """A command with the seconds that it may take; those of one `stage` run beside each other."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    stage: int


def steps() -> list[Step]:
    """All steps. Kernels are compiled before programs are measured, one program at a time."""
    python = sys.executable
    n_workers = str(max(2, (os.cpu_count() or 2) - 6))
    tests = (python, *PYTEST, f"{ROOT}/tests/nvfuser/test_gpu.py")
    program = (python, str(HERE / "gpu_programs.py"))
    found = [
        Step("doctor", (python, "-m", "lazy_tensor", "doctor"), 40, 0),
        Step("behaviour", (*tests, "-n", "4", "-k", "not test_an_op"), 150, 1),
        Step("operators", (*tests, "-n", n_workers, "-k", "test_an_op"), 150, 1),
        Step("copy", (*program, "copy"), 20, 2),
        *(Step(f"kernels of {name}", (*program, name, *COMPILED), 120, 3) for name in PROGRAMS),
    ]
    for i, name in enumerate(PROGRAMS):
        found.append(Step(name, (*program, name), 45, 4 + i))
    return found


@dataclass
class Page:
    """What is known so far."""

    folder: Path
    began: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    figures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, step: Step, status: str, output: str, seconds: float) -> None:
        told = summary(output)
        line = f"{step.name}: {status}{', ' if told else ''}{told} ({seconds:.0f} s)"
        print(f"{time.monotonic() - self.began:4.0f} s  {line}", flush=True)
        if step.name not in PROGRAMS:
            self.lines.append(line)
        found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if found:
            self.figures[step.name] = found
            (self.folder / "gpu.json").write_text(json.dumps(self.figures, indent=1))
        (self.folder / f"{re.sub('[^a-z0-9]+', '_', step.name)}.txt").write_text(output)
        (self.folder / "gpu.md").write_text(self.text())

    def text(self) -> str:
        """The page, as it is now."""
        from results_table import circumstances, line_of

        columns = ["program", *SIDES, "host: eager", *SIDES[1:], "kernels: eager", *SIDES[1:]]
        lines = ["# On a GPU", "", *circumstances(), "", *(f"- {line}" for line in self.lines), ""]
        rows = [row for name in PROGRAMS if (row := self.row(name))]
        if rows:
            lines += [line_of(columns), line_of(["---"] * len(columns)), *map(line_of, rows)]
        return "\n".join(lines) + "\n"

    def row(self, name: str) -> list[str]:
        sides = {one["side"]: one for one in self.figures.get(name, ()) if "side" in one}
        if not sides:
            return []
        copy = self.figures.get("copy", [{"bytes_per_s": 0}])[0]["bytes_per_s"]
        row = [name]
        for side in SIDES:
            one = sides.get(side, {})
            share = one.get("bytes_per_s", 0) / copy if copy else 0
            text = f"{one['step_ms']:.3f} ms" if "step_ms" in one else one.get("error", "")[:60]
            row.append(f"{text}, {share:.0%} of copy" if share else text)
        row += [f"{sides.get(s, {}).get('host_ms', 0) * 1e3:.0f} us" for s in SIDES]
        row += [str(sides.get(s, {}).get("n_kernels", "")) for s in SIDES]
        return row


def summary(output: str) -> str:
    """The last line of pytest's, or the figures of a program in short."""
    ended = re.findall(r"^=*\s*((?:\d+ \w+,? ?)+ in [\d.]+s).*$", output, re.MULTILINE)
    if ended:
        return str(ended[-1])
    told = []
    for line in output.splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            if "step_ms" in one:
                told.append(
                    f"{one['side']} {one['step_ms']:.3f} ms, host {one['host_ms'] * 1e3:.0f} us, "
                    f"{one['n_kernels']} kernels, {one['n_launches']} launches, first "
                    f"{one['first_s']:.1f} s, value {one['value']:.6g}"
                )
            else:
                told.append(" ".join(f"{k}: {v}" for k, v in one.items()))
    return "; ".join(told)


def environment() -> dict[str, str]:
    """Steps find the package in this checkout, installed or not."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}


def run(step: Step, page: Page, limit_s: float) -> None:
    """The step's process and all that it started end with its time, or the page's."""
    start = time.monotonic()
    left_s = page.began + limit_s - start
    process = subprocess.Popen(
        step.command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env=environment(),
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=max(1, min(step.limit_s, left_s)))
        status = "ok" if process.returncode == 0 else f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = "cut short"
    page.add(step, status, output, time.monotonic() - start)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--limit-s", type=float, default=600)
    parser.add_argument("--only", nargs="*", default=[], help="names of steps")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    page = Page(options.out)
    chosen = [step for step in steps() if not options.only or step.name in options.only]
    for stage in sorted({step.stage for step in chosen}):
        beside = [step for step in chosen if step.stage == stage]
        with ThreadPoolExecutor(6) as pool:
            for ended in [pool.submit(run, step, page, options.limit_s) for step in beside]:
                ended.result()


if __name__ == "__main__":
    main()
