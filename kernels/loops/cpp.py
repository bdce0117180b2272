"""The C++ that all kernels of loops begin with, SLEEF's functions for them, and their compiler.

In: a kernel's text. Out: a shared library. Called by `write`, and by the backend `inductor`.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.extension.cpp import found_compiler
from lazy_tensor.kernels.library import own_folder

FUNCTIONS = {
    "exp": ("exp", "u10"), "exp2": ("exp2", "u10"), "expm1": ("expm1", "u10"),
    "log": ("log", "u10"), "log2": ("log2", "u10"), "log10": ("log10", "u10"),
    "log1p": ("log1p", "u10"), "sin": ("sin", "u10"), "cos": ("cos", "u10"),
    "tan": ("tan", "u10"), "asin": ("asin", "u10"), "acos": ("acos", "u10"),
    "atan": ("atan", "u10"), "sinh": ("sinh", "u10"), "cosh": ("cosh", "u10"),
    "tanh": ("tanh", "u10"), "erf": ("erf", "u10"), "erfc": ("erfc", "u15"),
    "pow": ("pow", "u10"), "atan2": ("atan2", "u10"), "quick_erf": ("erf", "u10"),
    "asinh": ("asinh", "u10"), "acosh": ("acosh", "u10"), "atanh": ("atanh", "u10"),
    "hypot": ("hypot", "u05"), "fmod": ("fmod", ""),
}  # fmt: skip
BINARY_FUNCTIONS = ("pow", "atan2", "hypot", "fmod")
"""Of the functions that texts may call, those of two arguments. `FUNCTIONS` has SLEEF's name of
each, and the error bound that eager's kernels choose. For float32, `quick_erf` is the formula of
eager's GELU."""


def library_of(text: str) -> bytes:
    """The shared library of `text`; Declined without GCC, or on a CPU without AVX2."""
    compiler = _compiler()
    command = [compiler, *_FLAGS, f"-mprefer-vector-width={8 * vector_bytes()}"]
    functions = set(re.findall(r"Sleef_\w+", text))
    if functions:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        if not all(hasattr(torch_cpu, name) for name in functions):
            raise Declined("this torch has no SLEEF for other libraries")
        command += ["-Wl,--no-as-needed", str(_empty_libtorch(compiler))]
    # All texts share one folder, which is removed when the process ends. A forked child has its
    # parent's folder and counter, so the name also holds the process.
    source = Path(own_folder(), f"loops_{os.getpid()}_{next(_counter)}.cpp")
    library = source.with_suffix(".so")
    source.write_text(text)
    try:
        _compile([*command, str(source), "-o", str(library)])
        return library.read_bytes()
    finally:
        source.unlink(missing_ok=True)
        library.unlink(missing_ok=True)


_counter = itertools.count()


def _compile(command: list[str]) -> None:
    with subprocess.Popen(
        command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        _running.append(process)
        _, errors = process.communicate()
        _running.remove(process)
    if process.returncode:
        raise RuntimeError(f"its loops can't be compiled: {errors.strip()[:1000]}")


_running: list[subprocess.Popen[str]] = []


@atexit.register
def _end_compilers() -> None:
    """End compilers at exit: the process waits for its threads, and these for the compilers."""
    for process in [*_running]:
        process.kill()


# Floats as in eager's kernels: each op is rounded (no contraction), and NaNs are kept. Nobody reads
# `errno` and traps: without them GCC vectorizes loops with `sqrt` and conditions.
# - no-thread-jumps: GCC 12 vectorizes some loops wrongly after it has threaded jumps.
# - no-tree-sink: a call that is sunk into a branch isn't vectorized. For the same reason the rules'
#   texts call nothing in a branch, and don't use `&&`.
# - no-exceptions: only without them does GCC hoist calls of constants out of a loop.
# - no-tree-pre: GCC would move parts of partial redundancies into branches, or to the end of a
#   loop, which then isn't vectorized.
_FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fno-thread-jumps", "-fno-tree-sink", "-fno-tree-pre", "-fwrapv",
    "-fno-exceptions", "-fvisibility=hidden", "-fopenmp", "-w", "-shared", "-fPIC",
)  # fmt: skip


