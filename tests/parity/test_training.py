"""Whole training steps, bit-equal to eager op by op."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lazy_tensor import lazy_mode, materialize, wrap
from lazy_tensor.dispatch.trie.trace import Node, local


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


def transformer():
    return nn.Sequential(nn.Embedding(11, 8), Block(8), Block(8), nn.Linear(8, 11))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 11), nn.Dropout(0.2),
    )  # fmt: skip


def batch(kind):
    if kind is cnn:
        return torch.randn(5, 3, 8, 8), torch.randint(0, 11, (5,))
    return torch.randint(0, 11, (5, 6)), torch.randint(0, 11, (5, 6))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


def train(model, optimizer, data, n_steps=10):
    x, y = data
    torch.manual_seed(1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, [materialize(p.detach()) for p in model.parameters()]


def assert_same(got, expected):
    assert got[0] == expected[0]
    for a, b in zip(got[1], expected[1], strict=True):
        assert torch.equal(a, b)


def built(kind, optimizer):
    torch.manual_seed(7)
    model = kind()
    return model, OPTIMIZERS[optimizer](model.parameters())


def train_anew(kind, optimizer, data):
    model, optim = built(kind, optimizer)
    return train(model, optim, data)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [transformer, cnn], ids=lambda k: k.__name__)
@pytest.mark.parametrize("way", ["mode", "wrap"])
def test_losses_and_weights_are_bit_equal(kind, optimizer, way):
    data = batch(kind)
    expected = train_anew(kind, optimizer, data)
    model, optim = built(kind, optimizer)
    if way == "wrap":
        assert_same(train(wrap(model), optim, data), expected)
        return
    with lazy_mode():
        got = train(model, optim, data)
    assert_same(got, expected)


def test_optimizer_made_after_wrap():
    data = batch(transformer)
    expected = train_anew(transformer, "adam", data)
    torch.manual_seed(7)
    model = wrap(transformer())
    assert_same(train(model, OPTIMIZERS["adam"](model.parameters()), data), expected)


def test_accumulation_and_autocast():
    def run():
        torch.manual_seed(3)
        model = transformer()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, y = torch.arange(30).reshape(5, 6) % 11, torch.arange(30) % 11
        losses = []
        for step in range(6):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).flatten(0, -2).float(), y)
            loss.backward()
            losses.append(loss.item())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses, [materialize(p.detach()) for p in model.parameters()]

    expected = run()
    with lazy_mode():
        got = run()
    assert_same(got, expected)


def test_double_backward():
    def run():
        x = torch.linspace(-1, 1, 6).requires_grad_()
        (grad,) = torch.autograd.grad(x.sin().pow(3).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.grad

    expected = run()
    with lazy_mode():
        got = run()
    assert torch.equal(materialize(got), expected)


def test_wrapped_parameters_take_foreach_ops():
    model = wrap(torch.nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1, foreach=True).step()
    steps = local.trace.state.steps()
    ops = [step.facts.op for step in steps if isinstance(step, Node)]
    assert torch.ops.aten._foreach_add_.List in ops
