"""Takes away, or changes, what lazy_tensor relies on, each in a process of its own before the
import, and tells what a training step then gave: one line of JSON for each.

Run by `test_unrecorded.py`: this process imports torch alone, and forks.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

torch: Any = importlib.import_module("torch")  # whose names are replaced
importlib.import_module("torch._subclasses.fake_tensor")  # once, not in each process
ROOT = Path(__file__).resolve().parents[2]


def module_of(name):
    """A module of ours, as it is without the package around it."""
    path = ROOT / name.removeprefix("lazy_tensor.").replace(".", "/")
    spec = importlib.util.spec_from_file_location(name, path.with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def taken_away(name):
    """Delete a name of torch; of types that can't be changed let it seem to be absent."""
    names = module_of("lazy_tensor.dispatch.torch_checks.names")
    owner, _, last = name.rpartition(".")
    found = torch
    for i, part in enumerate(owner.split(".")[1:], 2):
        module = ".".join(owner.split(".")[:i])
        found = getattr(found, part, None) or importlib.import_module(module)
    try:
        delattr(found, last)
        if name in sys.modules:
            modules: dict[str, Any] = sys.modules
            modules[name] = None  # importing it raises
        if not hasattr(found, last):
            return
    except (AttributeError, TypeError):
        pass
    exists = names._exists
    names._exists = lambda asked: asked != name and exists(asked)


def no_compiler():
    os.environ.update(PATH="", CXX="", LAZY_TENSOR_HITS="")
    name = "lazy_tensor.kernels.extension.cpp"
    module_of(name).BUILT = Path("/nowhere")


def free_threaded():
    sys.abiflags = "t"


def counts_that_are_one():
    sys.getrefcount = lambda _: 1


def slots_elsewhere():
    ctypes.sizeof = lambda _: 0


def modes_that_are_not_pushed():
    torch._C._push_on_torch_dispatch_stack = lambda mode: None
    torch._C._pop_torch_dispatch_stack = lambda _: None


def keys_that_are_not_excluded():
    included = torch._C._dispatch_tls_local_include_set
    torch._C._dispatch_tls_local_exclude_set = included


def kernels_for_everything():
    torch._C._dispatch_has_kernel_for_dispatch_key = lambda *_: True


def tables_in_other_words():
    torch._C._dispatch_dump = lambda _: ""


def wrappers_of_other_arguments():
    own = torch.Tensor._make_wrapper_subclass

    def swapped(cls, stride, size, *more):
        return own(cls, size, stride, *more)

    torch.Tensor._make_wrapper_subclass = staticmethod(swapped)


def wrappers_that_are_refused():
    def refuse(*_):
        raise TypeError("unexpected argument")

    torch.Tensor._make_wrapper_subclass = staticmethod(refuse)


def clones_that_share():
    torch._lazy_clone = lambda tensor: tensor.detach()


def storages_that_count_differently():
    own = torch._C._storage_Use_Count
    torch._C._storage_Use_Count = lambda storage: own(storage) + 1


def versions_that_are_not_set():
    torch._C._autograd._unsafe_set_version_counter = lambda *_: None


def bits_that_are_not_set():
    torch._C._set_conj = lambda *_: None


CHANGES = {
    free_threaded: "one thread runs Python at a time",
    no_compiler: "there is no C++ compiler (install g++",
    counts_that_are_one: "reference counts tell",
    slots_elsewhere: "C++ finds attributes in slots",
    modes_that_are_not_pushed: "dispatch modes see ops",
    keys_that_are_not_excluded: "",  # two checks find it
    kernels_for_everything: "",  # torch asks too
    tables_in_other_words: "torch's tables say which kernels",
    wrappers_of_other_arguments: "tensors without memory have",
    wrappers_that_are_refused: "tensors without memory have",
    clones_that_share: "clones share memory until",
    storages_that_count_differently: "storages count",
    versions_that_are_not_set: "version counters count",
    bits_that_are_not_set: "conjugate bit",
}


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def stepped(model, x):
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss.detach()


def eager():
    model = new_model()
    x = torch.randn(5, 3)
    return [stepped(model, x).tolist() for _ in range(4)]


def with_every_name(lazy_tensor):
    model = lazy_tensor.wrap(new_model())
    x = torch.randn(5, 3)
    step = lazy_tensor.replay(stepped)
    lazy_tensor.configure(record="always")
    with lazy_tensor.lazy_mode(compile="off"):
        losses = [lazy_tensor.materialize(stepped(model, x))]
    with lazy_tensor.lazy_mode():
        losses.append(stepped(model, x))
    losses.append(lazy_tensor.lazy_mode()(lazy_tensor.lazy_mode(step))(model, x))
    losses.append(lazy_tensor.explain(stepped, model, x).result)
    lazy_tensor.flush()
    assert lazy_tensor.unwrap(model) is model
    assert not any(lazy_tensor.is_lazy(p) or lazy_tensor.is_pending(p) for p in model.parameters())
    assert lazy_tensor.stats()["ops"] == 0
    assert "recording is off" in str(lazy_tensor.explain())
    assert not isinstance(x, lazy_tensor.LazyTensor)
    lazy_tensor.cache_info()
    lazy_tensor.cache_clear()
    lazy_tensor.reset_stats()
    return [loss.tolist() for loss in losses]


def told(call, *args):
    try:
        return call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}", traceback.format_exc()


def outcome(change, *args):
    change(*args)
    expected = told(eager)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import lazy_tensor

        found = told(with_every_name, lazy_tensor)
    try:
        importlib.import_module("lazy_tensor.sharding")
    except ImportError as error:
        sharding = str(error)
    same = found == expected or (isinstance(found, tuple) and found[0] == expected[0])
    ours = [str(w.message) for w in caught if "lazy_tensor" in str(w.message)]
    return {"same": same, "found": found, "warnings": ours, "sharding": sharding}


def in_a_process(label, change, *args):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = outcome(change, *args)
        except BaseException:
            answer = {"failed": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    print(json.dumps({"change": label, **json.loads(answer)}))


if __name__ == "__main__":
    if sys.argv[1] == "names":
        names = module_of("lazy_tensor.dispatch.torch_checks.names")
        for name in (*names.NEEDED, *names.OF_OBJECTS):
            in_a_process(name, taken_away, name)
    else:
        for change, check in CHANGES.items():
            in_a_process(check, change)