def _compiler() -> str:
    compiler = found_compiler()
    if compiler is None or "clang" in os.path.realpath(compiler):
        raise Declined("there is no GCC, which knows functions of vectors")
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        raise Declined("a CPU without AVX2")
    return compiler


def vector_bytes() -> int:
    """Bytes of the vectors that eager's kernels use."""
    return 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32


@cache
def _empty_libtorch(compiler: str) -> Path:
    """An empty library with the name of that library of torch that has SLEEF in it.

    To link with torch's own, the linker would read its tables for half a second. At run time the
    loader uses torch's own, which is loaded already.
    """
    path = Path(own_folder(), "libtorch_cpu.so")
    soname = "-Wl,-soname,libtorch_cpu.so"
    subprocess.run(
        [compiler, "-shared", "-nostdlib", "-x", "c++", os.devnull, soname, "-o", str(path)],
        check=True, capture_output=True,
    )  # fmt: skip
    return path


PRELUDE = """\
// always: in a large kernel GCC would stop, and a loop that calls a function has no vectors
#define INLINE static inline __attribute__((always_inline))
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();
INLINE long larger(long a, long b) { return a > b ? a : b; }
INLINE long smaller(long a, long b) { return a < b ? a : b; }
template <typename T> struct Same { using type = T; };
INLINE float absolute(float x) { return __builtin_fabsf(x); }
INLINE double absolute(double x) { return __builtin_fabs(x); }
INLINE long absolute(long x) { return x < 0 ? -x : x; }
INLINE int absolute(int x) { return x < 0 ? -x : x; }
INLINE float square_root(float x) { return __builtin_sqrtf(x); }
INLINE double square_root(double x) { return __builtin_sqrt(x); }
INLINE float floor_of(float x) { return __builtin_floorf(x); }
INLINE double floor_of(double x) { return __builtin_floor(x); }
INLINE float nearest(float x) { return __builtin_rintf(x); }
INLINE double nearest(double x) { return __builtin_rint(x); }
INLINE float ceil_of(float x) { return __builtin_ceilf(x); }
INLINE double ceil_of(double x) { return __builtin_ceil(x); }
INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE float with_sign(float x, float y) { return __builtin_copysignf(x, y); }
INLINE double with_sign(double x, double y) { return __builtin_copysign(x, y); }
INLINE float trunc_of(float x) { return __builtin_truncf(x); }
INLINE double trunc_of(double x) { return __builtin_trunc(x); }
// Converts as eager does on x86, NaN and numbers out of range included. `no_bits` is 0. If GCC knew
// that, it would replace a conversion and one back by `trunc`, which keeps NaN and large numbers.
static long no_bits __attribute__((used));
template <typename T, typename F> INLINE T as_integer(F x) { return (T)x ^ (T)no_bits; }
template <> inline unsigned char as_integer(float x) { return (long)x ^ no_bits; }
template <> inline unsigned char as_integer(double x) { return (long)x ^ no_bits; }
// numbers of 16 bits: from memory to float, a float rounded to one, and such a float to memory
INLINE float float_of(unsigned x) { return __builtin_bit_cast(float, x); }
INLINE unsigned bits_of(float x) { return __builtin_bit_cast(unsigned, x); }
INLINE float widen_bfloat16(unsigned short x) { return float_of((unsigned)x << 16); }
INLINE unsigned short narrow_bfloat16(float x) { return bits_of(x) >> 16; }
INLINE float round_bfloat16(float x) {
  const unsigned bits = bits_of(x);
  const float rounded = float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
  return x != x ? x : rounded;
}
INLINE float widen_half(unsigned short x) {
  const unsigned sign = (unsigned)(x & 0x8000) << 16, bits = (unsigned)(x & 0x7fff) << 13;
  // the exponent of a half is 112 smaller; its greatest one stands for infinity and NaN
  const unsigned scaled = bits_of(float_of(bits) * 0x1p112f);
  return float_of(sign | (bits >= 0x0f800000 ? scaled | 0x7f800000 : scaled));
}
// to add a number of this size rounds away what a half can't hold
INLINE float round_half(float x) {
  const unsigned bits = bits_of(x), sign = bits & 0x80000000u;
  const float size = absolute(x);
  const unsigned exponent = bits & 0x7f800000u;
  const unsigned least = exponent < 0x38800000u ? 0x38800000u : exponent;
  const float magic = float_of(least + (13u << 23));
  const float rounded = size + magic - magic;
  const float held = rounded >= 65536 ? __builtin_inff() : rounded;
  const float found = size < 131072 ? held : __builtin_inff();
  return x != x ? x : float_of(bits_of(found) | sign);
}
INLINE unsigned short narrow_half(float x) {
  const unsigned bits = bits_of(x), scaled = bits_of(absolute(x) * 0x1p-112f) >> 13;
  const unsigned of_number = absolute(x) < __builtin_inff() ? scaled : 0x7c00;
  return (x != x ? 0x7e00 : of_number) | (bits >> 16 & 0x8000);
}
// of two numbers of which one is NaN, NaN
template <typename T> INLINE T maximum(T a, typename Same<T>::type b) {
  return a > b || a != a ? a : b;
}
template <typename T> INLINE T minimum(T a, typename Same<T>::type b) {
  return a < b || a != a ? a : b;
}
// the same, but of zeros the first one
template <typename T> INLINE T at_least(T a, typename Same<T>::type b) {
  return a < b || b != b ? b : a;
}
template <typename T> INLINE T at_most(T a, typename Same<T>::type b) {
  return a > b || b != b ? b : a;
}"""


