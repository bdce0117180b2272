"""`replay(model)`: a module whose calls run plans, forward and backward, with the loss outside.

In: a module. Out: the same module, whose calls give what they gave, joined to autograd by one node.
`Replay`s do the work. One runs forward and gives, besides the outputs, the tensors that autograd
saved for backward. Each plan of forward has a companion that runs backward, on these and the
outputs' gradients.

A replayed forward makes no graph. So forward is recorded until its companion has learnt backward
from the graphs of these calls, and whenever the two are checked. A recorded call whose graph can't
be stood for by one node gives its outputs with that graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lazy_tensor.capture.captured_call import CapturedCall
from lazy_tensor.capture.reach import is_atom
from lazy_tensor.capture.replay import Replay, recording
from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.tape import stop_tape
from lazy_tensor.kernels.service.verify import difference
from lazy_tensor.tensor import LazyTensor, computed

RECORDED_BEFORE_EAGER, MOST_LEARNT = 8, 4
"""Recorded calls without a replay, for each signature or plan up to so many, after which a module
runs as in eager: recording it would cost more than it gains."""
EAGER_CALLS = 1000
"""Calls as in eager before it is tried again."""
TAUGHT_AFTER = 3
"""Recorded calls of forward from which its companion learns a backward that it didn't know."""

Tensors = list[torch.Tensor]
Gradients = list[torch.Tensor | None]


def replay_module(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Have the module's calls replayed, from now on."""
    torch_private.call_by(module, ReplayedModule(module, options))
    return module


@dataclass(slots=True)
class Graph:
    """What a recorded forward leaves for a recorded backward: outputs with their graph, and where
    the gradients leave it. `flaw` says why one node can't stand for it, "" if one can."""

    outputs: Tensors
    edges: list[Any]
    flaw: str = ""


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


N_HEADER = 6
"""Numbers before the tensors in what `_Forward` gives."""


class _Forward(_Named):
    """Calls a module, and keeps its graph in `_here.made`.

    Gives a list: how many outputs there are, which of them have a graph (a bit each), the number of
    their form, how many tensors backward needs, which of the differentiated arguments the graph
    reaches (a bit each), and how many parameters; then the outputs, these tensors, the parameters,
    and the module's other parameters and buffers.
    """

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        if not torch.is_grad_enabled():
            outputs, form = _flattened(torch_private.call_module(module, args, kwargs))
            return [len(outputs), 0, _number_of(form), 0, 0, 0, *outputs]
        first = torch_private.next_sequence_number()
        inputs = _differentiated(args, kwargs)
        edges = [torch.autograd.graph.get_gradient_edge(one) for one in inputs]
        versions = [one._version for one in inputs]
        # whether this call is recorded or bypassed must not show in the graph
        with _saving() as saved, torch_private.views_by_their_ops():
            outputs, form = _flattened(torch_private.call_module(module, args, kwargs))
        bits, with_graph = 0, []
        for i, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                bits |= 1 << i
                with_graph.append(output)
                outputs[i] = output.detach()
        reached, parameters, flaw = _reached(with_graph, edges, first)
        if versions != [one._version for one in inputs]:
            flaw = "it writes an argument whose gradient is wanted"
        if any(_shares(output, inputs) for output in with_graph):
            flaw = "it gives an argument whose gradient is wanted, or a view of it"
        wanted = [one for i, one in enumerate(inputs) if reached >> i & 1] + parameters
        if any(one._backward_hooks or (one.retains_grad and not one.is_leaf) for one in wanted):
            flaw = "a parameter or an argument has a hook for its gradient, which would run twice"
        if flaw:
            stop_tape(flaw)
        edges = [edge for i, edge in enumerate(edges) if reached >> i & 1]
        edges += [torch.autograd.graph.get_gradient_edge(one) for one in parameters]
        _here.made = Graph(with_graph, edges, flaw)
        known = {id(one) for one in parameters}
        others = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in known]
        header = [len(outputs), bits, _number_of(form), len(saved), reached, len(parameters)]
        return [*header, *outputs, *saved, *parameters, *others]


