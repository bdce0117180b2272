"""`replay(model)`: a module whose forward and backward run as plans, while the loss stays outside.

In: a module. Out: the same module. Its outputs are joined to the program's autograd by one node.
The work is done by `Replay`s. One runs forward, and returns the tensors that autograd saved for
backward besides the outputs. Each captured call of forward has a companion: a `Replay` that runs
backward, on the saved tensors and the gradients of the outputs.

A replayed forward makes no graph. So forward is recorded until its companion has learnt backward
from the graphs of such calls, and again whenever both are checked. If one node can't stand for a
recorded call's graph (it has a `flaw`), the outputs are returned with that graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lazy_tensor.capture.captured_call import CapturedCall
from lazy_tensor.capture.outline import Constant
from lazy_tensor.capture.replay import Replay, recording
from lazy_tensor.capture.take import is_strided
from lazy_tensor.capture.watched_object import is_atom
from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.metadata.infer import is_marked
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.tape import stop_tape
from lazy_tensor.interop.wrappers import here
from lazy_tensor.kernels.service.verify import difference
from lazy_tensor.tensor import LazyTensor, computed

RECORDED_BEFORE_EAGER, MOST_LEARNT = 8, 4
"""Calls in a row that are recorded, with none replayed, before a module runs as in eager: recording
alone only costs. The bound is multiplied by the number of signatures, or plans, that are being
learnt, up to `MOST_LEARNT`."""
EAGER_CALLS = 1000
"""Calls that then run as in eager, before recording is tried again."""
TAUGHT_AFTER = 3
"""Calls of forward that are recorded after a backward came that its companion doesn't know."""

Tensors = list[torch.Tensor]
Gradients = list[torch.Tensor | None]


