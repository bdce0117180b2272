"""TorchScript in lazy_mode: its C++ fills memory, saves it and loads it without an op."""

import io

import pytest
import torch
from torch import nn

from lazy_tensor import lazy_mode, materialize, wrap
from tests.invariants.compare import WAYS, assert_same, lazily

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")


def saved(module):
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return file


def test_a_script_loads_its_parameters():
    module = torch.jit.script(nn.Linear(2, 2))
    file = saved(module)
    with lazy_mode():
        loaded = torch.jit.load(file)
        for name, value in loaded.state_dict().items():
            assert torch.equal(materialize(value), module.state_dict()[name])


def test_a_script_is_saved_with_pending_writes():
    module = torch.jit.script(nn.Linear(2, 2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with lazy_mode():
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1)
        file = saved(module)
    for name, value in torch.jit.load(file).state_dict().items():
        assert torch.equal(value, before[name] + 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_script_of_a_lazy_module_is_saved(way):
    if way == "wrap":
        file = saved(torch.jit.script(wrap(nn.Linear(2, 2))))
    else:
        with lazy_mode():
            file = saved(torch.jit.script(nn.Linear(2, 2)))
            torch.jit.load(file)(torch.ones(1, 2)).sum().backward()
            file.seek(0)
    assert torch.jit.load(file)(torch.ones(1, 2)).shape == (1, 2)


def test_a_trace():
    model, x = nn.Conv2d(1, 2, 3), torch.rand(1, 1, 5, 5)
    expected = model(x)
    with lazy_mode():
        for given in (x, x * 1):
            traced = torch.jit.trace(model, given)
            assert torch.equal(materialize(traced(x * 1)), expected)


def test_a_script_with_literals_and_gradients():
    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype, device=x.device)

    def program():
        x = torch.ones(3, requires_grad=True)
        y = scripted(x * 2)
        y.sum().backward()
        return y.detach(), x.grad

    assert_same(lazily("mode", program), program())


def test_a_tensor_attribute_of_a_scripted_module_is_saved():
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, x):
            return x * self.scale

    with lazy_mode():
        file = saved(torch.jit.script(Scaled(torch.ones(2) * 3)))
    assert torch.jit.load(file)(torch.ones(2)).tolist() == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("when", ["in the mode", "after two blocks"])
def test_a_script_of_functions_that_are_seen_to_by_name(when):
    def sparse(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        first, _ = torch.tensor_split(values, 2)
        return torch.sparse_coo_tensor(indices, values, [3]).to_dense() + first[0]

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(2, 2)

        def forward(self, x):
            return self.lstm(x)[0]

    given, x = (torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0])), torch.ones(1, 1, 2)
    module = Recurrent()
    for _ in range(2):
        with lazy_mode():
            if when == "in the mode":
                scripts = torch.jit.script(sparse), torch.jit.script(module)
    if when == "after two blocks":
        scripts = torch.jit.script(sparse), torch.jit.script(module)
    assert torch.equal(scripts[0](*given), sparse(*given))
    assert torch.equal(scripts[1](x), module(x))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_class_that_is_scripted_finds_the_names_of_its_module():
    """As those of `torch.distributed.optim`, which many libraries import."""
    with lazy_mode():

        @torch.jit.script
        class Doubler:
            def __init__(self):
                self.n = 0

            def call(self, x: torch.Tensor) -> torch.Tensor:
                return doubled(x)

        @torch.jit.script
        def twice(x: torch.Tensor) -> torch.Tensor:
            return Doubler().call(x)

    assert torch.equal(twice(torch.ones(2)), torch.full((2,), 2.0))
