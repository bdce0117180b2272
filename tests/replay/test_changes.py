"""What a replayed function can see and what changes between two calls: the next gives eager's."""

import array
import collections
import configparser
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import functools
import importlib
import multiprocessing
import operator
import queue
import random
import sys
import threading
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazy_tensor
from lazy_tensor import replay
from lazy_tensor.capture import object_graph
from lazy_tensor.dispatch.mentions import ANY_NAME, mentions_of

Space = types.SimpleNamespace
N_CALLS, CHANGED_AT = 8, 6
CASES: list[Any] = []


pytestmark = pytest.mark.usefixtures("quiet")


def case(make):
    """`make` gives a function and a change to what it sees."""
    CASES.append(make)
    return make


@case
def forward_of_an_instance():
    m = nn.Linear(3, 3).requires_grad_(False)
    old = m.forward
    return m, lambda: setattr(m, "forward", lambda x: old(x) * 5)


@case
def attribute_over_that_of_the_class():
    class M(nn.Module):
        scale = 2.0

        def forward(self, x):
            return x * self.scale

    m = M()
    return m, lambda: setattr(m, "scale", 5.0)


@case
def attribute_that_was_missing():
    c = Space()
    return lambda x: x * getattr(c, "scale", 2.0), lambda: setattr(c, "scale", 5.0)


@case
def method_of_a_derived_class():
    class B(nn.Module):
        def forward(self, x):
            return x * 2

    class M(B):
        pass

    return M(), lambda: setattr(M, "forward", lambda s, x: x * 5)


@case
def base_of_a_class():
    class B:
        k = 2.0

    class C(B):
        pass

    return lambda x: x * C.k, lambda: setattr(B, "k", 5.0)


@case
def class_of_an_object():
    class A:
        def f(self, x):
            return x * 2

    class B(A):
        def f(self, x):
            return x * 5

    a = A()
    return lambda x: a.f(x), lambda: setattr(a, "__class__", B)


@case
def special_method():
    class A:
        def __call__(self, x):
            return x * 2

    a = A()
    return lambda x: a(x), lambda: setattr(A, "__call__", lambda s, x: x * 5)


@case
def defaults():
    def function(x, k=2.0):
        return x * k

    return function, lambda: setattr(function, "__defaults__", (5.0,))


@case
def dtype_of_a_parameter():
    m = nn.Linear(3, 3)
    return lambda x: x.to(m.weight.dtype) / 3, m.double


@case
def size_of_a_parameter():
    m = nn.Linear(3, 3)
    return lambda x: x / m.weight.numel(), lambda: setattr(m.weight, "data", torch.zeros(9, 3))


@case
def size_of_a_tensor_to_be_replaced():
    c = Space(h=torch.zeros(3))

    def function(x):
        n = c.h.shape[0]
        c.h = x * n
        return c.h * 1

    return function, lambda: setattr(c, "h", torch.ones(5))


@case
def tensors_that_were_one():
    c = Space(a=torch.ones(3))
    c.b = c.a

    def function(x):
        c.a = c.b = c.a + 2 * c.b + x
        return c.a * 1

    return function, lambda: setattr(c, "b", torch.zeros(3))


@case
def gradients_that_were_one():
    w: Any = nn.Parameter(torch.ones(3))
    v: Any = nn.Parameter(torch.ones(3))
    w.grad = v.grad = torch.zeros(3)

    def function(x):
        (w * x + v).sum().backward()
        return torch.stack([w.grad, v.grad])

    def change():
        w.grad, v.grad = torch.zeros(3), torch.zeros(3)

    return function, change


@case
def gradient_that_is_returned():
    w = nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    return lambda x: w.grad, lambda: setattr(w, "grad", torch.ones(3) * 5)


@case
def attribute_of_a_parameter():
    w: Any = nn.Parameter(torch.ones(3))
    w.mult = 2.0
    return lambda x: x * w.mult, lambda: setattr(w, "mult", 5.0)


@case
def attribute_that_a_parameter_gets():
    w: Any = nn.Parameter(torch.ones(3))
    return lambda x: x * getattr(w, "mult", 2.0), lambda: setattr(w, "mult", 5.0)


@case
def further_attribute_that_a_parameter_gets():
    w: Any = nn.Parameter(torch.ones(3))
    w.base = 1.0
    return lambda x: x * getattr(w, "mult", 2.0) * w.base, lambda: setattr(w, "mult", 5.0)


@case
def global_that_hides_a_builtin():
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def function(x):\n    return x * max(1.0, 2.0)\n", space)
    return space["function"], lambda: space.__setitem__("max", lambda *_: 5.0)


@case
def module_that_is_imported_inside():
    m = sys.modules["lazy_tensor_test_settings"] = types.ModuleType("lazy_tensor_test_settings")
    m.scale = 2.0  # type: ignore[attr-defined]

    def function(x):
        from lazy_tensor_test_settings import scale  # type: ignore[import-not-found]

        return x * scale

    return function, lambda: setattr(m, "scale", 5.0)


