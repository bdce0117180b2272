"""Programs that a user would write around a model, told what they computed, lazily and eagerly.

A program takes a model and gives an `Outcome`: every number that it ends with, by name.
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from typing import Any

import numpy
import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from lazy_tensor import flush, is_lazy, lazy_mode, materialize, replay, wrap
from tests.models.entry import Entry

Outcome = dict[str, torch.Tensor]
Program = Callable[[Any], Outcome]
WAYS = ("mode", "wrap", "inside")


def seed(number: int = 5) -> None:
    """As `transformers.set_seed`: SpecAugment draws from numpy, layer drop from `random`."""
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def outcome_of(program: Program, entry: Entry, way: str, **options: Any) -> Outcome:
    """What `program` computes eagerly, or lazily: in the mode, wrapped, built in the mode, or by
    replays of the model."""
    if way == "inside":
        with lazy_mode(**options):
            return program(entry.build())
    model = entry.build()
    if way == "wrap":
        return program(wrap(model))
    if way == "replay":
        return program(replay(model, **options))
    with lazy_mode(**options) if way == "mode" else nullcontext():
        return program(model)


def left_behind(work: Callable[[], Outcome]) -> tuple[Outcome, int]:
    """What `work` gives, and the bytes of tensors that only the garbage collector can free then."""
    gc.collect()
    gc.disable()
    try:
        before = _storages(_tensors_there_are())
        outcome = work()
        flush()
        after = _storages(_tensors_there_are())
    finally:
        gc.enable()
    known = {**before, **_storages(outcome.values())}
    return outcome, sum(n_bytes for where, n_bytes in after.items() if where not in known)


def _tensors_there_are() -> list[torch.Tensor]:
    plain_types = (torch.Tensor, nn.Parameter)
    return [thing for thing in gc.get_objects() if type(thing) in plain_types]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The bytes of their memory, by where it is."""
    storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def plain(tensors: Mapping[str, torch.Tensor], prefix: str = "") -> Outcome:
    """Copies of `tensors`, computed."""
    found: Outcome = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        # a clone would change strides; `materialize` gives lazy ones memory of their own
        found[prefix + name] = materialize(tensor) if is_lazy(tensor) else copy.deepcopy(tensor)
    return found


def state_of(model: nn.Module) -> Outcome:
    """Parameters, buffers (those that `state_dict` leaves out too) and gradients."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return (
        plain(dict(model.named_parameters()), "parameter ")
        | plain(dict(model.named_buffers()), "buffer ")
        | plain(grads, "gradient ")
    )


def tensors_in(tree: Any, name: str = "") -> Outcome:
    """The tensors of a model's output, by their path in it."""
    if isinstance(tree, torch.Tensor):
        return plain({name: tree})
    if isinstance(tree, Mapping):
        items: Sequence[tuple[Any, Any]] = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    elif is_dataclass(tree) or isinstance(tree, (Cache, CacheLayerMixin)):
        items = list(vars(tree).items())
    else:
        return {}
    found: Outcome = {}
    for key, value in items:
        found |= tensors_in(value, f"{name}.{key}")
    return found


def is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def training(
    entry: Entry,
    *,
    n_steps: int = 4,
    autocast: bool = False,
    prepare: str | None = None,
    first_seed: int = 5,
    device: str = "cpu",
) -> Program:
    """AdamW, gradient clipping, a schedule and two micro-batches a step, as everyone writes it."""

    def train(model: Any) -> Outcome:
        batch = entry.batch()
        if prepare == "checkpointing":
            model.gradient_checkpointing_enable()
        if prepare == "bfloat16":
            model.to(torch.bfloat16)
            batch = {n: v.bfloat16() if is_floating(v) else v for n, v in batch.items()}
        if device != "cpu":
            model.to(device)
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
        seed(first_seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=n_steps + 1)
        losses = []
        for _ in range(n_steps):
            optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast(device, torch.bfloat16, enabled=autocast):
                    loss = model(**batch).loss / 2
                loss.backward()
                losses.append(loss.item())
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        moments = tensors_in(optimizer.state_dict()["state"], "optimizer")
        numbers = {"losses": torch.tensor(losses, dtype=torch.double), "norm": norm}
        return plain(numbers) | state_of(model) | moments

    return train


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 12, "top_p": 0.9, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "uncached": {"do_sample": False, "use_cache": False, "repetition_penalty": 1.3},
}


def generation(entry: Entry, how: str) -> Program:
    """`generate` in evaluation mode, with all that it can return."""

    def generate(model: Any) -> Outcome:
        assert entry.prompt is not None
        seed()
        found = model.eval().generate(
            **entry.prompt(), **GENERATION[how], max_new_tokens=6,
            return_dict_in_generate=True, output_logits=True, output_scores=True,
        )  # fmt: skip
        return tensors_in(found)

    return generate


def inference(entry: Entry, grad_mode: Callable[[], Any]) -> Program:
    """Two forward passes in evaluation mode."""

    def infer(model: Any) -> Outcome:
        model.eval()
        with grad_mode():
            outputs = [model(**entry.batch()) for _ in range(2)]
        return tensors_in(outputs)

    return infer
