"""`replay(model)`: a module whose calls run plans, forward and backward, with the loss outside.

In: a module. Out: the same module, whose calls give what they gave, joined to autograd by one node.
`Replay`s do the work. One runs forward and gives, besides the outputs, the tensors that autograd
saved for backward. Each plan of forward has a second that runs backward, on these and the outputs'
gradients.

A replayed forward makes no graph. Where backward has to be recorded after one, forward runs again
for its nodes alone: they find each tensor that they saved by its number, among those that the
replay gave.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.tape import is_random_on_tape, stop_tape
from lazy_tensor.reach import is_atom
from lazy_tensor.replay import Replay, recording
from lazy_tensor.settled import Settled
from lazy_tensor.tensor import LazyTensor, computed

RECORDED_BEFORE_EAGER = 8
"""Calls of each signature that are recorded without a replay after which a module runs as in eager:
recording it would cost more than it gains."""
EAGER_CALLS = 1000
"""Calls as in eager before it is tried again."""

Tensors = list[torch.Tensor]
Gradients = list[torch.Tensor | None]


def replay_module(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Have the module's calls replayed, from now on."""
    torch_private.call_by(module, ReplayedModule(module, options))
    return module


@dataclass(slots=True)
class Graph:
    """What a recorded forward leaves for a recorded backward: outputs with their graph, and the
    tensors whose gradients are wanted."""

    outputs: Tensors
    wanted: Tensors


class _NeedsGraph(Exception):
    """Backward is to be recorded, and its forward was replayed."""


class _Here(threading.local):
    made: Graph | None = None  # by the forward that was recorded last
    used: Graph | None = None  # by the backward that runs
    saved: Sequence[torch.Tensor] = ()  # what it finds instead of what its forward saved


_here = _Here()


class _Named:
    """A function that `replay` names as it names the module, and that has no state to look at."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name


N_HEADER = 4
"""Numbers before the tensors in what `_Forward` gives."""


class _Forward(_Named):
    """Calls a module, and keeps its graph in `_here.made`.

    Gives a list: how many outputs there are, which of them have a graph (a bit each), the number of
    their form, how many tensors backward needs; then the outputs, these tensors, and the parameters
    whose gradients are wanted. `differentiated` are numbers of tensors among the arguments whose
    gradients are wanted too.
    """

    def __call__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        differentiated: tuple[int, ...],
    ) -> list[Any]:
        if not torch.is_grad_enabled():
            outputs, form = _flattened(torch_private.call_module(module, args, kwargs))
            return [len(outputs), 0, _number_of(form), 0, *outputs]
        inputs: Tensors = []
        if differentiated:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            for i in differentiated:
                leaves[i] = leaves[i].detach().requires_grad_()
                inputs.append(leaves[i])
            args, kwargs = _unflattened(leaves, spec)
        with _saving() as saved, torch_private.noting_saved_tensors_hooks() as other_hooks:
            outputs, form = _flattened(torch_private.call_module(module, args, kwargs))
        parameters = [p for p in module.parameters() if p.requires_grad]
        bits, with_graph = 0, []
        for i, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                bits |= 1 << i
                with_graph.append(output)
                outputs[i] = output.detach()
        _here.made = Graph(with_graph, [*inputs, *parameters])
        if is_random_on_tape() and (other_hooks or torch_private.has_python_nodes(with_graph)):
            stop_tape("it draws random numbers that an autograd.Function or a checkpoint may keep")
        header = [len(outputs), bits, _number_of(form), len(saved)]
        return [*header, *outputs, *saved, *parameters]


@contextmanager
def _saving() -> Iterator[Tensors]:
    """Have autograd save numbers in place of tensors, which go into the list. What runs the graph
    without `_Backward`, as a module may keep a part of it, finds them there."""
    saved: Tensors = []
    number_of: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> int:
        known = number_of.get(id(tensor))
        if known is None:
            known = number_of[id(tensor)] = (len(saved), tensor)
            is_parameter = tensor.is_leaf and isinstance(tensor, nn.Parameter)
            saved.append(tensor if is_parameter else tensor.detach())
        return known[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: (_here.saved or saved)[i]):
        yield saved


class _Backward(_Named):
    """Gives the gradients of what is wanted of the graph in `_here.used`, from what was saved and
    the outputs' gradients; None for an output that has none."""

    def __call__(self, saved: Tensors, gradients: Gradients) -> Gradients:
        graph = _here.used
        if graph is None:
            raise _NeedsGraph
        pairs = zip(graph.outputs, gradients, strict=True)
        outputs, given = zip(*[pair for pair in pairs if pair[1] is not None], strict=True)
        saved_before, _here.saved = _here.saved, saved
        try:
            with torch_private.without_hooks(graph.wanted):  # they get what this gives
                found = torch.autograd.grad(
                    outputs, graph.wanted, given, allow_unused=True, retain_graph=True
                )
            return list(found)
        finally:
            _here.saved = saved_before


