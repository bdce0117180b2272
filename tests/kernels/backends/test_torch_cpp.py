"""Units of kernels."""

import ctypes

from torch._inductor import codecache

from lazy_tensor.kernels.backends.torch_cpp import Unit

TEXT = """#include <cstdint>
static int64_t number() {{ return {0}; }}
extern "C" void kernel(int64_t* out) {{ *out = number(); }}
// Python bindings to call kernel():
#include <no_such_header.h>
"""


def test_kernels_of_one_unit_have_names_of_their_own(tmp_path):
    unit = Unit()
    with unit:
        for n in (3, 5):
            codecache.CppPythonBindingsCodeCache.load_async(TEXT.format(n))
    path = tmp_path / "unit.so"
    path.write_bytes(unit.compile())
    library, out = ctypes.CDLL(str(path)), ctypes.c_int64()
    for name, n in ("kernel_0", 3), ("kernel_1", 5):
        getattr(library, name)(ctypes.byref(out))
        assert out.value == n
