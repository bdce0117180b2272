"""What is printed: a lazy tensor looks like the tensor that it stands for."""

import pytest
import torch

from lazy_tensor import is_pending, lazy_mode, wrap
from tests.invariants.compare import WAYS, fresh, lazily

VALUES = {
    "short": torch.tensor([1.0, 2.0]),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
    "long": torch.arange(40.0) / 7,
    "one full line": torch.arange(11.0) / 3,
    "matrix": torch.arange(12.0).view(3, 4) / 7,
    "one row": torch.arange(8.0).view(1, 8) / 7,
    "summarized": torch.arange(2000.0),
    "double": torch.tensor([1.0, 2.0], dtype=torch.float64),
    "long double": torch.arange(40.0, dtype=torch.float64) / 7,
    "half row": torch.arange(9.0, dtype=torch.float16) / 7,
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-8, 1e8]),
}
EXACT = {
    "ints": torch.arange(5),
    "long ints": torch.arange(70),
    "bools": torch.tensor([True, False]),
    "bytes": torch.arange(3, dtype=torch.uint8),
}
WITH_SUFFIX = {
    "no gradient": lambda x: x.detach(),
    "leaf": lambda x: x.detach().requires_grad_(),
    "sum": lambda x: x.detach().requires_grad_() + 1,
    "product": lambda x: x.detach().requires_grad_() * 1,
    "view": lambda x: (x.detach().requires_grad_() * 1).unsqueeze(0),
    "parameter": lambda x: torch.nn.Parameter(x.detach() * 1),
}
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize("suffix", WITH_SUFFIX.values(), ids=WITH_SUFFIX.keys())
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@each_way
def test_repr_is_eagers(value, suffix, way):
    expected = repr(suffix(fresh(value)))
    assert lazily(way, lambda x: repr(suffix(x)), fresh(value)) == expected


@pytest.mark.parametrize("value", EXACT.values(), ids=EXACT.keys())
@each_way
def test_repr_of_what_has_no_gradient_is_eagers(value, way):
    assert lazily(way, lambda x: repr(x | x), fresh(value)) == repr(value | value)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_break_where_print_options_say(width):
    x = torch.arange(9.0)
    torch.set_printoptions(linewidth=width)
    try:
        expected = repr(x.requires_grad_() * 2)
        with lazy_mode():
            assert repr(x * 2) == expected
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize("spec", ["", ".3f", ">10"])
@each_way
def test_formatting_a_scalar_is_eagers(spec, way):
    x = torch.tensor(1.23456)
    assert lazily(way, lambda t: format(t * 2, spec), x) == format(x * 2, spec)


@each_way
def test_containers_and_print_show_values(way, capsys):
    x = torch.tensor([1.0, 2.0])
    print({"a": [x + 1]}, x * 2)
    expected = capsys.readouterr().out
    lazily(way, lambda t: print({"a": [t + 1]}, t * 2), x)
    assert capsys.readouterr().out == expected


def test_a_printed_module_does_not_run_anything():
    layer = wrap(torch.nn.Linear(2, 2))
    layer.weight.data.mul_(2)
    assert repr(layer) == repr(torch.nn.Linear(2, 2))
    assert is_pending(layer.weight)


@pytest.mark.parametrize(
    ("value", "kind"), [(1.5, float), (3, int), (True, bool), (1 + 2j, complex)], ids=str
)
@each_way
def test_item_is_a_python_number(value, kind, way):
    x = torch.tensor([value, value])
    items = lazily(way, lambda t: (t[0].item(), t.view(2, 1)[1].tolist()[0]), x)
    assert items == (value, value)
    assert [type(item) for item in items] == [kind, kind]
