"""The sides on which a program runs, and everything about it that a user could see.

In: a `Program`. Out: None if lazy execution can't be told from eager, else the difference in words.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch

import lazy_tensor
from fuzzing.program import Program, eager_names
from lazy_tensor.dispatch.plan import remat
from lazy_tensor.dispatch.trie.trace import local


@dataclass(frozen=True)
class Side:
    """A way to run programs lazily. `rounds` are runs in a row: later ones follow known traces.

    One without `keeps_recording` records what was seen before alone (see `tiering.policy`). One
    that `leaves` has some lines in blocks of their own, the others outside, and no last flush.
    """

    name: str
    backend: str = "aten"
    wraps: bool = False
    rounds: int = 3
    debug: bool = False
    keeps_recording: bool = True
    remat_interval: int = 0
    leaves: bool = False

    @property
    def is_exact(self) -> bool:
        return self.backend == "aten"

    def around(self) -> AbstractContextManager[Any]:
        if self.wraps or self.leaves:
            return nullcontext()
        return lazy_tensor.lazy_mode(debug=self.debug)

    def around_line(self, line: str) -> AbstractContextManager[Any]:
        is_inside = self.leaves and crc32(line.encode()) % 3
        return lazy_tensor.lazy_mode() if is_inside else nullcontext()

    def names(self) -> dict[str, Any]:
        names = eager_names() | {"flush": lazy_tensor.flush, "materialize": lazy_tensor.materialize}
        if self.wraps:
            names["wrap"] = lazy_tensor.wrap
        return names


MODE = Side("mode")
WRAPPED = Side("wrapped", wraps=True)
COLD = Side("cold", rounds=1, keeps_recording=False)
DEBUG = Side("debug", rounds=1, debug=True)
INDUCTOR = Side("inductor", backend="inductor")
INDUCTOR_WRAPPED = Side("inductor wrapped", backend="inductor", wraps=True)
REMAT = Side("remat", remat_interval=2)
PIECES = Side("in pieces", leaves=True)
EXACT = (MODE, WRAPPED, COLD, DEBUG, REMAT, PIECES)
COMPILED = (INDUCTOR, INDUCTOR_WRAPPED)


def run(
    program: Program,
    names: dict[str, Any],
    around_line: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> list[str | None]:
    """Run the lines in `names`; for each what it raised, as text."""
    torch.manual_seed(program.seed)
    errors: list[str | None] = []
    for line in program.lines:
        try:
            with around_line(line):
                exec(line, names)
            errors.append(None)
        except Exception as error:
            # a view that was written has another node for tensor subclasses, see `_backward_of`
            text = re.sub(r"which is output \d+ of \w+", "which is an output", str(error))
            errors.append(f"{type(error).__name__}: {text}")
    return errors


def difference(program: Program, side: Side) -> str | None:
    """How `side` differs from eager on `program`; None if it doesn't."""
    small = patch.object(remat, "LEAST_BYTES", 1)  # the programs' tensors are small
    with warnings.catch_warnings(), small:
        warnings.simplefilter("ignore")
        eager = eager_names()
        expected = run(program, eager)
        rng = torch.get_rng_state()
        lazy_tensor.configure(
            backend=side.backend,
            compile="blocking" if side.keeps_recording else "off",
            remat_interval=side.remat_interval,
        )
        for i in range(side.rounds):
            names = side.names()
            if side.keeps_recording:
                local.trace.policy.reset()
            local.trace.policy.calls_left = 1 << 60 if side.keeps_recording else 0
            try:
                with side.around():
                    got = run(program, names, side.around_line)
                if not side.leaves:
                    lazy_tensor.flush()
            except Exception as error:
                return f"round {i}: the flush raised {type(error).__name__}: {error}"
            for line, a, b in zip(program.lines, got, expected, strict=True):
                if b is None and a is not None and SEVERAL_VIEWS in a:
                    return None  # see `OTHER_FOR_SUBCLASSES`: replaying such a view is refused
                if a != b:
                    return f"round {i}: {line!r} raised {a!r}, eagerly {b!r}"
            found = _seen(names, eager, side, _counts_versions(program, side))
            if found is None and not torch.equal(torch.get_rng_state(), rng):
                found = "the random number generator's state"
            if found is not None:
                return f"round {i}: {found}"
    return None


