"""Runs a captured call's plan as a CUDA graph: one launch for all kernels.

In: a plan, its trace's state, and the leaves of each run. Out: the plan's results. Called by
`captured_call`. Leaves that keep their address are read and written in place. Other leaves are
copied into buffers of the graph. Results are copied out, as the next run overwrites them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch

from lazy_tensor.dispatch.metadata.infer import is_dense
from lazy_tensor.dispatch.plan.plan import Given, Plan
from lazy_tensor.dispatch.torch_private import storage_id
from lazy_tensor.dispatch.trie.trace import Leaf, Node, State
from lazy_tensor.dispatch.wording import op_name

Tensors = Sequence[torch.Tensor]

RUNS_BEFORE = 3
"""Runs of a plan before it is captured: libraries initialize in the first ones."""
MOST_CAPTURES = 4
"""Graphs made of one plan before it is given up. A new one is needed when a leaf that had kept its
address moves, or when a kernel changes its status."""
UNSETTLED = frozenset({"queued", "compiling", "measuring"})
"""Statuses of fusions that will change soon: a graph captured now would be dropped."""
DEVICE = "cuda"
"""The type of the device that all tensors must be on. Tests capture on the CPU."""


def capture_on_cuda(run: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
    """Capture a function's kernels in a `torch.cuda.CUDAGraph`.

    Returns a function that runs them, and the results, which lie in the same memory after each run.
    Nothing has been computed when it returns.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph.replay, results


class CudaGraph:
    """Runs a plan as a CUDA graph as soon as possible, and until then as it is.

    `written` are the numbers of the leaves that the plan writes. `refusal` says why it can't become
    a graph, "" if it can. A graph keeps the numbers that it was captured with, so with
    `numbers_change` there is none.
    """

    def __init__(
        self, plan: Plan, state: State, written: Collection[int], *, numbers_change: bool = False
    ) -> None:
        self._plan = plan
        self._written = written
        self.refusal = _refusal(state.steps())
        if numbers_change and not self.refusal:
            self.refusal = "numbers that it gets change"
        self._before: list[int] = []  # the leaves' addresses in the last run
        self._n_runs = self._n_captures = 0
        self._statuses: list[str] = []
        self._forget()

    def told(self) -> str:
        """Whether there is a graph, for `explain()`."""
        if self.refusal:
            return f"no CUDA graph because {self.refusal}"
        return "as a CUDA graph" if self._replay is not None else "no CUDA graph yet"

    def _forget(self) -> None:
        self._replay: Callable[[], object] | None = None
        self._inputs: list[torch.Tensor] = []
        # where the graph finds each leaf; None: in a buffer in `_inputs`, to which it is copied
        self._addresses: list[int | None] = []
        self._results: Tensors = ()

    def __call__(self, leaves: list[torch.Tensor], scalars: list[complex], given: Given) -> None:
        """Append the plan's results for these leaves. The scalars are the same at each run."""
        is_ready = not self.refusal and self._is_ready(leaves)
        if is_ready and (self._replay is not None or self._make(leaves, scalars)):
            given.append(self._run(leaves))
        else:
            self._plan.run(leaves, scalars, given)

    def _is_ready(self, leaves: list[torch.Tensor]) -> bool:
        """Whether the graph fits these leaves, or one can be made. Drops one that doesn't fit."""
        statuses: list[str] = [fusion.status for fusion in self._plan.fusions]
        if self._replay is not None:
            fits = statuses == self._statuses and all(
                address is None or leaf.data_ptr() == address
                for leaf, address in zip(leaves, self._addresses, strict=True)
            )
            if fits:
                return True
            self._forget()
        self._n_runs += 1
        before, self._before = self._before, [leaf.data_ptr() for leaf in leaves]
        if self._n_runs <= RUNS_BEFORE or not UNSETTLED.isdisjoint(statuses):
            return False
        if self._n_captures == MOST_CAPTURES:
            self.refusal = "the memory that it writes moves"
            return False
        # a leaf that moved since the last run will be copied into a buffer at each run. If the plan
        # writes it, that is no way: the write must reach the leaf itself.
        stays = [now == then for now, then in zip(self._before, before, strict=True)]
        if any(i in self._written and not stay for i, stay in enumerate(stays)):
            return False
        self._addresses = [
            address if stay else None for address, stay in zip(self._before, stays, strict=True)
        ]
        self._statuses = statuses
        return True

    def _make(self, leaves: list[torch.Tensor], scalars: list[complex]) -> bool:
        """Capture the plan; False, with the refusal, if that fails."""
        # copies of two leaves on one storage would not share memory, and a copy has no gaps
        shared = _shared(leaves)
        self._inputs = []
        for i, (leaf, address) in enumerate(zip(leaves, self._addresses, strict=True)):
            if address is not None:
                self._inputs.append(leaf)
            elif storage_id(leaf) in shared or not is_dense(leaf.shape, leaf.stride()):
                self.refusal = f"input {i} moves, and shares memory or has gaps"
                return False
            else:
                buffer = torch.empty_strided(
                    leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
                )
                self._inputs.append(buffer)
        try:
            made = capture_on_cuda(lambda: self._planned(scalars))
        except Exception as error:  # without a graph the plan runs as before
            self._forget()
            self.refusal = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            return False
        self._replay, self._results = made
        self._n_captures += 1
        return True

    def _planned(self, scalars: list[complex]) -> Tensors:
        given: Given = []
        self._plan.run([*self._inputs], scalars, given)
        return given[0]

    def _run(self, leaves: list[torch.Tensor]) -> Tensors:
        assert self._replay is not None, "it was captured"
        # by storage in the graph: the storage to return results in, and what to add to offsets. A
        # result on a buffer is returned on the leaf's memory. Others are cloned, once for each
        # storage, so that results which share memory still do.
        memory: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for mine, leaf, address in zip(self._inputs, leaves, self._addresses, strict=True):
            if address is None:
                mine.copy_(leaf)
            moved = int(leaf.storage_offset()) if address is None else 0
            memory[storage_id(mine)] = leaf.untyped_storage(), moved
        self._replay()
        found: list[torch.Tensor] = []
        for result in self._results:
            where = storage_id(result)
            if where not in memory:
                memory[where] = result.untyped_storage().clone(), 0
            storage, moved = memory[where]
            empty = torch.empty(0, dtype=result.dtype, device=result.device)
            offset = result.storage_offset() + moved
            found.append(empty.set_(storage, offset, result.shape, result.stride()))
        return found


def _refusal(steps: list[Node | Leaf]) -> str:
    """Why a trace can't be captured, as far as its steps show; "" if they show nothing."""
    for step in steps:
        specs = step.specs if isinstance(step, Node) else (step.spec,)
        others = {spec.device.type for spec in specs if spec is not None} - {DEVICE}
        if others:
            return f"a tensor is on {others.pop()}"
        if isinstance(step, Node) and step.facts.communicates:
            return f"{op_name(step.facts.op)} communicates"
    return ""


def _shared(leaves: Tensors) -> set[int]:
    """The storages, by `storage_id`, that several leaves have."""
    counts = Counter(map(storage_id, leaves))
    return {where for where, count in counts.items() if count > 1}
