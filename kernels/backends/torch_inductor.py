"""The adapter to Inductor, and the only module that uses its private names.

Checked with torch 2.13. In: a functional graph. Out: a `Compiled`: the shared libraries that
Inductor compiled, the source of its Python wrapper, and the wrapper's steps as data. Importing this
module doesn't import Inductor; `compile_graph` does, which takes seconds.

A *wrapper* is the Python that Inductor generates around its kernels: it allocates buffers, calls
kernels, and returns results.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from lazy_tensor.kernels.backends import divisions
from lazy_tensor.kernels.segment import op_named

VERSIONS_CHECKED = ("2.13",)

Library = Callable[..., None]


class NotPortable(RuntimeError):
    """The compiled kernel can run only in the process that compiled it."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph compiled by Inductor, in a form that another process can load.

    `source` defines `call(list_of_tensors) -> results`, which empties its argument. It calls
    `_kernels[i]`, which `kernels[i]` describes: the number of a library, and the kernel's name in
    it. `steps` says the same as data (see `steps_of`), or is None if it can't. `strides` are those
    of the results. If sizes are symbolic, the kernel is correct for values of the `symbols` for
    which all `conditions` hold; these are Python expressions.
    """

    source: str
    steps: dict[str, Any] | None
    libraries: tuple[bytes, ...]
    kernels: tuple[tuple[int, str], ...]
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
    """Inductor's table of decompositions, and `divisions`: op -> function that computes it by
    simpler ops."""
    # the decompositions of pooling use this module, but don't import it
    importlib.import_module("torch._inductor.lowering")
    table: dict[Any, Callable[..., Any]] = private(
        "torch._inductor.decomposition", "select_decomp_table"
    )()
    return {**table, **divisions.TABLE}


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
            # Torch decides by the hints, and notes the decision as a condition. Two sizes that are
            # equal by chance would give the condition that they are always equal.
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
        found = [text(guard.expr) for guard in self._env.guards]
        # a symbol that was found to equal a constant or another symbol
        fixed = self._env.replacements.items()
        return [*found, *(f"{symbol} == {text(value)}" for symbol, value in fixed)]


def compile_in_process(
    graph: fx.GraphModule, inputs: Sequence[torch.Tensor], *, says_strides: bool = False
) -> Any:
    """Inductor's own callable: takes a list of tensors, empties it, and returns the results.

    With `says_strides` its source asserts the strides of each library call's results. `_Steps`
    reads them there.
    """
    compile_fx_inner = private("torch._inductor.compile_fx", "compile_fx_inner")
    config = private("torch._inductor.config", "patch")
    # The number of threads is explicit. By default a kernel's arrays are sized for the threads at
    # compile time, while the kernel runs on as many threads as there are then.
    settings = {
        **_SETTINGS, "cpp.threads": torch.get_num_threads(), "size_asserts": says_strides
    }  # fmt: skip
    if _has_vectors_of_torch():
        settings["cpp.vec_isa_ok"] = True
    with config(settings):
        return compile_fx_inner(graph, inputs)


@functools.cache
def _has_vectors_of_torch() -> bool:
    """Whether the widest vectors of this CPU are those that torch's own kernels use.

    If so, Inductor need not find out. It would compile and load a program for each width, which
    takes six seconds. A compiler that accepts Inductor's C++20 knows these instructions.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2":
        return not private("torch.cpu", "_is_avx512_supported")()
    return capability == "AVX512"


_SETTINGS = {
    # the caller has checked all that a kernel relies on
    "alignment_asserts": False,
    "nan_asserts": False,
    "assert_indirect_indexing": False,
    # `kernels.disk` keeps artifacts instead
    "fx_graph_cache": False,
    # `portable_source` and `steps_of` read the wrapper in Python
    "cpp_wrapper": False,
    "keep_output_stride": True,
    # `Workers` has processes of its own
    "compile_threads": 1,
}


