"""What lines of a random program can be: a production takes a `Writer` and gives a line, or None.

Productions know shapes and dtypes, so that most lines run; indices are always within bounds,
because an error that only values tell comes later lazily than eagerly.
"""

from __future__ import annotations

import torch

from fuzzing.program import Production, Writer

FLOATS = ("float32", "float32", "float32", "float64", "bfloat16")
DTYPES = (*FLOATS, "int64", "int32", "uint8", "bool", "complex64")
SIDES = (1, 2, 3, 4, 0, 5)
NUMBERS = ("2", "-1", "0.5", "1.5", "3", "0", "True", "-0.25", "1e-3")


def is_floating(t: torch.Tensor) -> bool:
    return t.is_floating_point()


def is_real(t: torch.Tensor) -> bool:
    return not t.is_complex() and t.dtype is not torch.bool


def is_differentiable(t: torch.Tensor) -> bool:
    return t.requires_grad and t.is_floating_point()


def shape(w: Writer, max_dims: int = 3) -> tuple[int, ...]:
    n_dims = w.choose(2, 1, 3, 0)
    return tuple(w.choose(*SIDES) for _ in range(min(n_dims, max_dims)))


def new_tensor(w: Writer) -> str:
    size, dtype = shape(w), w.choose(*DTYPES)
    if dtype in FLOATS or dtype == "complex64":
        made = f"torch.randn({size}, dtype=torch.{dtype})"
    elif dtype == "bool":
        made = f"torch.rand({size}) > 0.5"
    else:
        made = f"torch.randint(0, 6, {size}, dtype=torch.{dtype})"
    made = w.choose(made, made, made, f"torch.ones({size}, dtype=torch.{dtype})",
                    f"torch.arange({w.integer(0, 12)}, dtype=torch.float32)")  # fmt: skip
    if len(size) >= 2 and w.chance(4):
        made = f"({made}).transpose(0, -1)" if w.chance(2) else f"({made})[:, 1:]"
    if dtype in FLOATS and made[0] != "(" and w.chance(2):
        made = f"({made}).requires_grad_()"
    return f"{w.fresh()} = " + (f"wrap({made})" if not w.chance(5) else made)


def shared_tensor(w: Writer) -> str:
    """A plain tensor, and a lazy one on the same memory."""
    plain, lazy = w.fresh(), w.fresh()
    return f"{plain} = torch.randn({shape(w)}); {lazy} = wrap({plain}.detach())"


UNARY = (
    *("sin", "exp", "abs", "neg", "relu", "sigmoid", "tanh", "sqrt", "square", "reciprocal"),
    *("floor", "round", "sign", "log1p", "erf", "isnan", "logical_not", "cos", "atan", "softmax0"),
    *("cumsum0", "flip0", "clone", "contiguous", "gelu", "silu", "detach", "ceil", "frac"),
)
CALLS = {
    "softmax0": "F.softmax({}, 0)", "cumsum0": "{}.cumsum(0)", "flip0": "{}.flip(0)",
    "gelu": "F.gelu({})", "silu": "F.silu({})",
}  # fmt: skip


def unary(w: Writer) -> str | None:
    name, op = w.pick(), w.choose(*UNARY)
    return f"{w.fresh()} = " + CALLS.get(op, "{}." + op + "()").format(name) if name else None


def other(w: Writer, name: str) -> str:
    """An operand for `name`: a number, or a tensor that it probably broadcasts with."""
    mine = w.tensors[name]
    fits = w.pick(lambda t: t.shape == mine.shape[mine.dim() - t.dim() :] or t.numel() == 1)
    return fits if fits and not w.chance(3) else w.choose(*NUMBERS)


BINARY = ("{} + {}", "{} * {}", "{} - {}", "{} / {}", "{1} - {0}", "torch.maximum({}, {})",
          "torch.gt({}, {})", "{} == {}", "{} ** 2 + {}", "torch.add({}, {}, alpha=2)",
          "{} // 3 + {}",
          "torch.where({0} > 0, {0}, {1})", "{0} % 3 - {1}", "{0}.lerp({0} * 2, 0.25) + {1}",
          "torch.addcmul({0}, {0}, {0}, value=0.5) + {1}")  # fmt: skip


