"""The adapter to Inductor. This module and `torch_cpp` alone use its private names.

Checked with torch 2.13. In: a functional graph. Out: a `Compiled`: the steps of Inductor's Python
wrapper as data. The C++ of its kernels goes to a `Unit`, which compiles it to a shared library.
Inductor is imported by `compile_graph`, not by this module, since the import takes seconds.

A *wrapper* is the Python that Inductor generates around its kernels: it allocates buffers, calls
kernels, and returns results.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from lazy_tensor.kernels.segment import op_named

VERSIONS_CHECKED = ("2.13",)


class NotPortable(RuntimeError):
    """The compiled kernel can run only in the process that compiled it."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph compiled by Inductor, in a form that another process can load.

    `steps` are those of the wrapper (see `steps_of`). Kernel number i is the function `kernels[i]`
    of the library that the `Unit` compiles. `strides` are those of the results. If sizes are
    symbolic, the kernel is correct for values of the `symbols` for which all `conditions` hold;
    these are Python expressions.
    """

    steps: dict[str, Any]
    kernels: tuple[str, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    symbols: tuple[str, ...]
    conditions: tuple[str, ...]


def private(module: str, name: str) -> Any:
    """`name` in torch's `module`; if this torch lacks it, a RuntimeError says what to do."""
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"backend 'inductor': torch {torch.__version__} has no {module}.{name} ({error}); "
            f"checked with torch {', '.join(VERSIONS_CHECKED)}; choose backend='aten'"
        ) from None


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table of decompositions: op -> function that computes it with simpler ops."""
    # the decompositions of pooling use this module, but don't import it
    importlib.import_module("torch._inductor.lowering")
    table: dict[Any, Callable[..., Any]] = private(
        "torch._inductor.decomposition", "select_decomp_table"
    )()
    return table


def text_of_size(size: torch.SymInt) -> str:
    """A symbolic size as a Python expression in its symbols' names."""
    text: str = private("torch.utils._sympy.printers", "PythonPrinter")().doprint(size.node.expr)
    return text


class SymbolicSizes:
    """Symbols for the sizes of a generic segment, while it is traced and compiled.

    `values` are torch's SymInts, for use within `fake_mode`. `own` maps each symbol's name to the
    example size that the segment itself has.
    """

    def __init__(self, own: Sequence[int]) -> None:
        shapes = "torch.fx.experimental.symbolic_shapes"
        dynamic = private(shapes, "DimDynamic.DYNAMIC")
        source_of = private("torch._dynamo.source", "ConstantSource")
        self._env = private(shapes, "ShapeEnv")(duck_shape=False)
        self.fake_mode = FakeTensorMode(shape_env=self._env)
        self.values: list[Any] = []
        self.own: dict[str, int] = {}
        hints: set[int] = set()
        for i, n in enumerate(own):
            # Torch evaluates comparisons with the hints, and records each as a condition. Two sizes
            # that are equal by chance would give the condition that they are always equal.
            hint = n
            while hint in hints:
                hint *= 2
            hints.add(hint)
            source = source_of(f"size_{i}")
            symbol = self._env.create_symbol(hint, source, dynamic, constraint_dim=None)
            self.values.append(self._env.create_symintnode(symbol, hint=hint, source=source))
            self.own[str(symbol)] = n

    def conditions(self) -> list[str]:
        """The conditions on the sizes that tracing and compiling assumed, as Python expressions.

        Raises RuntimeError if one of them depends on data, and so can't be checked in advance.
        """
        if self._env.deferred_runtime_asserts:
            raise RuntimeError("it depends on sizes that only data tell")
        text = private("torch.utils._sympy.printers", "PythonPrinter")().doprint
        guards = [text(guard.expr) for guard in self._env.guards]
        # symbols that equal a constant or another symbol
        equalities = self._env.replacements.items()
        return [*guards, *(f"{symbol} == {text(value)}" for symbol, value in equalities)]


def compile_in_process(
    graph: fx.GraphModule, inputs: Sequence[torch.Tensor], *, says_strides: bool = False
) -> Any:
    """Inductor's own callable: takes a list of tensors, empties it, and returns the results.

    With `says_strides` its source asserts the strides of each library call's results, where
    `_Steps` reads them.
    """
    compile_fx_inner = private("torch._inductor.compile_fx", "compile_fx_inner")
    config = private("torch._inductor.config", "patch")
    with config({**settings(), "size_asserts": says_strides}):
        return compile_fx_inner(graph, inputs)