class Unit:
    """Collects the C++ of several graphs, to compile it as one file.

    Two thirds of the time that one kernel takes go to headers, which a unit compiles once. While it
    is entered (`with unit:`), Inductor's kernels are added to it instead of being compiled.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._codecache = private("torch._inductor.codecache", "CppPythonBindingsCodeCache")

    def __enter__(self) -> None:
        self._codecache.load_async = self._put

    def __exit__(self, *_: object) -> None:
        # torch's own method is in the base class, and is found again
        del self._codecache.load_async

    def _put(self, text: str, *_: Any, **__: Any) -> Callable[[], ModuleType]:
        """Keep the C++ text of an extension module, and return a stand-in for the module."""
        module = ModuleType("kernel")
        module.kernel = InUnit(f"kernel_{len(self._texts)}")  # type: ignore[attr-defined]
        self._texts.append(text)
        return lambda: module

    def compile(self) -> bytes:
        """Compile all kernels that were added; the bytes of the shared library."""
        module = self._codecache.load_async(unit_of(self._texts), "cpu")()
        with open(module.__file__, "rb") as file:
            return file.read()


@dataclass(frozen=True, slots=True)
class InUnit:
    """Stands for a kernel that `Unit.compile` compiles later, under `name`."""

    name: str


def unit_of(texts: Sequence[str]) -> str:
    """One C++ text out of those of several extension modules, all of which define `kernel`.

    Macros rename them to `kernel_0` and so on, and namespaces keep their other names apart. The
    module `kernel` is there too, since Inductor loads the library that it has compiled.
    """
    lines = [text.splitlines() for text in texts]
    includes = dict.fromkeys(one for text in lines for one in text if _is_include(one))
    unit = [*includes]
    for i, text in enumerate(lines):
        unit += [
            f"#define kernel kernel_{i}",
            f"#define PyInit_kernel PyInit_kernel_{i}",
            f"namespace unit_{i} {{",
            *(line for line in text if not _is_include(line)),
            "}",
            "#undef kernel",
            "#undef PyInit_kernel",
        ]
    unit.append("PyMODINIT_FUNC PyInit_kernel(void) { return unit_0::PyInit_kernel_0(); }")
    return "\n".join(unit)


def _is_include(line: str) -> bool:
    return line.lstrip().startswith("#include")


def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    symbols: SymbolicSizes | None = None,
    *,
    calls_libraries: bool = False,
) -> Compiled:
    """Compile `graph` for the CPU; NotPortable if the result can't run in another process.

    Inside a `Unit` the kernels are only added to its library, and `libraries` is empty. With
    `calls_libraries` the result has steps but no source: the wrapper's imports, which library calls
    need, are not kept.
    """
    compiled = compile_in_process(graph, inputs, says_strides=calls_libraries)
    call = compiled.current_callable
    if compiled.constants or not hasattr(call, "__func__"):
        raise NotPortable("the wrapper holds constants or isn't a method of Inductor's Runner")
    # the wrapper's module: there the names of kernels lead to the functions that Inductor loaded
    names = call.__func__.__globals__
    source, kernels = portable_source(compiled.source_code, may_call=calls_libraries)
    found = [names[kernel] for kernel in kernels]
    libraries: tuple[bytes, ...] = ()
    if all(isinstance(one, InUnit) for one in found):
        places = tuple((0, one.name) for one in found)
    else:
        libraries = tuple(_library_bytes(one) for one in found)
        places = tuple((i, "kernel") for i in range(len(found)))
    conditions = symbols.conditions() if symbols is not None else []
    own = symbols.own if symbols is not None else {}
    # strides come as the text of expressions in the symbols
    strides = tuple(
        None if stride is None else tuple(int(eval(str(s), {}, own)) for s in stride)
        for stride in compiled.output_strides
    )
    steps = steps_of(source, kernels, tuple(own), may_call=calls_libraries)
    if calls_libraries:
        if steps is None:
            raise NotPortable("the wrapper does something that no step stands for")
        source = ""
    return Compiled(source, steps, libraries, places, strides, tuple(own), tuple(conditions))


def _library_bytes(kernel: Any) -> bytes:
    path = kernel.__self__.__file__
    with open(path, "rb") as file:
        return file.read()


def portable_source(source: str, *, may_call: bool = False) -> tuple[str, list[str]]:
    """A wrapper's source without Inductor's imports and C++ texts, and its kernels' names in order.

    NotPortable if the rest uses a name that was imported from Inductor, as library calls do, unless
    it `may_call` libraries.
    """
    tree = ast.parse(source)
    kernels: list[str] = []
    dropped: set[str] = set()
    kept: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(
            "torch._i"
        ):
            dropped.update(alias.asname or alias.name for alias in statement.names)
        elif _is_kernel(statement):
            # whoever runs the source provides the loaded kernels as `_kernels`
            kernel = statement.targets[0].id  # type: ignore[attr-defined]
            kept.append(ast.parse(f"{kernel} = _kernels[{len(kernels)}]").body[0])
            kernels.append(kernel)
        elif not _is_for_inductor_alone(statement):
            kept.append(statement)
    used = {n.id for s in kept for n in ast.walk(s) if isinstance(n, ast.Name)} & dropped
    if used and not may_call:
        raise NotPortable(f"the wrapper uses {', '.join(sorted(used))}")
    return ast.unparse(ast.Module(kept, [])), kernels


def steps_of(
    source: str, kernels: Sequence[str], symbols: Sequence[str] = (), *, may_call: bool = False
) -> dict[str, Any] | None:
    """The steps of a wrapper as data that fits JSON; None if a statement of it is no known step.

    The result has `arguments` and `results`, which are names, and `steps`, each one of:
    - `["allocate", name, size, stride, dtype]`
    - `["view", name, base, size, stride, offset]`
    - `["kernel", number, arguments, dead]`: `dead` are names that no later step needs
    - `["call", op, args, kwargs, made, strides, dead]`: a library call, only if it `may_call`
      libraries; the arguments have the form that `_Steps.given` returns

    A size is an integer, or a text: an expression in the `symbols`. An argument of a kernel is a
    name, or a list of one size.
    """
    (call,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    )
    read = _Steps(kernels, symbols, may_call=may_call)
    try:
        for statement in call.body:
            read.take(statement)
    except (KeyError, ValueError):
        return None
    return {"arguments": read.arguments, "steps": read.steps, "results": read.results}


MOST_ARGUMENTS = 1024
"""The most arguments that `program.cpp` can pass to a kernel."""


class _Steps:
    """Reads the steps of a wrapper, statement by statement.

    `take` raises ValueError or KeyError for a statement that is no known step. The wrapper then
    runs as Python.
    """

    def __init__(self, kernels: Sequence[str], symbols: Sequence[str], *, may_call: bool) -> None:
        self._may_call = may_call
        self._kernels = {name: i for i, name in enumerate(kernels)}
        self._symbols = frozenset(symbols)
        # `buf1 = buf0`: a buffer's names -> the first one, by which the steps know it
        self._same: dict[str, str] = {}
        # the name of a result -> the step of the library call that returns it
        self._calls: dict[str, list[Any]] = {}
        # views that stand among the arguments of the next library call
        self._temporary: list[Any] = []
        self.arguments: list[str] = []
        self.steps: list[Any] = []
        self.results: list[str] = []

    def take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign([ast.Tuple(names)], ast.Name("args")):
                self.arguments = [self._name(one) for one in names]
            # the wrapper reads the symbols' values from its inputs; `Steps.for_sizes` is given them
            case ast.Assign([_], ast.Call(ast.Attribute(ast.Name(), "size"), [])):
                pass
            case ast.Assign([ast.Name(name)], ast.Subscript()) if name in self._symbols:
                pass
            # `buf2 = buf1[0]`: one result of a library call that returns several
            case ast.Assign(
                [ast.Name(name)], ast.Subscript(ast.Name(several), ast.Constant(int(i)))
            ):
                made = self._calls[several][_MADE]
                made[i] = name
                self._calls[name] = self._calls[several]
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute() as op, given, named)):
                self._call(name, op, given, named)
            case ast.Expr(ast.Call(ast.Attribute() as op, given, named)) if (
                ast.unparse(op) != "args.clear"
            ):
                self._call(None, op, given, named)
            case ast.Expr(
                ast.Call(ast.Name("assert_size_stride"), [ast.Name(name), _, stride, *_])
            ):
                self._lay_out(name, stride)
            case ast.Assign([ast.Name(name)], ast.Name(other)):
                self._same[name] = self._same.setdefault(other, other)
            case ast.Assign([ast.Name(name)], value):
                self._make(name, value)
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("args"), "clear"))):
                pass
            case ast.Expr(ast.Call(ast.Name(function), given, [])):
                taken = [self._argument(one) for one in given]
                if len(taken) > MOST_ARGUMENTS:
                    raise ValueError("a kernel of too many arguments")
                self.steps.append(["kernel", self._kernels[function], taken, []])
            case ast.Delete(targets):
                self._drop([one.id for one in targets if isinstance(one, ast.Name)])
            case ast.Return(ast.Tuple(values)):
                # Later steps rely on the strides that Inductor assumed. A result for which the
                # wrapper asserts none might have others.
                for step in self._calls.values():
                    if any(n and s is None for n, s in zip(*step[_MADE:-1], strict=True)):
                        raise ValueError("a library call whose results' strides aren't said")
                self.results = [self._result(i, value) for i, value in enumerate(values)]
            case _:
                raise ValueError(ast.unparse(statement))

    def _call(
        self,
        name: str | None,
        called: ast.Attribute,
        given: Sequence[ast.expr],
        named: Sequence[ast.keyword],
    ) -> None:
        """Add a library call that returns `name`, or writes its `out` argument if that is None."""
        if not self._may_call:
            raise ValueError("a library call")
        kwargs = {one.arg: self.given(one.value) for one in named if one.arg is not None}
        op = _op_called(ast.unparse(called), is_out="out" in kwargs)
        returns = [] if name is None else op_named(op)._schema.returns
        if any(str(one.type) != "Tensor" for one in returns):
            raise ValueError(f"{op} gives a list")
        n_made = len(returns)
        made = [name] if n_made == 1 else [None] * n_made
        args = [self.given(one) for one in given]
        # views made for this call alone come before it, and die with it
        dead = [step[1] for step in self._temporary]
        self.steps += self._temporary
        self._temporary = []
        step = ["call", op, args, kwargs, made, [None] * n_made, dead]
        self.steps.append(step)
        if name is not None:
            self._calls[name] = step

    def _lay_out(self, name: str, stride: ast.expr) -> None:
        """Record the strides that Inductor assumes of a library call's result.

        The program copies the result if the library returns others.
        """
        if name in self._calls:
            _, _, _, _, made, strides, _ = self._calls[name]
            strides[made.index(name)] = self._sizes(stride)

    def given(self, value: ast.expr) -> Any:
        """An argument of a library call, as data that fits JSON.

        It is a number, text or None, a list of arguments, `{"tensor": name}`, or `{"torch": name}`
        for a constant of torch such as a dtype.
        """
        match value:
            case ast.Name():
                return {"tensor": self._name(value)}
            case ast.Call(ast.Name("reinterpret_tensor"), [base, size, stride, offset]):
                name = f"view {len(self.steps) + len(self._temporary)}"
                place = self._sizes(size), self._sizes(stride), self._size(offset)
                self._temporary.append(["view", name, self._name(base), *place])
                return {"tensor": name}
            case ast.Tuple(items) | ast.List(items):
                return [self.given(one) for one in items]
            case ast.Attribute(ast.Name("torch"), name):
                return {"torch": name}
            # `float('inf')`, which is no literal
            case ast.Call(ast.Name("float"), [ast.Constant(str(text))]):
                return float(text)
        return ast.literal_eval(value)

    def _make(self, name: str, value: ast.expr) -> None:
        """Add the step that gives `name` its buffer: new memory, or a view."""
        match value:
            case ast.Call(ast.Name("empty_strided_cpu"), [size, stride, ast.Attribute(_, dtype)]):
                self.steps.append(["allocate", name, self._sizes(size), self._sizes(stride), dtype])
            case ast.Call(ast.Name("reinterpret_tensor"), [base, size, stride, offset]):
                place = self._sizes(size), self._sizes(stride), self._size(offset)
                self.steps.append(["view", name, self._name(base), *place])
            case _:
                raise ValueError(ast.unparse(value))

    def _name(self, value: ast.expr) -> str:
        if not isinstance(value, ast.Name):
            raise ValueError(ast.unparse(value))
        return self._same.get(value.id, value.id)

    def _argument(self, value: ast.expr) -> str | list[int | str]:
        if isinstance(value, ast.Name) and value.id not in self._symbols:
            return self._name(value)
        return [self._size(value)]

    def _sizes(self, value: ast.expr) -> list[int | str]:
        if not isinstance(value, ast.Tuple):
            raise ValueError(ast.unparse(value))
        return [self._size(one) for one in value.elts]

    def _size(self, value: ast.expr) -> int | str:
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if not names <= self._symbols | {"math"}:
            raise ValueError(ast.unparse(value))
        return ast.unparse(value) if names else int(ast.literal_eval(value))

    def _result(self, i: int, value: ast.expr) -> str:
        if isinstance(value, ast.Name):
            return self._name(value)
        self._make(f"result {i}", value)
        return f"result {i}"

    def _drop(self, names: list[str]) -> None:
        """Let the last step free the buffers that have no other names than these. A step without
        a list for that frees none."""
        buffers = [self._same.pop(name, name) for name in names]
        if self.steps and self.steps[-1][0] in ("kernel", "call"):
            alive = set(self._same.values())
            self.steps[-1][-1] += [buffer for buffer in buffers if buffer not in alive]


_MADE = 4
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


def _is_kernel(statement: ast.stmt) -> bool:
    """Whether it is `name = async_compile.cpp_pybinding(...)`, which compiles a kernel."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func) == "async_compile.cpp_pybinding"
    )


