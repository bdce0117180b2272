"""`DTensor` as users hold it: made, read, written, copied, saved, refused."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor, experimental as theirs

import lazy_tensor
import lazy_tensor.sharding as sharding
from lazy_tensor.sharding import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tests.sharding.ranks import on_ranks, run_on_ranks


def a_mesh(*shape):
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


@on_ranks(2)
def test_it_is_a_lazy_tensor_and_torchs_dtensor():
    tensor = distribute_tensor(torch.arange(6.0).view(3, 2), a_mesh(), [Shard(0)])
    assert isinstance(tensor, lazy_tensor.LazyTensor)
    assert isinstance(tensor, TorchDTensor)
    assert tensor.shape == (3, 2)
    assert tensor.to_local().shape == ((2, 2) if dist.get_rank() == 0 else (1, 2))
    doubled = tensor * 2
    assert lazy_tensor.is_pending(doubled)
    assert type(doubled) is DTensor
    assert doubled.placements == (Shard(0),)


@on_ranks(2)
def test_gradients_come_back_through_local_tensors():
    mesh = a_mesh()
    local = torch.full((2, 3), 1.0 + dist.get_rank(), requires_grad=True)
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    (tensor.redistribute(placements=[Replicate()]).square().to_local().sum()).backward()
    assert torch.equal(local.grad, 2 * local.detach())
    partial = DTensor.from_local(local.detach().requires_grad_(), mesh, [Partial()])
    assert torch.equal(partial.full_tensor(), torch.full((2, 3), 3.0))


@on_ranks(2)
def test_the_gradient_of_a_local_tensor_may_be_asked_for_as_a_part_of_a_sum():
    local = torch.ones(2, 2, requires_grad=True)
    tensor = DTensor.from_local(local, a_mesh(), [Replicate()], grad_placements=[Partial()])
    (tensor * 2).to_local().sum().backward()
    assert torch.equal(local.grad, torch.ones(2, 2))  # each of two ranks has half


@pytest.mark.parametrize("reduction", ["sum", "avg", "max"])
def test_a_number_meets_partial_tensors_as_in_torchs_dtensor(reduction):
    def made(module):
        x = module.from_local(torch.arange(4.0) + 1, a_mesh(), [Partial(reduction)])
        results = [x + 1, 1 - x, x - 1, x * 3, x / 3, x.add(1, alpha=2), x**2, x > 1]
        return [(r.placements, lazy_tensor.materialize(r.to_local())) for r in results]

    for found, expected in run_on_ranks(2, lambda: (made(DTensor), made(TorchDTensor))):
        for ours, of_torch in zip(found, expected, strict=True):
            assert ours[0] == of_torch[0]
            assert torch.equal(ours[1], of_torch[1])


@on_ranks(2)
def test_writes_to_views_show_where_a_rank_has_no_row():
    x, y = torch.arange(4.0).view(1, 4), torch.ones(1, 4)
    mine, other = (distribute_tensor(t.clone(), a_mesh(), [Shard(0)]) for t in (x, y))
    for a, b in ((x, y), (mine, other)):
        a[:, 1].mul_(0)
        a[0:1].add_(5)
        a[:, 2:3].copy_(b[:, 2:3])
        a[:, 0] = b[:, 1]
        a.chunk(2, 1)[0].mul_(2)
        a.unbind(1)[3].sub_(1)
    assert mine.placements == (Shard(0),)
    assert torch.equal(mine.full_tensor(), x)


@on_ranks(2)
def test_second_derivatives_go_through_redistribution():
    x = distribute_tensor(torch.arange(4.0), a_mesh(), [Shard(0)]).requires_grad_()
    y = (x.redistribute(placements=[Replicate()]) ** 3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second.full_tensor(), 6 * torch.arange(4.0))


@on_ranks(2)
def test_writes_show_in_views_and_in_the_local_tensor():
    tensor = distribute_tensor(torch.zeros(4, 4), a_mesh(), [Shard(0)])
    local = tensor.to_local()
    tensor[:, 1].fill_(3)
    tensor.add_(1)
    assert torch.equal(tensor.full_tensor()[:, 1], torch.full((4,), 4.0))
    assert torch.equal(local[:, 0], torch.ones(2))


@on_ranks(2)
def test_copies_are_apart_and_parameters_stay_parameters():
    tensor = torch.nn.Parameter(distribute_tensor(torch.ones(4), a_mesh(), [Shard(0)]))
    twin = copy.deepcopy(tensor)
    assert isinstance(twin, torch.nn.Parameter)
    assert type(twin) is DTensor
    assert twin.placements == tensor.placements
    with torch.no_grad():
        twin.mul_(5)
    assert torch.equal(tensor.full_tensor(), torch.ones(4))
    assert isinstance(tensor.to_local(), torch.nn.Parameter)


@on_ranks(2)
def test_saved_and_loaded_it_is_what_it_was():
    tensor = distribute_tensor(torch.arange(4.0), a_mesh(), [Shard(0)]) * 2
    file = io.BytesIO()
    torch.save({"x": tensor}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["x"]
    assert loaded.placements == (Shard(0),)
    assert torch.equal(loaded.full_tensor(), torch.arange(4.0) * 2)


@on_ranks(3)
def test_factories_draw_what_one_process_draws():
    mesh = a_mesh()
    generator = torch.Generator().manual_seed(5)
    expected = torch.randn(5, 2, generator=generator)
    if dist.get_rank() == 0:  # the ranks share a generator here
        torch.manual_seed(5)
        made = sharding.randn(5, 2, device_mesh=mesh, placements=[Shard(0)])
        assert torch.equal(made.to_local(), expected[:2])
    for name in ("zeros", "ones", "full"):
        value = {"zeros": (), "ones": (), "full": (7.0,)}[name]
        made = getattr(sharding, name)((5, 2), *value, device_mesh=mesh, placements=[Shard(0)])
        assert torch.equal(made.full_tensor(), getattr(torch, name)((5, 2), *value))
    assert sharding.empty(5, 2, device_mesh=mesh, placements=[Shard(1)]).shape == (5, 2)


@on_ranks(2)
def test_an_op_without_a_rule_gathers_and_says_so():
    tensor = distribute_tensor(torch.arange(6.0), a_mesh(), [Shard(0)])
    lazy_tensor.reset_stats()
    windows = tensor.unfold(0, 2, 2)
    assert windows.placements == (Replicate(),)
    assert torch.equal(windows.full_tensor(), torch.arange(6.0).unfold(0, 2, 2))
    assert torch.equal(tensor.nonzero().full_tensor(), torch.arange(6.0).nonzero())
    assert any("unfold" in line for line in lazy_tensor.stats()["redistributions"])
    assert "unfold" in str(lazy_tensor.explain())


@on_ranks(2)
def test_forbidden_redistribution_names_the_op_and_the_line():
    tensor = distribute_tensor(torch.arange(6.0), a_mesh(), [Shard(0)])
    before = tensor.sort()  # it gathers, unasked
    assert torch.equal(before.values.full_tensor(), torch.arange(6.0))
    with (
        lazy_tensor.lazy_mode(forbid={"redistribute"}),
        pytest.raises(RuntimeError, match=r"aten.sort.* at .*test_tensor.py.*'redistribute'"),
    ):
        tensor.sort()
    tensor.redistribute(placements=[Replicate()])


def gathers_what_bernoulli_compares_with(sharded):
    return torch.bernoulli(sharded)


def reduces_the_mean_of_losses(sharded):
    targets = distribute_tensor(torch.zeros(4, dtype=torch.long), sharded.device_mesh, [Shard(0)])
    return torch.nn.functional.nll_loss(sharded, targets)


def gathers_the_number_that_fills(sharded):
    return torch.ones_like(sharded).fill_(sharded.sum())


def gathers_what_is_compared(sharded):
    return torch.equal(
        sharded, distribute_tensor(torch.zeros(4, 4), sharded.device_mesh, [Shard(1)])
    )


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (gathers_what_bernoulli_compares_with, "bernoulli"),
        (reduces_the_mean_of_losses, "nll_loss_forward"),
        (gathers_the_number_that_fills, "fill_"),
        (gathers_what_is_compared, "equal"),
    ],
)
def test_no_op_redistributes_silently(function, op):
    def body():
        sharded = distribute_tensor(torch.zeros(4, 4), a_mesh(), [Shard(0)])
        function(sharded)
        dist.barrier()  # the ranks are threads here, and the counts are of all
        assert any(op in line for line in lazy_tensor.stats()["redistributions"])
        with (
            lazy_tensor.lazy_mode(forbid={"redistribute"}),
            pytest.raises(RuntimeError, match=rf"aten\.{op}.* at .*test_tensor.py.*'redistribute'"),
        ):
            function(sharded)

    lazy_tensor.reset_stats()
    run_on_ranks(2, body)


@on_ranks(2)
def test_plain_tensors_are_accepted_inside_implicit_replication_only():
    tensor, plain = distribute_tensor(torch.ones(4, 4), a_mesh(), [Shard(0)]), torch.ones(4, 4)
    for block in (sharding.implicit_replication, theirs.implicit_replication):
        for _ in range(3):
            with lazy_tensor.lazy_mode(record="always"):
                with block():
                    assert torch.equal((tensor + plain).full_tensor(), torch.full((4, 4), 2.0))
                with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
                    tensor + plain


@on_ranks(2)
def test_sizes_are_compared_as_those_of_whole_tensors():
    mesh = a_mesh()
    rows, columns = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(dim)]) for dim in (0, 1))
    assert torch.is_same_size(rows, columns)
    assert not torch.is_same_size(rows, distribute_tensor(torch.ones(2, 4), mesh, [Replicate()]))
    assert not torch.ops.aten.is_pinned(rows)


@on_ranks(2)
def test_equal_refuses_a_plain_tensor():
    tensor = distribute_tensor(torch.ones(4, 4), a_mesh(), [Shard(0)])
    for pair in itertools.permutations((tensor, torch.ones(4, 4))):
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            torch.equal(*pair)
        with sharding.implicit_replication():
            assert torch.equal(*pair)


@on_ranks(2)
def test_errors_name_argument_shape_and_placements():
    tensor = distribute_tensor(torch.ones(4, 4), a_mesh(), [Shard(0)])
    assert torch.equal((tensor + torch.tensor(2.0)).full_tensor(), torch.full((4, 4), 3.0))
    with pytest.raises(RuntimeError, match=r"mixed.*argument other is a plain.*\(4, 4\)"):
        tensor + torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="broadcast"):
        tensor + distribute_tensor(torch.ones(3, 4), a_mesh(), [Replicate()])
    with pytest.raises(ValueError, match="give one for each"):
        tensor.redistribute(placements=[Shard(0), Shard(1)])
    with pytest.raises(RuntimeError, match="no rank has all of it"):
        tensor.numpy()


@on_ranks(4)
def test_two_meshes_are_not_mixed():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    one = distribute_tensor(torch.ones(4), mesh["a"], [Shard(0)])
    other = distribute_tensor(torch.ones(4), mesh["b"], [Shard(0)])
    with pytest.raises(RuntimeError, match="2 different meshes"):
        one + other


@on_ranks(2)
def test_wrap_and_unwrap_know_it():
    torchs = torch.distributed.tensor.distribute_tensor(torch.ones(4), a_mesh(), [Shard(0)])
    ours = lazy_tensor.wrap(torchs)
    assert type(ours) is DTensor
    assert torch.equal((ours + 1).full_tensor(), torch.full((4,), 2.0))
    back = lazy_tensor.unwrap(ours + 1)
    assert type(back) is TorchDTensor
    assert torch.equal(lazy_tensor.materialize([ours + 1])[0], torch.full((4,), 2.0))


@on_ranks(2)
def test_equal_and_item_look_at_all_ranks():
    tensor = distribute_tensor(torch.arange(4.0), a_mesh(), [Shard(0)])
    other = distribute_tensor(torch.tensor([0.0, 1.0, 2.0, 4.0]), a_mesh(), [Shard(0)])
    assert torch.equal(tensor, tensor + 0)
    assert not torch.equal(tensor, other)
    assert tensor.sum().item() == 6.0


@on_ranks(2)
def test_a_decision_for_all_sizes_serves_new_ones_in_lazy_mode():
    mesh = a_mesh()

    def one_of(n):
        return distribute_tensor(torch.ones(n, 3), mesh, [Shard(0)])

    for n in (4, 6, 8):
        with lazy_tensor.lazy_mode():  # no closed form: fake tensors are asked
            first, second = torch._foreach_lerp([one_of(n)] * 2, [one_of(n) * 3] * 2, 0.5)
        assert torch.equal(first.full_tensor(), torch.full((n, 3), 2.0))
        assert second.placements == (Shard(0),)


@on_ranks(4)
def test_norms_and_clipping_over_several_meshes_and_plain_parameters():
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    plain = [torch.arange(6.0).view(3, 2) + i for i in range(4)]
    places = [
        (line, [Shard(0)]),
        (square, [Shard(0), Replicate()]),
        (square["b"], [Shard(1)]),
        None,
    ]
    for foreach in (True, False):
        parameters, expected = [], []
        for tensor, place in zip(plain, places, strict=True):
            mine = torch.nn.Parameter(
                distribute_tensor(tensor, *place) if place else tensor.clone()
            )
            theirs = torch.nn.Parameter(tensor.clone())
            (mine * 2).sum().backward()
            (theirs * 2).sum().backward()
            parameters.append(mine)
            expected.append(theirs)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
        theirs_norm = torch.nn.utils.clip_grad_norm_(expected, 1.0, foreach=foreach)
        torch.testing.assert_close(lazy_tensor.materialize(norm), theirs_norm)
        for mine, theirs in zip(parameters, expected, strict=True):
            found = mine.grad.full_tensor() if isinstance(mine, DTensor) else mine.grad
            torch.testing.assert_close(lazy_tensor.materialize(found), theirs.grad)


@on_ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_writes_where_a_mask_says_so(placement):
    plain = torch.linspace(-1, 1, 12).view(3, 4)
    for values in (torch.tensor(2.0), torch.arange(6.0)):
        expected, found = plain.clone(), distribute_tensor(plain, a_mesh(), [placement])
        expected[expected > 0] = values
        value = values if values.ndim == 0 else distribute_tensor(values, a_mesh(), [Replicate()])
        found[found > 0] = value
        assert found.placements == (placement,)
        torch.testing.assert_close(lazy_tensor.materialize(found.full_tensor()), expected)
    rows = torch.tensor([True, False, True])
    expected, found = plain.clone(), distribute_tensor(plain, a_mesh(), [placement])
    expected[rows] = 0.0
    found[distribute_tensor(rows, a_mesh(), [Shard(0)])] = 0.0
    torch.testing.assert_close(lazy_tensor.materialize(found.full_tensor()), expected)


@on_ranks(1)
def test_the_class_makes_a_tensor_of_a_spec():
    local = torch.rand(3, 2, requires_grad=True)
    spec = distribute_tensor(local.detach(), a_mesh(), [Shard(0)])._spec
    made = DTensor(local, spec, requires_grad=True)
    assert made.requires_grad
    assert made.placements == (Shard(0),)
    with pytest.warns(UserWarning, match="To construct a DTensor"):
        DTensor(local, spec)


@pytest.mark.parametrize("lazily", [False, True])
@on_ranks(2)
def test_what_a_rank_outside_the_mesh_has(lazily):
    mesh = DeviceMesh("cpu", [0])
    is_member = dist.get_rank() == 0
    for _ in range(3):  # a lazy local tensor's layout is known from the second time on
        local = lazy_tensor.wrap(torch.ones(2, 3)) if lazily else torch.ones(2, 3)
        x = DTensor.from_local(local, mesh, [Shard(0)])
        torch.testing.assert_close(
            lazy_tensor.materialize(x.sum().to_local()), torch.tensor(6.0 if is_member else 0.0)
        )
        assert x.to_local().shape == (x + 1).to_local().shape == ((2, 3) if is_member else (0,))


@on_ranks(2)
def test_errors_name_the_argument():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    sharding.parallelize_module(model, a_mesh(), {"0": sharding.ColwiseParallel()})
    with pytest.raises(RuntimeError, match=r"argument other is a plain tensor of shape \(2, 2\)"):
        torch.add(model[0].weight, torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"other\[0\] is a plain tensor"):
        torch._foreach_add_([model.get_parameter("0.weight").detach()], [torch.ones(2, 2)])


@on_ranks(2)
def test_numbers_of_a_call_that_a_mode_watches_are_its_own():
    def scaled(number):
        return distribute_tensor(torch.ones(2), a_mesh(), [Shard(0)]) * number * 3.5

    for number in range(1, 9):  # until numbers are inputs of the trace
        scaled(float(number)).to_local().tolist()
    with sharding.CommDebugMode():
        product = scaled(9.0) * 11.0
    assert product.to_local().tolist() == [9.0 * 3.5 * 11.0]


@on_ranks(2)
def test_local_functions_may_wait_for_their_own_collectives():
    def product(mesh, x, weight):
        return funcol.all_reduce(torch.mm(x, weight), "sum", mesh).wait()

    mesh = a_mesh()
    x, weight = torch.arange(24.0).view(4, 6), torch.arange(18.0).view(6, 3)
    given = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Shard(0)])
    placements = (None, [Shard(1)], [Shard(0)])
    local = sharding.local_map(product, [Replicate()], placements, device_mesh=mesh)
    found = local(mesh, *given)
    torch.testing.assert_close(found.full_tensor(), x @ weight)


@on_ranks(2)
def test_lists_of_sharded_and_plain_tensors_come_back_so_each_time():
    sharded = distribute_tensor(torch.ones(4), a_mesh(), [Shard(0)])
    plain = lazy_tensor.wrap(torch.ones(3))
    for _ in range(3):
        first, second = torch._foreach_mul([sharded, plain], 2.0)
        assert type(first) is DTensor
        assert type(second) is lazy_tensor.LazyTensor
        assert second.tolist() == [2.0] * 3


@on_ranks(6)
@pytest.mark.parametrize("n_rows", [1, 7])
def test_reshaping_moves_nothing_where_a_rank_has_no_part(n_rows):
    whole = torch.arange(8.0 * n_rows).reshape(n_rows, 2, 2, 2)
    tensor = distribute_tensor(whole, a_mesh(), [Shard(0)])
    with sharding.CommDebugMode() as counts:
        for reshaped in (tensor.view(n_rows, 4, 2), tensor.mT, tensor.unsqueeze(1)):
            assert reshaped.placements == (Shard(0),)
        assert not counts.get_comm_counts()
    assert torch.equal(tensor.view(n_rows, 8).full_tensor(), whole.view(n_rows, 8))
    assert torch.equal(tensor.view(n_rows, -1).full_tensor(), whole.view(n_rows, 8))


@on_ranks(4)
def test_norms_and_sums_move_nothing_where_a_rank_has_no_part():
    whole = torch.linspace(-1, 1, 120).view(4, 5, 6)
    norm = torch.nn.LayerNorm(6)
    given = distribute_tensor(whole, a_mesh(), [Shard(1)])
    sharded = sharding.distribute_module(copy.deepcopy(norm), a_mesh())
    weights = sharded.weight.detach(), sharded.bias.detach()
    aten = torch.ops.aten
    with sharding.CommDebugMode() as counts:
        result, *moments = aten.native_layer_norm(given, [6], *weights, norm.eps)
        aten.native_layer_norm_backward(given, given, [6], *moments, *weights, [True] * 3)
        assert given.sum().placements[0].is_partial()
        assert not counts.get_comm_counts()
    layer_norm = torch.nn.functional.layer_norm  # modules would be seen by other ranks' counts
    torch.testing.assert_close(result.full_tensor(), layer_norm(whole, (6,)))
    for weight, x in ((norm.weight, whole), (sharded.weight, given)):
        (layer_norm(x, (6,), weight) ** 2 * x).sum().backward()
    torch.testing.assert_close(sharded.weight.grad.full_tensor(), norm.weight.grad)


@on_ranks(2)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_an_op_that_makes_tensors_of_its_own_when_taken_apart(mode):
    whole = torch.arange(8.0).view(2, 1, 2, 2)
    given = distribute_tensor(whole, a_mesh(), [Shard(0)])
    grown = torch.nn.functional.interpolate(given, scale_factor=2, mode=mode)
    expected = torch.nn.functional.interpolate(whole, scale_factor=2, mode=mode)
    torch.testing.assert_close(grown.full_tensor(), expected)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        given + torch.ones(2, 1, 2, 2)


@on_ranks(4)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("states", ["as parameters", "replicated"])
def test_optimizers_where_a_rank_has_no_part(fused, states):
    """Six rows on four ranks: the last has none. A fused step writes more than its parameters."""
    plain, grads = torch.linspace(-1, 1, 6), torch.linspace(2, -3, 6)
    expected = torch.nn.Parameter(plain.clone())
    parameter = torch.nn.Parameter(distribute_tensor(plain, a_mesh(), [Shard(0)]))
    optimizers = [torch.optim.AdamW([p], lr=0.1, fused=fused) for p in (expected, parameter)]
    for step in range(4):
        expected.grad = grads.clone()
        parameter.grad = distribute_tensor(grads, a_mesh(), [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
        state = optimizers[1].state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            if states == "replicated" and step == 0:
                state[name] = state[name].redistribute(placements=[Replicate()])
            found = lazy_tensor.materialize(state[name].full_tensor())
            torch.testing.assert_close(found, optimizers[0].state[expected][name])
    wanted = Replicate() if states == "replicated" else Shard(0)
    assert state["exp_avg"].placements == (wanted,)
    found = lazy_tensor.materialize(parameter.full_tensor().detach())
    torch.testing.assert_close(found, expected.detach())


@on_ranks(2)
@pytest.mark.parametrize("placements", list(itertools.product((Replicate(), Shard(0)), repeat=3)))
def test_convolution_with_any_of_its_arguments_sharded(placements):
    # torch's handler takes the weight to be whole, whatever it is
    x, weight = torch.arange(48.0).view(2, 4, 6).sin(), torch.arange(48.0).view(4, 4, 3).cos()
    bias, mesh = torch.ones(4), a_mesh()
    expected = torch.nn.functional.conv1d(x, weight, bias)
    x, weight, bias = (
        distribute_tensor(tensor, mesh, [placement])
        for tensor, placement in zip((x, weight, bias), placements, strict=True)
    )
    found = torch.nn.functional.conv1d(x, weight, bias)
    torch.testing.assert_close(lazy_tensor.materialize(found.full_tensor()), expected)


@on_ranks(2)
def test_norms_of_changing_order():
    # the order says how the ranks' norms become one
    plain = torch.arange(1.0, 5.0)
    sharded = distribute_tensor(plain, a_mesh(), [Shard(0)])
    for order in (2.0, 1.0, 3.0, 0.0, float("inf"), 5.0, 2.0):
        for norm in (
            lambda x, p: torch.norm(x, p, [0], False),
            lambda x, p: torch.linalg.vector_norm(x, p),
            lambda x, p: torch._foreach_norm([x], p)[0],
        ):
            found = lazy_tensor.materialize(norm(sharded, order).full_tensor())
            torch.testing.assert_close(found, norm(plain, order))


@on_ranks(2)
def test_reduced_dimensions_are_kept():
    plain = torch.arange(12.0).view(3, 4).sin()
    for placement in (Replicate(), Shard(0), Shard(1)):
        sharded = distribute_tensor(plain, a_mesh(), [placement])
        for dim in (0, 1):
            found = torch.logsumexp(sharded, dim, True)
            expected = torch.logsumexp(plain, dim, True)
            torch.testing.assert_close(lazy_tensor.materialize(found.full_tensor()), expected)
            places = torch.argmax(sharded, dim - 2, True)
            assert lazy_tensor.materialize(places.full_tensor()).equal(plain.argmax(dim, True))


@on_ranks(2)
def test_only_an_integer_of_one_element_is_an_index():
    mesh = a_mesh()
    assert [10, 20][distribute_tensor(torch.tensor([1]), mesh, [Shard(0)]).sum()] == 20
    with pytest.raises(TypeError, match="only integer tensors of a single element"):
        [10, 20][distribute_tensor(torch.tensor(1.0), mesh, [Replicate()])]


@on_ranks(2)
def test_conversions_gather_parts():
    split = distribute_tensor(torch.tensor([1.0, 2.0]), a_mesh(), [Shard(0)])
    total = split.sum()
    assert (float(total), int(total), bool(total), complex(total)) == (3.0, 3, True, 3 + 0j)
    with pytest.raises(RuntimeError, match="Boolean value of Tensor"):
        bool(split)
