"""The checks of `dispatch.torch_checks.assumptions`: shown by `doctor`, and the whole command line
where one fails.

In: the arguments. Out: lines of text. Imports nothing that needs private names of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from lazy_tensor.cli.errors import BAD_REQUEST
from lazy_tensor.dispatch.torch_checks import assumptions


def checks() -> Iterator[tuple[str, str]]:
    """`("holds" or "failed", assumption)`; after one that failed, what was found and what to do."""
    for check in assumptions.checks():
        yield "failed" if check.problem else "holds", check.name
        if check.problem:
            yield "", f"{check.problem}; {check.remedy}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line where recording is off: `doctor` lists the checks, other commands say why
    they can't run."""
    (command, *_) = [*(sys.argv[1:] if argv is None else argv), ""]
    if command == "doctor":
        print("checks")
        for name, text in checks():
            print(f"  {name:<22}{text}")
        return 0
    print(f"lazy_tensor {command}: recording is off: {assumptions.why_off()}", file=sys.stderr)
    return BAD_REQUEST