N_CALLS, CHANGED_AT = 7, 5


def difference_of_loop(program: Program) -> tuple[str | None, int]:
    """How a replayed loop differs from eager's after one of its calls, and how many were replayed.

    The body is all lines but the first, which make tensors; between two calls one is changed.
    """
    lazy_tensor.configure(backend="aten", compile="blocking")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, names = eager_names(), eager_names()
        step, looped = _loop(program, eager), _loop(program, names)
        step_again = lazy_tensor.replay(looped)
        states = [torch.get_rng_state()] * 2
        for i in range(N_CALLS):
            sides: list[tuple[Callable[[], Any], dict[str, Any]]]
            sides = [(step, eager), (step_again, names)]
            for k, (call, of) in enumerate(sides):
                torch.set_rng_state(states[k])
                made = of.get("v1")
                if i == CHANGED_AT and made is not None and made.is_floating_point():
                    with torch.no_grad():
                        made.mul_(0.5)
                try:
                    call()
                except Exception as error:
                    if type(error).__name__ in eager["errors"]:
                        return None, step_again.n_replayed  # values alone can tell: it comes later
                    return f"call {i} raised {type(error).__name__}: {error}", 0
                states[k] = torch.get_rng_state()
            if names["errors"] != eager["errors"]:
                return f"call {i}: errors {names['errors']}, eagerly {eager['errors']}", 0
            found = _seen(names, eager, MODE, False)
            if found is None and not torch.equal(*states):
                found = "the random number generator's state"
            if found is not None:
                return f"call {i}, {step_again.n_replayed} replayed: {found}", 0
    return None, step_again.n_replayed


def _loop(program: Program, names: dict[str, Any]) -> Callable[[], None]:
    """The program's first lines run in `names`, the others as a function of them."""
    n_made = next(
        (i for i, line in enumerate(program.lines) if not _MAKES_TENSOR.match(line)),
        len(program.lines),
    )
    torch.manual_seed(program.seed)
    for line in program.lines[:n_made]:
        with suppress(Exception):
            exec(line, names)
    assigned = sorted(set(re.findall(r"\bv\d+\b", str(program)))) or ["v1"]
    body = ["def step():", f"  global {', '.join(assigned)}"]
    for line in program.lines[n_made:]:
        inside = line.replace("\n", "\n   ")
        body += ["  try:", f"   {inside}", "  except Exception as error:",
                 "   errors.append(type(error).__name__)"]  # fmt: skip
    names["errors"] = []
    exec("\n".join([*body, "  pass"]), names)
    loop: Callable[[], None] = names.pop("step")
    return loop


_MAKES_TENSOR = re.compile(r"v\d+ = (wrap\()?\(*torch\.(randn|rand|randint|ones|arange)\(")


def _counts_versions(program: Program, side: Side) -> bool:
    """Whether versions are the same on both sides.

    Wrapped, a tensor and its plain twin each have their own; and autograd's engine adds gradients
    up in place where it may, as do some kernels in inference mode.
    """
    text = str(program)
    return not (side.wraps or "backward" in text or "grad(" in text or "inference" in text)


def _seen(
    names: dict[str, Any], eager: dict[str, Any], side: Side, counts_versions: bool
) -> str | None:
    for i, (a, b) in enumerate(zip(names["seen"], eager["seen"], strict=True)):
        if not _same_python(a, b, side.is_exact):
            return f"seen[{i}] is {a}, eagerly {b}"
    tensors = {k: v for k, v in eager.items() if isinstance(v, torch.Tensor)}
    # through empty views of what was written replay passes gradients, `as_strided` none
    has_graph = all(t.numel() or not t.requires_grad for t in tensors.values())
    for name, expected in tensors.items():
        for fact, a, b in _facts(names[name], expected, side, has_graph):
            if a != b and not (fact == "version" and not counts_versions):
                return f"{fact} of {name} is {a}, eagerly {b}"
    for one, two in combinations(tensors, 2):
        shares = _share_memory(names[one], names[two])
        if tensors[one].numel() and shares != _share_memory(tensors[one], tensors[two]):
            return f"{one} and {two} share memory: {shares}, eagerly {not shares}"
    return None