def replay_module(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Have the module's calls replayed from now on; return the module."""
    torch_private.call_by(module, ReplayedModule(module, options))
    return module


@dataclass(slots=True)
class Graph:
    """What a recorded forward leaves for a recorded backward: the outputs with their graph, and the
    edges at which gradients leave the graph. `flaw` says why one node can't stand for the graph, ""
    if one can."""

    outputs: Tensors
    edges: list[Any]
    flaw: str = ""


class _NeedsGraph(Exception):
    """Backward has to be recorded, but its forward was replayed and left no graph."""


# What passes between this file's functions beside a `Replay`, which passes on only what a plan can
# give: tensors and constants.
class _Here(threading.local):
    made: Graph | None = None  # the graph of the forward that was recorded last
    used: Graph | None = None  # the graph that the running backward differentiates
    saved: Sequence[torch.Tensor] = ()  # the tensors that this graph's nodes find as saved ones


_here = _Here()


class _Named:
    """A function with the module's name, for messages. It has no state for `replay` to watch: the
    module comes as an argument."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name


N_HEADER = 6
"""Items before the tensors in the list that `_Forward` returns."""


class _Forward(_Named):
    """Calls a module, and leaves its graph in `_here.made`.

    Returns a list. First, `N_HEADER` items: how many outputs there are; a bit for each output that
    has a graph; the outputs' form; how many tensors were saved for backward; a bit for each
    differentiated argument that the graph reaches; how many parameters it reaches.
    Then the outputs, the saved tensors, these parameters, and the module's other parameters and
    buffers.
    """

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        if not torch.is_grad_enabled():
            result = torch_private.call_module(module, args, kwargs)
            outputs, form = _taken_apart(result, module, args, kwargs)
            return [len(outputs), 0, form, 0, 0, 0, *outputs]
        first = torch_private.next_sequence_number()  # nodes with less were made before the call
        inputs = _differentiated(args, kwargs)
        edges = [torch.autograd.graph.get_gradient_edge(one) for one in inputs]
        versions = [one._version for one in inputs]
        # autograd keeps a view's op for lazy tensors, but for plain ones only if it is told to: the
        # graph must be the same, whether this call is recorded or bypassed
        with _saving() as (saved, is_written, put_aside), torch_private.views_by_their_ops():
            result = torch_private.call_module(module, args, kwargs)
        outputs, form = _taken_apart(result, module, args, kwargs)
        bits, with_graph = 0, []
        for i, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                bits |= 1 << i
                with_graph.append(output)
                outputs[i] = output.detach()  # a plan returns no tensor with a graph
        # with a flaw, one node in place of the graph would give wrong gradients, or hooks would run
        # twice
        reached, parameters, flaw = _reached(with_graph, edges, first)
        if versions != [one._version for one in inputs]:
            flaw = "it writes an argument whose gradient is wanted"
        if any(_shares(output, inputs) for output in with_graph):
            flaw = "it gives an argument whose gradient is wanted, or a view of it"
        if any(output.grad_fn is None for output in with_graph):
            flaw = "it gives a leaf that requires a gradient, which would be no leaf of a replay"
        if any(map(is_written, range(len(saved)))):
            flaw = "it writes what its backward needs"
        if put_aside:
            flaw = "it disables hooks for saved tensors, as torch.func.grad does"
        wanted = [one for i, one in enumerate(inputs) if reached >> i & 1] + parameters
        if any(one._backward_hooks or (one.retains_grad and not one.is_leaf) for one in wanted):
            flaw = "a parameter or an argument has a hook for its gradient, which would run twice"
        edges = [edge for i, edge in enumerate(edges) if reached >> i & 1]
        edges += [torch.autograd.graph.get_gradient_edge(one) for one in parameters]
        if _lead_on(edges):
            flaw = "an argument was computed from another one, or from the module's parameters"
        if flaw:
            stop_tape(flaw)  # so that the call can't be captured
        _here.made = Graph(with_graph, edges, flaw)
        # all parameters and buffers are returned, so that a caller of a replay can save those whose
        # memory backward needs: see `_whose_memory_is_saved`
        known = {id(one) for one in parameters}
        others = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in known]
        header = [len(outputs), bits, form, len(saved), reached, len(parameters)]
        return [*header, *outputs, *saved, *parameters, *others]


def _differentiated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
    """The tensors among the arguments whose gradients are wanted, each once."""
    return list({id(one): one for one in _tensors_in(args, kwargs) if one.requires_grad}.values())


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
    """The tensors among the arguments."""
    found = [one for one in args if isinstance(one, torch.Tensor)]
    if kwargs or len(found) < len(args):
        found = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    return found


def _shares(output: torch.Tensor, inputs: Tensors) -> bool:
    """Whether an output is one of the inputs, or autograd knows both as views of one tensor."""
    base = output._base if output._is_view() else output
    return any(base is (one._base if one._is_view() else one) for one in inputs)


def _reached(outputs: Tensors, edges: list[Any], first: int) -> tuple[int, Tensors, str]:
    """Where the outputs' graph ends: a bit for each of `edges` that it reaches, and the leaves; and
    the flaw if a node in it is older than the number `first`, else ""."""
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


def _lead_on(edges: list[Any]) -> bool:
    """Whether the graph behind one of the edges leads to another one.

    Autograd doesn't stop at an edge then: it would run that part of the graph for the module's
    backward, and once more for the program's.
    """
    ends = {edge.node for edge in edges}
    waiting = [one for end in ends for one, _ in end.next_functions]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in ends:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [one for one, _ in node.next_functions]
    return False


@contextmanager
def _saving() -> Iterator[tuple[Tensors, Callable[[int], bool], list[bool]]]:
    """Have autograd save numbers instead of tensors; yields the list of these tensors, whether one
    of them has been written since, and a list that isn't empty if the hooks were put aside.

    Nodes of the graph look a number up in `_here.saved`, which `_Backward` sets. Without it, as
    when the outputs are returned with this graph, they look in the list. A tensor there must not
    have been written since: autograd doesn't check that where there are hooks.
    """
    saved: Tensors = []
    versions: list[int] = []
    number_of: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> int:
        version = tensor._version
        known = number_of.get((id(tensor), version))
        if known is None:
            known = number_of[id(tensor), version] = (len(saved), tensor)
            saved.append(tensor if tensor.is_leaf else tensor.detach())
            versions.append(version)
        return known[0]

    def is_written(i: int) -> bool:
        return saved[i]._version != versions[i]

    def unpack(i: int) -> torch.Tensor:
        if _here.saved:
            return _here.saved[i]
        if is_written(i):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {list(saved[i].shape)} is at version "
                f"{saved[i]._version}; expected version {versions[i]} instead"
            )
        return saved[i]

    hooks, put_aside = torch.autograd.graph.saved_tensors_hooks(pack, unpack), list[bool]()

    @contextmanager
    def aside() -> Iterator[None]:
        put_aside.append(True)
        hooks.__exit__()
        here.saving, outer = None, here.saving
        try:
            yield
        finally:
            here.saving = outer
            hooks.__enter__()

    here.saving, outer = aside, here.saving
    try:
        with hooks:
            yield saved, is_written, put_aside
    finally:
        here.saving = outer


class _Backward(_Named):
    """Differentiates the graph in `_here.used`, from saved tensors and the outputs' gradients (None
    for an output without one). Returns the gradients at the graph's edges.

    The saved tensors are arguments, so that a captured backward takes those of any forward.
    """

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
class _Form(Constant):
    """How to put together what a module returns from a list of leaves.

    `spec` has the containers. `objects` are leaves that hold tensors themselves, such as a cache of
    keys and values. For each: its number, its class, the names of its attributes, and the form of
    their values, which come as further leaves behind those of the containers.

    The form of the whole says, too, which leaves aren't among the outputs. `views` are views of one
    tensor: each leaf's number, that of the output with the tensor, the size, the strides, and the
    offset from that tensor's. `same` are pairs of a leaf and the earlier one that it is.
    """

    spec: Any
    objects: tuple[tuple[int, type[Any], tuple[str, ...], _Form], ...]
    views: tuple[tuple[int, int, torch.Size, tuple[int, ...], int], ...] = ()
    same: tuple[tuple[int, int], ...] = ()


def _taken_apart(
    result: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], _Form]:
    """The outputs in what a module returned, and the form of the whole.

    In place of views of one tensor, which a write would change together, that tensor is an output.
    An object among the arguments, or in an attribute of the module, is one leaf: a call returns it
    itself.
    """
    kept = {id(value) for one in module.modules() for value in vars(one).values()}
    kept.update(map(id, pytree.tree_leaves((args, kwargs))))
    leaves, form = _flattened(result, kept)
    first: dict[int, int] = {}
    same = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and first.setdefault(id(leaf), i) != i:
            same.append((i, first[id(leaf)]))
            leaves[i] = None
    views = []
    for base, numbers in _views_of_one(leaves):
        at = first.get(id(base))
        if at is None:
            at = len(leaves)
            leaves.append(base)
        for i in numbers:
            if i != at:
                one, leaves[i] = leaves[i], None
                moved = one.storage_offset() - base.storage_offset()
                views.append((i, at, one.size(), one.stride(), moved))
    return leaves, replace(form, views=tuple(views), same=tuple(same))


def _views_of_one(leaves: list[Any]) -> list[tuple[torch.Tensor, list[int]]]:
    """Tensors that autograd knows several of the leaves as views of, and the numbers of these."""
    found: dict[int, tuple[torch.Tensor, list[int]]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_strided(leaf):
            known = leaf._base if leaf._is_view() else None
            base = leaf if known is None else known
            if base.requires_grad and base.dtype is leaf.dtype and not is_marked(leaf):
                found.setdefault(id(base), (base, []))[1].append(i)
    return [(base, numbers) for base, numbers in found.values() if len(numbers) > 1]


def _flattened(result: Any, kept: set[int]) -> tuple[list[Any], _Form]:
    """The leaves of what a module returned, those in objects too, and their form. Objects with an
    `id` in `kept` are leaves."""
    leaves, spec = pytree.tree_flatten(result, is_leaf=lambda one: id(one) in kept)
    objects: list[tuple[int, type[Any], tuple[str, ...], _Form]] = []
    for i in range(spec.num_leaves):
        one = leaves[i]
        if id(one) in kept or not _is_made_anew(one):
            continue
        inner, form = _flattened(list(vars(one).values()), kept)
        if any(isinstance(leaf, torch.Tensor) for leaf in inner):
            leaves[i] = None
            leaves += inner
            objects.append((i, type(one), tuple(vars(one)), form))
    return leaves, _Form(spec, tuple(objects))


def _is_made_anew(one: Any) -> bool:
    """Whether a returned object may be made anew from its attributes. Others are returned as they
    are, if `replay` finds them among what the module can see."""
    if is_atom(one) or isinstance(one, (torch.Tensor, type, nn.Module, dict, list, tuple, set)):
        return False
    return hasattr(one, "__dict__") and not callable(one) and "__dict__" not in vars(one)


def _put_together(outputs: list[Any], form: _Form) -> Any:
    """What a module returned, from its outputs: undoes `_taken_apart`."""
    for i, at, size, stride, moved in form.views:
        base = outputs[at]
        outputs[i] = base.as_strided(size, stride, base.storage_offset() + moved)
    for i, at in form.same:
        outputs[i] = outputs[at]
    return _made_of(outputs, form)


def _made_of(leaves: list[Any], form: _Form) -> Any:
    """What a module returned, from its leaves: undoes `_flattened`."""
    if form.spec.is_leaf() and not form.objects:
        return leaves[0]
    n = form.spec.num_leaves
    found, left = leaves[:n], leaves[n:]
    for i, kind, names, inner in form.objects:
        n = _n_leaves(inner)
        found[i] = made = object.__new__(kind)
        vars(made).update(zip(names, _made_of(left[:n], inner), strict=True))
        left = left[n:]
    return form.spec.unflatten(found)


def _n_leaves(form: _Form) -> int:
    """All leaves of a form, those in objects too."""
    return int(form.spec.num_leaves) + sum(_n_leaves(inner) for *_, inner in form.objects)


class ReplayedModule:
    """What runs when a module is called that was given to `replay`."""

    is_replay = True  # for `unwrap`

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self.options = options
        self._name = type(module).__name__
        self.forward = Replay(_Forward(self._name), is_part=True, **options)
        self.backward = self.new_backward()  # for calls of which no forward is captured
        self._module = weakref.ref(module)  # the module has this object as an attribute
        self._n_eager = 0  # calls still to run as in eager
        self._n_in_vain = 0  # recorded calls since the last replay

    def new_backward(self) -> Replay[Any, Any]:
        """A `Replay` that runs backward for one captured call of forward.

        It needs no warmup, as that call has repeated, and no checks of its own: it is checked
        whenever forward is.
        """
        options = {**self.options, "warmup": 0, "check_every": 0}
        return Replay(_Backward(f"{self._name}, backward"), is_part=True, **options)

    def _teaches(self, captured: CapturedCall) -> bool:
        """Whether to record a forward that could be replayed, for its companion to learn from."""
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
        # for `_made_again`, should the forward have to run once more
        states = torch_private.generator_states() if torch.is_grad_enabled() else ()
        call = (module, args, kwargs)
        found, captured, _, is_replayed = self.forward.call(call, {}, must_record=self._teaches)
        graph, _here.made = _here.made, None
        self._n_in_vain = 0 if is_replayed else self._n_in_vain + 1
        n_outputs, bits, form, n_saved, reached, n_parameters = found[:N_HEADER]
        at = N_HEADER + n_outputs
        outputs = list(map(_plain, found[N_HEADER:at]))
        places = [i for i in range(n_outputs) if bits >> i & 1]  # of outputs with a graph
        if graph is not None and graph.flaw:
            given: Any = graph.outputs
        elif places:
            saved = list(map(_plain, found[at : at + n_saved]))
            at += n_saved
            inputs = _differentiated(args, kwargs)
            wanted = [one for i, one in enumerate(inputs) if reached >> i & 1]
            wanted += found[at : at + n_parameters]
            run = _Run(self, call, states, graph, captured, wanted)
            seen = [*_tensors_in(args, kwargs), *outputs, *found[at:]]
            # kept by the node only for autograd to raise if one was written before backward
            saved_too = [seen[i] for i in _whose_memory_is_saved(captured, saved, seen)]
            given = hits.loaded.joined(
                run.backward, saved + saved_too, len(saved), [outputs[i] for i in places], wanted
            )
        else:
            given = ()
        for i, output in zip(places, given, strict=True):
            outputs[i] = output
        return _put_together(outputs, form)

    def _runs_eagerly(self) -> bool:
        """Whether this call runs as in eager, since recording led to no replay, or there can't be
        plans yet."""
        # checkpointing sees what is saved, and must see the same when it repeats the forward
        if torch_private.saves_by_hooks():
            return False
        if not self.forward.may_plan():
            return True
        if self._n_eager > 0:
            self._n_eager -= 1
            return True
        if self._n_in_vain >= RECORDED_BEFORE_EAGER:
            # plans are learnt one by one: with gradients to add to, and without, are two
            n_learnt = max(self.forward.n_signatures, len(self.forward.captured()), 1)
            if self._n_in_vain >= RECORDED_BEFORE_EAGER * min(n_learnt, MOST_LEARNT):
                self.go_eager()
        return self._n_eager > 0

    def go_eager(self) -> None:
        """Run the next `EAGER_CALLS` as in eager, and forget what was learnt."""
        self._n_eager, self._n_in_vain = EAGER_CALLS, 0
        self.forward.forget()


def _whose_memory_is_saved(
    captured: CapturedCall | None, saved: Tensors, seen: Sequence[Any]
) -> list[int]:
    """The numbers of the tensors in `seen` that have the memory of a saved tensor.

    A write to one of them before backward is an error, as in eager. A saved tensor may be a new
    one on that memory, for which autograd doesn't count the write.
    """
    if captured is not None and captured.shared is not None:
        return captured.shared
    storages = {torch_private.storage_id(one) for one in saved if is_strided(one)}
    found = [
        i
        for i, one in enumerate(seen)
        if isinstance(one, torch.Tensor)
        and is_strided(one)
        and not one.is_inference()
        and torch_private.storage_id(_plain(one)) in storages
    ]
    if captured is not None:
        captured.shared = found
    return found


@dataclass(slots=True, eq=False)
class _Run:
    """One forward, with what its backward needs; the autograd node calls `backward`.

    `call` is the module and its arguments, `states` those of random generators before it. `graph`
    is there if the call was recorded, `captured` if it was replayed or could have been. `wanted`
    are the tensors whose gradients are computed.
    """

    module: ReplayedModule
    call: tuple[Any, ...]
    states: tuple[Any, ...]
    graph: Graph | None
    captured: CapturedCall | None
    wanted: Tensors
    autocast: Any = field(default_factory=torch_private.autocast_state)

    def backward(self, saved: Tensors, given: Gradients) -> Gradients:
        """The gradients wanted, from the saved tensors and the gradients of the outputs."""
        # with `create_graph=True` the gradients need a graph themselves, which no plan makes
        with_graph = torch.is_grad_enabled()
        return self._differentiable(saved, given) if with_graph else self._gradients(saved, given)

    def _gradients(self, saved: Tensors, given: Gradients) -> Gradients:
        """The gradients without a graph, by a plan where there is one."""
        captured, module = self.captured, self.module
        arguments = (saved, given)
        is_in_vmap = torch_private.is_in_vmap()  # no plan runs on gradients that stand for many
        if is_in_vmap and self.graph is None:
            self.graph = self._made_again(saved)
        if captured is None or is_in_vmap:
            return list(map(_plain, self._by(module.backward.recorded, arguments, {})))
        if captured.companion is None:
            captured.companion = module.new_backward()
        backward: Replay[Any, Any] = captured.companion
        try:
            # a recorded forward has a graph: backward can be recorded, and compared with its plan
            found, _, known, _ = self._by(
                backward.call, arguments, {}, checks=self.graph is not None
            )
        except _NeedsGraph:
            # outputs were used that were not used before, say: learn this backward from the next
            # forwards, and run this forward again for its graph
            captured.n_to_teach = TAUGHT_AFTER
            self.graph = self._made_again(saved)
            found, _, known, _ = self._by(backward.call, arguments, {})
        n_learnt = min(max(backward.n_signatures, 1), MOST_LEARNT)
        if (known is not None and known.captured) or backward.runs_any_size():
            captured.n_to_teach = 0
        elif backward.n_replayed == 0 and backward.n_recorded >= RECORDED_BEFORE_EAGER * n_learnt:
            module.go_eager()
        return list(map(_plain, found))

    def _by(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a `Replay` of `_Backward`, with this forward's graph for it to use."""
        used_before, _here.used = _here.used, self.graph
        try:
            return call(*args, **kwargs)
        finally:
            _here.used = used_before

    def _made_again(self, saved: Tensors) -> Graph:
        """The graph of a forward that was replayed, by running it again. Generators and the
        module's attributes stay as they are.

        RuntimeError unless the same values are saved, up to rounding if the replay may have run
        kernels.
        """
        module = self.call[0]
        with (
            torch_private.attributes_kept(module),
            torch_private.generators_at(self.states),
            torch_private.autocast_as(self.autocast),
            torch_private.outside_vmap(),
            recording(),
            torch.enable_grad(),
        ):
            found = _Forward("")(*self.call)
        graph, _here.made = _here.made, None
        n_outputs, n_saved = found[0], found[3]
        again = found[N_HEADER + n_outputs : N_HEADER + n_outputs + n_saved]
        # results of kernels may differ by rounding from those of single ops
        rounds = self.module.options.get("compile", settings.current().compile) != "off"
        if graph is None or graph.flaw or not _are_equal(again, saved, rounds=rounds):
            raise RuntimeError(
                f"backward of a replayed {type(module).__name__} has to be recorded, and its "
                "forward does something else when it runs again; run backward before what forward "
                "reads changes, or call the module without replay"
            )
        return graph

    def _differentiable(self, saved: Tensors, given: Gradients) -> Gradients:
        """The gradients with a graph of their own, by a forward and a backward in eager.

        RuntimeError if that forward saves other values than the replayed one.
        """
        again = self._made_again(saved).outputs
        pairs = [pair for pair in zip(again, given, strict=True) if pair[1] is not None]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs], self.wanted, [gradient for _, gradient in pairs],
            allow_unused=True, create_graph=True,
        )  # fmt: skip
        return list(gradients)


def _are_equal(some: Sequence[Any], others: Tensors, *, rounds: bool) -> bool:
    """Whether values are the same: up to the rounding of kernels if `rounds`, else exactly."""

    def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not is_strided(one):
            return torch.equal(one, other)
        if rounds:
            return difference([one.detach()], [other.detach()]) is None
        return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)

    return len(some) == len(others) and all(map(is_equal, map(_plain, some), others))


def _plain(tensor: Any) -> Any:
    """The plain tensor behind a lazy one; anything else as it is."""
    return computed(tensor) if type(tensor) is LazyTensor else tensor