_IN_FLOAT = {
    # SLEEF's formula
    "exp": """\
INLINE float exp(float x) {
  const float n = nearest(x * 0x1.715476p+0f);
  const float r = fused(n, -0x1.7f7d1cp-20f, fused(n, -0x1.62e4p-1f, x));
  float sum = fused(0x1.a057b4p-13f, r, 0x1.6d2d92p-10f);
  sum = fused(fused(sum, r, 0x1.11114cp-7f), r, 0x1.5554f4p-5f);
  sum = fused(fused(sum, r, 0x1.555556p-3f), r, 0.5f);
  // two factors, as the result may be subnormal
  const int power = (int)n, half = power >> 1;
  const float one = float_of((unsigned)(half + 127) << 23);
  const float other = float_of((unsigned)(power - half + 127) << 23);
  const float found = (1 + fused(r * r, sum, r)) * one * other;
  const float small = x < -104 ? 0 : found;
  return x > 100 ? __builtin_inff() : small;
}""",
    # formulas of Cephes, wrong by less than 2 units in the last place
    "log": """\
INLINE float log(float x) {
  const float scaled = x < 0x1p-126f ? x * 0x1p23f : x;
  // from the root of 1/2 to that of 2, and a power of two
  const int bits = (int)bits_of(scaled), power = (bits - 0x3f3504f3) >> 23;
  const float part = float_of((unsigned)bits - ((unsigned)power << 23)) - 1;
  const float n = x < 0x1p-126f ? power - 23 : power;
  float sum = fused(7.0376836292e-2f, part, -1.1514610310e-1f);
  sum = fused(fused(sum, part, 1.1676998740e-1f), part, -1.2420140846e-1f);
  sum = fused(fused(sum, part, 1.4249322787e-1f), part, -1.6668057665e-1f);
  sum = fused(fused(sum, part, 2.0000714765e-1f), part, -2.4999993993e-1f);
  sum = fused(sum, part, 3.3333331174e-1f) * part * (part * part);
  sum = part + fused(-0.5f, part * part, fused(n, -2.12194440e-4f, sum));
  const float found = fused(n, 0.693359375f, sum);
  const float positive = x < __builtin_inff() ? found : x;
  const float other = x == 0 ? -__builtin_inff() : __builtin_nanf("");
  return x > 0 ? positive : other;
}""",
    "log1p": """\
INLINE float log1p(float x) {
  const float sum = 1 + x;
  const float lost = (sum - 1 - x) / sum;
  const float found = log(sum) - lost;
  return with_sign(lost == lost ? found : log(sum), x);
}""",
    "tanh": """\
INLINE float tanh(float x) {
  const float square = x * x;
  float sum = fused(-5.70498872745e-3f, square, 2.06390887954e-2f);
  sum = fused(fused(sum, square, -5.37397155531e-2f), square, 1.33314422036e-1f);
  const float near = fused(fused(sum, square, -3.33332819422e-1f) * square, x, x);
  const float far = 1 - 2 / (exp(2 * absolute(x)) + 1);
  return with_sign(absolute(x) < 0.625f ? near : far, x);
}""",
    # polynomials fitted for float32: of `erf(x) / x - 1` near 0, and of the logarithm of `1 - erf`
    "erf": """\
INLINE float erf(float x) {
  const float size = absolute(x), square = x * x;
  float sum = fused(-5.99934254e-4f, square, 4.99481801e-3f);
  sum = fused(fused(sum, square, -2.67677121e-2f), square, 1.12818457e-1f);
  sum = fused(fused(sum, square, -3.76124978e-1f), square, 1.28379151e-1f);
  const float near = fused(sum, x, x);
  sum = fused(1.12304795e-5f, size, -3.22795589e-4f);
  sum = fused(fused(sum, size, 3.64242541e-3f), size, -2.37619914e-2f);
  sum = fused(fused(sum, size, 1.06236793e-1f), size, 6.35151386e-1f);
  const float far = 1 - exp(-size * fused(sum, size, 1.12864852f));
  return with_sign(size < 0.92f ? near : far, x);
}""",
    # formula 7.1.26 of Abramowitz and Stegun, which is wrong by up to 1.5e-7
    "quick_erf": """\
INLINE float quick_erf(float x) {
  const float t = 1 / (0.3275911f * absolute(x) + 1);
  const float r = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t
      + 0.254829592f) * t;
  return __builtin_copysignf(1 - r * exp(-x * x), x);
}""",
}
"""Functions of float32 that are inlined, because a call of SLEEF takes longer."""
CALLED = {"tanh": "exp", "erf": "exp", "quick_erf": "exp", "log1p": "log"}
"""The inlined functions that call another one, and the one they call."""


