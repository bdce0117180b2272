"""Text generation by transformers' `generate`, with a cache that grows: eager, and `replay(model)`.

Beside them `torch.compile` with the static cache that its guide recommends. Small models of random
weights, greedy, 200 tokens at a time, from empty caches. Writes `results/generate.md`.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page

import lazy_tensor

N_TOKENS, N_ROUNDS = 200, 6
PROMPT = 10


def models() -> dict[str, Callable[[], Any]]:
    """Functions that make the models, by name."""
    import transformers as t

    small: dict[str, Any] = {"vocab_size": 1000, "decoder_start_token_id": 0}
    llama = t.LlamaConfig(
        **small, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    gpt2 = t.GPT2Config(**small, n_embd=256, n_layer=4, n_head=4, n_positions=512)
    t5 = t.T5Config(
        **small, d_model=256, d_kv=64, d_ff=512, num_layers=4, num_heads=4
    )  # fmt: skip
    mamba = t.MambaConfig(**small, hidden_size=256, num_hidden_layers=4)
    return {
        "Llama": lambda: t.LlamaForCausalLM(llama),
        "GPT-2": lambda: t.GPT2LMHeadModel(gpt2),
        "T5": lambda: t.T5ForConditionalGeneration(t5),
        "Mamba": lambda: t.MambaForCausalLM(mamba),
    }


def generator(model: Any, n_tokens: int, **options: Any) -> Callable[[], torch.Tensor]:
    prompt = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def generate() -> torch.Tensor:
        with torch.no_grad():
            tokens: torch.Tensor = model.generate(
                input_ids=prompt, max_new_tokens=n_tokens, min_new_tokens=n_tokens,
                do_sample=False, pad_token_id=0, **options,
            )  # fmt: skip
        return tokens

    return generate


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make().eval()


def sides_of(make: Callable[[], Any], n_tokens: int, quick: bool) -> dict[str, Any]:
    replayed = lazy_tensor.replay(made(make), sizes="any", compile="off" if quick else "background")
    sides = {
        "eager": generator(made(make), n_tokens),
        "replay": generator(replayed, n_tokens),
    }
    if not quick:
        compiled = made(make)
        compiled.forward = torch.compile(compiled.forward)
        sides["compile, static cache"] = generator(
            compiled, n_tokens, cache_implementation="static"
        )
    return sides


def times(sides: dict[str, Any], n_rounds: int) -> tuple[dict[str, list[float]], list[str]]:
    """Seconds of each generation by each side, in turns; and the sides that failed."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    failed: list[str] = []
    for _ in range(n_rounds):
        expected = None
        for name, generate in sides.items():
            if name in failed:
                continue
            start = time.perf_counter()
            try:
                tokens = generate()
            except Exception as error:
                failed.append(name)
                warnings.warn(f"{name}: {error!r}", stacklevel=2)
                continue
            seconds[name].append(time.perf_counter() - start)
            expected = tokens if expected is None else expected
            assert torch.equal(tokens, expected), f"{name} gives other tokens than eager"
    return seconds, failed


def bench_generate(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    pytest.importorskip("transformers")
    n_tokens, n_rounds = (12, 1) if quick else (N_TOKENS, N_ROUNDS)
    n_threads = torch.get_num_threads()
    rows: list[list[str]] = []

    def run() -> None:
        for name, make in models().items():
            lazy_tensor.cache_clear()
            seconds, failed = times(sides_of(make, n_tokens, quick), n_rounds)
            eager = statistics.median(seconds["eager"]) / n_tokens
            row = [name, f"{eager * 1e3:.2f} ms"]
            for side in ("replay", "compile, static cache"):
                found = [one / n_tokens / eager for one in seconds.get(side, ())]
                lost = side in failed or not found
                row += ["fails"] * 2 if lost else [f"{found[0]:.2f}", f"{found[-1]:.2f}"]
            rows.append(row)

    torch.set_num_threads(1)
    try:
        benchmark.pedantic(run, rounds=1, iterations=1)
    finally:
        torch.set_num_threads(n_threads)
    title = f"Generating {n_tokens} tokens with transformers, one thread"
    columns = (
        "model", "eager, a token", "`replay(model, sizes='any')`, first", f"the {n_rounds}th",
        "compile, first", f"the {n_rounds}th",
    )  # fmt: skip
    notes = [
        "eager's time a token = 1; the whole of `generate`, with the prompt; greedy, batch 1",
        "`replay` and eager have a `DynamicCache`, `torch.compile` a static one",
        "all sides gave the same tokens",
    ]
    (results_dir / "generate.md").write_text(page(title, columns, rows, notes))