def binary(w: Writer) -> str | None:
    name = w.pick()
    if name is None:
        return None
    return f"{w.fresh()} = " + w.choose(*BINARY).format(name, other(w, name))


REDUCTIONS = ("sum", "mean", "amax", "amin", "std", "var", "argmax", "any", "all",
              "logsumexp", "norm")  # fmt: skip


def reduction(w: Writer) -> str | None:
    name = w.pick()
    if name is None:
        return None
    arguments = "" if not w.tensors[name].dim() or w.chance(3) else f"{w.choose(0, -1)}"
    if arguments and w.chance(2):
        arguments += ", keepdim=True"
    op = w.choose(*REDUCTIONS)
    if op == "norm":
        return f"{w.fresh()} = torch.linalg.vector_norm({name})"
    return f"{w.fresh()} = {name}.{op}({arguments})"


def product(w: Writer) -> str | None:
    left = w.pick(lambda t: t.is_floating_point() and t.dim() == 2)
    if left is None:
        return None
    mine = w.tensors[left]
    right = w.pick(lambda t: t.dtype == mine.dtype and t.dim() == 2)
    assert right is not None
    its = w.tensors[right]
    if its.shape[0] == mine.shape[1]:
        return f"{w.fresh()} = {left} @ {right}"
    return f"{w.fresh()} = {left} @ {right}.t()"


def smooth_unary(w: Writer) -> str | None:
    name = w.pick(is_floating)
    op = w.choose("sin()", "relu()", "sigmoid()", "tanh()", "cos()", "atan()", "abs()", "neg()")
    return f"{w.fresh()} = {name}.{op}" if name else None


def smooth_binary(w: Writer) -> str | None:
    name = w.pick(is_floating)
    how = ("{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})",
           "{0}.lerp({0} * 2, 0.25) + {1}", "torch.addcmul({0}, {0}, {0}, value=0.5) + {1}",
           "({0} * {1}).sigmoid()")  # fmt: skip
    return f"{w.fresh()} = " + w.choose(*how).format(name, other(w, name)) if name else None


def smooth_reduction(w: Writer) -> str | None:
    name = w.pick(lambda t: t.is_floating_point() and t.dim() >= 1)
    how = ("sum(-1)", "mean(0)", "amax(-1)", "softmax(-1)", "sum(0, keepdim=True)", "mean()")
    return f"{w.fresh()} = {name}.{w.choose(*how)}" if name else None


def several(w: Writer) -> str | None:
    name = w.pick(lambda t: t.dim() >= 1)
    if name is None:
        return None
    a, b = w.fresh(), w.fresh()
    return w.choose(
        f"{a}, {b} = {name}.chunk(2) if {name}.shape[0] == 2 else ({name}, {name} * 2)",
        f"{a}, {b} = {name}.sort(0, stable=True)",
        f"{a}, {b} = {name}.max(0)",
        f"{a}, {b} = {name}.split([1, {name}.shape[0] - 1])",
        f"{a} = torch.cat([{name}, {name}]); {b} = torch.stack([{name}, {name}], -1)",
        f"{a}, {b} = torch._foreach_add([{name}, {name}], 1)",
        f"{a}, {b} = {name}.unbind(0)",
        f"{a}, {b} = torch.std_mean({name}, 0)",
    )


