"""Copies and files: deepcopy, pickle, `torch.save`, state dicts, safetensors."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lazy_tensor import is_lazy, lazy_mode, materialize, stats, unwrap, wrap
from lazy_tensor.dispatch.trie.trace import local
from tests.invariants.compare import WAYS, assert_agrees, assert_same

each_way = pytest.mark.parametrize("way", WAYS)


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def through_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def deepcopied_leaf(x):
    y = x.detach().requires_grad_()
    (y * 2).sum().backward()
    twin = copy.deepcopy(y)
    twin.data.add_(1)
    return y, twin, twin.grad, twin.requires_grad


def deepcopied_views_share(x):
    y = x + 1
    pair = copy.deepcopy({"a": y, "again": y})
    pair["a"].zero_()
    return y, pair["again"]


def shallow_copied(x):
    y = x + 1
    twin = copy.copy(y)
    y.add_(1)
    return twin


def pickled(x):
    y = x + 1
    loaded = pickle.loads(pickle.dumps(y))
    y.add_(1)
    return loaded, y


def saved(x):
    y = x + 1
    loaded = through_file({"y": y, "row": y[0] + 0, "n": 3})
    loaded["y"].zero_()
    return loaded, y


def saved_views_share(x):
    y = x + 1
    loaded = through_file([y, y[0], y.detach()])
    loaded[0].zero_()
    return loaded


def saved_parameter(x):
    p = nn.Parameter(x * 2)
    loaded = through_file(p, weights_only=False)
    return type(loaded) is nn.Parameter or is_lazy(loaded), loaded.detach(), loaded.requires_grad


PROGRAMS = [
    deepcopied_leaf, deepcopied_views_share, shallow_copied, pickled, saved,
    saved_views_share, saved_parameter,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@each_way
def test_copies_agree(program, way):
    assert_agrees(way, program, torch.rand(3, 4))


def test_a_deepcopy_of_a_non_leaf_is_refused_as_in_eager():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError) as eager:
        copy.deepcopy(x * 2)
    with lazy_mode(), pytest.raises(RuntimeError) as lazy:
        copy.deepcopy(x * 2)
    assert str(lazy.value) == str(eager.value)


def test_a_pickled_lazy_tensor_holds_no_lazy_type():
    data = pickle.dumps({"x": wrap(torch.ones(2)) + 1, "m": wrap(nn.Linear(2, 2))})
    assert b"lazy_tensor" not in data


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("source", ["plain", "lazy"])
def test_a_state_dict_is_loaded_into_a_wrapped_model(assign, source):
    model, other = wrap(model_of(1)), model_of(2)
    x = torch.rand(5, 3)
    expected = copy.deepcopy(other).eval()(x)
    state = (wrap(other) if source == "lazy" else other).state_dict()
    model.load_state_dict(state, assign=assign)
    assert_same(model.eval()(x).detach(), expected.detach())


@pytest.mark.parametrize("assign", [False, True])
def test_a_lazy_state_dict_is_loaded_into_a_plain_model(assign):
    model, other = model_of(1), model_of(2)
    x = torch.rand(5, 3)
    expected = copy.deepcopy(other).eval()(x)
    model.load_state_dict(wrap(other).state_dict(), assign=assign)
    assert_same(model.eval()(x).detach(), expected.detach())


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_loaded_in_the_mode_is_seen_after_it(assign):
    model, other = model_of(1), model_of(2)
    with lazy_mode():
        model.load_state_dict(other.state_dict(), assign=assign)
    assert_same(materialize(model.state_dict()), other.state_dict())


def test_a_state_dict_taken_in_the_mode_is_a_snapshot_of_nothing():
    model = model_of(1)
    with lazy_mode():
        state = model.state_dict()
        with torch.no_grad():
            model[0].weight.zero_()
    assert materialize(state["0.weight"]).count_nonzero().item() == 0


def test_optimizer_state_goes_through_a_file_and_training_goes_on_bit_equal():
    def program():
        model, x = model_of(1), torch.linspace(0, 1, 15).view(5, 3)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        losses = []
        for step in range(4):
            if step == 2:
                states = through_file((model.state_dict(), optimizer.state_dict()))
                model = model_of(2)
                model.load_state_dict(states[0])
                optimizer = torch.optim.Adam(model.parameters(), 0.5)
                optimizer.load_state_dict(states[1])
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = program()
    with lazy_mode():
        assert program() == expected


def test_a_wrapped_model_goes_through_safetensors(tmp_path):
    from safetensors.torch import load_file, load_model, save_file, save_model

    model, twin = model_of(1), wrap(model_of(2))
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    wrap(model)
    save_model(model, str(tmp_path / "model"))
    assert_same(sorted(load_file(tmp_path / "model").items()), sorted(expected.items()))
    load_model(twin, str(tmp_path / "model"))
    assert_same(dict(twin.state_dict()), expected)
    pending = {name: t * 2 for name, t in model.state_dict().items()}
    save_file(pending, tmp_path / "pending")
    doubled = {name: t * 2 for name, t in expected.items()}
    assert_same(sorted(load_file(tmp_path / "pending").items()), sorted(doubled.items()))


def test_tied_weights_are_saved_once_by_safetensors(tmp_path):
    from safetensors.torch import load_file, save_model

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save_model(wrap(model), str(tmp_path / "tied"))
    assert len(load_file(tmp_path / "tied")) == 3


@each_way
def test_tied_weights_are_saved_once_by_torch(way):
    def size_of(state):
        file = io.BytesIO()
        torch.save(state, file)
        return file.tell()

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    expected = size_of(model.state_dict())
    if way == "wrap":
        assert size_of(wrap(model).state_dict()) == expected
        return
    with lazy_mode():
        assert size_of(model.state_dict()) == expected


def test_a_deepcopied_wrapped_model_trains_apart():
    model = wrap(model_of(1))
    twin = copy.deepcopy(model)
    before = materialize(model[0].weight.detach())
    optimizer = torch.optim.SGD(twin.parameters(), 0.5)
    twin(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    assert_same(model[0].weight.detach(), before)
    assert not torch.equal(materialize(twin[0].weight.detach()), before)
    assert model[0].weight.grad is None


def test_unwrap_gives_an_ordinary_model_with_what_was_learned():
    model = wrap(model_of(1))
    objects = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    learned = materialize(model[0].weight.detach())
    unwrap(model)
    assert all(p is q for p, q in zip(model.parameters(), objects, strict=True))
    assert not any(map(is_lazy, [*model.parameters(), *model.buffers()]))
    assert_same(model[0].weight.detach(), learned)
    flushes = stats()["flushes"]
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    assert stats()["flushes"] == flushes


def test_deepcopy_is_lazy_where_recording_has_stopped():
    module = wrap(model_of(0))
    with lazy_mode():
        local.trace.policy.cold = 1
        twin = copy.deepcopy(module)
        tensor = copy.deepcopy(module[0].weight.detach())
    assert isinstance(twin[0].weight, nn.Parameter)
    for mine, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        assert is_lazy(mine)
        assert mine.requires_grad
        assert_same(materialize(mine), materialize(theirs))
    assert_same(materialize(tensor), materialize(module[0].weight))