def declared(function: str) -> str:
    """The C++ of a function for float and double: a scalar function that calls of SLEEF vectorize.

    GCC finds the vector form by its name in the x86 ABI for vector functions.
    """
    sleef, bound = FUNCTIONS[function]
    is_binary = function in BINARY_FUNCTIONS
    lines = [_IN_FLOAT[function]] if function in _IN_FLOAT else []
    for kind, letter in (("float", "f"), ("double", "d")):
        if function in _IN_FLOAT and kind == "float":
            continue
        n = vector_bytes() // (4 if kind == "float" else 8)
        name, callee = f"lazy_{function}{letter}", f"Sleef_{sleef}{letter}{n}_{bound}".rstrip("_")
        vector = f"{kind[0].upper()}{n}_{function}"
        types, form = (f"{vector}, {vector}", "vv") if is_binary else (vector, "v")
        vector_parameters = f"{vector} x, {vector} y" if is_binary else f"{vector} x"
        parameters = f"{kind} x, {kind} y" if is_binary else f"{kind} x"
        arguments = "x, y" if is_binary else "x"
        # the scalar becomes a vector by subtraction of zeros: adding them would turn -0.0 into 0.0
        spread = ", ".join(f"{x} - {vector}{{}}" for x in arguments.split(", "))
        lines += [
            f"typedef {kind} {vector} __attribute__((vector_size({vector_bytes()})));",
            f'extern "C" {vector} {callee}({types});',
        ]
        # the ABI's letters for AVX2 and AVX-512
        for isa in "de" if vector_bytes() == 32 else "e":
            vectors = f"_ZGV{isa}N{n}{form}_{name}({vector_parameters})"
            lines.append(f'extern "C" {vector} {vectors} {{ return {callee}({arguments}); }}')
        lines.append(
            f"""\
extern "C" {kind} {name}_alone({parameters}) asm("{name}");
{kind} {name}_alone({parameters}) {{ return {callee}({spread})[0]; }}
#pragma omp declare simd simdlen({n}) notinbranch
extern "C" __attribute__((const)) {kind} {name}({parameters});
INLINE {kind} {function}({parameters}) {{ return {name}({arguments}); }}"""
        )
    return "\n".join(lines)
