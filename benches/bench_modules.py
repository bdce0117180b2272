"""Training with `replay(model)`, which replays forward and backward and leaves the loop as it is.

It is timed beside eager, `torch.compile(model)`, and `replay` of the whole step. Models of
transformers compute their loss themselves; the optimizer, fused AdamW, is outside of the model. One
thread. Replayed steps first run until their plans are final. Writes `results/modules.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page, seconds_text
from settled import settle
from timing import interleaved
from torch import Tensor, nn

from lazy_tensor import replay

Step = Callable[[], object]
SIDES = ("eager", "replay(model)", "replay(step)", "torch.compile(model)")
TOKENS = (4, 64)
VOCAB = 512


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def mlp() -> tuple[nn.Module, Any]:
    """an MLP, 32-64-64-10, batch 32"""
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers), torch.randn(32, 32)


def residual() -> tuple[nn.Module, Any]:
    """32 residual layers, 16 wide, batch 8"""
    return nn.Sequential(*[Residual(16) for _ in range(32)]), torch.randn(8, 16)


def cnn() -> tuple[nn.Module, Any]:
    """a CNN with batch norms, 8 images of 32 x 32"""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*layers), torch.randn(8, 3, 32, 32)


def of_transformers(name: str, **config: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        import transformers

        kind: Any = getattr(transformers, name)
        model: nn.Module = kind(kind.config_class(vocab_size=VOCAB, **config))
        tokens = torch.randint(3, VOCAB, TOKENS)
        return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens),
                       "labels": tokens}  # fmt: skip

    make.__doc__ = f"transformers' {name}, 128 wide"
    return make


LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 128}
MODELS = (
    mlp,
    residual,
    cnn,
    of_transformers("GPT2LMHeadModel", n_layer=4, n_head=4, n_embd=128, bos_token_id=1,
                    eos_token_id=1),
    of_transformers("LlamaForCausalLM", num_key_value_heads=2, intermediate_size=256, **LAYERS),
    of_transformers("BertForMaskedLM", intermediate_size=256, **LAYERS),
    of_transformers("T5ForConditionalGeneration", d_model=128, d_ff=256, num_layers=2, num_heads=4,
                    d_kv=32, decoder_start_token_id=0),
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def step_of(make: Callable[[], tuple[nn.Module, Any]], side: str) -> Step:
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    run: Any = model
    if side == "replay(model)":
        run = replay(model)
    elif side == "torch.compile(model)":
        run = torch.compile(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = run(**batch).loss if isinstance(batch, dict) else run(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return replay(step) if side == "replay(step)" else step


@pytest.mark.filterwarnings("ignore")  # of models, and of torch.compile
def bench_modules(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    rounds, warmup = (3, 3) if quick else (60, 12)
    rows = []

    def run() -> None:
        for make in MODELS[: 2 if quick else None]:
            steps, first_s = {}, {}
            for side in SIDES[: 3 if quick else None]:
                steps[side] = step_of(make, side)
                began_s = time.perf_counter()
                steps[side]()
                first_s[side] = time.perf_counter() - began_s
                if side.startswith("replay") and not quick:
                    settle(steps[side])
            timings = interleaved(steps, rounds, warmup)
            row = [str(make.__doc__), seconds_text(timings.spread("eager").median_s)]
            for side in list(steps)[1:]:
                row += [f"{timings.ratio(side, 'eager'):.2f}", seconds_text(first_s[side])]
            rows.append(row)

    benchmark.pedantic(run, rounds=1, iterations=1)
    columns = ["model", "eager's step"]
    for side in SIDES[1 : 3 if quick else None]:
        columns += [side, "its first step"]
    notes = [
        "a training step over eager's, medians of steps in turns: smaller is better",
        "the loss and fused AdamW stay outside replay(model) and torch.compile(model)",
        "replayed steps run first until no better plan is to come, for 120 s at most",
    ]
    title = "Models in loops of one's own"
    (results_dir / "modules.md").write_text(page(title, columns, rows, notes))
