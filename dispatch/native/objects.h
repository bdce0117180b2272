// What every other file here needs: owned references, attributes of Python objects by their offset,
// the GIL, torch's dispatch modes, and the pointers of each thread to its trace.
//
// `dispatch/run/hits.py` calls `install` (module.cpp) right after it has loaded this library. That
// sets the globals below; nothing here works before.

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
#include <sstream>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace hits {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// Owns a reference: `Ref(object)` takes over a new one, `Ref::to(object)` adds one to a borrowed
// object. Both may hold null.
//
// Assignment swaps. So the object that was held before is released only when the right-hand side
// goes out of scope: a finalizer that this runs finds the assigned `Ref` complete.
class Ref {
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

// The result of a call of Python's C API; throws if that failed, with Python's error set.
PyObject* sure(PyObject* object) {
  if (object == nullptr) throw python_error();
  return object;
}

void sure(int status) {
  if (status < 0) throw python_error();
}

// An attribute that its class declares in `__slots__`: CPython keeps it as one pointer at a fixed
// offset (`torch_checks.assumptions` checks that). Reading it so costs no look-up, but nothing
// checks that the object is of the class: the caller must know.
class Member {
 public:
  void find(PyObject* cls, const char* name) {
    Ref found(sure(PyObject_GetAttrString(cls, name)));
    TORCH_CHECK(Py_TYPE(found.get()) == &PyMemberDescr_Type, name, " is not in __slots__");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member->offset;
  }
  PyObject* in(PyObject* owner) const { return place(owner); }  // borrowed; null if never set
  // The new object is in place before the old one is released, which may run a finalizer.
  void set(PyObject* owner, PyObject* value) const {
    Py_INCREF(value);
    PyObject* before = std::exchange(place(owner), value);
    Py_XDECREF(before);
  }
  // Exchange the two; nothing is released.
  void swap(PyObject* owner, Ref& value) const {
    value = Ref(std::exchange(place(owner), value.release()));
  }

 private:
  PyObject*& place(PyObject* owner) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(owner) + offset_);
  }
  Py_ssize_t offset_ = 0;
};

// The slots of Python's classes that are used here: a group for each class, by their names there.
// `FIND_SLOTS` finds their offsets, and raises if the class has no such slot.
#define SLOTS(group, ...) \
  struct {                \
    Member __VA_ARGS__;   \
  } group;                \
  constexpr const char* names_##group = #__VA_ARGS__
#define FIND_SLOTS(group, cls) find_slots(reinterpret_cast<Member*>(&group), cls, names_##group)

void find_slots(Member* slot, PyObject* cls, const std::string& names) {
  std::istringstream listed(names);
  for (std::string name; std::getline(listed >> std::ws, name, ',');) (slot++)->find(cls, name.c_str());
}

SLOTS(of_trace, state, values, leaves, leaf_values, leaf_slots, leaf_offsets, snapshot_slots, storages,
      scalars, policy, claimed, is_outdated, busy, ran, slots, tape, copies, kept, one_call_inputs,
      root, noted, begun, unnoted_hits, similar_path, first_new, _rooted, _roots, _n_finals);
SLOTS(of_state, call, call_start, edges, generic, key, kind, layout, meta, slot, parent, step,
      offset_fixup, closes, n_ops, n_slots, n_scalars, plans, counts_writes, remembered);
SLOTS(of_plan, is_checked, parts_of_leaves, spent_s, tier_from_s, steps, peak_bytes, tier_says);
SLOTS(of_slot, index, trace);
SLOTS(of_policy, address, past, _began_s, _flushed_s, _gap_s, _ran_s, _round_began_s, grown_s,
      _n_flushes, _n_flushed, _n_reads, _n_recorded, _n_known, n_turns, n_turns_noted, is_bypassed,
      _is_parted, has_read, _outcome);
SLOTS(of_stats, counts, causes, flush_s, regions, regions_s, log);
SLOTS(of_record, thread, cause, where, n_ops, began_s, seconds, gap_s, state, steps, peak_bytes, tier,
      statuses, reasons);
SLOTS(of_layout, number, meta, local);  // found by `use_sharded`

// `LazyTensor`, `RecordingMode`, `trace.Leaf` and `Plan`.
PyTypeObject *tensor_class, *mode_class, *leaf_class, *plan_class;
PyTypeObject* sharded_class = nullptr;  // the lazy DTensor, once `sharding` is imported
// What `install` sets. The first two are sets of `memory_sharing`, which Python goes on changing:
// ids of storages that others may write, and of storages that a plain tensor may have too. Its dict
// `lazy_users` is changed here alone. The rest are functions.
PyObject *externally_writable, *shared, *lazy_users, *share, *is_shared, *may_pass_by,
    *describe, *close_segment, *at_turn, *to_read, *current, *share_with_parts, *snapshot,
    *note_writes;

