// Blocks that rest, one after another: all at one place, bypassed, with nothing to do but to be
// counted. Python grants some at a time, and looks in between whether anything has changed.

#pragma once

#include <chrono>

#include "objects.h"

namespace hits {

// Counts changes of settings and calls of `wrap`. Each ends what was granted before.
std::atomic<uint64_t> rests_epoch{0};

class Rests {
 public:
  // Let `n` blocks rest at a place, as `lazy_mode._place` has it.
  void grant(uintptr_t code, int instruction, int64_t n) {
    *this = {};
    code_ = code;
    instruction_ = instruction;
    n_left_ = n;
    granted_ = Clock::now();
    epoch_ = rests_epoch;
  }

  // Whether the block that begins at this place rests.
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
  static constexpr std::chrono::milliseconds LASTS{100};

  static bool is_asleep() {  // cold_here and trace_here are known together
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
thread_local Rests rests;

// grant_rests(code, instruction, n)
PyObject* py_grant_rests(PyObject*, PyObject* args) {
  Py_ssize_t code;
  int instruction;
  long n;
  if (!PyArg_ParseTuple(args, "nil", &code, &instruction, &n)) return nullptr;
  rests.grant(static_cast<uintptr_t>(code), instruction, n);
  Py_RETURN_NONE;
}

// begin_rest(function): whether the block that the caller's caller enters, or that `function` runs
// in, rests.
PyObject* py_begin_rest(PyObject*, PyObject* function) {
  PyFrameObject* here = PyEval_GetFrame();
  const Ref caller(here == nullptr ? nullptr : reinterpret_cast<PyObject*>(PyFrame_GetBack(here)));
  if (caller.get() == nullptr) Py_RETURN_FALSE;
  auto* frame = reinterpret_cast<PyFrameObject*>(caller.get());
  const Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const PyObject* of = function == Py_None ? code.get() : function;
  return PyBool_FromLong(rests.begin(reinterpret_cast<uintptr_t>(of), PyFrame_GetLasti(frame)));
}

// end_rest(): end such a block; whether nothing is pending.
PyObject* py_end_rest(PyObject*, PyObject*) { return PyBool_FromLong(rests.end()); }

// rested(): as `Rests::take`.
PyObject* py_rested(PyObject*, PyObject*) {
  const auto [n, seconds] = rests.take();
  return Py_BuildValue("(Ld)", static_cast<long long>(n), seconds);
}

// end_rests(): have Python look at the next block of each thread.
PyObject* py_end_rests(PyObject*, PyObject*) {
  ++rests_epoch;
  Py_RETURN_NONE;
}

}  // namespace hits
