// Blocks of `lazy_mode` that *rest*: bypassed ones, one after the other at one place of the
// program, which are only counted and timed. `Policy.rests` grants a number of them. When they are
// used up, or anything differs, Python looks at the next block.

#pragma once

#include <chrono>

#include "objects.h"

namespace hits {

// Counts changes of settings and calls of `wrap`, in any thread. Each ends all grants of before.
std::atomic<uint64_t> rests_epoch{0};

// The grant of a thread, and the blocks that have rested by it.
class BypassGrant {
 public:
  // Let `n` blocks rest at a place: a code object, or decorated function, by its id(), and an
  // instruction, as `lazy_mode._place` has them. A block that rests may be open, and goes on.
  void grant(uintptr_t code, int instruction, int64_t n) {
    n_ = 0;
    seconds_ = 0;
    code_ = code;
    instruction_ = instruction;
    n_left_ = n;
    granted_ = Clock::now();
    epoch_ = rests_epoch;
  }

  // Whether the block that begins at this place rests. If it does not, the grant ends.
  bool begin(uintptr_t code, int instruction) {
    const auto now = Clock::now();
    const bool may = n_left_ > 0 && code == code_ && instruction == instruction_ && !is_in_one_ &&
                     epoch_ == rests_epoch && now - granted_ < LASTS && is_asleep() &&
                     is_nothing_pending();
    n_left_ = may ? n_left_ - 1 : 0;
    if (!may) return false;
    ++n_;
    is_in_one_ = true;
    began_ = now;
    return true;
  }

  // End it; whether nothing is pending.
  bool end() {
    is_in_one_ = false;
    seconds_ += std::chrono::duration<double>(Clock::now() - began_).count();
    return is_nothing_pending();
  }

  // End the grant. Returns how many blocks have rested by it, and their seconds.
  std::pair<int64_t, double> take() {
    n_left_ = 0;
    return {std::exchange(n_, 0), std::exchange(seconds_, 0)};
  }

 private:
  using Clock = std::chrono::steady_clock;
  // How long a grant lasts: kernels may have come meanwhile, for which only Python looks.
  static constexpr std::chrono::milliseconds LASTS{100};

  // Whether no ops of this thread come here, and no mode is entered. Asked before
  // `is_nothing_pending`: `trace_here` is known if `cold_here` is.
  static bool is_asleep() {
    return cold_here != nullptr && *cold_here == ASLEEP && mode_asleep == nullptr &&
           c10::impl::TorchDispatchModeTLS::stack_len() == 0;
  }

  static bool is_nothing_pending() {
    return of_trace.state.in(trace_here) == of_trace.root.in(trace_here);
  }

  uintptr_t code_ = 0;
  int instruction_ = 0;
  int64_t n_left_ = 0, n_ = 0;
  double seconds_ = 0;
  Clock::time_point granted_, began_;
  uint64_t epoch_ = 0;
  bool is_in_one_ = false;
};
thread_local BypassGrant rests;

// grant_rests(code, instruction, n)
PyObject* py_grant_rests(PyObject*, PyObject* args) {
  Py_ssize_t code;
  int instruction;
  long n;
  if (!PyArg_ParseTuple(args, "nil", &code, &instruction, &n)) return nullptr;
  rests.grant(static_cast<uintptr_t>(code), instruction, n);
  Py_RETURN_NONE;
}

// begin_rest(function): whether the block that begins rests. `lazy_mode.__enter__` calls this; the
// block is where its caller's frame is. `function` is the one that the block decorates, or None.
PyObject* py_begin_rest(PyObject*, PyObject* function) {
  const Ref caller(reinterpret_cast<PyObject*>(PyFrame_GetBack(PyEval_GetFrame())));
  if (caller.get() == nullptr) Py_RETURN_FALSE;
  auto* frame = reinterpret_cast<PyFrameObject*>(caller.get());
  const Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const PyObject* of = function == Py_None ? code.get() : function;
  return PyBool_FromLong(rests.begin(reinterpret_cast<uintptr_t>(of), PyFrame_GetLasti(frame)));
}

// end_rest(): end such a block. Whether nothing is pending: else Python flushes.
PyObject* py_end_rest(PyObject*, PyObject*) { return PyBool_FromLong(rests.end()); }

// rested(): end the grant; the pair of `BypassGrant::take`.
PyObject* py_rested(PyObject*, PyObject*) {
  const auto [n, seconds] = rests.take();
  return Py_BuildValue("(Ld)", static_cast<long long>(n), seconds);
}

// end_rests(): end the grants of all threads.
PyObject* py_end_rests(PyObject*, PyObject*) {
  ++rests_epoch;
  Py_RETURN_NONE;
}

}  // namespace hits