class Held:
    """Objects of which only attributes are watched that the code mentions."""


@case
def computed_name():
    c: Any = Held()
    c.rate_a = 2.0

    def function(x):
        for k in "a":
            x = x * getattr(c, f"rate_{k}")
        return x

    return function, lambda: setattr(c, "rate_a", 5.0)


NAMES = {"key": "rate_a"}
COMPUTED: dict[str, Any] = {
    "format": lambda c, k: getattr(c, "rate_{}".format(k[1])),  # noqa: UP032
    "item": lambda c, k: getattr(c, NAMES["key"]),
    "join": lambda c, k: getattr(c, "_".join(["rate", k[1]])),
    "method": lambda c, k: getattr(c, k.removeprefix("x")),
    "default": lambda c, k: getattr(c, k, "none"),
    "or": lambda c, k: getattr(c, k.lower() or "none"),
    "constant or not": lambda c, k: getattr(c, k.lower() if k else "none"),
    "getter": lambda c, k: operator.attrgetter(k.lower())(c),
    "several getters": lambda c, k: operator.attrgetter(k.lower(), "keep")(c)[0],
    "path": lambda c, k: operator.attrgetter("inner.rate_a")(c),
    "passed on": lambda c, k: next(map(getattr, [c], [k.lower()])),
    "arguments": lambda c, k: getattr(*(c, k.lower())),
    "another name": lambda c, k: (lambda get: get(c, k.lower() or "none"))(getattr),
}
KEYS = {"format": "aa", "join": "aa", "method": "xrate_a", "default": "rate_a"}


@pytest.mark.parametrize("kind", COMPUTED)
def test_attributes_whose_names_are_computed(kind):
    read, key = COMPUTED[kind], KEYS.get(kind, "RATE_A")

    def make():
        c: Any = Held()
        inner: Any = Held()
        c.rate_a = inner.rate_a = 2.0
        c.inner, c.keep = inner, 1.0

        def change():
            c.rate_a = inner.rate_a = 5.0

        return lambda x: x * read(c, key), change

    check(make)


class Names:
    """Code whose names of attributes are constants."""

    def plain(self, c, k):
        setattr(c, "d", k["e"])  # noqa: B010
        return getattr(c, "a"), getattr(c, "b", k + 1)  # noqa: B009

    def nested(self, c, k):
        return getattr(getattr(c.f(k), "a"), "b", max(k, hash("e")))  # noqa: B009

    def getters(self, c, k):
        return operator.attrgetter("a", "b.c")(c), hasattr(c, "d") and "{}".format(k)  # noqa: UP032


@pytest.mark.parametrize("code", [Names.plain, Names.nested, Names.getters])
def test_names_that_are_constants_are_not_computed(code):
    assert ANY_NAME not in mentions_of(code.__code__).names


@case
def all_attributes():
    c: Any = Held()
    c.rate = 2.0
    return lambda x: x * sum(vars(c).values()), lambda: setattr(c, "rate", 5.0)


class Knobs:
    knob = 2.0


@case
def pattern():
    c = Knobs()

    def function(x):
        match c:
            case Knobs(knob=k):
                return x * k

    return function, lambda: setattr(c, "knob", 5.0)


@case
def order_of_a_dict():
    o = collections.OrderedDict(a=2.0, b=3.0)

    def function(x):
        for v in o.values():
            x = (x + v) * v
        return x

    return function, lambda: o.move_to_end("a")


@case
def private_slot():
    class C:
        __slots__ = ("__s",)

        def __init__(self):
            self.__s = 2.0

        def get(self):
            return self.__s

        def put(self, v):
            self.__s = v

    c = C()
    return lambda x: x * c.get(), lambda: c.put(5.0)


@case
def attribute_of_a_list():
    class L(list[int]):
        k = 2.0

    one = L()
    return lambda x: x * one.k, lambda: setattr(one, "k", 5.0)


@case
def range_of_equal_items():
    c = Space(r=range(0, 3, 2))
    return lambda x: x * c.r.stop, lambda: setattr(c, "r", range(0, 4, 2))


SCALE = [2.0]


@functools.wraps(F.relu)
def scaled_relu(x):
    return F.relu(x) * SCALE[0]


@case
def function_that_goes_by_torchs_name():
    SCALE[0] = 2.0
    return lambda x: scaled_relu(x), lambda: SCALE.__setitem__(0, 5.0)


@case
def weak_reference():
    class C:
        s = 2.0

    c = C()
    weak_reference.keep = c
    r: Any = weakref.ref(c)
    return lambda x: x * r().s, lambda: setattr(c, "s", 5.0)


@case
def cached_function():
    k = [2.0]
    f = functools.cache(lambda: k[0])

    def change():
        k[0] = 5.0
        f.cache_clear()

    return lambda x: x * f(), change


class ByAttribute(type):
    value = 2.0

    @property
    def scale(cls):
        return cls.value


class Configured(metaclass=ByAttribute):
    pass