def _same_python(a: Any, b: Any, is_exact: bool) -> bool:
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(
            _same_python(x, y, is_exact) for x, y in zip(a, b, strict=True)
        )
    if isinstance(b, str):
        if not is_exact:
            return True  # a rounding error shows in the text
        if any(f"grad_fn=<{name}>" in b for name in OTHER_FOR_SUBCLASSES):
            a, b = (re.sub(r"grad_fn=<\w+>", "grad_fn", text) for text in (a, b))
    if isinstance(b, (float, complex)) and not is_exact:
        return torch.allclose(torch.tensor(a), torch.tensor(b), 1e-3, 1e-3, equal_nan=True)
    return bool(a == b or (a != a and b != b) or str(a) == str(b))


def _facts(
    a: torch.Tensor, b: torch.Tensor, side: Side, has_graph: bool
) -> Iterator[tuple[str, Any, Any]]:
    """Everything about a tensor that a program can ask for: its name, `a`'s and `b`'s."""
    shape, memory = b.shape, b.numel() > 0  # eager's own kernels disagree on empty strides

    def has_gradient(t: torch.Tensor) -> bool:
        return t.is_leaf and t.grad is not None

    asked: dict[str, Callable[[torch.Tensor], Any]] = {
        "shape": lambda t: t.shape,
        "dtype": lambda t: t.dtype,
        "stride": lambda t: memory and [n for n, m in zip(t.stride(), shape, strict=True) if m > 1],
        "storage_offset": lambda t: memory and t.storage_offset(),
        "is_conj": lambda t: (t.is_conj(), t.is_neg()),
        "is_inference": lambda t: t.is_inference(),
        "version": lambda t: t.is_inference() or t._version,
    }
    if has_graph:
        asked |= {
            "requires_grad": lambda t: t.requires_grad,
            "is_leaf": lambda t: t.is_leaf,
            "grad_fn": lambda t: None if t.grad_fn is None else _backward_of(t, b),
            "has a gradient": has_gradient,
        }
    for fact, ask in asked.items():
        yield fact, _answer(ask, a), _answer(ask, b)
    yield "value", *_values(a, b, side.is_exact)
    if _answer(has_gradient, a) is _answer(has_gradient, b) is True:
        assert a.grad is not None
        assert b.grad is not None
        yield "gradient", *_values(a.grad, b.grad, side.is_exact)


def _answer(ask: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    try:
        return ask(tensor)
    except RuntimeError as error:  # autograd refuses, say, views of several that were written
        return str(error)


OTHER_FOR_SUBCLASSES = ("AsStridedBackward0", "IndexPutImplBackward0", "ReshapeAliasBackward0")
SEVERAL_VIEWS = "is the output of a function that returns multiple views"


def _backward_of(tensor: torch.Tensor, eager: torch.Tensor) -> str:
    """The name of `tensor.grad_fn`, where autograd has one way only.

    For a view that was written, say, it replays the views of a tensor subclass, and takes one
    `as_strided` for plain tensors.
    """
    assert eager.grad_fn is not None
    assert tensor.grad_fn is not None
    has_two = eager.grad_fn.name() in OTHER_FOR_SUBCLASSES
    return eager.grad_fn.name() if has_two else str(tensor.grad_fn.name())


def _values(a: torch.Tensor, b: torch.Tensor, is_exact: bool) -> tuple[str, str]:
    """Texts of both that are equal if the values are: bit for bit, or within tolerance."""
    plain, expected = lazy_tensor.materialize(a.detach()), b.detach()
    rtol, atol = (0.0, 0.0) if is_exact else (1e-3, 1e-3)
    if expected.dtype is torch.bfloat16 and not is_exact:
        rtol = atol = 5e-2
    try:
        torch.testing.assert_close(plain, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        return f"{plain}", f"{expected}"
    return "equal", "equal"


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _address(a) == _address(b)


def _address(tensor: torch.Tensor) -> int:
    if lazy_tensor.is_lazy(tensor):
        tensor = lazy_tensor.unwrap(tensor.detach())
    return tensor.detach().untyped_storage().data_ptr()