def view_of(w: Writer, name: str) -> str:
    """An expression for a view of `name`."""
    t = w.tensors[name]
    options = [f"{name}.unsqueeze({w.choose(0, -1)})", f"{name}.view(-1)", f"{name}.detach()",
               f"{name}.reshape(-1)", f"{name}.squeeze()", f"{name}[...]",
               f"{name}.data"]  # fmt: skip
    if t.dim() >= 1:
        options += [f"{name}[1:]", f"{name}[0]", f"{name}[::2]", f"{name}[:-1]", f"{name}[-1:]",
                    f"{name}.expand(2, *{name}.shape)", f"{name}.narrow(0, 0, 1)"]  # fmt: skip
    if t.dim() >= 2:
        options += [f"{name}.t()" if t.dim() == 2 else f"{name}.mT", f"{name}[:, 0]",
                    f"{name}.transpose(0, 1)[1:]", f"{name}[0, 1:]", f"{name}.diagonal()",
                    f"{name}.flatten()", f"{name}[:, ::2]", f"{name}.movedim(0, -1)"]  # fmt: skip
    if t.is_complex():
        options += [f"{name}.real", f"{name}.imag", f"{name}.conj()", f"torch.view_as_real({name})"]
    return w.choose(*options)


def view(w: Writer) -> str | None:
    name = w.pick()
    return f"{w.fresh()} = {view_of(w, name)}" if name else None


def bits(w: Writer) -> str | None:
    """A view as another dtype, in which the sign of a zero shows."""
    name = w.pick(lambda t: t.dtype == torch.float32)
    return f"{w.fresh()} = {name}.detach().view(torch.int32)" if name else None


INPLACE = ("add_({})", "mul_({})", "sub_({})", "copy_({})", "clamp_(-1, 1)", "zero_()", "relu_()",
           "fill_(2)", "neg_()", "sin_()", "add_({}, alpha=2)", "masked_fill_({0} != {0}, 1)",
           "div_({})", "sigmoid_()")  # fmt: skip
AUGMENTED = ("{} += {}", "{} *= {}", "{} -= {}")


def inplace(w: Writer) -> str | None:
    name = w.pick()
    if name is None:
        return None
    operand = other(w, name)
    if w.chance(4):
        line = w.choose(*AUGMENTED).format(name, operand)
    elif w.chance(2):
        line = f"{view_of(w, name)}.{w.choose(*INPLACE).format(operand)}"
    else:
        line = f"{name}.{w.choose(*INPLACE).format(operand)}"
    return f"with torch.no_grad(): {line}" if w.chance(2) else line


def set_item(w: Writer) -> str | None:
    name = w.pick(lambda t: t.dim() >= 1 and t.shape[0] > 0)
    if name is None:
        return None
    last = w.tensors[name].shape[0] - 1
    value = w.choose("1", "0.5", f"{name}[0]", f"{name}[{last}] * 2")
    index = w.choose("0", "-1", "1:", "::2", "...", f"torch.tensor([0, {last}])", f"{name} > 0")
    if index == f"{name} > 0" and not value[0].isdigit():
        value = "2"
    line = f"{name}[{index}] = {value}"
    return f"with torch.no_grad(): {line}" if w.chance(2) else line


def indexed(w: Writer) -> str | None:
    name = w.pick(lambda t: t.dim() >= 1 and t.shape[0] > 0)
    if name is None:
        return None
    last = w.tensors[name].shape[0] - 1
    rows = f"torch.tensor([{last}, 0, 0])"
    expression = w.choose(
        f"{name}[{rows}]", f"{name}[{name} > 0]", f"{name}.index_select(0, {rows})",
        f"F.embedding({rows}, {name})",
        f"{name}.gather(0, torch.zeros_like({name}, dtype=torch.int64))",
        f"{name}.index_add(0, torch.tensor([0]), {name}[:1])", f"{name}.roll(1, 0)",
        f"{name}.nonzero()", f"{name}.take({rows})", f"{name}.topk(1, 0)[0]",
        f"{name}.repeat_interleave(2, 0)", f"F.pad({name}, (1, 0))", f"{name}.tril()",
        f"{name}.scatter(0, torch.zeros_like({name}, dtype=torch.int64), {name})",
    )  # fmt: skip
    return f"{w.fresh()} = {expression}"


def cast(w: Writer) -> str | None:
    name = w.pick()
    if name is None:
        return None
    how = w.choose("float()", "long()", "bool()", "to(torch.float64)", "to(torch.bfloat16)",
                   "to(torch.complex64)", "type_as(torch.ones(1))")  # fmt: skip
    return f"{w.fresh()} = {name}.{how}"


