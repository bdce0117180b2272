"""The host's time for CUDA programs, and the kernels that they launch, by nvFuser and by others.

    python tests/device/stand_in.py pytest benches/bench_nvfuser_host.py

runs it on a stand-in for a GPU (`tests/device/stand_in.py`). There a kernel is compiled, but a
launch does nothing. So times are the host's alone, without the driver's part of a launch. Writes
`results/nvfuser_host.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved
from torch import nn
from torch.nn import functional as F

import lazy_tensor
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.kernels.nvfuser import backend, library

pytestmark = [
    pytest.mark.skipif(
        not stand_in.is_loaded(), reason="needs python tests/device/stand_in.py pytest ..."
    ),
    pytest.mark.skipif(library.problem() is not None, reason=str(library.problem())),
    pytest.mark.filterwarnings("ignore"),
]
Step = Callable[[], object]
NOTES = (
    "the device is a stand-in: kernels are compiled for it and launched, and do nothing",
    "times are the host's, medians of rounds in turns; a real launch adds 2 to 3 us a kernel",
    "kernels are what the device was asked for in a settled call",
)


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    found: list[list[str]] = []
    yield found
    header = ["what", "eager", "torch.compile", "recorded", "replay", "kernels: eager",
              "torch.compile", "lazy", "of nvFuser"]  # fmt: skip
    text = page(f"The host's side of nvFuser: {library.installed()}", header, found, NOTES)
    (results_dir / "nvfuser_host.md").write_text(text)


@pytest.fixture(autouse=True)
def blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = settings.current()
    # on a GPU the backend declines segments that are too small to gain, as these are
    monkeypatch.setattr(backend.NvfuserBackend, "declines", lambda self, segment: None)
    lazy_tensor.configure(backend="nvfuser", compile="blocking", cache_dir=str(tmp_path))
    yield
    settings.put(before)


def lazily(step: Step) -> Step:
    def run() -> object:
        with lazy_tensor.lazy_mode():
            return step()

    return run


def compiled(step: Step) -> Step:
    torch._dynamo.reset()
    found: Step = torch.compile(step)
    return found


WAYS: dict[str, Callable[[Step], Step]] = {
    "eager": lambda step: step,
    "torch.compile": compiled,
    "recorded": lazily,
    "replay": lambda step: lazy_tensor.replay(step),
}


def pointwise() -> Step:
    x, y = (torch.randn(64, 64, device="cuda") for _ in range(2))
    w = torch.randn(64, device="cuda")
    return lambda: ((x * 2 + y).sin().exp() * w - 1).tanh()


def norm_gelu() -> Step:
    x, y = (torch.randn(64, 64, device="cuda") for _ in range(2))
    w = torch.randn(64, device="cuda")
    return lambda: F.gelu(F.layer_norm(x, w.shape, w, w)) + y


def cross_entropy() -> Step:
    x, y = torch.randn(64, 50, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")
    return lambda: F.cross_entropy(x * 2, y)


def adam(*, foreach: bool) -> Step:
    parameters = [nn.Parameter(torch.randn(64, 64, device="cuda")) for _ in range(48)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return torch.optim.Adam(parameters, foreach=foreach, capturable=True).step


def training() -> Step:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu",
                                       batch_first=True, norm_first=True)  # fmt: skip
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(50, 64), body, nn.Linear(64, 50)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    tokens = torch.zeros(4, 17, dtype=torch.long, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


CASES: dict[str, Callable[[], Step]] = {
    "7 pointwise ops": pointwise,
    "layer norm, GELU, add": norm_gelu,
    "cross-entropy": cross_entropy,
    "Adam, 48 parameters, a loop": lambda: adam(foreach=False),
    "Adam, 48 parameters, foreach": lambda: adam(foreach=True),
    "a training step, 2 layers": training,
}


@pytest.mark.parametrize("name", CASES)
def bench_host(benchmark: BenchmarkFixture, rows: list[list[str]], quick: bool, name: str) -> None:
    sides = {way: wrapped(CASES[name]()) for way, wrapped in WAYS.items()}
    n_calls = 1 if quick or "step" in name or "Adam" in name else 20

    def repeated(side: Step) -> Step:
        def run() -> None:
            for _ in range(n_calls):
                side()

        return run

    repeats = {way: repeated(side) for way, side in sides.items()}
    timings = interleaved(repeats, 3 if quick else 30, 8)
    asked: dict[str, list[str]] = {}
    for way, side in sides.items():
        with stand_in.asked() as entries:
            side()
        asked[way] = stand_in.kernels(entries)
    benchmark.pedantic(sides["recorded"])
    failed = [one.reason for one in list(compiler()._fusions) if one.status == "failed"]
    assert not failed, failed[0]
    times = [f"{timings.spread(way).median_s / n_calls * 1e6:.0f} us" for way in WAYS]
    n_own = sum(map(stand_in.is_of_nvfuser, asked["recorded"]))
    counts = [len(asked[way]) for way in ("eager", "torch.compile", "recorded")]
    rows.append([name, *times, *map(str, counts), str(n_own)])


def bench_cached_call(benchmark: BenchmarkFixture, rows: list[list[str]], quick: bool) -> None:
    """nvFuser's own part of a call: running a definition whose kernel is known."""
    x, y = (torch.randn(64, 64, device="cuda") for _ in range(2))
    fused: list[library.Fused] = []
    own = library.Fused.__init__

    def noted(self: library.Fused, *args: Any) -> None:
        own(self, *args)
        fused.append(self)

    with pytest.MonkeyPatch.context() as patch, lazy_tensor.lazy_mode():
        patch.setattr(library.Fused, "__init__", noted)
        lazy_tensor.materialize(((x * 2 + y).sin().exp() - 1).tanh())
    run = fused[-1].run
    n_calls = 10 if quick else 2000

    def calls() -> None:
        for _ in range(n_calls):
            run([x, y])

    timings = interleaved({"call": calls}, 3 if quick else 20, 2)
    benchmark.pedantic(run, ([x, y],))
    cached_us = timings.spread("call").median_s / n_calls * 1e6
    rows.append(
        ["nvFuser's own call, one kernel", "", "", f"{cached_us:.1f} us", "", "", "", "1", "1"]
    )