def settings() -> dict[str, Any]:
    """Inductor's settings, for its code and for the C++ compiler's command."""
    # By default a kernel's arrays have room for the threads at compile time, but the kernel starts
    # as many threads as are set at run time. An explicit number holds for both.
    options = {**_SETTINGS, "cpp.threads": torch.get_num_threads()}
    if _has_vectors_of_torch():
        options["cpp.vec_isa_ok"] = True
    # Without line numbers for a debugger a library is a third as large. torch 2.10 has none.
    if hasattr(private("torch._inductor.config", "aot_inductor"), "enable_line_tables"):
        options["aot_inductor.enable_line_tables"] = False
    return options


@functools.cache
def _has_vectors_of_torch() -> bool:
    """Whether the widest vectors of this CPU are those that torch's own kernels use.

    If so, Inductor needn't test which vectors work: it would compile and load a program for each
    width, which takes six seconds. A compiler of Inductor's C++20 knows these instructions.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2":
        return not private("torch.cpu", "_is_avx512_supported")()
    return capability == "AVX512"


_SETTINGS = {
    # the caller has checked everything that a kernel assumes
    "alignment_asserts": False,
    "nan_asserts": False,
    "assert_indirect_indexing": False,
    # `kernels.disk` keeps artifacts instead
    "fx_graph_cache": False,
    # `steps_of` reads the wrapper in Python
    "cpp_wrapper": False,
    "keep_output_stride": True,
    # By default Inductor removes `x.bfloat16().float()`, as if it changed nothing (torch 2.13).
    "emulate_precision_casts": True,
    # `Workers` has processes of its own
    "compile_threads": 1,
}


def compile_graph(
    graph: fx.GraphModule, inputs: Sequence[torch.Tensor], symbols: SymbolicSizes | None = None
) -> Compiled:
    """Compile `graph` for the CPU, within a `Unit`, to whose library the kernels are added.

    NotPortable if the result can't run in another process.
    """
    compiled = compile_in_process(graph, inputs, says_strides=True)
    call = compiled.current_callable
    if compiled.constants or not hasattr(call, "__func__"):
        raise NotPortable("the wrapper holds constants or isn't a method of Inductor's Runner")
    own = symbols.own if symbols is not None else {}
    steps, kernels = steps_of(compiled.source_code, tuple(own))
    # the wrapper's module maps each kernel to the name in the library, from `Unit._add_text`
    names = call.__func__.__globals__
    conditions = symbols.conditions() if symbols is not None else []
    # strides come as the text of expressions in the symbols
    strides = tuple(
        None if stride is None else tuple(int(eval(str(s), {}, own)) for s in stride)
        for stride in compiled.output_strides
    )
    library_names = tuple(names[kernel] for kernel in kernels)
    return Compiled(steps, library_names, strides, tuple(own), tuple(conditions))


def steps_of(source: str, symbols: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """The steps of a wrapper as data that fits JSON, and the names of its kernels.

    The steps have `arguments` and `results`, which are names, and `steps`, each one of:
    - `["allocate", name, size, stride, dtype]`
    - `["view", name, base, size, stride, offset]`
    - `["kernel", number, arguments, dead]`: `dead` are names that no later step needs
    - `["call", op, args, kwargs, results, strides, dead]`: a library call, whose arguments have the
      form that `_Steps.call_argument` returns

    A size is an integer, or the text of an expression in the `symbols`. An argument of a kernel is
    a name, or a list of one size. NotPortable if a statement is no known step.
    """
    tree = ast.parse(source)
    kernels = [name for statement in tree.body for name in _kernels_in(statement)]
    (call,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"
    )
    reader = _Steps(kernels, symbols)
    for statement in call.body:
        try:
            reader.read(statement)
        except (KeyError, ValueError) as error:
            text = ast.unparse(statement)
            raise NotPortable(f"the wrapper has {text!r}, which is no known step") from error
    data = {"arguments": reader.arguments, "steps": reader.steps, "results": reader.results}
    return data, kernels


def _kernels_in(statement: ast.stmt) -> list[str]:
    """The name of the kernel that the statement compiles, if it does."""
    match statement:
        case ast.Assign(
            [ast.Name(name)], ast.Call(ast.Attribute(ast.Name("async_compile"), "cpp_pybinding"))
        ):
            return [name]
    return []


MOST_ARGUMENTS = 1024
"""The most arguments that `program.cpp` can pass to a kernel."""


class _Steps:
    """Reads the steps of a wrapper, statement by statement.

    `read` raises ValueError or KeyError for a statement that is no known step.
    """

    def __init__(self, kernels: Sequence[str], symbols: Sequence[str]) -> None:
        self._kernels = {name: i for i, name in enumerate(kernels)}
        self._symbols = frozenset(symbols)
        # after `buf1 = buf0`: each name of a buffer -> its first name, which the steps use
        self._names: dict[str, str] = {}
        # the name of a result -> the step of the library call that returns it
        self._calls: dict[str, list[Any]] = {}
        # steps of views that are written among the arguments of the next library call
        self._temporary: list[Any] = []
        self.arguments: list[str] = []
        self.steps: list[Any] = []
        self.results: list[str] = []

    def read(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign([ast.Tuple(names)], ast.Name("args")):
                self.arguments = [self._name(name) for name in names]
            # the wrapper reads the symbols' values from its inputs; `Steps.for_sizes` has them
            case ast.Assign([_], ast.Call(ast.Attribute(ast.Name(), "size"), [])):
                pass
            case ast.Assign([ast.Name(name)], ast.Subscript()) if name in self._symbols:
                pass
            # `buf2 = buf1[0]`: one result of a library call that returns several
            case ast.Assign(
                [ast.Name(name)], ast.Subscript(ast.Name(several), ast.Constant(int(i)))
            ):
                self._calls[several][_RESULTS][i] = name
                self._calls[name] = self._calls[several]
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute() as op, args, keywords)):
                self._call(name, op, args, keywords)
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("args"), "clear"))):
                pass
            case ast.Expr(ast.Call(ast.Attribute() as op, args, keywords)):
                self._call(None, op, args, keywords)
            case ast.Expr(
                ast.Call(ast.Name("assert_size_stride"), [ast.Name(name), _, stride, *_])
            ):
                self._record_strides(name, stride)
            case ast.Assign([ast.Name(name)], ast.Name(other)):
                self._names[name] = self._names.setdefault(other, other)
            case ast.Assign([ast.Name(name)], value):
                self.steps.append(self._buffer(name, value))
            case ast.Expr(ast.Call(ast.Name(function), args, [])):
                arguments = [self._argument(arg) for arg in args]
                if len(arguments) > MOST_ARGUMENTS:
                    raise ValueError("a kernel of too many arguments")
                self.steps.append(["kernel", self._kernels[function], arguments, []])
            case ast.Delete(targets):
                self._free([target.id for target in targets if isinstance(target, ast.Name)])
            case ast.Return(ast.Tuple(values)):
                # Later steps depend on the strides that Inductor assumed. Without an assertion of
                # them in the wrapper, a result might have others.
                for step in self._calls.values():
                    if any(n and s is None for n, s in zip(*step[_RESULTS:-1], strict=True)):
                        raise ValueError("a library call whose results' strides aren't said")
                self.results = [self._result(i, value) for i, value in enumerate(values)]
            case _:
                raise ValueError(ast.unparse(statement))

    def _call(
        self,
        name: str | None,
        function: ast.Attribute,
        arguments: Sequence[ast.expr],
        keywords: Sequence[ast.keyword],
    ) -> None:
        """Add a library call that returns `name`, or writes its `out` argument if that is None."""
        kwargs = {k.arg: self.call_argument(k.value) for k in keywords if k.arg is not None}
        op = _op_called(ast.unparse(function), is_out="out" in kwargs)
        returns = [] if name is None else op_named(op)._schema.returns
        if any(str(r.type) != "Tensor" for r in returns):
            raise ValueError(f"{op} gives a list")
        n_results = len(returns)
        results = [name] if n_results == 1 else [None] * n_results
        args = [self.call_argument(argument) for argument in arguments]
        # views made for this call alone come before it, and die with it
        dead = [step[1] for step in self._temporary]
        self.steps += self._temporary
        self._temporary = []
        step = ["call", op, args, kwargs, results, [None] * n_results, dead]
        self.steps.append(step)
        if name is not None:
            self._calls[name] = step

    def _record_strides(self, name: str, stride: ast.expr) -> None:
        """Record the strides that Inductor assumes of a library call's result.

        The program copies the result if the library returns others.
        """
        name = self._names.get(name, name)
        if name in self._calls:
            _, _, _, _, results, strides, _ = self._calls[name]
            strides[results.index(name)] = self._sizes(stride)

    def call_argument(self, value: ast.expr) -> Any:
        """An argument of a library call, as data that fits JSON.

        It is a number, text or None, a list of arguments, `{"tensor": name}`, or `{"torch": name}`
        for a constant of torch such as a dtype.
        """
        match value:
            case ast.Name(name) if name not in self._symbols:
                return {"tensor": self._name(value)}
            case ast.Call(ast.Name("reinterpret_tensor")):
                name = f"view {len(self.steps) + len(self._temporary)}"
                self._temporary.append(self._buffer(name, value))
                return {"tensor": name}
            case ast.Tuple(items) | ast.List(items):
                return [self.call_argument(item) for item in items]
            case ast.Attribute(ast.Name("torch"), name):
                return {"torch": name}
            # `float('inf')`, which is no literal
            case ast.Call(ast.Name("float"), [ast.Constant(str(text))]):
                return float(text)
        return ast.literal_eval(value)

    def _buffer(self, name: str, value: ast.expr) -> list[Any]:
        """The step that gives `name` its buffer: new memory, or a view."""
        match value:
            case ast.Call(ast.Name("empty_strided_cpu"), [size, stride, ast.Attribute(_, dtype)]):
                return ["allocate", name, self._sizes(size), self._sizes(stride), dtype]
            case ast.Call(ast.Name("reinterpret_tensor"), [base, size, stride, offset]):
                place = self._sizes(size), self._sizes(stride), self._size(offset)
                return ["view", name, self._name(base), *place]
        raise ValueError(ast.unparse(value))

    def _name(self, value: ast.expr) -> str:
        if not isinstance(value, ast.Name):
            raise ValueError(ast.unparse(value))
        return self._names.get(value.id, value.id)

    def _argument(self, value: ast.expr) -> str | list[int | str]:
        if isinstance(value, ast.Name) and value.id not in self._symbols:
            return self._name(value)
        return [self._size(value)]

    def _sizes(self, value: ast.expr) -> list[int | str]:
        if not isinstance(value, ast.Tuple):
            raise ValueError(ast.unparse(value))
        return [self._size(size) for size in value.elts]

    def _size(self, value: ast.expr) -> int | str:
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if not names <= self._symbols | {"math"}:
            raise ValueError(ast.unparse(value))
        return ast.unparse(value) if names else int(ast.literal_eval(value))

    def _result(self, i: int, value: ast.expr) -> str:
        if isinstance(value, ast.Name):
            return self._name(value)
        self.steps.append(self._buffer(f"result {i}", value))
        return f"result {i}"

    def _free(self, names: list[str]) -> None:
        """Add the buffers that have no other names than these to the dead ones of the last step.

        Another kind of last step has no such list, and the buffers live on.
        """
        buffers = [self._names.pop(name, name) for name in names]
        if self.steps and self.steps[-1][0] in ("kernel", "call"):
            alive = set(self._names.values())
            self.steps[-1][-1] += [buffer for buffer in buffers if buffer not in alive]


_RESULTS = 4
"""The position, in the step of a library call, of the names of its results."""


def _op_called(text: str, *, is_out: bool) -> str:
    """The name of the op that a wrapper calls by `text`.

    That is `extern_kernels.mm`, or `torch.ops.aten.sort.default` with or without `torch.ops.`.
    """
    owner, _, name = text.removeprefix("torch.ops.").partition(".")
    if owner == "aten":
        return f"aten.{name}"
    if owner != "extern_kernels":
        raise ValueError(text)
    return f"aten.{name}.{'out' if is_out else 'default'}"


def addresses_of(kernels: Sequence[str], path: str) -> list[int]:
    """The addresses of the kernels of these names, in the library at `path`.

    The library stays loaded: ctypes never unloads one.
    """
    library = ctypes.CDLL(path)
    pointers = [ctypes.cast(getattr(library, kernel), ctypes.c_void_p) for kernel in kernels]
    return [pointer.value for pointer in pointers if pointer.value is not None]