def random(w: Writer) -> str | None:
    name = w.pick(is_floating)
    if name is None:
        return None
    new = w.fresh()
    return w.choose(
        f"{new} = torch.rand_like({name})", f"{new} = F.dropout({name}, 0.5)",
        f"{new} = torch.randn({tuple(w.tensors[name].shape)}) + {name}",
        f"with torch.no_grad(): {name}.normal_()", f"with torch.no_grad(): {name}.uniform_(-1, 1)",
        f"{new} = torch.bernoulli({name}.detach().sigmoid())",
        f"torch.manual_seed({w.integer(0, 5)})",
        f"{new} = torch.randperm(4)", f"{new} = torch.randint_like({name}, 5)",
        f"state = torch.get_rng_state(); {new} = torch.rand(2); torch.set_rng_state(state)",
        f"{new} = F.dropout({name}, 0.5, training=False)", f"{new} = torch.normal({name}, 1.0)",
    )  # fmt: skip


def observed(w: Writer) -> str | None:
    name = w.pick()
    if name is None:
        return None
    seen = w.choose(
        f"{name}.tolist()", f"{name}.sum().item()", f"repr({name})", f"str({name}.sum())",
        f"{name}.detach().resolve_conj().cpu().tolist()", f"bool({name}.sum() > 0)",
        f"({name}.shape, {name}.requires_grad, {name}.is_contiguous())",
        f"torch.equal({name}, {name} * 1)", f"float({name}.abs().sum())",
        f"materialize({name}).tolist()",
        f"[x.tolist() for x in {name}]", f"len({name})", f"{name}.dim() and {name}[0].tolist()",
    )  # fmt: skip
    return f"seen.append({seen})"


def control_flow(w: Writer) -> str | None:
    name = w.pick(is_real)
    if name is None:
        return None
    new = w.fresh()
    return w.choose(
        f"{new} = {name} * 2 if {name}.sum() > 0 else {name} - 1",
        f"{new} = {name}\nfor _ in range({w.integer(1, 4)}): {new} = {new} * 0.5 + {name}",
        # an infinite sum stays infinite
        f"{new} = {name} + 1\nwhile 1 < {new}.sum() < 1e9: {new} = {new} * 0.25 - 0.1",
        f"{new} = [{name}, {name} * 2][int(({name}.sum() > 0).item())]",
        f"{new} = torch.zeros(3)\nfor i in range(3): {new}[i] = {name}.sum() * i",
    )


def backward(w: Writer) -> str | None:
    name = w.pick(is_differentiable)
    if name is None:
        return None
    leaf = w.pick(lambda t: t.requires_grad and t.is_leaf)
    new = w.fresh()
    return w.choose(
        f"{name}.sum().backward()", f"({name} * 2).mean().backward(retain_graph=True)",
        f"{name}.backward(torch.ones_like({name}))",
        f"{new}, = torch.autograd.grad({name}.square().sum(), {leaf}, allow_unused=True, "
        "materialize_grads=True)",
        f"{new}, = torch.autograd.grad({name}.sin().sum(), {leaf}, create_graph=True, "
        "allow_unused=True, materialize_grads=True)",
    )  # fmt: skip


def gradient(w: Writer) -> str | None:
    leaf = w.pick(lambda t: t.is_leaf and t.grad is not None)
    if leaf is None:
        return None
    return w.choose(
        f"with torch.no_grad(): {leaf}.sub_({leaf}.grad, alpha=0.1)", f"{leaf}.grad.zero_()",
        f"with torch.no_grad(): {leaf} -= 0.1 * {leaf}.grad", f"{leaf}.grad = None",
        f"{w.fresh()} = {leaf}.grad", f"{leaf}.data.add_({leaf}.grad)",
        f"torch.optim.SGD([{leaf}], 0.1, momentum=0.9).step()",
        f"torch.nn.utils.clip_grad_norm_([{leaf}], 0.5)", f"torch.optim.Adam([{leaf}], 0.1).step()",
    )  # fmt: skip


