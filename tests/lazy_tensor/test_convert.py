import copy
import io
import pickle
import weakref

import pytest
import torch
from torch.nn.utils import prune, weight_norm

from lazy_tensor import LazyTensor, is_lazy, is_pending, materialize, unwrap, wrap


def test_wrap_of_something_else_says_what_it_takes():
    with pytest.raises(TypeError, match=r"wrap\(\): x is a list; it takes a torch.Tensor"):
        wrap([1])  # type: ignore[call-overload]


def test_lazy_tensor_is_not_made_by_calling_it():
    with pytest.raises(TypeError, match=r"use lazy_tensor.wrap"):
        LazyTensor([1.0, 2.0])


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "prepare", [weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)]
)
@pytest.mark.parametrize("way", [wrap, lambda model: unwrap(wrap(model))])
def test_weights_that_are_computed_before_each_forward_pass(prepare, way):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    prepare(model[0])
    eager = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    prepare(eager[0])
    eager.load_state_dict(model.state_dict())
    way(model)
    for one in (eager, model):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for _ in range(3):
            one(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(materialize(ours), theirs)


def test_tied_weights_stay_tied():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    model = wrap(Tied())
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == 1


def test_gradients_are_wrapped_too():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    grad = model.weight.grad
    assert grad is not None
    expected = grad.clone()
    wrap(model)
    assert is_lazy(model.weight.grad)
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(materialize(model.weight.grad), expected * 2)


def test_wrap_refuses_a_parameter_with_a_weak_reference():
    model = torch.nn.Linear(2, 2)
    reference = weakref.ref(model.weight)
    with pytest.raises(RuntimeError, match="weak reference, so it can't change in place"):
        wrap(model)
    assert reference() is model.weight


def test_wraps_recurrent_modules_which_hold_weak_references():
    x = torch.randn(2, 3, 4)
    model = torch.nn.LSTM(4, 5, batch_first=True)
    expected = model(x)[0].detach()
    assert torch.equal(materialize(wrap(model)(x)[0].detach()), expected)
    assert torch.equal(unwrap(model)(x)[0].detach(), expected)


def test_materialized_copy_does_not_follow_later_writes():
    x = wrap(torch.ones(3))
    copied = materialize(x)
    x.add_(1)
    assert copied.tolist() == [1.0] * 3
    copied.mul_(7)
    assert x.tolist() == [2.0] * 3


def test_materialize_keeps_the_tree():
    tree = {"a": [wrap(torch.ones(1)) + 1, 3], "b": (None, "text")}
    result = materialize(tree)
    assert type(result["a"][0]) is torch.Tensor
    assert (result["a"][0].item(), result["a"][1], result["b"]) == (2.0, 3, (None, "text"))


def test_plain_input_changed_later_outside_the_mode_is_read_as_it_was():
    x = torch.ones(3)
    y = wrap(torch.ones(3)) + x
    x.zero_()
    z = wrap(torch.ones(3)) + x
    assert y.tolist() == [2.0] * 3
    assert z.tolist() == [1.0] * 3


def test_array_that_shares_an_input_is_read_as_it_was():
    array = torch.ones(3).numpy()
    x = torch.from_numpy(array)
    y = wrap(torch.ones(3)) + x
    array[:] = 5
    assert y.tolist() == [2.0] * 3


def test_write_to_a_plain_tensor_outside_the_mode_happens_at_once():
    x = torch.zeros(3)
    x.add_(wrap(torch.ones(3)) * 2)
    assert x.tolist() == [2.0] * 3


def test_numpy_shares_memory_and_later_reads_see_writes_through_it():
    x = wrap(torch.zeros(3))
    array = x.numpy()
    y = x + 1
    array[:] = 7
    assert y.tolist() == [1.0] * 3
    assert (x + 1).tolist() == [8.0] * 3


def test_is_pending_is_true_for_a_pending_write():
    x = wrap(torch.zeros(3))
    assert not is_pending(x)
    y = x + 1
    assert not is_pending(x)
    x[0:1].add_(1)
    assert is_pending(x)
    assert x.tolist() == [1.0, 0.0, 0.0]
    assert not is_pending(y)


def test_repr_looks_like_a_tensor():
    x = torch.tensor([1.0, 2.0])
    assert repr(wrap(x) + 1) == repr(x + 1)
    p = torch.nn.Parameter(x.clone())
    expected = repr(p), repr(p * 2)
    p = wrap(torch.nn.ParameterList([p]))[0]
    assert (repr(p), repr(p * 2)) == expected
    assert f"{wrap(torch.tensor(1.5)):.3f}" == "1.500"


def test_deepcopy_pickle_and_save_give_the_value():
    model = wrap(torch.nn.Linear(3, 2))
    twin = copy.deepcopy(model)
    assert is_lazy(twin.weight)
    assert isinstance(twin.weight, torch.nn.Parameter)
    assert twin.weight is not model.weight
    expected = materialize(model.weight)
    assert torch.equal(materialize(twin.weight), expected)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded.weight) is torch.nn.Parameter
    assert torch.equal(loaded.weight, expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file)["weight"], expected)


