// The extension module `lazy_tensor_hits`, as `dispatch/run/hits.py` loads it: the functions that
// Python calls. It records hits below Python: what `recorder.py` does for a call that the trie
// knows, on the same objects (trace, states, values), in a kernel for the dispatch key "Python". A
// call that the trie doesn't know goes on to `__torch_dispatch__`, and is learnt from there.
//
// In the order of a hit: `kernel.h` gets the call, `call.h` builds its key (`keys.h`) and lets
// tensors in, `trie.h` has the step that follows, `results.h` takes it and makes tensors
// (`tensors.h`). After a call that Python handled comes `learning.h`.
//
// - While nothing is recorded: `below.h` runs calls, `at_once.h` those on sharded tensors, `past.h`
//   knows which sequences of them repeat, `rests.h` counts blocks that are bypassed.
// - `flush.h` runs what was recorded. `accounts.h` adds up how often, and how long it took.
// - `routes.h` has composite ops that torch would take apart otherwise than in eager.
// - `sharded.h` makes sharded tensors of local ones, and the reverse.
// - For `replay`, which records nothing: `arguments.h` reads arguments, `watch.h` checks what else
//   a call sees, `captured.h` runs it, and `joined.h` joins a module's results to autograd.
//
// All of this runs with the GIL held, but for four: `Kernel::run_cold` runs calls on plain tensors
// without it, and `Computed::run`, `run_local` and `Kernel::decompose` release it while torch's code
// runs.

#include "arguments.h"
#include "captured.h"
#include "joined.h"
#include "rests.h"

