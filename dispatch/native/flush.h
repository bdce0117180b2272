// A flush whose plan is known and has run before, in one call: look up the plan, empty the trace,
// run the plan, give each value its data, and tell Python of it. `flush._run_known` calls it;
// `flush._compute` does all other flushes in Python.

#pragma once

#include "accounts.h"

namespace hits {

// Classes of flush.py and trace.py, and `user_frame.is_users`.
PyObject *work_class, *pending_class, *is_users_module;
PyObject* name_of_module = interned("__name__");

// What a trace holds between two flushes; at first that of an empty trace.
struct Content {
  Ref values{sure(PyList_New(0))}, leaf_values{sure(PyList_New(0))}, leaves{sure(PyList_New(0))},
      scalars{sure(PyList_New(0))}, one_call_inputs{sure(PyList_New(0))}, kept{sure(PyList_New(0))};
  Ref leaf_slots{sure(PyDict_New())}, leaf_offsets{sure(PyDict_New())},
      snapshot_slots{sure(PyDict_New())}, copies{sure(PyDict_New())}, storages{sure(PyDict_New())},
      roots{sure(PyDict_New())};

  // Exchange this with the content of a trace. Nothing is freed, so no finalizer runs that could
  // see a trace that is half empty.
  void swap_with(PyObject* trace) {
    of_trace.values.swap(trace, values);
    of_trace.leaf_values.swap(trace, leaf_values);
    of_trace.leaves.swap(trace, leaves);
    of_trace.scalars.swap(trace, scalars);
    of_trace.one_call_inputs.swap(trace, one_call_inputs);
    of_trace.kept.swap(trace, kept);
    of_trace.leaf_slots.swap(trace, leaf_slots);
    of_trace.leaf_offsets.swap(trace, leaf_offsets);
    of_trace.snapshot_slots.swap(trace, snapshot_slots);
    of_trace.copies.swap(trace, copies);
    of_trace.storages.swap(trace, storages);
    of_trace._roots.swap(trace, roots);
  }
};

// Let the trace begin anew at its root, as `Trace.reset` does. The trie owns the states that it
// leaves.
void restart(PyObject* trace) {
  PyObject* root = of_trace.root.in(trace);
  for (const Member* at : {&of_trace.state, &of_trace.noted, &of_trace.begun}) at->set(trace, root);
  for (const Member* none : {&of_trace.similar_path, &of_trace.first_new, &of_trace.ran,
                             &of_trace._rooted}) {
    none->set(trace, Py_None);
  }
}

// The values of a trace that something besides the trace holds, and their slots. The trace's list
// has one reference to each, so any other is a tensor's (see `liveness.live_values`).
struct Live {
  std::vector<PyObject*> values;  // borrowed from that list
  Ref slots;

  explicit Live(PyObject* all) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all); ++i) {
      PyObject* value = PyList_GET_ITEM(all, i);
      if (Py_REFCNT(value) > 1 && slot_in(value).get() != Py_None) values.push_back(value);
    }
    slots = Ref(sure(PyTuple_New(static_cast<Py_ssize_t>(values.size()))));
    for (size_t i = 0; i < values.size(); ++i) {
      const Ref slot = slot_in(values[i]);
      PyTuple_SET_ITEM(slots.get(), static_cast<Py_ssize_t>(i),
                       Ref::to(of_slot.index.in(slot.get())).release());
    }
  }
  Ref list() const {
    Ref made(sure(PyList_New(0)));
    for (PyObject* value : values) append(made.get(), value);
    return made;
  }
};

// Set an attribute of a value of either kind.
void put_in(PyObject* value, PyObject* Value::* member, PyObject* name, PyObject* held) {
  if (Py_TYPE(value) != &value_type) return sure(PyObject_SetAttr(value, name, held));
  const Ref before(std::exchange(reinterpret_cast<Value*>(value)->*member, Ref::to(held).release()));
}

