"""`fully_shard` against one process: the same training; collectives counted, memory given back."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lazy_tensor
import lazy_tensor.sharding as sharding
from lazy_tensor.dispatch.run import plan_cache
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.sharding import MixedPrecisionPolicy, Replicate, Shard, fully_shard
from tests.sharding.ranks import on_ranks, run_on_ranks

N = 4
STEPS = 4
_functional = torch.ops._c10d_functional
GATHER, SCATTER, REDUCE = (
    _functional.all_gather_into_tensor, _functional.reduce_scatter_tensor, _functional.all_reduce
)  # fmt: skip


class _Counting(TorchDispatchMode):
    """Counts collectives of its own thread: torch's `CommDebugMode` counts all threads' modules."""

    def __enter__(self) -> Any:
        self.found: Counter[Any] = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sharding.DTensor in types:
            return NotImplemented  # until what is recorded is known
        if op.namespace == "_c10d_functional" and "wait" not in op._schema.name:
            self.found[op.overloadpacket] += 1
        return op(*args, **(kwargs or {}))


class Block(nn.Module):
    """Sizes that 4 ranks don't share evenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *, tied: bool = False, saves: bool = True, width: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.saves = saves

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.saves else checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@functools.cache
def _first(**how: Any) -> Net:
    torch.manual_seed(0)
    return Net(**how)


_drawing = threading.Lock()  # the generator is shared by the threads that are ranks


def made(**how: Any) -> Any:
    with _drawing:
        return copy.deepcopy(_first(**how))


TOKENS = torch.randint(0, 11, (N, 3, 5), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


# half the ops of AdamW's
momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=0.01)