namespace hits {

// learn(trace, function, state): see `learn`.
PyObject* py_learn(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *trace, *function, *state;
  if (!PyArg_ParseTuple(args, "OOO", &trace, &function, &state)) return nullptr;
  learn(trace, function, state);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// call_under_way(): the number of the innermost call in Python, for the past; 0 if it has none.
PyObject* py_call_under_way(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(frames.empty() ? 0 : frames.back().number);
}

// wake_up(): see ops of this thread again, if its mode is asleep. Whether they are seen now.
PyObject* py_wake_up(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(wake_up());
  END_HANDLE_TH_ERRORS
}

// sees_all(): see `sees_all`.
PyObject* py_sees_all(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(sees_all());
  END_HANDLE_TH_ERRORS
}

// pass_read(tensor): whether Python need not look at a read of the tensor's value. It need not if
// the read ends no region; nor while this thread is asleep, but for one read in each round.
PyObject* py_pass_read(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (!ends_region(THPVariable_Unpack(tensor))) Py_RETURN_TRUE;
  const bool is_asleep = cold_here != nullptr && *cold_here == ASLEEP;
  return PyBool_FromLong(is_asleep && passed_reads.add());
  END_HANDLE_TH_ERRORS
}

// passed_reads(): how many reads Python did not look at since this was asked last.
PyObject* py_passed_reads(PyObject*, PyObject*) { return PyLong_FromLongLong(passed_reads.take()); }

// see_next_read(): have Python look at the next read of this thread, if it is asleep.
PyObject* py_see_next_read(PyObject*, PyObject*) {
  passed_reads.see_next();
  Py_RETURN_NONE;
}

// end_passing(): have ops come to all lazy tensors again.
PyObject* py_end_passing(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  passed_by.end();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// listen(namespace): register a `Kernel` for each op of it, for as long as the process lives. torch
// reads its tables of kernels without a lock, so no other thread may be recording
// (`hits.start_if_compiled`).
//
// The key "PythonTLSSnapshot" comes before "Python": torch's kernel for it notes the thread's keys
// for handlers in Python, and packs the arguments once more, which takes a tenth of a hit, and twice
// that of a composite op. These ops pass it by; `to_python` does the same for calls that need it.
PyObject* py_listen(PyObject*, PyObject* name) {
  HANDLE_TH_ERRORS
  const std::string space = PyUnicode_AsUTF8(name);
  auto* library =
      new torch::Library(torch::Library::IMPL, space, DispatchKey::Python, __FILE__, __LINE__);
  auto* passed_by = new torch::Library(torch::Library::IMPL, space, DispatchKey::PythonTLSSnapshot,
                                       __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op_name : dispatcher.getAllOpNames()) {
    if (op_name.getNamespace() != space) continue;
    const auto op = dispatcher.findSchema(op_name);
    if (!op.has_value() || op->hasKernelForDispatchKey(DispatchKey::Python)) continue;
    std::string local = op_name.name.substr(space.size() + 2);
    if (!op_name.overload_name.empty()) local += "." + op_name.overload_name;
    library->impl(local.c_str(),
                  torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(*op)));
    if (!op->hasKernelForDispatchKey(DispatchKey::PythonTLSSnapshot)) {
      passed_by->impl(local.c_str(), torch::CppFunction::makeFallthrough());
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// take_routes(): register the kernels of `routes.h`, for as long as the process lives. Python has
// taken its own for the same ops away by then.
PyObject* py_take_routes(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PythonTLSSnapshot,
                                     __FILE__, __LINE__);
  for (const bool is_out : {false, true}) {
    library->impl(is_out ? "matmul.out" : "matmul",
                  torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Matmul>(is_out)));
  }
  library->impl("one_hot", torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OneHot>()));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

#define OBJECT(name) {&name, #name}
#define CLASS(name) {reinterpret_cast<PyObject**>(&name), #name}

// install(needed): set the globals of this library to the objects that the dict `needed` has under
// their names, for as long as the process lives, and find the offsets of slots.
PyObject* py_install(PyObject*, PyObject* needed) {
  HANDLE_TH_ERRORS
  const auto get = [=](const char* name) { return sure(PyMapping_GetItemString(needed, name)); };
  const std::pair<PyObject**, const char*> objects[] = {
      CLASS(tensor_class), CLASS(mode_class), CLASS(leaf_class), CLASS(plan_class),
      OBJECT(externally_writable), OBJECT(shared), OBJECT(lazy_users), OBJECT(share),
      OBJECT(is_shared), OBJECT(may_pass_by), OBJECT(describe), OBJECT(close_segment),
      OBJECT(at_turn), OBJECT(to_read), OBJECT(current), OBJECT(share_with_parts), OBJECT(snapshot),
      OBJECT(note_writes), OBJECT(work_class), OBJECT(pending_class), OBJECT(is_users_module),
      OBJECT(stats), OBJECT(blank_record), OBJECT(add_tier), OBJECT(recorded), OBJECT(unknown),
      OBJECT(obstacle_class), OBJECT(nothing), OBJECT(any_tensor), OBJECT(atoms),
      OBJECT(own_attributes),
  };
  for (const auto& [object, name] : objects) *object = get(name);
  unsigned long long included, excluded;
  const Ref keys(get("kernel_keys"));
  if (!PyArg_ParseTuple(keys.get(), "KK", &included, &excluded)) return nullptr;
  keys_included = DispatchKeySet::from_raw_repr(included);
  keys_excluded = DispatchKeySet::from_raw_repr(excluded);
  reads_in_round = PyLong_AsLongLong(Ref(get("reads_in_round")).get());
  round_s = PyFloat_AsDouble(Ref(get("round_s")).get());
  says_so_after_s = PyFloat_AsDouble(Ref(get("says_so_after_s")).get());
  PyObject* record = reinterpret_cast<PyObject*>(Py_TYPE(blank_record));
  const Ref slots(sure(PyObject_GetAttrString(record, "__slots__")));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots.get()); ++i) {
    slots_of_record.emplace_back().find(record, PyUnicode_AsUTF8(PyTuple_GET_ITEM(slots.get(), i)));
  }
  FIND_SLOTS(of_trace, Ref(get("trace_class")).get());
  FIND_SLOTS(of_state, Ref(get("state_class")).get());
  FIND_SLOTS(of_plan, reinterpret_cast<PyObject*>(plan_class));
  FIND_SLOTS(of_slot, Ref(get("slot_class")).get());
  FIND_SLOTS(of_policy, Ref(get("policy_class")).get());
  FIND_SLOTS(of_stats, reinterpret_cast<PyObject*>(Py_TYPE(stats)));
  FIND_SLOTS(of_record, record);
  visit_values_of<&of_lazy>(tensor_class);
  PyObject* cls = reinterpret_cast<PyObject*>(tensor_class);
  const Ref descriptor(sure(PyDescr_NewGetSet(tensor_class, &value_of_tensor)));
  sure(PyObject_SetAttrString(cls, "_value", descriptor.get()));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// use_sharded(cls, layout_class): name the class of sharded tensors, and that of their layouts.
PyObject* py_use_sharded(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *cls, *layout;
  if (!PyArg_ParseTuple(args, "OO", &cls, &layout)) return nullptr;
  FIND_SLOTS(of_layout, layout);
  const Ref descriptor(
      sure(PyDescr_NewGetSet(reinterpret_cast<PyTypeObject*>(cls), &layout_of_tensor)));
  sure(PyObject_SetAttrString(cls, "_layout", descriptor.get()));
  sharded_class = reinterpret_cast<PyTypeObject*>(Ref::to(cls).release());
  visit_values_of<&of_sharded>(sharded_class);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// concrete(data): a lazy tensor that has its value.
PyObject* py_concrete(PyObject*, PyObject* data) {
  HANDLE_TH_ERRORS
  return object_of(lazy_with(THPVariable_Unpack(data))).release();
  END_HANDLE_TH_ERRORS
}

// lazy_on(value, meta, like): a lazy tensor on a value; see `tensor_types.new_tensor`.
PyObject* py_lazy_on(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *value, *meta, *like;
  if (!PyArg_ParseTuple(args, "OOO", &value, &meta, &like)) return nullptr;
  const Inference same(like == Py_None ? c10::InferenceMode::is_enabled()
                                       : THPVariable_Unpack(like).is_inference());
  const Output made = output_of(meta, Py_None, nullptr);
  return object_of(lazy(made, made.offset, value)).release();
  END_HANDLE_TH_ERRORS
}

// detached(tensor): `tensor.detach()` for the mode's handler, of an ordinary tensor while the trace is
// cold; None if Python has to handle the call. Autograd detaches each result that it saves.
PyObject* py_detached(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (cold_here == nullptr || (*cold_here != 1 && *cold_here != BYPASSED_TURNS) ||
      c10::impl::TorchDispatchModeTLS::stack_len() != 0 || has_python(tensor)) {
    Py_RETURN_NONE;
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(PYTHON_TOO);
  return THPVariable_Wrap(tensor.detach());
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"lazy_on", py_lazy_on, METH_VARARGS, nullptr},
    {"concrete", py_concrete, METH_O, nullptr},
    {"detached", py_detached, METH_O, nullptr},
    {"use_sharded", py_use_sharded, METH_VARARGS, nullptr},
    {"sharded", py_sharded, METH_VARARGS, nullptr},
    {"learn_at_once", py_learn_at_once, METH_VARARGS, nullptr},
    {"forget_at_once", py_forget_at_once, METH_NOARGS, nullptr},
    {"joined", py_joined, METH_VARARGS, nullptr},
    {"local", py_local, METH_O, nullptr},
    {"linked", py_linked, METH_VARARGS, nullptr},
    {"linked_all", py_linked_all, METH_VARARGS, nullptr},
    {"install", py_install, METH_O, nullptr},
    {"listen", py_listen, METH_O, nullptr},
    {"take_routes", py_take_routes, METH_NOARGS, nullptr},
    {"learn", py_learn, METH_VARARGS, nullptr},
    {"flush_known", py_flush_known, METH_VARARGS, nullptr},
    {"end_region_of_hits",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_end_region_of_hits)),
     METH_FASTCALL, nullptr},
    {"read_arguments", py_read_arguments, METH_VARARGS, nullptr},
    {"read_argument", py_read_argument, METH_VARARGS, nullptr},
    {"first_change", py_first_change, METH_VARARGS, nullptr},
    {"leaf_words", py_leaf_words, METH_O, nullptr},
    {"argument_words", py_argument_words, METH_VARARGS, nullptr},
    {"are_equal", py_are_equal, METH_VARARGS, nullptr},
    {"call_environment", py_call_environment, METH_NOARGS, nullptr},
    {"call_under_way", py_call_under_way, METH_NOARGS, nullptr},
    {"wake_up", py_wake_up, METH_NOARGS, nullptr},
    {"sees_all", py_sees_all, METH_NOARGS, nullptr},
    {"pass_read", py_pass_read, METH_O, nullptr},
    {"passed_reads", py_passed_reads, METH_NOARGS, nullptr},
    {"see_next_read", py_see_next_read, METH_NOARGS, nullptr},
    {"end_passing", py_end_passing, METH_NOARGS, nullptr},
    {"grant_rests", py_grant_rests, METH_VARARGS, nullptr},
    {"begin_rest", py_begin_rest, METH_O, nullptr},
    {"end_rest", py_end_rest, METH_NOARGS, nullptr},
    {"rested", py_rested, METH_NOARGS, nullptr},
    {"end_rests", py_end_rests, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "lazy_tensor_hits", nullptr, -1, methods};

}  // namespace hits

PyMODINIT_FUNC PyInit_lazy_tensor_hits() {
  using namespace hits;
  edges_type.tp_name = "lazy_tensor.dispatch.run.hits.Edges";
  edges_type.tp_basicsize = sizeof(Edges);
  edges_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  edges_type.tp_traverse = visit_edges;
  edges_type.tp_clear = clear_edges;
  edges_type.tp_dealloc = delete_edges;
  value_type.tp_name = "lazy_tensor.dispatch.run.hits.Value";
  value_type.tp_basicsize = sizeof(Value);
  value_type.tp_flags = Py_TPFLAGS_DEFAULT;
  value_type.tp_getset = value_members;
  value_type.tp_dealloc = delete_value;
  past_type.tp_name = "lazy_tensor.dispatch.run.hits.Past";
  past_type.tp_basicsize = sizeof(PastObject);
  past_type.tp_flags = Py_TPFLAGS_DEFAULT;
  past_type.tp_methods = past_methods;
  past_type.tp_new = new_past;
  past_type.tp_dealloc = delete_past;
  captured_type.tp_name = "lazy_tensor.dispatch.run.hits.CapturedCall";
  captured_type.tp_basicsize = sizeof(CapturedObject);
  captured_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  captured_type.tp_methods = captured_methods;
  captured_type.tp_new = new_captured;
  captured_type.tp_traverse = visit_captured;
  captured_type.tp_clear = clear_captured;
  captured_type.tp_dealloc = delete_captured;
  for (PyTypeObject* type : {&edges_type, &value_type, &past_type, &captured_type}) {
    if (PyType_Ready(type) < 0) return nullptr;
  }
  PyObject* made = PyModule_Create(&module);
  if (made != nullptr) {
    PyModule_AddObjectRef(made, "Past", reinterpret_cast<PyObject*>(&past_type));
    PyModule_AddObjectRef(made, "CapturedCall", reinterpret_cast<PyObject*>(&captured_type));
  }
  return made;
}