@dataclass(frozen=True, slots=True)
class _Form:
    """How leaves make up what a module gives: containers by `spec`; and of each object among its
    leaves (a cache of keys and values, say) its number, its class, the names of its attributes, and
    the form of their values, which are further leaves."""

    spec: Any
    objects: tuple[tuple[int, type[Any], tuple[str, ...], _Form], ...]
    n_leaves: int
    """Those of the containers."""


def _flattened(result: Any) -> tuple[list[Any], _Form]:
    leaves, spec = pytree.tree_flatten(result)
    n_leaves = len(leaves)
    objects: list[tuple[int, type[Any], tuple[str, ...], _Form]] = []
    for i in range(n_leaves):
        one = leaves[i]
        if is_atom(one) or isinstance(one, (torch.Tensor, type)) or not hasattr(one, "__dict__"):
            continue
        inner, form = _flattened(list(vars(one).values()))
        leaves[i] = None
        leaves += inner
        objects.append((i, type(one), tuple(vars(one)), form))
    return leaves, _Form(spec, tuple(objects), n_leaves)


def _made_of(leaves: list[Any], form: _Form) -> Any:
    if form.spec.is_leaf() and not form.objects:
        return leaves[0]
    found, left = leaves[: form.n_leaves], leaves[form.n_leaves :]
    for i, kind, names, inner in form.objects:
        n = _n_leaves(inner)
        found[i] = made = object.__new__(kind)
        vars(made).update(zip(names, _made_of(left[:n], inner), strict=True))
        left = left[n:]
    return pytree.tree_unflatten(found, form.spec)


def _n_leaves(form: _Form) -> int:
    return form.n_leaves + sum(_n_leaves(inner) for *_, inner in form.objects)


_forms: list[_Form] = []


def _number_of(form: _Form) -> int:
    """A number for a form: `replay` compares numbers."""
    if form not in _forms:
        _forms.append(form)
    return _forms.index(form)