@case
def property_of_a_metaclass():
    ByAttribute.value = 2.0
    return lambda x: x * Configured.scale, lambda: setattr(ByAttribute, "value", 5.0)


@case
def attrgetter_kept_in_a_global():
    c, get = Knobs(), operator.attrgetter("knob")
    return lambda x: x * get(c), lambda: setattr(c, "knob", 5.0)


@case
def global_by_its_name():
    SCALE[0] = 2.0
    return lambda x: x * globals()["SCALE"][0], lambda: SCALE.__setitem__(0, 5.0)


@case
def module_by_its_name():
    SCALE[0] = 2.0
    name = __name__
    code = f"lambda x: x * sys.modules[{name!r}].SCALE[0]"
    return eval(code, {"sys": sys}), lambda: SCALE.__setitem__(0, 5.0)


class Made:
    """An instance is made inside the function, which Python has call its special methods."""

    def __init__(self, x):
        self.x = x

    def __matmul__(self, other):
        return self.x * SCALE[0] + other


@case
def special_method_of_what_is_made_inside():
    SCALE[0] = 2.0
    return lambda x: Made(x) @ 1, lambda: SCALE.__setitem__(0, 5.0)


@case
def attribute_of_an_object_in_a_set():
    made = Made(2.0)
    objects = {made}
    return lambda x: x * sum(o.x for o in objects), lambda: setattr(made, "x", 5.0)


@case
def init_that_is_inherited():
    k = [2.0]

    class Base:
        def __init__(self):
            self.k = k[0]

    class Derived(Base):
        pass

    return lambda x: x * Derived().k, lambda: k.__setitem__(0, 5.0)


def _with_another(o, name, value):
    """Give an object, or a class, one attribute in place of another."""
    del o.junk
    setattr(o, name, value)


@case
def attribute_in_place_of_another():
    class Owner:
        k = 2.0

    o: Any = Owner()
    o.junk = 1
    return lambda x: x * o.k, lambda: _with_another(o, "k", 5.0)


@case
def member_of_a_class_in_place_of_another():
    class Base:
        k = 2.0

    class Owner(Base):
        junk = 1

    return lambda x: x * Owner.k, lambda: _with_another(Owner, "k", 5.0)


@case
def attribute_of_a_parameter_in_place_of_another():
    p: Any = nn.Parameter(torch.ones(3))
    p.junk = 1
    return lambda x: x * getattr(p, "k", 2.0), lambda: _with_another(p, "k", 5.0)


@case
def attributes_replaced_as_a_whole():
    made = Made(2.0)
    return lambda x: x * made.x, lambda: setattr(made, "__dict__", {"x": 5.0})


@case
def module_that_is_a_key():
    dropout = nn.Dropout(0.5).eval()
    weights = {dropout: 2.0}
    return lambda x: [m(x) * weight for m, weight in weights.items()][0], dropout.train


@case
def function_that_is_a_key():
    k = [2.0]
    losses = {(lambda x: x * k[0]): 1.0}
    return lambda x: next(iter(losses))(x), lambda: k.__setitem__(0, 5.0)


def _of_parser(parser):
    parser.read_dict({"a": {"k": "0"}})
    return parser