def test_deepcopy_gives_each_parameter_memory_of_its_own():
    def twin_of(convert):
        flat = torch.arange(1000.0)
        model = torch.nn.Module()
        model.a = torch.nn.Parameter(flat[:4].view(2, 2).t())
        model.b = torch.nn.Parameter(model.a.data)
        return copy.deepcopy(convert(model))

    for twin in map(twin_of, (lambda model: model, wrap)):
        with torch.no_grad():
            twin.a.add_(5)
        assert materialize(twin.b).tolist() == [[0, 2], [1, 3]]
        assert twin.a.stride() == (1, 2)
        assert twin.a.untyped_storage().nbytes() == 16


def test_load_state_dict_into_wrapped_module():
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    wrap(model).load_state_dict(other.state_dict())
    assert torch.equal(materialize(model.weight), other.weight)


def test_unwrap_shares_memory():
    x = torch.ones(3)
    lazy = wrap(x)
    lazy.add_(1)
    plain = unwrap(lazy)
    assert plain.tolist() == [2.0] * 3
    assert x.data_ptr() == plain.data_ptr()


def test_resize_and_transpose_in_place_follow():
    x = wrap(torch.arange(6.0).reshape(2, 3))
    x.t_()
    assert list(x.shape) == [3, 2]
    assert x.tolist() == [[0, 3], [1, 4], [2, 5]]
    x.unsqueeze_(0)
    assert list(x.shape) == [1, 3, 2]
    y = wrap(torch.ones(2))
    y.resize_(4)
    assert y.shape == (4,)
    assert y[:2].tolist() == [1, 1]


def test_a_metadata_change_leaves_aliases_alone():
    x = wrap(torch.zeros(2, 3))
    y = x.detach()
    y.t_()
    assert (x.shape, y.shape) == ((2, 3), (3, 2))
    y[2, 1] = 4
    assert x[1, 2].item() == 4


def doubled_by_hook(model, way, when):
    """The gradient of a weight whose hook doubles it; it is registered before `way(model)` or after
    it, or in place of one that was removed."""
    weight = model.weight
    if when == "removed before":
        weight.register_hook(lambda grad: grad).remove()
    if when == "before":
        weight.register_hook(lambda grad: 2 * grad)
    way(model)
    if when != "before":
        weight.register_hook(lambda grad: 2 * grad)
    model(torch.ones(1, 2)).sum().backward()
    assert weight.grad is not None
    return weight.grad.tolist()


@pytest.mark.parametrize("when", ["before", "after", "removed before"])
@pytest.mark.parametrize("way", [wrap, lambda model: unwrap(wrap(model))])
def test_hooks_of_parameters_stay(way, when):
    assert doubled_by_hook(torch.nn.Linear(2, 1), way, when) == [[2.0, 2.0]]


def test_hooks_that_were_registered_on_a_wrapped_parameter_stay():
    model = wrap(torch.nn.Linear(2, 1))
    handle = model.weight.register_hook(lambda grad: 2 * grad)
    unwrap(model)
    for expected in ([[2.0, 2.0]], [[1.0, 1.0]]):
        model.weight.grad = None
        model(torch.ones(1, 2)).sum().backward()
        grad = model.weight.grad
        assert grad is not None
        assert grad.tolist() == expected
        handle.remove()


def test_hooks_behind_accumulation_stay():
    """An optimizer in backward is one."""
    model = torch.nn.Linear(2, 1)
    seen = []
    model.weight.register_post_accumulate_grad_hook(
        lambda weight: seen.append(weight.grad.tolist())
    )
    wrap(model)(torch.ones(1, 2)).sum().backward()
    assert seen == [[[1.0, 1.0]]]


def test_parameters_of_a_class_of_the_programs_stay_what_they_are():
    class Scaled(torch.nn.Parameter):
        def scaled(self):
            return self * 5

    model = torch.nn.Module()
    parameter = model.p = Scaled(torch.ones(1))
    assert wrap(model).p is parameter
    assert parameter.scaled().tolist() == [5.0]
    assert not is_lazy(wrap(parameter))


def loaded(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [loaded, lambda x: pickle.loads(pickle.dumps(x))])
def test_attributes_of_tensors_are_saved_with_them(again):
    model = torch.nn.Linear(2, 2)
    vars(model.weight)["no_decay"] = True
    assert vars(again(wrap(model)).weight)["no_decay"]
    x = wrap(torch.ones(2)) * 2
    vars(x)["tag"] = "a"
    assert vars(again(x))["tag"] == "a"