class ReplayedModule:
    """What calls of a module that was given to `replay` go to."""

    is_replay = True  # for `unwrap`

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self._options = options
        self._name = type(module).__name__
        self.forward = Replay(_Forward(self._name), is_part=True, **options)
        self.backward = self.new_backward()  # of calls whose forward was recorded
        self._module = weakref.ref(module)
        self._n_eager = 0  # calls to come

    def new_backward(self) -> Replay[Any, Any]:
        """What runs backward of one plan of forward, which has repeated already."""
        options = {**self._options, "warmup": 0}
        return Replay(_Backward(f"{self._name}, backward"), is_part=True, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "it is being called"
        if self._runs_eagerly() or self.forward.is_seen_by_others():
            return torch_private.call_module(module, args, kwargs)
        given: Tensors = []
        wanted: Tensors = []
        differentiated: list[int] = []
        if torch.is_grad_enabled():
            is_flat = not kwargs and all([isinstance(one, torch.Tensor) for one in args])
            leaves, spec = (list(args), None) if is_flat else pytree.tree_flatten((args, kwargs))
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    given.append(leaf)
                    if leaf.requires_grad:
                        differentiated.append(i)
                        wanted.append(leaf)
                        leaves[i] = leaf.detach()
            if wanted:
                args, kwargs = (tuple(leaves), {}) if is_flat else _unflattened(leaves, spec)
        _here.made = None
        call = (module, args, kwargs, tuple(differentiated))
        found = self.forward(*call)
        graph, _here.made = _here.made, None
        n_outputs, bits, form, n_saved = found[:N_HEADER]
        n_before = N_HEADER + n_outputs
        outputs = list(map(_plain, found[N_HEADER:n_before]))
        if bits:
            saved = list(map(_plain, found[n_before : n_before + n_saved]))
            parameters = found[n_before + n_saved :]
            places = [i for i in range(n_outputs) if bits >> i & 1]
            computed = [outputs[i] for i in places]
            wanted += parameters
            may_be_saved = [*given, *parameters, *computed]
            run = _Run(self, call, graph, self.forward.ran(), wanted, may_be_saved)
            joined: Any = _Joined.apply(run, saved, computed, *wanted)  # type: ignore[no-untyped-call]
            for i, output in zip(places, joined, strict=True):
                outputs[i] = output
        return _made_of(outputs, _forms[form])

    def _runs_eagerly(self) -> bool:
        """Whether this call does, as recording was in vain. Not while hooks see what is saved: to
        checkpointing a forward and its repetition must look alike."""
        if torch_private.saves_by_hooks():
            return False
        if self._n_eager > 0:
            self._n_eager -= 1
            return True
        self.look_at(self.forward)
        return self._n_eager > 0

    def look_at(self, part: Replay[Any, Any]) -> None:
        """Have the next calls run as in eager if this part of them was recorded in vain."""
        most = RECORDED_BEFORE_EAGER * part.n_signatures
        if part.n_replayed == 0 and part.n_recorded >= most > 0:
            part.n_recorded = 0
            self._n_eager = EAGER_CALLS


class _Run:
    """One forward: by what call of which module; its graph if it was recorded, else what it was
    replayed by; the tensors whose gradients are wanted; and those whose memory backward may need,
    with their versions then."""

    __slots__ = ("_autocast", "_call", "_graph", "_module", "_settled", "_versions", "_wanted")

    def __init__(
        self,
        module: ReplayedModule,
        call: tuple[Any, ...],
        graph: Graph | None,
        settled: Settled | None,
        wanted: Tensors,
        may_be_saved: Tensors,
    ) -> None:
        self._module = module
        self._call = call
        self._graph = graph
        self._settled = settled
        self._wanted = wanted
        self._versions = [(t, t._version) for t in may_be_saved if not t.is_inference()]
        self._autocast = torch_private.autocast_state()

    def gradients(self, saved: Tensors, given: Gradients) -> Gradients:
        """Those wanted. RuntimeError if what forward saved was written since."""
        self._check(saved)
        if self._settled is None:
            found = self._by(self._module.backward.recorded, saved, given)
        else:
            backward = self._settled.companion
            if backward is None:
                backward = self._settled.companion = self._module.new_backward()
            try:
                found = self._by(backward, saved, given)
            except _NeedsGraph:
                with self._again():
                    _Forward("")(*self._call)
                self._graph, _here.made = _here.made, None
                found = self._by(backward, saved, given)
            self._module.look_at(backward)
        return list(map(_plain, found))

    def _by(
        self, backward: Callable[..., Gradients], saved: Tensors, given: Gradients
    ) -> Gradients:
        used_before, _here.used = _here.used, self._graph
        try:
            return backward(saved, given)
        finally:
            _here.used = used_before

    def _check(self, saved: Tensors) -> None:
        """Autograd does so too, but views that were saved don't count the writes to what they are
        views of."""
        written = [tensor for tensor, version in self._versions if tensor._version != version]
        if not written:
            return
        storages = {torch_private.storage_id(tensor) for tensor in saved}
        for tensor in written:
            if torch_private.storage_id(_plain(tensor)) in storages:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor of shape {tuple(tensor.shape)} that a replayed "
                    f"{type(self._call[0]).__name__} read; copy it, or write it after backward()"
                )

    def differentiable(self, given: Gradients) -> Gradients:
        """The gradients with a graph of their own: by an eager forward and backward.

        RuntimeError if the module draws random numbers, which these would not be.
        """
        module, args, kwargs, differentiated = self._call
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for i, tensor in zip(differentiated, self._wanted, strict=False):
            leaves[i] = tensor
        args, kwargs = _unflattened(leaves, spec)
        with self._again():
            before = torch.random.get_rng_state()
            found, _ = _flattened(torch_private.call_module(module, args, kwargs))
            is_random = not torch.equal(torch.random.get_rng_state(), before)
        if is_random:
            raise RuntimeError(
                f"a replayed {type(module).__name__} can't be differentiated twice, as it draws "
                "random numbers; call it without replay there"
            )
        again = [one for one in found if isinstance(one, torch.Tensor) and one.requires_grad]
        pairs = [pair for pair in zip(again, given, strict=True) if pair[1] is not None]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs], self._wanted, [gradient for _, gradient in pairs],
            allow_unused=True, create_graph=True,
        )  # fmt: skip
        return list(gradients)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Call the module once more: random numbers and buffers are as they were afterwards."""
        buffers = [buffer for buffer in self._call[0].buffers() if not buffer.is_inference()]
        copies = [buffer.detach().clone() for buffer in buffers]
        as_then = torch_private.autocast_as(self._autocast)
        with torch_private.versions_kept(buffers):
            try:
                with recording(), torch.random.fork_rng(), torch.enable_grad(), as_then:
                    yield
            finally:
                with torch.no_grad():
                    for buffer, copy in zip(buffers, copies, strict=True):
                        buffer.copy_(copy)


class _Joined(torch.autograd.Function):
    """The node that stands for a module's graph."""

    @staticmethod
    def forward(
        ctx: Any, run: _Run, saved: Tensors, outputs: Tensors, *wanted: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return tuple([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        run, saved = ctx.run, list(ctx.saved_tensors)
        given = [None if one is None else one.contiguous() for one in gradients]
        creates_graph = torch.is_grad_enabled()
        found = run.differentiable(given) if creates_graph else run.gradients(saved, given)
        return (None, None, None, *found)


def _unflattened(leaves: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments."""
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def _plain(tensor: Any) -> Any:
    """The plain tensor behind a lazy one; anything else as it is."""
    return computed(tensor) if type(tensor) is LazyTensor else tensor