def _differentiated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
    """The tensors among the arguments whose gradients are wanted, each once."""
    return list({id(one): one for one in _tensors_in(args, kwargs) if one.requires_grad}.values())


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
    found = [one for one in args if isinstance(one, torch.Tensor)]
    if kwargs or len(found) < len(args):
        found = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    return found


def _shares(output: torch.Tensor, inputs: Tensors) -> bool:
    base = output._base if output._is_view() else output
    return any(base is (one._base if one._is_view() else one) for one in inputs)


def _reached(outputs: Tensors, edges: list[Any], first: int) -> tuple[int, Tensors, str]:
    """Where the outputs' graph ends: at which of these edges (a bit each), and at which leaves; and
    what in it is older than the number `first`."""
    ends = {(edge.node, edge.output_nr): i for i, edge in enumerate(edges)}
    reached, leaves, flaw = 0, {}, ""
    waiting = [(output.grad_fn, output.output_nr) for output in outputs]
    seen: set[Any] = set()
    while waiting:
        edge = waiting.pop()
        node = edge[0]
        if node is None:
            continue
        if edge in ends:
            reached |= 1 << ends[edge]
        elif node in seen:
            continue
        elif hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        elif node._sequence_nr() < first:
            flaw = "it uses a tensor whose graph was made before the call"
        else:
            seen.add(node)
            waiting += node.next_functions
    return reached, list(leaves.values()), flaw


@contextmanager
def _saving() -> Iterator[Tensors]:
    """Have autograd save numbers in place of tensors, which go into the list. What runs the graph
    without `_Backward` finds them there."""
    saved: Tensors = []
    number_of: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> int:
        known = number_of.get(id(tensor))
        if known is None:
            known = number_of[id(tensor)] = (len(saved), tensor)
            saved.append(tensor if tensor.is_leaf else tensor.detach())
        return known[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: (_here.saved or saved)[i]):
        yield saved


class _Backward(_Named):
    """Gives the gradients that are wanted of the graph in `_here.used`, from what was saved and the
    outputs' gradients; None for an output that has none."""

    def __call__(self, saved: Tensors, gradients: Gradients) -> Gradients:
        graph = _here.used
        if graph is None:
            raise _NeedsGraph
        pairs = [pair for pair in zip(graph.outputs, gradients, strict=True) if pair[1] is not None]
        if not pairs:
            return [None] * len(graph.edges)
        saved_before, _here.saved = _here.saved, saved
        try:
            found = torch.autograd.grad(
                [output for output, _ in pairs], graph.edges, [given for _, given in pairs],
                allow_unused=True, retain_graph=True,
            )  # fmt: skip
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
        if not _is_taken_apart(one):
            continue
        inner, form = _flattened(list(vars(one).values()))
        if any(isinstance(leaf, torch.Tensor) for leaf in inner):
            leaves[i] = None
            leaves += inner
            objects.append((i, type(one), tuple(vars(one)), form))
    return leaves, _Form(spec, tuple(objects), n_leaves)