// Values of `*cold_here` besides 0 (the trace records) and 1 (it does not): see `policy.py`.
constexpr int64_t PAUSED = 2, ASLEEP = -1, BYPASSED_TURNS = 3;
// Names of attributes and methods, interned: looking one up then compares pointers. Made when
// Python loads this library.
PyObject* interned(const char* name) { return sure(PyUnicode_InternFromString(name)); }
PyObject *name_value = interned("_value"), *name_slot = interned("slot"),
    *name_leaf = interned("leaf"), *name_data = interned("data"),
    *name_layout = interned("_layout"), *name_run = interned("run"),
    *name_append = interned("append"), *name_clear = interned("clear"),
    *name_told = interned("told"), *name_remember = interned("remember"),
    *name_note_kernels = interned("note_kernels"), *name_add_work = interned("add_work"),
    *name_ops = interned("ops"), *name_flushes = interned("flushes"),
    *name_segments = interned("segments"), *name_plans_reused = interned("plans_reused");

// Append to a list, or to a deque: `Trace.unnoted_hits` is one.
void append(PyObject* items, PyObject* item) {
  if (PyList_Check(items)) return sure(PyList_Append(items, item));
  Ref(sure(PyObject_CallMethodOneArg(items, name_append, item)));
}

// The dispatch keys to include and to exclude while a plan runs, as in
// `torch_private.kernels_only`.
DispatchKeySet keys_included, keys_excluded;

// What a call gives, as in trace.py, which says what each means.
enum Kind { ONE, SELF, MANY, ALIAS, NOTHING, MARKED };

// The trace that this thread records into, once it is known. Borrowed: the thread's `trace.local`
// holds it for as long as the thread runs.
thread_local PyObject* trace_here = nullptr;
// The trace's `Policy.cold`; null while `trace_here` is. It lies in an array, not in a Python
// number, so that it can be read without the GIL.
thread_local int64_t* cold_here = nullptr;
// The trace's `Policy.past`, borrowed.
thread_local PyObject* past_here = nullptr;

// Note this thread's trace.
void set_current_trace(PyObject* trace) {
  trace_here = trace;
  past_here = of_policy.past.in(of_trace.policy.in(trace));
  PyObject* address = of_policy.address.in(of_trace.policy.in(trace));
  cold_here = static_cast<int64_t*>(PyLong_AsVoidPtr(address));
}

// Holds the GIL in its scope, or until `release`. May be nested.
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

// Whether this thread may ask for the GIL. Once the interpreter finalizes, CPython ends each thread
// that asks for it. To end a thread with C++ frames on its stack ends the process. The thread that
// finalizes has the GIL already.
bool python_goes_on() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool ends = Py_IsFinalizing();
#else
  const bool ends = _Py_IsFinalizing();
#endif
  return Py_IsInitialized() && (!ends || PyGILState_Check());
}

using Mode = c10::impl::PyObject_TorchDispatchMode;

// Compares pointers and counts no reference, so it may be called without the GIL.
bool is_our_mode(const std::shared_ptr<Mode>& mode) {
  return Py_TYPE(mode->ptr(c10::impl::getGlobalPyInterpreter())) == mode_class;
}

// Whether Python would have `record` handle the call: our mode is the innermost one (`in_mode`), or
// there is no mode, and an argument has to be lazy.
bool is_ours(bool& in_mode) {
  const auto n_modes = c10::impl::TorchDispatchModeTLS::stack_len();
  if (n_modes == 0) return true;  // the tensors are looked at later
  in_mode = is_our_mode(c10::impl::TorchDispatchModeTLS::get_stack_at(n_modes - 1));
  return in_mode;
}

// Whether no dispatch mode but ours, and no `TorchFunctionMode`, is active in this thread.
bool sees_all() {
  const auto n_modes = c10::impl::TorchDispatchModeTLS::stack_len();
  if (n_modes > 1 || at::impl::PythonTorchFunctionTLS::stack_len() > 0) return false;
  return n_modes == 0 || is_our_mode(c10::impl::TorchDispatchModeTLS::get_stack_at(0));
}

// Our mode while it is asleep. `fall_asleep` takes it off torch's stack, so that ops don't come to
// `Kernel` at all. A guard of torch's that restores the stack may put it back.
thread_local std::shared_ptr<Mode> mode_asleep;

// Let ops on plain tensors pass unseen. Our mode must be the innermost one.
void fall_asleep() { mode_asleep = c10::impl::TorchDispatchModeTLS::pop_stack(); }

// Whether no mode is entered. Ops may come as if one were: if our mode fell asleep in a guard of
// torch's that restores the keys and not the stack, as those of `torch.func` do. From now on they
// don't come.
bool is_without_mode() {
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0) return false;
  if (c10::impl::tls_is_dispatch_key_included(DispatchKey::Python)) {
    c10::impl::tls_set_dispatch_key_included(DispatchKey::Python, false);
    c10::impl::tls_set_dispatch_key_included(DispatchKey::PythonTLSSnapshot, false);
  }
  return true;
}

// Have ops come again. False if another mode was entered meanwhile: ours belongs below it, and can
// only be put there when that one is left.
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
