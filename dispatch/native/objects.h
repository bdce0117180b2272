// Python objects as C++ holds them: references, attributes at fixed places, the GIL; and what
// `hits.use` names.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <Python.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <structmember.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace hits {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

class Ref {  // owns a reference
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  static Ref to(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Ref(borrowed);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

// `object`, unless the call that gave it failed.
PyObject* sure(PyObject* object) {
  if (object == nullptr) throw python_error();
  return object;
}

void sure(int status) {
  if (status < 0) throw python_error();
}

// An attribute that its class declares in `__slots__`.
class Member {
 public:
  void find(PyObject* cls, const char* name) {
    Ref found(sure(PyObject_GetAttrString(cls, name)));
    TORCH_CHECK(Py_TYPE(found.get()) == &PyMemberDescr_Type, name, " is not in __slots__");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member->offset;
  }
  PyObject* in(PyObject* owner) const { return place(owner); }  // borrowed; null if never set
  void set(PyObject* owner, PyObject* value) const {
    Py_INCREF(value);
    PyObject* before = std::exchange(place(owner), value);
    Py_XDECREF(before);
  }
  void swap(PyObject* owner, Ref& value) const {
    value = Ref(std::exchange(place(owner), value.release()));
  }

 private:
  PyObject*& place(PyObject* owner) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(owner) + offset_);
  }
  Py_ssize_t offset_ = 0;
};

struct {
  Member state, values, leaves, leaf_values, leaf_slots, leaf_offsets, snapshot_slots, storages,
      scalars, policy, claimed, is_outdated, busy, ran, slots, tape, copies, kept, one_call_inputs,
      root, noted, begun, unnoted_hits, similar_path, first_new, _rooted, _roots;
} of_trace;
struct {
  Member call, edges, generic, key, kind, layout, meta, slot, parent, call_site, step, offset_fixup,
      closes, n_slots, n_scalars, plans, counts_writes;
} of_state;
struct {
  Member is_checked, is_pooled, parts_of_leaves;
} of_plan;
struct {
  Member index, trace;
} of_slot;
Member address_of_policy, past_of_policy, number_of_layout, meta_of_layout, local_of_layout;

PyTypeObject *tensor_class, *mode_class, *leaf_class, *plan_class;
PyTypeObject* sharded_class = nullptr;  // a subclass of tensor_class, once there is one
PyObject *externally_writable, *shared, *describe, *close_segment, *at_turn, *current, *share_with_parts;

// Values of `cold_here` beside 0 and 1: see `policy.py`.
constexpr int64_t PAUSED = 2, ASLEEP = -1, BYPASSED_TURNS = 3;
PyObject *name_value, *name_slot, *name_leaf, *name_data, *name_layout, *name_run, *name_append;

// Dispatch keys in force while a plan runs, as `torch_private.kernels_only` has them.
DispatchKeySet keys_included, keys_excluded;

enum Kind { ONE, SELF, MANY, ALIAS, NOTHING, MARKED, SLOW = 16 };  // as in trace.py

// The trace that this thread records into; traces live as long as the process.
thread_local PyObject* trace_here = nullptr;
// Its policy's count of the ops that run unrecorded, 0 while it records; known once it is.
thread_local int64_t* cold_here = nullptr;
// Its calls of late.
thread_local PyObject* past_here = nullptr;

void be_at(PyObject* trace) {
  trace_here = trace;
  past_here = past_of_policy.in(of_trace.policy.in(trace));
  PyObject* address = address_of_policy.in(of_trace.policy.in(trace));
  cold_here = static_cast<int64_t*>(PyLong_AsVoidPtr(address));
}

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { release(); }
  void release() {
    if (std::exchange(is_held_, false)) PyGILState_Release(state_);
  }

 private:
  PyGILState_STATE state_;
  bool is_held_ = true;
};

// Whether this thread may ask for the GIL: once the interpreter ends, threads that do are ended, and
// with C++ on their stacks the process.
bool python_goes_on() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool ends = Py_IsFinalizing();
#else
  const bool ends = _Py_IsFinalizing();
#endif
  return Py_IsInitialized() && (!ends || PyGILState_Check());
}

using Mode = c10::impl::PyObject_TorchDispatchMode;

bool is_our_mode(const std::shared_ptr<Mode>& mode) {
  return Py_TYPE(mode->ptr(c10::impl::getGlobalPyInterpreter())) == mode_class;
}

// Whether calls come to `record`; `in_mode` says by which way.
bool is_ours(bool& in_mode) {
  const auto n_modes = c10::impl::TorchDispatchModeTLS::stack_len();
  if (n_modes == 0) return true;  // the tensors are looked at later
  in_mode = is_our_mode(c10::impl::TorchDispatchModeTLS::get_stack_at(n_modes - 1));
  return in_mode;
}

// Whether no mode but ours sees this thread's ops or functions.
bool sees_all() {
  const auto n_modes = c10::impl::TorchDispatchModeTLS::stack_len();
  if (n_modes > 1 || at::impl::PythonTorchFunctionTLS::stack_len() > 0) return false;
  return n_modes == 0 || is_our_mode(c10::impl::TorchDispatchModeTLS::get_stack_at(0));
}

// This thread's mode while it sees no ops: off torch's stack, which a guard may have put it back on.
thread_local std::shared_ptr<Mode> mode_asleep;

// Let ops on plain tensors pass by the mode that is entered last, and is ours.
void fall_asleep() { mode_asleep = c10::impl::TorchDispatchModeTLS::pop_stack(); }

// Have them come again; false if another mode was entered meanwhile, which has to be left first.
bool wake_up() {
  if (mode_asleep == nullptr) return true;
  const auto n_modes = c10::impl::TorchDispatchModeTLS::stack_len();
  if (n_modes == 0) {
    c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(mode_asleep));
  } else if (c10::impl::TorchDispatchModeTLS::get_stack_at(n_modes - 1) != mode_asleep) {
    return false;
  }
  mode_asleep.reset();
  return true;
}

}  // namespace hits