def _is_taken_apart(one: Any) -> bool:
    """Whether an object may be made anew from its attributes. Others are given back as they are, if
    `replay` finds them where the module may look."""
    if is_atom(one) or isinstance(one, (torch.Tensor, type, nn.Module, dict, list, tuple, set)):
        return False
    return hasattr(one, "__dict__") and not callable(one) and "__dict__" not in vars(one)


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
        self.forward.must_record = self._teaches
        self.backward = self.new_backward()  # of calls whose forward was recorded
        self._module = weakref.ref(module)
        self._n_eager = 0  # calls to come
        self._n_in_vain = 0  # recorded calls since one was replayed

    def new_backward(self) -> Replay[Any, Any]:
        """What runs backward of one plan of forward, which has repeated already. It is checked when
        that is."""
        options = {**self._options, "warmup": 0, "check_every": 0}
        return Replay(_Backward(f"{self._name}, backward"), is_part=True, **options)

    def _teaches(self, captured: CapturedCall) -> bool:
        """Whether a forward that might be replayed is recorded, for its companion to learn."""
        if not torch.is_grad_enabled() or captured.n_to_teach == 0:
            return False
        captured.n_to_teach -= 1
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "it is being called"
        if self._runs_eagerly() or self.forward.is_seen_by_others():
            return torch_private.call_module(module, args, kwargs)
        _here.made = None
        states = torch_private.generator_states() if torch.is_grad_enabled() else ()
        call = (module, args, kwargs)
        found = self.forward(*call)
        graph, _here.made = _here.made, None
        self._n_in_vain = 0 if self.forward.has_replayed() else self._n_in_vain + 1
        n_outputs, bits, form, n_saved, reached, n_parameters = found[:N_HEADER]
        at = N_HEADER + n_outputs
        outputs = list(map(_plain, found[N_HEADER:at]))
        places = [i for i in range(n_outputs) if bits >> i & 1]
        if graph is not None and graph.flaw:
            given: Any = graph.outputs
        elif places:
            saved = list(map(_plain, found[at : at + n_saved]))
            at += n_saved
            inputs = _differentiated(args, kwargs)
            wanted = [one for i, one in enumerate(inputs) if reached >> i & 1]
            wanted += found[at : at + n_parameters]
            run = _Run(self, call, states, graph, self.forward.ran(), wanted)
            seen = [*_tensors_in(args, kwargs), *outputs, *found[at:]]
            saved_too = [seen[i] for i in self._whose_memory_is_saved(saved, seen)]
            given = hits.loaded.joined(
                run.backward, saved + saved_too, len(saved), [outputs[i] for i in places], wanted
            )
        else:
            given = ()
        for i, output in zip(places, given, strict=True):
            outputs[i] = output
        return _made_of(outputs, _forms[form])

    def _whose_memory_is_saved(self, saved: Tensors, seen: Tensors) -> list[int]:
        """The numbers of the tensors whose memory something has that was saved: a write to them is
        an error of backward. Views that are saved don't count it."""
        captured = self.forward.ran()
        if captured is not None and captured.shared is not None:
            return captured.shared
        storages = {torch_private.storage_id(_plain(one)) for one in saved if _is_strided(one)}
        found = [
            i
            for i, one in enumerate(seen)
            if isinstance(one, torch.Tensor)
            and _is_strided(one)
            and not one.is_inference()
            and torch_private.storage_id(_plain(one)) in storages
        ]
        if captured is not None:
            captured.shared = found
        return found

    def _runs_eagerly(self) -> bool:
        """Whether this call does: recording was in vain, or there can't be plans yet. Not while
        hooks see what is saved: to checkpointing a forward and its repetition must look alike."""
        if torch_private.saves_by_hooks():
            return False
        if not self.forward.may_plan():
            return True
        if self._n_eager > 0:
            self._n_eager -= 1
            return True
        if self._n_in_vain >= RECORDED_BEFORE_EAGER:
            # with gradients to add to, and without any, there is a plan for each
            n_learnt = max(self.forward.n_signatures, len(self.forward.captured()), 1)
            if self._n_in_vain >= RECORDED_BEFORE_EAGER * min(n_learnt, MOST_LEARNT):
                self.go_eager()
        return self._n_eager > 0

    def may_run_kernels(self) -> bool:
        """Whether results may differ from those of ops one by one, by rounding."""
        return bool(self._options.get("compile", settings.current().compile) != "off")

    def go_eager(self) -> None:
        """Run the next calls as in eager."""
        self._n_eager, self._n_in_vain = EAGER_CALLS, 0
        self.forward.forget()