// Forget the place that the value had in the trace that was run.
void release(PyObject* value) {
  put_in(value, &Value::slot, name_slot, Py_None);
  put_in(value, &Value::leaf, name_leaf, Py_None);
}

// Give the live values their data.
void settle(const Live& live, PyObject* results) {
  TORCH_CHECK(PyTuple_GET_SIZE(results) == static_cast<Py_ssize_t>(live.values.size()),
              "a plan gives as many results as there are live values");
  for (size_t i = 0; i < live.values.size(); ++i) {
    put_in(live.values[i], &Value::data, name_data,
           PyTuple_GET_ITEM(results, static_cast<Py_ssize_t>(i)));
    release(live.values[i]);
  }
}

bool is_empty(PyObject* sized) { return PyObject_Size(sized) == 0; }

// The plan of the trace's state for these live values. Null leaves the flush to Python: if the plan
// is unknown or unchecked, its kernels count writes for autograd, or results may share a plain
// tensor's memory, which Python has to note.
Ref plan_of(PyObject* trace, PyObject* plans_by, const Live& live) {
  PyObject* state = of_trace.state.in(trace);
  PyObject* plans = of_state.plans.in(state);
  if (plans == nullptr || !PyDict_Check(plans) || of_state.counts_writes.in(state) == Py_True) {
    return Ref();
  }
  const Ref key(sure(PyTuple_Pack(2, live.slots.get(), plans_by)));
  Ref plan = Ref::to(PyDict_GetItemWithError(plans, key.get()));
  if (plan.get() == nullptr && PyErr_Occurred()) throw python_error();
  if (plan.get() == nullptr || Py_TYPE(plan.get()) != plan_class) return Ref();
  const bool is_simple = of_plan.is_checked.in(plan.get()) == Py_True &&
                         (is_empty(of_plan.parts_of_leaves.in(plan.get())) ||
                          is_empty(of_trace.leaf_slots.in(trace)));
  return is_simple ? std::move(plan) : Ref();
}

// Run a plan, which appends its results to `given`; false if it raised.
bool run(PyObject* plan, const Content& content, PyObject* given) {
  // What was recorded outside inference mode, or outside autocast, may be computed inside.
  std::optional<c10::InferenceMode> ordinary;
  if (c10::InferenceMode::is_enabled()) ordinary.emplace(false);
  const c10::impl::ForceDispatchKeyGuard guard(keys_included, keys_excluded);
  const Ref done(PyObject_CallMethodObjArgs(plan, name_run, content.leaves.get(),
                                            content.scalars.get(), given, nullptr));
  return done.get() != nullptr;
}

// Finds the program's line for the log of flushes, as `user_frame.user_line` does.
class UserLine {
 public:
  // "file.py:line" of the innermost frame whose module is the user's; "?" if there is none.
  Ref get() {
    Ref frame = Ref::to(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    for (; frame.get() != nullptr; frame = Ref(reinterpret_cast<PyObject*>(back(frame)))) {
      const Ref globals(PyFrame_GetGlobals(reinterpret_cast<PyFrameObject*>(frame.get())));
      PyObject* module = PyDict_GetItemWithError(globals.get(), name_of_module);
      if (module == nullptr || is_users(module)) return line_of(frame);
    }
    return Ref(sure(PyUnicode_FromString("?")));
  }

 private:
  static PyFrameObject* back(const Ref& frame) {
    return PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.get()));
  }
  static Ref line_of(const Ref& of) {
    auto* frame = reinterpret_cast<PyFrameObject*>(of.get());
    const Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    return Ref(sure(PyUnicode_FromFormat(
        "%U:%d", reinterpret_cast<PyCodeObject*>(code.get())->co_filename,
        PyFrame_GetLineNumber(frame))));
  }
  // Python is asked once for each module.
  bool is_users(PyObject* module) {
    PyObject* known = PyDict_GetItemWithError(known_.get(), module);
    if (known != nullptr) return known == Py_True;
    const Ref answer(sure(PyObject_CallOneArg(is_users_module, module)));
    sure(PyDict_SetItem(known_.get(), module, answer.get()));
    return answer.get() == Py_True;
  }
  Ref known_{sure(PyDict_New())};
};