def _is_for_inductor_alone(statement: ast.stmt) -> bool:
    """Whether it compiles or benchmarks, and has no part in a call of the wrapper."""
    match statement:
        case ast.FunctionDef(name="get_args" | "benchmark_compiled_module") | ast.If():
            return True
        case ast.Assign(targets=[ast.Name(id="async_compile")]):
            return True
        case ast.Delete() | ast.Expr():
            return "async_compile" in ast.unparse(statement)
    return False


_DATA_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"


def load_kernels(kernels: Sequence[str], path: str, name: str) -> list[Library]:
    """The kernels of these names in the library at `path`, as functions of Python.

    `name` must be new in this process, as an extension module is known by its name.
    """
    # when loaded, the library reads the address of torch's accessor of tensor data from here
    pointer = private("torch._C", "_dynamo.guards._torchinductor_pyobject_tensor_data_ptr")
    os.environ[_DATA_POINTER] = str(pointer)
    found: list[Library] = []
    for kernel in kernels:
        spec = importlib.util.spec_from_file_location(f"{name}.{kernel}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(module.kernel)
    return found


def addresses_of(kernels: Sequence[str], path: str, _: str) -> list[int]:
    """The addresses of the kernels of these names, in the library at `path`.

    The library stays loaded: ctypes never unloads one.
    """
    library = ctypes.CDLL(path)
    found = [ctypes.cast(getattr(library, kernel), ctypes.c_void_p).value for kernel in kernels]
    return [address for address in found if address is not None]