def forgotten(w: Writer) -> str | None:
    name = w.pick()
    if name is None or len(w.tensors) < 3:
        return None
    alias = w.fresh()
    return str(w.choose(f"del {name}", f"{alias} = {name}", "flush()", "flush()", "flush()"))


def handed_out(w: Writer) -> str | None:
    """Memory in the hands of others: arrays, storages, `set_`, `resize_`."""
    name = w.pick(lambda t: t.dtype in (torch.float32, torch.float64, torch.int64))
    if name is None:
        return None
    new = w.fresh()
    return w.choose(
        f"{name}.detach().numpy()[...] = 3", f"{new} = torch.from_numpy({name}.detach().numpy())",
        f"array = {name}.detach().numpy(); {new} = {name} * 2; array[...] = 7",
        f"{name}.data = {name}.data * 2", f"{name}.detach().t_()", f"{name}.detach().unsqueeze_(0)",
        f"{new} = torch.empty(0); {new}.set_({name}.detach())",
        f"{new} = {name}.detach().clone().resize_({name}.numel() and 1)",
        f"seen.append({name}.data_ptr() == {name}.data_ptr())",
        f"{new} = torch.empty(0); torch.add({name}.detach(), 1, out={new})",
        f"torch.mul({name}.detach(), 2, out={name}.detach())",
        f"import copy; {new} = copy.deepcopy({name}.detach()) * 1",
        f"import pickle; {new} = pickle.loads(pickle.dumps({name}.detach()))",
    )  # fmt: skip


def region(w: Writer) -> str | None:
    name = w.pick(is_floating)
    if name is None:
        return None
    new = w.fresh()
    return w.choose(
        f"with torch.inference_mode(): numbers = ({name} * 2 + 1).tolist()\n"
        f"{new} = torch.tensor(numbers)",
        f"with torch.autocast('cpu', torch.bfloat16): "
        f"{new} = {name}.reshape(1, -1) @ {name}.reshape(-1, 1)",
        f"from torch.utils.checkpoint import checkpoint; "
        f"{new} = checkpoint(lambda x: F.dropout(x.sin(), 0.5) * x, {name}, use_reentrant=False)",
        f"{new} = torch.func.vmap(lambda x: x.sum() + x)({name})",
        f"{new} = torch.func.grad(lambda x: x.square().sum())({name}.detach())",
        f"{new} = F.layer_norm({name}, {name}.shape[-1:])",
        f"{new} = F.mse_loss({name}, {name} * 0.5)",
        f"{new} = F.scaled_dot_product_attention(*[{name}.reshape(1, 1, -1, 1)] * 3)",
        f"{new} = F.conv1d({name}.reshape(1, 1, -1), torch.ones(1, 1, 1, dtype={name}.dtype))",
        f"{new} = F.cross_entropy({name}.reshape(1, -1), torch.tensor([0]))",
        f"torch.set_default_dtype(torch.float64); {new} = torch.ones(2) * 1.5; "
        "torch.set_default_dtype(torch.float32)",
    )


PRODUCTIONS: dict[Production, int] = {
    unary: 4, binary: 8, reduction: 4, product: 2, several: 2, view: 7, bits: 1, inplace: 9,
    set_item: 4, indexed: 3, cast: 2, random: 3, observed: 3, control_flow: 2, backward: 4,
    gradient: 4, forgotten: 3, handed_out: 2, region: 2, new_tensor: 2, shared_tensor: 1,
}  # fmt: skip
"""Every kind of line and its weight."""

LOOPS = PRODUCTIONS | {observed: 0, handed_out: 0, forgotten: 0, shared_tensor: 0, control_flow: 1}
"""For bodies of loops: without what needs a value, which no replay passes."""

SMOOTH = PRODUCTIONS | {
    unary: 0, smooth_unary: 8, binary: 0, smooth_binary: 10, reduction: 0, smooth_reduction: 4,
    several: 0, indexed: 0, cast: 0, bits: 0, control_flow: 0, observed: 0, set_item: 2,
    inplace: 9,
}  # fmt: skip
"""Without what turns a rounding error into a whole number, or into another path: for kernels, which
round otherwise than op-by-op execution."""
