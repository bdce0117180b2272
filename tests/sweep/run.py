r"""The whole sweep, and the page that tells what it found.

    python tests/sweep/run.py [--results PATH] [--names PATTERN] [--workers 2] \
        [--without-compiler]

`callables.py` says what is called, `patterns.py` with what, and `operands.py` has the tensors;
`outcome.py` has what a program gives, and how that differs from eager. Chunks of callables run in
subprocesses (`worker.py`). One that dies, or is silent for `TIMEOUT_S`, has said what it was at:
that callable is then left out for that kind of operand, and the rest goes on. `found.py` and
`page.py` tell what came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from tests.pages import commit  # noqa: E402
from tests.sweep import callables  # noqa: E402
from tests.sweep.found import Found, Result  # noqa: E402
from tests.sweep.page import one_of_each, page  # noqa: E402

TIMEOUT_S = 60.0
CHUNK = 40


def sweep(names: Sequence[str], *options: str) -> Result:
    """What one subprocess after another finds with these callables."""
    result = Result()
    left = list(names)
    left_out: list[tuple[str, str, str]] = []
    while left:
        at, is_done, ended = _one_process(
            left, [*options, "--left-out", json.dumps(left_out)], result
        )
        if is_done:
            break
        if at is None:
            raise RuntimeError(f"a subprocess of the sweep {ended} before its first program")
        name, pattern, kind, dtype, side = at
        result.found = [  # what else that callable gave is found again
            one for one in result.found if one.name != name or one.what == "crashes"
        ]
        if side == "lazily":
            result.found.append(Found("crashes", name, pattern, kind, dtype, "runs", ended))
        left_out.append((name, kind, side))
        left = left[left.index(name) :]
    return result


def _one_process(
    names: Sequence[str], options: Sequence[str], result: Result
) -> tuple[list[str] | None, bool, str]:
    """What it was at in the end, whether it came to an end by itself, and what it died of."""
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
        [sys.executable, "-m", "tests.sweep.worker", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        cwd=folder,  # some callables write a file of the name that they are given
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write("\n".join(names).encode())
        process.stdin.close()
        at = None
        for kind, *rest in _lines(process):
            if kind == "at":
                at = rest
            elif kind == "found":
                result.found.append(Found(*rest))
            elif kind == "counted":
                result.counts[rest[0]] = Counter(rest[1])
            elif kind == "done":
                return at, True, ""
            elif kind == "silent":
                process.kill()
                return at, False, f"is silent for {TIMEOUT_S:.0f} s"
    return at, False, f"dies with status {process.returncode}"


def _lines(process: subprocess.Popen[bytes]) -> Iterator[list[Any]]:
    assert process.stdout is not None
    rest, source = b"", process.stdout.fileno()
    while True:
        if not select.select([source], [], [], TIMEOUT_S)[0]:
            yield ["silent"]
            return
        read = os.read(source, 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from map(json.loads, lines)


def sweep_all(names: Sequence[str], workers: int = 2, *options: str) -> Result:
    """The same with several subprocesses at a time."""
    chunks = [names[start : start + CHUNK] for start in range(0, len(names), CHUNK)]
    result = Result()
    with ThreadPoolExecutor(workers) as pool:
        for one in pool.map(lambda chunk: sweep(chunk, *options), chunks):
            result.add(one)
            print(f"{len(result.counts)} callables, {len(result.unlisted())} differ", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="where to write the page")
    parser.add_argument("--names", default=".*", help="a regular expression")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--without-compiler", action="store_true", help="in processes without torch's compiler"
    )
    options = parser.parse_args()
    names = [name for name in callables.names() if re.fullmatch(options.names, name)]
    compiler = [] if options.without_compiler else ["--compiler"]
    result = sweep_all(names, options.workers, *compiler)
    for one in one_of_each(result.unlisted()):
        print(one)
    if options.results is not None:
        options.results.write_text(page(result, commit()), encoding="utf-8")
    return min(len(result.unlisted()), 1)


if __name__ == "__main__":
    sys.exit(main())
