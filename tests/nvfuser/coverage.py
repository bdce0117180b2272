"""Which aten ops of real training steps nvFuser's rules cover, as a page.

    python tests/nvfuser/coverage.py [PATH]

Three training steps with AdamW of each of the ten models that are also trained with kernels. Writes
to PATH, benches/results/nvfuser.md by default.
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import lazy_tensor  # noqa: E402
from lazy_tensor.dispatch.tiering.policy import Policy  # noqa: E402
from lazy_tensor.kernels import Call, fusible, register_backend  # noqa: E402
from lazy_tensor.kernels.nvfuser.backend import TAKEN  # noqa: E402
from tests.models.run import outcome_of, training  # noqa: E402
from tests.models.test_with_kernels import MODELS  # noqa: E402
from tests.models.zoo import ZOO  # noqa: E402
from tests.nvfuser.conftest import Interpreted  # noqa: E402

Counts = collections.Counter[str]


class Asked(Interpreted):
    """Counts the calls that it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: Counts = collections.Counter()
        self.left: dict[str, Counts] = {}

    def refuses(self, call: Call, inputs=()):
        reason = super().refuses(call, inputs)
        name = fusible.base_name(call.op)
        if reason is None:
            self.taken[name] += 1
        else:
            said = "fusible, but not here" if fusible.refuses(call) is None else reason
            self.left.setdefault(said.rpartition(": ")[2], collections.Counter())[name] += 1
        return reason


def asked_of(model: str) -> Asked:
    backend = Asked()
    register_backend("interpreted", backend)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy_tensor.configure(backend="interpreted", compile="blocking", cache_dir=folder)
        outcome_of(training(ZOO[model], n_steps=3), ZOO[model], "mode")
        lazy_tensor.configure(backend="aten", compile="off")
        lazy_tensor.cache_clear()
    return backend


def row(name: str, taken: Counts, left: dict[str, Counts]) -> str:
    missed = left.get("fusible, but not here", collections.Counter())
    n_fusible = taken.total() + missed.total()
    kinds = set(taken) | set(missed)
    others = sum(c.total() for reason, c in left.items() if reason != "fusible, but not here")
    return (
        f"| {name} | {n_fusible} | {taken.total() / n_fusible:.1%} | {len(kinds)} | "
        f"{len(set(taken) - set(missed)) / len(kinds):.1%} | {others} |"
    )


def main() -> None:
    Policy.may_grow = lambda self: True  # type: ignore[method-assign]
    torch.set_num_threads(1)
    path = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "benches" / "results" / "nvfuser.md")
    taken: Counts = collections.Counter()
    left: dict[str, Counts] = {}
    n_definitions = n_declined = 0
    rows: list[str] = []
    for model in MODELS:
        asked = asked_of(model)
        rows.append(row(model, asked.taken, asked.left))
        taken += asked.taken
        n_definitions += asked.n_definitions
        n_declined += len(asked.declined)
        for reason, counts in asked.left.items():
            left.setdefault(reason, collections.Counter()).update(counts)
    others = [
        f"- {reason}: {', '.join(f'{name} ({n})' for name, n in counts.most_common())}"
        for reason, counts in sorted(left.items(), key=lambda pair: -pair[1].total())
    ]
    path.write_text(
        "\n".join([
            "# What nvFuser's rules cover", "",
            f"`python tests/nvfuser/coverage.py`, torch {torch.__version__}. Ops of three training "
            "steps (AdamW) as planned; fusible are those that Inductor or nvFuser takes. They made "
            f"{n_definitions} definitions; {n_declined} segments were declined. Nothing here ran "
            "on a GPU.", "",
            "| model | fusible ops | covered | kinds of op | covered | others |",
            "|---|---|---|---|---|---|", *rows, row("all", taken, left), "",
            "Others, by the reason why no kernel holds them:", "", *others, "",
            "## Ops in these steps that are covered", "",
            ", ".join(f"{name} ({n})" for name, n in taken.most_common()), "",
            f"## All {len(TAKEN)} ops with rules", "",
            "By name, all overloads but `out=` ones; slices without a step; float64, float32, "
            "float16, bfloat16, int64, int32 and bool, up to eight dimensions.", "",
            " ".join(sorted(TAKEN)), "",
        ])
    )  # fmt: skip
    print(path.read_text())


if __name__ == "__main__":
    main()