class _Run:
    """One forward: by what call of which module, from which states of random generators; its graph
    if it was recorded, and what it was, or might have been, replayed by; and the tensors whose
    gradients are wanted."""

    __slots__ = ("_autocast", "_call", "_graph", "_module", "_captured", "_states", "_wanted")

    def __init__(
        self,
        module: ReplayedModule,
        call: tuple[Any, ...],
        states: tuple[Any, ...],
        graph: Graph | None,
        captured: CapturedCall | None,
        wanted: Tensors,
    ) -> None:
        self._module = module
        self._call = call
        self._states = states
        self._graph = graph
        self._captured = captured
        self._wanted = wanted
        self._autocast = torch_private.autocast_state()

    def backward(self, saved: Tensors, given: Gradients) -> Gradients:
        """The gradients wanted, by the tensors saved and those of the outputs."""
        with_graph = torch.is_grad_enabled()
        return self._differentiable(saved, given) if with_graph else self._gradients(saved, given)

    def _gradients(self, saved: Tensors, given: Gradients) -> Gradients:
        captured = self._captured
        if captured is None:
            return list(map(_plain, self._by(self._module.backward.recorded, saved, given)))
        if captured.companion is None:
            captured.companion = self._module.new_backward()
        backward = captured.companion
        backward.checks_next = self._graph is not None
        try:
            found = self._by(backward, saved, given)
        except _NeedsGraph:
            captured.n_to_teach = TAUGHT_AFTER
            self._graph = self._made_again(saved)
            found = self._by(backward, saved, given)
        finally:
            backward.checks_next = False
        if backward.is_captured():
            captured.n_to_teach = 0
        elif backward.n_replayed == 0 and backward.n_recorded >= RECORDED_BEFORE_EAGER:
            self._module.go_eager()
        return list(map(_plain, found))

    def _by(
        self, backward: Callable[..., Gradients], saved: Tensors, given: Gradients
    ) -> Gradients:
        used_before, _here.used = _here.used, self._graph
        try:
            return backward(saved, given)
        finally:
            _here.used = used_before

    def _made_again(self, saved: Tensors) -> Graph:
        """The graph of a forward that was replayed, by another. RuntimeError unless that saves the
        same values, up to rounding where that one may have run kernels."""
        with self._as_then():
            found = _Forward("")(*self._call)
        graph, _here.made = _here.made, None
        n_outputs, n_saved = found[0], found[3]
        again = found[N_HEADER + n_outputs : N_HEADER + n_outputs + n_saved]
        rounds = self._module.may_run_kernels()
        if graph is None or graph.flaw or not _are_equal(again, saved, rounds=rounds):
            raise RuntimeError(
                f"backward of a replayed {type(self._call[0]).__name__} has to be recorded, and "
                "its forward does something else when it runs again; run backward before what "
                "forward reads changes, or call the module without replay"
            )
        return graph

    def _differentiable(self, saved: Tensors, given: Gradients) -> Gradients:
        """The gradients with a graph of their own: by an eager forward and backward, which must
        save what the replayed one did."""
        self._made_again(saved)
        with self._as_then():
            found, _ = _flattened(torch_private.call_module(*self._call))
        again = [one for one in found if isinstance(one, torch.Tensor) and one.requires_grad]
        pairs = [pair for pair in zip(again, given, strict=True) if pair[1] is not None]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs], self._wanted, [gradient for _, gradient in pairs],
            allow_unused=True, create_graph=True,
        )  # fmt: skip
        return list(gradients)

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Call the module once more, as from the forward's generators and autocast; afterwards its
        attributes and the generators are as they were before."""
        with ExitStack() as stack:
            stack.enter_context(torch_private.attributes_kept(self._call[0]))
            stack.enter_context(torch_private.generators_at(self._states))
            stack.enter_context(torch_private.autocast_as(self._autocast))
            stack.enter_context(recording())
            stack.enter_context(torch.enable_grad())
            yield


def _are_equal(some: Sequence[Any], others: Tensors, *, rounds: bool) -> bool:
    """Whether values are the same; up to the rounding that fusion brings if one side `rounds`."""
    if len(some) != len(others):
        return False
    for one, other in zip(map(_plain, some), others, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not _is_strided(one):
            is_equal = torch.equal(one, other)
        elif rounds:
            is_equal = difference([one.detach()], [other.detach()]) is None
        else:
            is_equal = torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
        if not is_equal:
            return False
    return True


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _plain(tensor: Any) -> Any:
    """The plain tensor behind a lazy one; anything else as it is."""
    return computed(tensor) if type(tensor) is LazyTensor else tensor