UserLine* const user_line = new UserLine;  // never deleted: Python may have ended by then

// What Python needs to go on: a `flush._Work`.
struct Work {
  Ref object{sure(PyObject_CallNoArgs(work_class))};

  void put(const char* name, PyObject* value) const {
    sure(PyObject_SetAttrString(object.get(), name, value));
  }
};

// flush_known(trace, plans_by, records_all, thread, cause): run what the trace has recorded, if its plan
// is known, let the trace begin anew at its root, and account for it. Returns None if it did. Else
// `flush` goes on with the `flush._Work` that this returns. It is a new one if nothing has changed. If
// the plan raised an error, it holds that error and the content of the trace.
PyObject* py_flush_known(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *trace, *plans_by, *records_all, *thread, *cause;
  if (!PyArg_ParseTuple(args, "OOOOO", &trace, &plans_by, &records_all, &thread, &cause)) {
    return nullptr;
  }
  const Ref state = Ref::to(of_trace.state.in(trace)), noted = Ref::to(of_trace.noted.in(trace));
  const Ref values = Ref::to(of_trace.values.in(trace));
  const bool ends_region = of_trace.begun.in(trace) == state.get();
  Content content;
  const Ref given(sure(PyList_New(0)));
  const Live live(values.get());
  const Ref plan = plan_of(trace, plans_by, live);
  if (plan.get() == nullptr) return Work().object.release();
  const Ref hits(sure(PyTuple_Pack(2, noted.get(), state.get())));
  const Ref where = user_line->get();
  const double began = seconds_now();
  const Ref began_s(sure(PyFloat_FromDouble(began)));
  // All objects that are needed are made by now. Making one may have started a garbage collection,
  // whose finalizers may have run ops: then the plan found is not that of the trace any more.
  if (of_trace.values.in(trace) != values.get() || of_trace.state.in(trace) != state.get()) {
    return Work().object.release();
  }
  content.swap_with(trace);
  restart(trace);
  if (noted.get() != state.get()) append(of_trace.unnoted_hits.in(trace), hits.get());
  for (Ref* freed : {&content.kept, &content.copies}) *freed = Ref();  // the plan may want memory
  const bool has_run = run(plan.get(), content, given.get());
  if (!has_run || PyList_GET_SIZE(given.get()) != 1) {
    if (has_run) PyErr_SetString(PyExc_RuntimeError, "a plan gives its results once");
    PyObject *type, *error, *place;
    PyErr_Fetch(&type, &error, &place);
    PyErr_NormalizeException(&type, &error, &place);
    const Ref types(type), raised(error), traceback(place);
    if (place != nullptr) PyException_SetTraceback(error, place);
    const Ref pending(sure(PyObject_CallFunctionObjArgs(
        pending_class, state.get(), noted.get(), values.get(), content.leaf_values.get(),
        content.leaves.get(), content.leaf_slots.get(), content.scalars.get(), nullptr)));
    Work work;
    work.put("error", raised.get());
    work.put("state", state.get());
    work.put("pending", pending.get());
    work.put("alive", live.list().get());
    work.put("ran", plan.get());
    work.put("given", given.get());
    work.put("ends_region", ends_region ? Py_True : Py_False);
    for (const char* begin : {"began_s", "planned_s"}) work.put(begin, began_s.get());
    return work.object.release();
  }
  settle(live, PyList_GET_ITEM(given.get(), 0));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(content.leaf_values.get()); ++i) {
    release(PyList_GET_ITEM(content.leaf_values.get(), i));
  }
  note_flush({trace, state.get(), plan.get(), thread, cause, where.get(), began, ends_region,
              records_all == Py_False});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace hits