OBJECTS: dict[str, Any] = {
    "proxy of a dict": (
        lambda: (d := {"a": 0.0}, types.MappingProxyType(d)),
        lambda o: o[1]["a"], lambda o, v: o[0].__setitem__("a", v),
    ),
    "weak dictionary": (
        lambda: (collections.Counter, weakref.WeakKeyDictionary()),
        lambda o: o[1][o[0]], lambda o, v: o[1].__setitem__(o[0], v),
    ),
    "ctypes": (ctypes.c_double, lambda o: o.value, lambda o, v: setattr(o, "value", v)),
    "ctypes structure": (
        type("Point", (ctypes.Structure,), {"_fields_": [("x", ctypes.c_double)]}),
        lambda o: o.x, lambda o, v: setattr(o, "x", v),
    ),
    "shared value": (
        lambda: multiprocessing.Value("d", 0.0), lambda o: o.value,
        lambda o, v: setattr(o, "value", v),
    ),
    "parser": (
        lambda: _of_parser(configparser.ConfigParser()),
        lambda o: o.getfloat("a", "k"), lambda o, v: o.set("a", "k", str(v)),
    ),
    "queue": (queue.Queue, lambda o: 2.0 + o.qsize(), lambda o, v: v == 5 and o.put(1)),
    "thread's own": (threading.local, lambda o: o.s, lambda o, v: setattr(o, "s", v)),
    "context": (
        lambda: contextvars.ContextVar("k"), lambda o: o.get(), lambda o, v: o.set(v)
    ),
    "array": (
        lambda: array.array("d", [0]), lambda o: o[0], lambda o, v: o.__setitem__(0, v)
    ),
    "user list": (
        lambda: collections.UserList([0]), lambda o: o[0], lambda o, v: o.__setitem__(0, v)
    ),
    "chain": (
        lambda: collections.ChainMap({}), lambda o: o["a"], lambda o, v: o.__setitem__("a", v)
    ),
    "empty set": (set, lambda o: 5.0 if o else 2.0, lambda o, v: v == 5 and o.add(v)),
    "event": (
        threading.Event, lambda o: 5.0 if o.is_set() else 2.0, lambda o, v: v == 5 and o.set()
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_of_pythons_own(kind):
    def make():
        made, get, put = OBJECTS[kind]
        o = made()
        put(o, 2.0)
        return lambda x: x * get(o), lambda: put(o, 5.0)

    check(make)


def check(make):
    found = []
    for wrap in (lambda f: f, lambda f: replay(f, backend="aten")):
        torch.manual_seed(0)
        function, change = make()
        step = wrap(function)
        given = []
        for i in range(N_CALLS):
            if i == CHANGED_AT:
                change()
            given.append(lazy_tensor.materialize(step(torch.arange(3.0) + i)).detach().clone())
        found.append(given)
    for actual, expected in zip(found[1], found[0], strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_changes_are_noticed(make):
    check(make)


def both(run):
    """What `run` gives with a function as it is, and replayed."""
    expected = run(lambda f: f)
    assert run(lambda f: replay(f, backend="aten")) == expected


def x_of(i):
    return torch.arange(3.0) + i


def test_arguments_that_the_call_changes():
    def popped(wrap):
        step = wrap(lambda b: b["x"] * b.pop("y"))
        for i in range(6):
            batch = {"x": x_of(i), "y": x_of(1)}
            step(batch)
        return list(batch)

    both(popped)

    def appended(wrap):
        step = wrap(lambda x, out: (out.append(1), x * 2)[1])
        for i in range(6):
            out: list[int] = []
            step(x_of(i), out)
        return out

    both(appended)


def test_the_order_of_keywords():
    def run(wrap):
        step = wrap(lambda **k: torch.cat(list(k.values())))
        for i in range(6):
            step(a=x_of(i), b=x_of(9))
        return step(b=x_of(9), a=x_of(0)).tolist()

    both(run)


def test_methods_and_attributes_of_arguments():
    def run(wrap):
        k = [2.0]

        @dataclasses.dataclass
        class B:
            x: torch.Tensor

            def scaled(self):
                return self.x * k[0] * getattr(self, "more", 1.0)

            def __add__(self, other):
                return self.x * k[0] + other

        step = wrap(lambda b: b.scaled() + (b + 1))
        for i in range(6):
            step(B(x_of(i)))
        k[0] = 5.0
        found = step(B(x_of(1))).tolist()
        b = B(x_of(1))
        b.more = 3.0  # type: ignore[attr-defined]
        return found, step(b).tolist()

    both(run)


def test_slots_of_arguments():
    @dataclasses.dataclass(slots=True)
    class Batch:
        x: torch.Tensor
        scale: float = 2.0

    class Private(list[torch.Tensor]):
        __slots__ = ("__scale",)

        def __init__(self, scale):
            self.__scale = scale

        @property
        def scale(self):
            return self.__scale

    def private(x, scale):
        made = Private(scale)
        made.append(x)
        return made

    def run(wrap):
        scaled, of_list = wrap(lambda b: b.x * b.scale), wrap(lambda b: b[0] * b.scale)
        found = []
        for i in range(8):
            scale = 2.0 if i < 6 else 5.0
            found.append(scaled(Batch(x_of(i), scale)).tolist())
            found.append(of_list(private(x_of(i), scale)).tolist())
        return found

    both(run)
    step = replay(lambda b: b.x * b.scale)
    for i in range(6):
        step(Batch(x_of(i)))
    assert step.n_replayed >= 3


def test_slots_of_arguments_that_the_call_changes():
    @dataclasses.dataclass(slots=True)
    class Batch:
        x: torch.Tensor
        n_read: int = 0

    def read(b):
        b.n_read += 1
        return b.x * 2

    def run(wrap):
        step = wrap(read)
        found = []
        for i in range(8):
            batch = Batch(x_of(i))
            step(batch)
            found.append(batch.n_read)
        return found

    both(run)


def test_an_argument_that_is_seen_elsewhere_too():
    def run(wrap):
        c = Space(t=torch.ones(3))
        step = wrap(lambda x: x * (2 if x is c.t else 5))
        return [step(torch.ones(3) if i < 6 else c.t).tolist() for i in range(8)]

    both(run)


@pytest.mark.parametrize("kind", [dict.fromkeys, set])
def test_an_argument_that_is_a_key_or_in_a_set(kind):
    a, b = torch.ones(3), torch.ones(3)
    seen = kind([a])

    def run(wrap):
        step = wrap(lambda x: x * (2.0 if x in seen else 5.0))
        return [step(a if i < CHANGED_AT else b).tolist() for i in range(N_CALLS)]

    both(run)


def test_another_tensor_is_a_key_of_an_argument():
    step = replay(lambda given: torch.stack([*given.values()]).sum(0))
    a, b = torch.ones(2), torch.zeros(2)
    for key in (a, a, a, a, a, b, a):
        assert step({key: torch.ones(3)}).tolist() == [1.0, 1.0, 1.0]
    assert step.n_replayed > 0, step.obstacle
    for _ in range(40):  # until `replay` says which argument differs
        step({torch.ones(2): torch.ones(3)})


def test_an_object_that_knows_about_how_long_it_is():
    class Scaled:
        scale = 1.0

        def __length_hint__(self):
            return 1

    given = Scaled()
    step = replay(lambda x: x * given.scale)
    for i in range(12):
        given.scale = 1.0 if i < 6 else float(i)
        assert step(torch.ones(2)).tolist() == [given.scale] * 2
    assert step.n_replayed > 0, step.obstacle


class Bound:
    """Methods in C that are bound to what the program changes."""

    def __init__(self):
        self.seen: list[int] = []
        self.settings = {"scale": 2.0}
        self.log, self.get = self.seen.append, self.settings.get
        self.item, self.values = self.settings.__getitem__, self.settings.values()
        self.bytes = memoryview(bytearray([1]))

    def logs(self, x):
        self.log(1)
        return x * len(self.seen)

    def gets(self, x):
        return x * self.get("scale")

    def looks_up(self, x):
        return x * self.item("scale")

    def sums(self, x):
        return x * sum(self.values)

    def reads_bytes(self, x):
        return x * self.bytes[0]


@pytest.mark.parametrize("name", ["logs", "gets", "looks_up", "sums", "reads_bytes"])
def test_methods_in_c_and_views_of_dicts_lead_to_what_they_are_of(name):
    def run(wrap):
        program = Bound()
        step = wrap(getattr(program, name))
        results = []
        for i in range(N_CALLS):
            if i == CHANGED_AT:
                program.settings["scale"] = 5.0
                program.bytes[0] = 7
            results.append(step(torch.ones(3)).tolist())
        return results, program.seen

    both(run)


def test_a_small_tensor_that_a_cache_keeps_is_no_constant():
    @functools.cache
    def mask(n):
        return torch.ones(n, n).tril()

    def run(wrap):
        mask.cache_clear()
        mask(4)
        step = wrap(lambda x: mask(4) @ x)
        results = []
        for i in range(N_CALLS):
            if i == CHANGED_AT:
                mask(4).zero_()
            results.append(step(torch.ones(4)).tolist())
        return results

    both(run)


def test_numbers_and_schedulers_after_an_error():
    def run(wrap):
        torch.manual_seed(0)
        embedding, table = torch.nn.Embedding(5, 3), torch.arange(4.0)
        optimizer = torch.optim.SGD(embedding.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        state = Space(n=0)

        def step(i):
            state.n += 1
            loss = embedding(i).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.detach() + table[i].sum()

        step = wrap(step)
        for k in range(30):
            with contextlib.suppress(IndexError):  # a bad batch
                step(torch.tensor([k % 3, 4 if k % 5 == 4 else 1]))
        return state.n, scheduler.last_epoch, optimizer.param_groups[0]["lr"]

    both(run)


class HasLazyLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra = torch.nn.Linear(6, 3), torch.nn.LazyLinear(2)

    def forward(self, x):
        return self.body(x).detach() if len(x) else self.extra(x)


def test_parameters_without_a_size():
    model = HasLazyLayers()
    step = replay(lambda x: model(x))
    for _ in range(6):
        assert torch.equal(step(torch.ones(4, 6)), model(torch.ones(4, 6)))
    assert step.n_replayed > 0, step.obstacle


class Thing:
    size = 2.0


def test_objects_that_can_not_be_looked_at():
    system, thing = random.SystemRandom(), Thing()
    proxy = weakref.proxy(thing)

    def step(x):
        try:
            return x * proxy.size
        except ReferenceError:
            return x * (system.random() >= 0)

    replayed = replay(step)
    assert replayed(torch.ones(2)).tolist() == [2.0, 2.0]
    del thing
    for _ in range(4):
        assert replayed(torch.ones(2)).tolist() == [1.0, 1.0]
    assert "looks" in replayed.obstacle or "raises" in replayed.obstacle


def test_what_is_returned_keeps_its_identity():
    state = {"h": torch.zeros(3)}
    c = Space(h=torch.zeros(3))

    def step(x):
        state["h"] = state["h"] + x
        c.h = c.h + x
        return c.h

    for function in (replay(step), replay(lambda x: (x * 2,) * 2), replay(lambda x: state)):
        for i in range(6):
            found = function(x_of(i))
        assert function.n_replayed >= 3
        if isinstance(found, tuple):
            assert found[0] is found[1]
        elif isinstance(found, dict):
            assert found is state
        else:
            assert found is c.h


def test_what_the_call_replaces_is_returned_as_it_was():
    def run(wrap):
        c = Space(h=torch.zeros(3))

        def function(x):
            old, c.h = c.h, c.h + x
            return old

        step = wrap(function)
        return [step(x_of(i)).tolist() for i in range(8)]

    both(run)


def test_no_warning_of_gradients_that_only_leaves_have():
    w = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        step = replay(lambda x: x * 2)
        for i in range(5):
            with torch.enable_grad():
                x = w * i
            step(x)
    assert step.n_replayed == 2


def test_models_wrapped_and_unwrapped_between_calls():
    model = nn.Linear(6, 3).requires_grad_(False)
    expected = model(torch.ones(4, 6))
    step = replay(lambda x: model(x), backend="aten")
    for change in (lambda m: m, lazy_tensor.wrap, lazy_tensor.unwrap):
        change(model)
        for _ in range(6):
            actual = step(torch.ones(4, 6))
            assert torch.equal(lazy_tensor.materialize(actual), expected)
    assert step.n_replayed >= 9


def test_verification_in_another_thread_and_after_the_caches_are_cleared():
    step = replay(lambda x: x * 2, check_every=20)
    for _ in range(10):
        step(torch.ones(3))
    failed = []

    def work():
        try:
            for _ in range(60):
                step(torch.ones(3))
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    lazy_tensor.cache_clear()
    for _ in range(60):
        step(torch.ones(3))


def test_a_graph_that_saved_what_a_replay_replaces_is_as_it_was():
    c, w = Space(h=torch.ones(3)), nn.Parameter(torch.ones(3))

    def step(x):
        c.h = c.h + x

    step = replay(step)
    for _ in range(5):
        step(torch.ones(3))
    loss = (w * c.h).sum()
    step(torch.ones(3))
    loss.backward()
    assert w.grad is not None
    assert w.grad.tolist() == [6.0] * 3
    assert c.h.tolist() == [7.0] * 3


class Keeper:
    """Leaves a tensor where `kind` says; `left()` is what lies there."""

    def __init__(self, kind):
        self.kind = kind
        self.h = self.same = torch.zeros(2)
        self.items, self.pair = [torch.zeros(2)], (torch.zeros(2), 1)
        self.w = nn.Parameter(torch.ones(2))

    def step(self, x):
        if self.kind == "attribute":
            self.h = self.h + x
        elif self.kind == "two places":
            self.h = self.same = self.h + x
        elif self.kind == "list":
            self.items[0] = self.items[0] + x
        elif self.kind == "tuple":
            self.pair = (self.pair[0] + x, 1)
        else:
            self.w.grad = None
            (self.w * x).pow(2).sum().backward()
        return x * 2

    def left(self):
        assert self.same is self.h or self.kind != "two places"
        given = {"list": self.items[0], "tuple": self.pair[0], "gradient": self.w.grad}
        return given.get(self.kind, self.h)


@pytest.mark.parametrize("kind", ["attribute", "two places", "list", "tuple", "gradient"])
def test_tensors_of_earlier_calls_that_somebody_holds_keep_their_values(kind):
    kept, expected = [], []
    ours, theirs = Keeper(kind), Keeper(kind)
    step = replay(ours.step)
    for i in range(12):
        assert step(torch.ones(2) * i).tolist() == theirs.step(torch.ones(2) * i).tolist()
        if i % 2:
            kept.append(ours.left())
            expected.append(theirs.left())
    assert len({id(one) for one in kept}) == len(kept)
    assert [one.tolist() for one in kept] == [one.tolist() for one in expected]
    assert step.n_replayed > 0 or kind == "tuple"  # a replay can't put a tensor in a tuple


@pytest.mark.parametrize("kind", ["attribute", "list", "gradient"])
def test_a_tensor_that_only_its_place_holds_stays_one_object(kind):
    keeper = Keeper(kind)
    step = replay(keeper.step)
    for _ in range(8):
        step(torch.ones(2))
    before = id(keeper.left())
    n = step.n_replayed
    step(torch.ones(2))
    assert step.n_replayed == n + 1
    assert id(keeper.left()) == before


class Returner:
    def __init__(self):
        self.cache = {"h": torch.zeros(2)}
        self.state = [torch.zeros(2)]

    def kept(self, x):
        self.cache["h"] = self.cache["h"] + x
        return x, {"cache": self.cache}

    def made_anew(self, x):
        self.state = [self.state[0] + x]
        return x, self.state


def test_a_container_that_a_call_keeps_is_returned_itself():
    ours = Returner()
    step = replay(ours.kept)
    for _ in range(8):
        assert step(torch.ones(2))[1]["cache"] is ours.cache
    assert step.n_replayed > 0


def test_containers_that_replay_would_not_return_as_they_are():
    ours, argument = Returner(), [torch.ones(2)]
    made_anew, given = replay(ours.made_anew), replay(lambda xs: [xs])
    states = [made_anew(torch.ones(2))[1] for _ in range(8)]
    assert [one[0].tolist() for one in states] == [[i + 1.0] * 2 for i in range(8)]
    assert states[-1] is ours.state
    assert "a list that it makes anew and keeps" in made_anew.obstacle
    assert all(given(argument)[0] is argument for _ in range(8))
    assert "a list or a dict that is an argument" in given.obstacle


@pytest.mark.parametrize("around", ["anomaly", "saved hooks", "forward"])
def test_states_of_autograd_around_the_call(around):
    w: Any = nn.Parameter(torch.ones(3))

    def function(x):
        w.grad = None
        (w * x).pow(2).sum().backward()
        return w.grad * 1

    step = replay(function, backend="aten")
    for _ in range(5):
        step(x_of(1))
    contexts: dict[str, Any] = {
        "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
        "saved hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
            lambda t: t, lambda t: t * 0
        ),
        "forward": lambda: torch.autograd.forward_ad.dual_level(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contexts[around]():
            actual = step(x_of(1)).tolist()
            assert actual == function(x_of(1)).tolist()
    assert step.n_replayed == 2


@pytest.mark.recorded
def test_programs_that_are_common_settle():
    m, x, no_grad = nn.Linear(3, 3), torch.ones(2, 2, 3), torch.no_grad()
    c = Space(d=torch.zeros(3, requires_grad=True))

    def attack(x):
        (x * c.d + x).pow(2).sum().backward()
        c.d = (c.d.detach() + 0.1 * c.d.grad.sign()).requires_grad_()

    def zeroed(x):
        x = x.clone()
        x[:, 0] = 0
        return x

    functions = {
        "view of a view": no_grad(lambda x: m(x)[:, -1]),
        "transposed": no_grad(lambda x: m(x).transpose(1, 2)),
        "state with a gradient": attack,
        "item set": zeroed,
        "number as a tensor": lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
    }
    for name, function in functions.items():
        step, twin = replay(function, backend="aten"), copy.deepcopy(c.d.detach())
        for _ in range(6):
            step(x)
        assert step.n_replayed >= 2, f"{name}: {step.obstacle}"
        assert twin is not c.d
    step = replay(no_grad(lambda x: m(x)), backend="aten")
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            actual, expected = step(x), m(x)
        assert torch.equal(lazy_tensor.materialize(actual), expected.detach())
    assert step.n_replayed == 3, step.obstacle


def test_odd_arguments():
    assert replay(lambda x, i: x[i])(x_of(1), slice(0, 2)).tolist() == [1.0, 2.0]
    node = {"x": x_of(1)}
    node["self"] = node
    assert replay(lambda n: n["x"] * 2)(node).tolist() == [2.0, 4.0, 6.0]

    class Callable:
        def __init__(self):
            self._lock = 3

        def __call__(self, x):
            return x * 2

    assert replay(Callable())(x_of(1)).tolist() == [2.0, 4.0, 6.0]


def test_a_call_in_another_thread_inside_a_call():
    def function(x, deeper):
        if not deeper:
            return x * 2
        found = []
        thread = threading.Thread(target=lambda: found.append(step(x, False)))
        thread.start()
        thread.join(20)
        return found[0] + 1

    step = replay(function)
    assert step(x_of(1), True).tolist() == [3.0, 5.0, 7.0]


class Chained:
    """Each method mentions the next, which so is found only when the one before was read."""

    scale = 2.0


def _mention(i):
    def method(self, x):
        return getattr(self, "scale") * x  # noqa: B009

    method.__code__ = method.__code__.replace(co_names=(*method.__code__.co_names, f"step_{i + 1}"))
    return method


for i in range(40):
    setattr(Chained, f"step_{i}", _mention(i))


def test_code_is_followed_however_late_its_name_is_found():
    chained: Any = Chained()
    picture = object_graph.explore([("f", lambda x: chained.step_0(x))], [], set())
    found = {str(name) for name in picture.holdings}
    assert {f"method'{n}" for n in range(1, 40)} <= found
    names = [one.names for one in picture.holdings.values() if isinstance(one.names, set)]
    assert len(names) > 1
    assert len({id(some) for some in names}) == 1  # they can be thousands, for thousands of objects


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that pip might have installed."""
    (tmp_path / "installed_package.py").write_text(
        "FACTOR = 2.0\n"
        "class Scale:\n"
        "    def __init__(self):\n"
        "        self.by = 3.0\n"
        "    def __call__(self, x):\n"
        "        return x * self.by * FACTOR\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(object_graph, "INSTALLED", (str(tmp_path),))
    yield importlib.import_module("installed_package")
    del sys.modules["installed_package"]
    object_graph._is_installed.cache_clear()


def test_imports_inside_a_function_may_be_relative(tmp_path, monkeypatch):
    package = tmp_path / "of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "settings.py").write_text("SCALE = 2.0\n")
    (package / "steps.py").write_text(
        "def step(x):\n"
        "    from . import settings\n"
        "    from .settings import SCALE\n"
        "    return x * SCALE + settings.SCALE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    step = replay(importlib.import_module("of_tests.steps").step)
    for _ in range(6):
        assert step(x_of(0)).tolist() == [2.0, 4.0, 6.0]
    assert step.n_replayed > 0
    monkeypatch.setattr("of_tests.settings.SCALE", 3.0)
    assert step(x_of(0)).tolist() == [3.0, 6.0, 9.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sizes_of_nested_arguments():
    step = replay(lambda nested, x: x * nested.size(0))
    parts = [torch.ones(2)] * 3
    for _ in range(6):
        assert step(torch.nested.nested_tensor(parts), x_of(0)).tolist() == [0.0, 3.0, 6.0]
    parts = [torch.ones(2)] * 5
    assert step(torch.nested.nested_tensor(parts), x_of(0)).tolist() == [0.0, 5.0, 10.0]


def test_code_of_installed_packages_is_constant_and_what_their_objects_hold_is_not(installed):
    scale = installed.Scale()
    step = replay(lambda x: scale(x) + 1)
    for _ in range(6):
        step(torch.ones(2))
    assert step.n_replayed
    scale.by = 5.0
    assert step(torch.ones(2)).tolist() == [11.0, 11.0]
    picture = object_graph.explore([("step", step.__replayed__)], [], set())
    assert not any("FACTOR" in holding.keys for holding in picture.holdings.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x * 2, x.shape),
        lambda x: {"size": [x.shape], "n": x.shape[0]},
        lambda x: torch.nn.Parameter(x * 2),
        lambda x: [torch.nn.Buffer(x * 2)],
        lambda x: torch.tensor([x[0], x[1]]),
    ],
)
def test_what_is_returned_has_its_class(make):
    step = replay(make)
    for i in range(6):
        found, expected = step(x_of(i)), make(x_of(i))
        assert classes_in(found) == classes_in(expected)
        assert repr(found) == repr(expected)


def classes_in(result):
    if isinstance(result, dict):
        return {key: classes_in(one) for key, one in result.items()}
    if isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
        return [classes_in(one) for one in result]
    kinds = (torch.nn.Parameter, torch.nn.Buffer, torch.Tensor, torch.Size, int)
    return next(one for one in kinds if isinstance(result, one))


@pytest.mark.parametrize("holder", [types.SimpleNamespace, type("Holder", (), {})])
def test_state_in_a_tuple_settles(holder):
    """Each recorded call puts a new tuple: a replay has to find that of the last check."""
    state = holder()
    state.h, state.n = (torch.zeros(3),), 0

    def step(x):
        state.h = tuple([one * 0.5 + x for one in state.h])
        return state.h[0] + 1

    replayed = replay(step, check_every=10)
    expected = torch.zeros(3)
    for i in range(60):
        expected = expected * 0.5 + x_of(i)
        assert torch.equal(replayed(x_of(i)), expected + 1)
        state.n += 1  # which the step doesn't look at
    assert replayed.n_recorded < 12, replayed.obstacle


def test_many_reads_are_computed_together():
    def step(x):
        for _ in range(20):
            x = (x * 2).clamp(max=50)
            if (x >= 50).all():
                break
        return x

    replayed = replay(step, check_every=0)
    for i in range(12):
        assert torch.equal(replayed(x_of(i) + 1), step(x_of(i) + 1))
    (captured,) = {len(one._asides) for one in replayed.captured()}
    assert captured == 1


@pytest.mark.parametrize("is_read", [True, False])
def test_an_error_that_the_function_catches(is_read):
    def step(x, i):
        try:
            found = x[i].sum().item()
            return found + 1 if is_read else len(str(found))
        except IndexError:
            return "caught"

    replayed = replay(step)
    for k in range(20):
        i = torch.tensor([7 if k in (0, 3, 9, 10) else k % 2])
        assert replayed(torch.arange(3.0), i) == step(torch.arange(3.0), i)


def test_what_changes_at_each_call_is_told():
    epoch = 0

    def step(x):
        return x * (1 if str(epoch) else 2)

    def train():
        nonlocal epoch
        for i in range(20):
            epoch = i
            replayed(torch.ones(2))

    replayed = replay(step)
    with pytest.warns(UserWarning, match=r"epoch.* changed; what changes at each call") as told:
        train()
    assert [one.filename for one in told] == [__file__]
    assert "epoch" in replayed.obstacle


@pytest.mark.parametrize(
    "make",
    [
        lambda k: torch.tensor([k, 1.0]),
        lambda k: torch.as_tensor([[1.0], [k]]),
        lambda k: torch.ones(1).new_tensor([k]),
        lambda k: torch.FloatTensor([k]),
    ],
)
def test_tensors_made_of_lists_of_tensors_follow_them(make):
    step = replay(lambda x, k: x * make(k).sum(), warn=False)
    for i in range(12):
        k = torch.tensor(float(i // 3))
        assert torch.equal(step(torch.ones(2), k), torch.ones(2) * make(k).sum())


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU])
def test_lengths_of_packed_sequences_may_change(kind):
    model, x = kind(3, 4), torch.randn(5, 3, 3)
    lazy = replay(copy.deepcopy(model), warn=False)
    for i in range(20):  # as many elements, steps and sequences
        lengths = torch.tensor([[5, 3, 2], [5, 4, 1]][i // 8 % 2])
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
        found, expected = lazy(packed)[0].data, model(packed)[0].data
        found.sum().backward()
        torch.testing.assert_close(found, expected)