def trained_by_one(
    model: nn.Module, made_optimizer: Callable[[Any], Any] = momentum
) -> list[torch.Tensor]:
    optimizer = made_optimizer(model.parameters())
    for _ in range(STEPS):
        loss_of(model, TOKENS.flatten(0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [lazy_tensor.materialize(p.full_tensor().detach()) for p in model.parameters()]


def trained(
    model: nn.Module, made_optimizer: Callable[[Any], Any] = momentum, *, lazily: bool = True
) -> list[torch.Tensor]:
    """What each rank trains with its part of the data."""
    optimizer = made_optimizer(model.parameters())
    for _ in range(STEPS):
        with lazy_tensor.lazy_mode() if lazily else nullcontext():
            loss_of(model, TOKENS[dist.get_rank()]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def by_blocks(model: Any, mesh: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def check(
    sharded: Callable[[], nn.Module],
    model: Callable[[], nn.Module] = made,
    made_optimizer: Callable[[Any], Any] = momentum,
    **how: Any,
) -> None:
    expected = trained_by_one(model(), made_optimizer)
    for found in run_on_ranks(N, lambda: trained(sharded(), made_optimizer, **how)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def compare_gradients(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        found = ours.grad.full_tensor()
        torch.testing.assert_close(lazy_tensor.materialize(found), theirs.grad)


def line() -> Any:
    return sharding.init_device_mesh("cpu", (N,))


@pytest.mark.parametrize("lazily", [True, False])
def test_training_is_that_of_one_process(lazily: bool) -> None:
    check(lambda: by_blocks(made(), line()), made_optimizer=adamw, lazily=lazily)


@pytest.mark.parametrize("reshards", [True, False, 2])
def test_resharding_after_forward_changes_no_result(reshards: Any) -> None:
    check(lambda: by_blocks(made(), line(), reshard_after_forward=reshards))


def test_activation_checkpointing_computes_again_on_gathered_parameters() -> None:
    check(lambda: by_blocks(made(saves=False), line()))


def test_replicas_sum_their_gradients_too() -> None:
    def pairs() -> Any:
        mesh = sharding.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
        return by_blocks(made(), mesh)

    check(pairs)


def test_tied_parameters_stay_one() -> None:
    check(lambda: by_blocks(made(tied=True), line()), lambda: made(tied=True))


def test_a_group_of_several_modules() -> None:
    def grouped() -> Any:
        model, mesh = made(tied=True), line()
        fully_shard([model.embedding, model.head], mesh=mesh)
        return by_blocks(model, mesh)

    check(grouped, lambda: made(tied=True))


def each_apart(model: Any, mesh: Any, **options: Any) -> Any:
    """The tied layers by themselves, the second one first."""
    fully_shard(model.head, mesh=mesh, **options)
    fully_shard(model.embedding, mesh=mesh, **options)
    return by_blocks(model, mesh, **options)


@pytest.mark.parametrize("reshards", [None, True, False, 2])
@pytest.mark.parametrize("lazily", [True, False])
def test_tied_layers_that_are_wrapped_apart(lazily: bool, reshards: Any) -> None:
    options = {} if reshards is None else {"reshard_after_forward": reshards}
    check(
        lambda: each_apart(made(tied=True), line(), **options),
        lambda: made(tied=True),
        lazily=lazily,
    )


def test_a_layer_tied_to_one_of_the_root() -> None:
    def apart() -> Any:
        model, mesh = made(tied=True), line()
        fully_shard(model.embedding, mesh=mesh)
        return by_blocks(model, mesh)

    check(apart, lambda: made(tied=True))


def tied_in_pairs() -> Any:
    """Linear layers that share weights with the next but one, biases with all."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(4)]
    for i, layer in enumerate(layers):
        layer.weight = layers[i % 2].weight
        layer.bias = layers[0].bias
    return nn.Sequential(*layers)


@on_ranks(N)
def test_what_is_tied_is_gathered_once_and_reduced_once() -> None:
    with _drawing:
        model, expected = tied_in_pairs(), tied_in_pairs()
    for layer in model:
        fully_shard(layer, mesh=line())
    fully_shard(model, mesh=line())
    assert len(list(model.parameters())) == len(list(expected.parameters())) == 3
    optimizers = [torch.optim.Adam(m.parameters()) for m in (model, expected)]
    for _ in range(3):
        x = torch.arange(12.0).view(2, 6) / 12
        with lazy_tensor.lazy_mode(), _Counting() as counts:
            loss = model(x).square().sum()
            loss.backward()
        # the first layer's weight and bias, the second one's weight
        assert counts.found == {GATHER: 2, SCATTER: 2}
        expected(x).square().sum().backward()
        compare_gradients(model, expected)
        assert all(isinstance(p, sharding.DTensor) for p in model.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(N)
def test_tied_layers_apart_give_bit_for_bit_what_one_group_gives() -> None:
    def together() -> Any:
        model, mesh = made(tied=True), line()
        fully_shard([model.embedding, model.head], mesh=mesh)
        return by_blocks(model, mesh)

    assert all(map(torch.equal, trained(together()), trained(each_apart(made(tied=True), line()))))


@on_ranks(N)
def test_state_dicts_of_tied_layers_that_are_wrapped_apart() -> None:
    model, other = (each_apart(made(tied=True), line()) for _ in range(2))
    trained(model)
    loss_of(model, TOKENS[dist.get_rank()])  # leaves what is tied whole
    saved = model.head.state_dict()
    assert isinstance(saved["weight"], sharding.DTensor)
    for assign in (False, True):
        state = {name: p.detach().clone() for name, p in model.state_dict().items()}
        other.load_state_dict(state, assign=assign)
        assert other.head.weight is other.embedding.weight
        loss_of(other, TOKENS[dist.get_rank()]).backward()
        assert all(map(torch.equal, whole(other), whole(model)))
        assert other.head.weight is other.embedding.weight
        trained(other)


@on_ranks(N)
def test_a_frozen_parameter_that_layers_share() -> None:
    model = made(tied=True)
    model.head.requires_grad_(False)
    expected = copy.deepcopy(model)
    each_apart(model, line())
    for _ in range(2):
        loss_of(model, TOKENS[0]).backward()
        loss_of(expected, TOKENS[0]).backward()
    assert model.head.weight.grad is None
    compare_gradients(model.blocks, expected.blocks)


@on_ranks(N)
def test_what_a_tied_parameter_is_sharded_with_must_agree() -> None:
    model, mesh = made(tied=True), line()
    fully_shard(model.embedding, mesh=mesh)
    with pytest.raises(ValueError, match=r"mp_policy=.*'weight' of FSDPEmbedding, which"):
        fully_shard(model.head, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


@on_ranks(N)
def test_a_tied_parameter_under_another_root() -> None:
    model, mesh = made(tied=True), line()
    fully_shard(model.embedding, mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="call fully_shard on a module that contains"):
            model.head(torch.ones(2, 6))
    fully_shard(model, mesh=mesh)
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()


def test_frozen_parameters_stay_and_others_learn() -> None:
    def frozen() -> Any:
        model = made()
        for block in model.blocks:
            block.norm.requires_grad_(False)
            block.up.weight.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        return model

    check(lambda: by_blocks(frozen(), line()), frozen)


def test_frozen_weights_are_given_back_where_the_input_has_no_gradient() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("bias" in name)

    def body() -> None:
        model, expected = copy.deepcopy(plain), copy.deepcopy(plain)
        for block in model:
            fully_shard(block, mesh=line())
        fully_shard(model, mesh=line())
        x = torch.ones(3, 8)
        for each in (model, expected):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                each(x).square().sum().backward()
                optimizer.step()
        assert all(isinstance(p, sharding.DTensor) for p in model.parameters())
        torch.testing.assert_close(whole(model), list(expected.parameters()))

    run_on_ranks(N, body)


@pytest.mark.parametrize("reshards", [None, True])
def test_validation_outside_a_block_between_steps_in_blocks(reshards: Any) -> None:
    """It reads snapshots of the whole parameters, whose memory is freed behind it all the same."""

    def program(model: Any, tokens: torch.Tensor, block: Any) -> list[torch.Tensor]:
        optimizer = adamw(model.parameters())
        seen = []
        for _ in range(3):
            for n in (2, 3, 1, 2):
                with block():
                    loss_of(model, tokens[:n]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                seen += [model(tokens[:n]) for n in (3, 2)]
        return seen

    def body() -> Any:
        model = by_blocks(made(), line(), reshard_after_forward=reshards)
        return lazy_tensor.materialize(program(model, TOKENS[0], lazy_tensor.lazy_mode))

    expected = program(made(), TOKENS[0], nullcontext)
    for found in run_on_ranks(N, body):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Checked(nn.Linear):
    """A class that sees its own attributes set."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(
    "module", [lambda: nn.LSTM(6, 5), lambda: nn.GRU(6, 5), lambda: Checked(6, 5)]
)
def test_modules_whose_class_sets_attributes_itself(module: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    first = module()
    x = torch.randn(3, 2, 6)

    def program(model: nn.Module) -> None:
        optimizer = momentum(model.parameters())
        for _ in range(3):
            made = model(x)
            (made if isinstance(made, torch.Tensor) else made[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def body() -> list[torch.Tensor]:
        model = fully_shard(copy.deepcopy(first), mesh=line())
        program(model)
        return whole(model)

    expected = copy.deepcopy(first)
    program(expected)
    for found in run_on_ranks(N, body):
        torch.testing.assert_close(found, [p.detach() for p in expected.parameters()])


def test_a_parameter_that_is_frozen_later() -> None:
    def body() -> None:
        model = by_blocks(made(), line())
        loss_of(model, TOKENS[dist.get_rank()]).backward()
        up = model.blocks[0].up.weight
        before = up.grad.full_tensor()
        up.requires_grad_(False)
        loss_of(model, TOKENS[dist.get_rank()]).backward()
        torch.testing.assert_close(up.grad.full_tensor(), before)

    run_on_ranks(N, body)


def test_parameters_sharded_along_another_dimension() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False))
    models = [copy.deepcopy(plain) for _ in range(N)]

    def columns() -> Any:
        model = models[dist.get_rank()]
        where = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 8 else None  # noqa: E731
        return fully_shard(model, mesh=line(), shard_placement_fn=where)

    expected = trained_by_one(plain)
    for found in run_on_ranks(N, lambda: trained(columns())):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_data_and_tensor_parallel_together() -> None:
    def both() -> Any:
        mesh = sharding.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = made(width=8)
        for block in model.blocks:
            plan = {"up": sharding.ColwiseParallel(), "down": sharding.RowwiseParallel()}
            sharding.parallelize_module(block, mesh["tensor"], plan)
        return by_blocks(model, mesh["data"])

    def body() -> list[torch.Tensor]:
        model = both()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        part = TOKENS.unflatten(0, (2, 2))[dist.get_rank() // 2].flatten(0, 1)
        for _ in range(STEPS):
            with lazy_tensor.lazy_mode():
                loss_of(model, part).backward()
                optimizer.step()
                optimizer.zero_grad()
        return whole(model)

    expected = made(width=8)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss_of(expected, TOKENS.flatten(0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_on_ranks(N, body):
        for ours, theirs in zip(found, expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


@on_ranks(N)
def test_each_group_is_gathered_and_reduced_by_one_collective() -> None:
    model = by_blocks(made(tied=True), line())
    for _ in range(2):
        with _Counting() as counts:
            loss = loss_of(model, TOKENS[dist.get_rank()])
        assert counts.found == {GATHER: 4}  # three blocks and the root
        with _Counting() as counts:
            loss.backward()
        # the root stays whole, with what its two modules share
        assert counts.found == {GATHER: 3, SCATTER: 4}


@on_ranks(N)
def test_replicas_take_one_more_collective_a_group() -> None:
    mesh = sharding.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    model = by_blocks(made(), mesh)
    loss = loss_of(model, TOKENS[dist.get_rank()])
    with _Counting() as counts:
        loss.backward()
    assert counts.found == {GATHER: 3, SCATTER: 4, REDUCE: 4}


@on_ranks(N)
def test_memory_of_whole_parameters_comes_and_goes() -> None:
    model = by_blocks(made(), line())
    group = model.blocks[1]._get_fsdp_state()._fsdp_param_group

    def n_bytes() -> int:
        lazy_tensor.flush()
        memory: list[Any] = [tensor_types.value_in(p.buffer).data for p in group.fsdp_params]
        return sum(tensor.untyped_storage().nbytes() for tensor in memory)

    seen: list[int] = []
    model.blocks[1].up.register_forward_hook(lambda *_: seen.append(n_bytes()))
    loss = loss_of(model, TOKENS[dist.get_rank()])
    padded = (8 * 6 + 8 + 8 * 7 + 8 + 8 + 8) * 4
    assert seen == [padded]
    assert n_bytes() == 0
    model.blocks[1].up.weight.register_hook(lambda _: seen.append(n_bytes()))
    loss.backward()
    assert n_bytes() == 0
    assert all(isinstance(p, sharding.DTensor) for p in model.blocks[1].parameters())


@pytest.mark.parametrize(
    ("switch", "waits", "shape"),
    [("set_requires_gradient_sync", SCATTER, (N,)), ("set_requires_all_reduce", REDUCE, (2, 2))],
)
@on_ranks(N)
def test_gradients_wait_until_they_are_to_be_reduced(
    switch: str, waits: Any, shape: tuple[int, ...]
) -> None:
    names = ("replicas", "parts")[-len(shape) :]
    model = by_blocks(made(), sharding.init_device_mesh("cpu", shape, mesh_dim_names=names))
    expected = made()
    for i in range(3):
        tokens = TOKENS.roll(i, 0)
        loss_of(expected, tokens.flatten(0, 1)).backward()
        getattr(model, switch)(i == 2)
        with _Counting() as counts:
            loss_of(model, tokens[dist.get_rank()]).backward()
        assert counts.found[waits] == (4 if i == 2 else 0)
        assert waits is SCATTER or counts.found[SCATTER] == 4
    compare_gradients(model, expected)


class OneOfTwo(nn.Module):
    """Uses one of its weights."""

    def __init__(self, n_columns: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(6, 2), torch.ones(6, n_columns)])

    def forward(self, x: torch.Tensor, which: int) -> Any:
        return x @ self.weights[which]


@pytest.mark.parametrize("n_columns", [2, 3])
@pytest.mark.parametrize("order", [(0, 1), (1, 0, 1)])
@on_ranks(N)
def test_backwards_that_use_other_parameters_wait_for_one_all_reduce(
    order: tuple[int, ...], n_columns: int
) -> None:
    mesh = sharding.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    model, expected = fully_shard(OneOfTwo(n_columns), mesh=mesh), OneOfTwo(n_columns)
    x = torch.arange(24.0).view(4, 6)
    for i, which in enumerate(order):
        model.set_requires_all_reduce(i == len(order) - 1)
        (model(x, which) * (i + 1)).sum().backward()
        (expected(x, which) * (i + 1)).sum().backward()
    compare_gradients(model, expected)


@on_ranks(N)
def test_gradients_add_up_over_backwards() -> None:
    model, expected = by_blocks(made(), line()), made()
    for i in range(2):
        tokens = TOKENS.roll(i, 0)
        loss_of(expected, tokens.flatten(0, 1)).backward()
        loss_of(model, tokens[dist.get_rank()]).backward()
    compare_gradients(model, expected)


@on_ranks(N)
def test_two_forwards_before_one_backward() -> None:
    model, expected = by_blocks(made(), line()), made()
    rank = dist.get_rank()
    (
        loss_of(expected, TOKENS.flatten(0, 1)) + loss_of(expected, TOKENS.flip(0, 1).flatten(0, 1))
    ).backward()
    (loss_of(model, TOKENS[rank]) + loss_of(model, TOKENS.flip(0, 1)[rank])).backward()
    compare_gradients(model, expected)


@on_ranks(N)
def test_gathers_and_computes_in_the_dtypes_of_the_policy() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    model = made()
    for block in model.blocks:
        fully_shard(block, mesh=line(), mp_policy=policy)
    fully_shard(model, mesh=line(), mp_policy=replace(policy, output_dtype=torch.float64))
    seen: list[torch.dtype] = []
    model.blocks[0].up.register_forward_hook(lambda *_: seen.append(_[0].weight.dtype))
    output = model(TOKENS[dist.get_rank()])
    assert output.dtype is torch.float64
    assert seen == [torch.bfloat16]
    output.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    expected = made().bfloat16()
    expected(TOKENS.flatten(0, 1)).float().sum().div(N).backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        found = lazy_tensor.materialize(ours.grad.full_tensor())
        torch.testing.assert_close(found, theirs.grad.float(), rtol=0.1, atol=0.1)


@on_ranks(N)
def test_inference_without_gradients() -> None:
    model, expected = by_blocks(made(), line()), made()
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            found = lazy_tensor.materialize(model(TOKENS[0]))
        torch.testing.assert_close(found, expected(TOKENS[0]))
        assert not found.requires_grad
    loss_of(model, TOKENS[dist.get_rank()]).backward()  # training goes on afterwards
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_a_forward_before_the_step_leaves_nothing_out_of_date(options: dict[str, Any]) -> None:
    def outputs(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
        optimizer, seen = momentum(model.parameters()), []
        for _ in range(3):
            loss_of(model, tokens).backward()
            with torch.no_grad():
                seen.append(lazy_tensor.materialize(model(TOKENS[0])))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    expected = outputs(made(), TOKENS.flatten(0, 1))

    def body() -> list[torch.Tensor]:
        return outputs(by_blocks(made(), line(), **options), TOKENS[dist.get_rank()])

    for found in run_on_ranks(N, body):
        torch.testing.assert_close(found, expected)


@on_ranks(N)
def test_unshard_and_reshard_by_hand() -> None:
    model, expected = by_blocks(made(), line()), made()
    block = model.blocks[0]
    handle = block.unshard(async_op=True)
    assert isinstance(block.up.weight, sharding.DTensor)
    handle.wait()
    weight = block.up.weight
    assert isinstance(weight, nn.Parameter)
    assert not isinstance(weight, sharding.DTensor)
    torch.testing.assert_close(lazy_tensor.materialize(weight), expected.blocks[0].up.weight)
    block.reshard()
    assert isinstance(block.up.weight, sharding.DTensor)


@on_ranks(N)
def test_an_unused_module_has_no_gradients_or_zeros_if_wanted() -> None:
    model = by_blocks(made(), line())
    skipped: Any = model.blocks[2]
    skipped.forward = lambda x: x
    loss_of(model, TOKENS[dist.get_rank()]).backward()
    assert all(p.grad is None for p in skipped.parameters())
    model.set_reduce_scatter_unused_params(True)
    loss_of(model, TOKENS[dist.get_rank()]).backward()
    assert all(not p.grad.full_tensor().any() for p in skipped.parameters())


@on_ranks(N)
def test_zeros_for_what_is_unused_come_once_beside_frozen_parameters() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    model[0].requires_grad_(False)
    model.forward = lambda x: model[1](model[0](x))
    fully_shard(model, mesh=line())
    model.set_reduce_scatter_unused_params(True)
    calls: Counter[Any] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    for n in range(1, 4):
        with _Counting() as counted:
            model(torch.ones(2, 5, requires_grad=True)).sum().backward()
        assert counted.found[SCATTER] == 1
        assert calls == {f"{i}.{name}": n for i in (1, 2) for name in ("weight", "bias")}


@on_ranks(N)
def test_parameters_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Net()
    model = by_blocks(model, line())
    with pytest.raises(RuntimeError, match="meta device"):
        model(TOKENS[0])
    model = Net().to("meta")
    model = by_blocks(model, line())
    model.to_empty(device="cpu")
    plain = made()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        with torch.no_grad():
            ours.copy_(
                sharding.distribute_tensor(theirs.detach(), ours.device_mesh, ours.placements)
            )
    torch.testing.assert_close(lazy_tensor.materialize(model(TOKENS[0])), plain(TOKENS[0]))


@on_ranks(N)
def test_state_dicts_hold_sharded_parameters_and_load() -> None:
    model, other = by_blocks(made(), line()), by_blocks(Net(), line())
    state = model.state_dict()
    assert all(isinstance(t, sharding.DTensor) for t in state.values())
    other.load_state_dict(state)
    torch.testing.assert_close(
        lazy_tensor.materialize(other(TOKENS[0])), lazy_tensor.materialize(model(TOKENS[0]))
    )
    third = by_blocks(Net(), line())
    third.load_state_dict(state, assign=True)
    torch.testing.assert_close(
        lazy_tensor.materialize(third(TOKENS[0])), lazy_tensor.materialize(model(TOKENS[0]))
    )


@on_ranks(N)
def test_clipping_by_the_norm_of_all_gradients() -> None:
    model, expected = by_blocks(made(), line()), made()
    loss_of(expected, TOKENS.flatten(0, 1)).backward()
    loss_of(model, TOKENS[dist.get_rank()]).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    theirs = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    torch.testing.assert_close(lazy_tensor.materialize(norm.full_tensor()), theirs)
    for ours, plain in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(lazy_tensor.materialize(ours.grad.full_tensor()), plain.grad)


@on_ranks(N)
def test_a_failed_forward_leaves_a_model_that_can_be_reset() -> None:
    model, expected = by_blocks(made(), line()), made()
    fails = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(TOKENS[0])
    fails.remove()
    model.reset_iter_state()
    torch.testing.assert_close(lazy_tensor.materialize(model(TOKENS[0])), expected(TOKENS[0]))


@on_ranks(2)
def test_optimizers_may_step_within_backward() -> None:
    model, expected = by_blocks(made(), sharding.init_device_mesh("cpu", (2,))), made()

    def steps(parameters: list[Any]) -> None:
        for p in parameters:
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(_: Any, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)

    steps(list(model.parameters()))
    steps(list(expected.parameters()))
    for _ in range(2):
        loss_of(model, TOKENS.unflatten(0, (2, 2))[dist.get_rank()].flatten(0, 1)).backward()
        loss_of(expected, TOKENS.flatten(0, 1)).backward()
    for ours, theirs in zip(whole(model), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach())


@on_ranks(2)
def test_what_is_refused_says_why() -> None:
    mesh = sharding.init_device_mesh("cpu", (2,))
    model = by_blocks(made(), mesh)
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="scalar"):
        fully_shard(nn.ParameterDict({"a": torch.zeros(())}), mesh=mesh)
    with pytest.raises(ValueError, match="containers"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh)
    assert Replicate() not in next(model.parameters()).placements


class Again(nn.Module):
    """Each of its modules comes several times, one of them frozen, with gradients and without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.learns = (nn.Linear(5, 5) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(torch.relu(self.learns(x)))
            with torch.no_grad():
                x += torch.relu(self.learns(x))
        return x


def test_modules_that_come_several_times() -> None:
    torch.manual_seed(0)
    plain, x = Again(), torch.randn(N, 8, 5)
    models = [copy.deepcopy(plain) for _ in range(N)]
    plain(x.flatten(0, 1)).sum().div(N).backward()

    def body() -> list[Any]:
        rank = dist.get_rank()
        model, mesh = models[rank], line()
        for part in [*model.children(), model]:
            fully_shard(part, mesh=mesh)
        model(x[rank]).sum().backward()
        gradients = [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]
        return [lazy_tensor.materialize(gradient) for gradient in gradients]

    expected = [p.grad for p in plain.parameters() if p.requires_grad]
    for found in run_on_ranks(N, body):
        torch.testing.assert_close(found, expected)


def test_plans_gather_ahead_and_wait_for_reductions_late(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    build_plan = plan_cache.build_plan

    def noted(*args: Any, **kwargs: Any) -> Any:
        plans.append(build_plan(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(plan_cache, "build_plan", noted)

    def body() -> None:
        model = by_blocks(made(), line())
        for _ in range(3):
            with lazy_tensor.lazy_mode(compile="blocking"):  # plans at once
                loss_of(model, TOKENS[dist.get_rank()]).backward()
                lazy_tensor.flush()
            for parameter in model.parameters():
                parameter.grad = None

    run_on_ranks(N, body)
    steps = [str(node.facts.op) for step in plans[-1].steps for node in step.nodes]
    names = [op.split("::")[-1].split(".")[-2] for op in steps]
    gathers = [i for i, name in enumerate(names) if name == "all_gather_into_tensor"]
    scatters = [i for i, name in enumerate(names) if name == "reduce_scatter_tensor"]
    assert (len(gathers), len(scatters)) == (7, 4)

    def until(name: str, start: int) -> list[str]:
        return names[start : names.index(name, start)]

    for gather in gathers[2:4]:  # the second and the third block's, in forward
        assert "addmm" in until("refill_", gather)
    for scatter in scatters[:2]:
        assert "mm" in until("div_", scatter)
    for scatter, following in itertools.pairwise(scatters):
        assert names[scatter:following].count("div_") == 1  # one under way at a time
