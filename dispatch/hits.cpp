// Recording a hit below Python: what `record.py` does for a call that the trie knows, on the same
// objects (trace, states, values), in a kernel for the dispatch key "Python". Whatever it does not
// know goes on to `__torch_dispatch__` as it would without this file, and is learnt from there.
//
// A call's key here is a row of words: the op, then each argument of the schema, defaults included,
// with its type; tensors by slot. So it says no less than the key that `keys.py` builds. A state's
// `edges` map such keys to the states that follow.
//
// Everything runs with the GIL held.

#include <Python.h>
#include <structmember.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// ---- Python objects ----

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

 private:
  PyObject*& place(PyObject* owner) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(owner) + offset_);
  }
  Py_ssize_t offset_ = 0;
};

struct {
  Member state, values, leaves, leaf_values, leaf_slots, leaf_offsets, storages, scalars, budget,
      claimed, is_outdated, busy, ran, slots;
} of_trace;
struct {
  Member edges, generic, key, kind, meta, slot, parent, step, rebase, closes, n_slots, n_scalars;
} of_state;
struct {
  Member index, trace;
} of_slot;
Member cold_of_budget;

PyTypeObject *tensor_class, *mode_class, *leaf_class;
PyObject *exposed, *shared, *describe, *close_segment;
PyObject *name_value, *name_slot, *name_data;

enum Kind { ONE, SELF, MANY, ALIAS, NOTHING, MARKED, SLOW = 16 };  // as in trace.py

// The trace that this thread records into.
thread_local PyObject* trace_here = nullptr;

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// Whether calls come to `record`; `in_mode` says by which way.
bool is_ours(bool& in_mode) {
  const auto n_modes = c10::impl::TorchDispatchModeTLS::stack_len();
  if (n_modes == 0) return true;  // the tensors are looked at later
  const auto& mode = c10::impl::TorchDispatchModeTLS::get_stack_at(n_modes - 1);
  in_mode = Py_TYPE(mode->ptr(c10::impl::getGlobalPyInterpreter())) == mode_class;
  return in_mode;
}

// ---- Lazy tensors and their values ----

Ref object_of(const at::Tensor& tensor) { return Ref(sure(THPVariable_Wrap(tensor))); }

// As `trace.Value`, which Python makes, but unknown to garbage collections: a long trace would set
// them off. What it holds they see as the tensor's that owns it.
struct Value {
  PyObject_HEAD
  PyObject *slot, *leaf, *data, *failure;
};

void delete_value(PyObject* self) {
  auto* value = reinterpret_cast<Value*>(self);
  Py_CLEAR(value->slot);
  Py_CLEAR(value->leaf);
  Py_CLEAR(value->data);
  Py_CLEAR(value->failure);
  PyObject_Free(self);
}

template <PyObject* Value::*member>
PyObject* get_member(PyObject* self, void*) {
  PyObject* held = reinterpret_cast<Value*>(self)->*member;
  return Ref::to(held == nullptr ? Py_None : held).release();
}

template <PyObject* Value::*member>
int set_member(PyObject* self, PyObject* held, void*) {
  const Ref before(std::exchange(reinterpret_cast<Value*>(self)->*member, Ref::to(held).release()));
  return 0;
}

PyGetSetDef value_members[] = {
    {"slot", get_member<&Value::slot>, set_member<&Value::slot>, nullptr, nullptr},
    {"leaf", get_member<&Value::leaf>, set_member<&Value::leaf>, nullptr, nullptr},
    {"data", get_member<&Value::data>, set_member<&Value::data>, nullptr, nullptr},
    {"failure", get_member<&Value::failure>, set_member<&Value::failure>, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyTypeObject value_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

Ref new_value() {
  auto* made = PyObject_New(Value, &value_type);
  sure(reinterpret_cast<PyObject*>(made));
  made->slot = made->leaf = made->data = made->failure = nullptr;
  return Ref(reinterpret_cast<PyObject*>(made));
}

Ref in_value(PyObject* value, PyObject* Value::*member, PyObject* name) {
  if (Py_TYPE(value) != &value_type) return Ref(sure(PyObject_GetAttr(value, name)));
  PyObject* held = reinterpret_cast<Value*>(value)->*member;
  return Ref::to(held == nullptr ? Py_None : held);
}

Ref slot_in(PyObject* value) { return in_value(value, &Value::slot, name_slot); }
Ref data_in(PyObject* value) { return in_value(value, &Value::data, name_data); }

// A lazy tensor that was made here: it has its value with it, where Python's has it among its
// attributes. And autograd detaches what it saved by a method, not by an op that a kernel could take.
class LazyImpl : public c10::TensorImpl {
 public:
  using TensorImpl::TensorImpl;
  PyObject* value = nullptr;

  ~LazyImpl() override { release_value(); }
  void release_resources() override {
    release_value();
    TensorImpl::release_resources();
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version, bool allows_change) const override {
    return detached(version, allows_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version, bool allows_change) const override {
    return detached(version, allows_change);
  }

 private:
  void release_value() {
    if (value != nullptr && Py_IsInitialized()) {
      const WithGil gil;
      Py_CLEAR(value);
    }
  }
  c10::intrusive_ptr<TensorImpl> detached(const c10::VariableVersion& version, bool allows_change) const {
    bool in_mode = false;
    if (value == nullptr || c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python) || !is_ours(in_mode)) {
      return TensorImpl::shallow_copy_and_detach(version, allows_change);
    }
    const WithGil gil;
    auto made = c10::make_intrusive<LazyImpl>(c10::Storage(storage_), key_set_, data_type_);
    copy_tensor_metadata(this, made.get(), version, allows_change);
    made->set_python_dispatch(true);
    made->value = Ref::to(value).release();
    const Ref object(sure(THPVariable_Wrap(at::Tensor(made), tensor_class)));
    return made;
  }
};

LazyImpl* made_here(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return typeid(*impl) == typeid(LazyImpl) ? static_cast<LazyImpl*>(impl) : nullptr;
}

// The value of a tensor if it is a lazy one; else none. `object` becomes the tensor's Python object
// where that had to be looked at.
Ref value_of(const at::Tensor& tensor, Ref& object) {
  const LazyImpl* impl = made_here(tensor);
  if (impl != nullptr && impl->value != nullptr) return Ref::to(impl->value);
  object = object_of(tensor);
  if (Py_TYPE(object.get()) != tensor_class) return Ref();
  return Ref(sure(PyObject_GetAttr(object.get(), name_value)));
}

// `LazyTensor._value`
PyObject* get_value(PyObject* self, void*) {
  if (const LazyImpl* impl = made_here(THPVariable_Unpack(self)); impl != nullptr && impl->value != nullptr) {
    return Ref::to(impl->value).release();
  }
  const Ref attributes(PyObject_GenericGetDict(self, nullptr));
  if (attributes.get() == nullptr) return nullptr;
  PyObject* found = PyDict_GetItemWithError(attributes.get(), name_value);
  if (found == nullptr && !PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, name_value);
  return Ref::to(found).release();
}

int set_value(PyObject* self, PyObject* value, void*) {
  if (LazyImpl* impl = made_here(THPVariable_Unpack(self))) {
    const Ref before(std::exchange(impl->value, Ref::to(value).release()));
    return 0;
  }
  const Ref attributes(PyObject_GenericGetDict(self, nullptr));
  if (attributes.get() == nullptr) return -1;
  return value == nullptr ? PyDict_DelItem(attributes.get(), name_value)
                          : PyDict_SetItem(attributes.get(), name_value, value);
}

PyGetSetDef value_of_tensor = {"_value", get_value, set_value, nullptr, nullptr};

// What garbage collections see of a lazy tensor: what Python knows of it, and its value.
traverseproc visit_attributes;

int visit_tensor(PyObject* self, visitproc visit, void* arg) {
  const at::Tensor& tensor = THPVariable_Unpack(self);
  if (tensor.defined() && tensor.use_count() == 1) {
    const LazyImpl* impl = made_here(tensor);
    PyObject* value = impl == nullptr ? nullptr : impl->value;
    if (value != nullptr && Py_TYPE(value) != &value_type) {
      Py_VISIT(value);
    } else if (value != nullptr && Py_REFCNT(value) == 1) {
      Py_VISIT(reinterpret_cast<Value*>(value)->data);
      Py_VISIT(reinterpret_cast<Value*>(value)->failure);
    }
  }
  tensor_class->tp_traverse = visit_attributes;  // it looks for the first base that has another
  const int status = visit_attributes(self, visit, arg);
  tensor_class->tp_traverse = visit_tensor;
  return status;
}

// ---- Keys ----

using Words = c10::SmallVector<uint64_t, 48>;

enum class Tag : uint64_t {
  NONE = 1, INT, DOUBLE, BOOL, COMPLEX, STRING, DEVICE, TENSOR, LIST, LEAF,
  INT_AT_RUN_TIME, DOUBLE_AT_RUN_TIME, COMPLEX_AT_RUN_TIME,
};  // clang-format skip

void put(Words& words, Tag tag, uint64_t more = 0) {
  words.push_back(static_cast<uint64_t>(tag) << 56 | more);
}

uint64_t bits(double number) {
  uint64_t word;
  std::memcpy(&word, &number, sizeof word);
  return word;
}

uint64_t hash_of(const uint64_t* words, size_t n) {
  uint64_t hash = n;
  for (size_t i = 0; i < n; ++i) {
    hash = (hash ^ words[i]) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

// The words of `value` if it is no tensor and holds none; false if keys can't have it.
bool put_static(Words& words, const IValue& value) {
  if (value.isNone()) {
    put(words, Tag::NONE);
  } else if (value.isInt()) {
    put(words, Tag::INT);
    words.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    put(words, Tag::BOOL, value.toBool());
  } else if (value.isDouble()) {
    put(words, Tag::DOUBLE);
    words.push_back(bits(value.toDouble()));
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    put(words, Tag::COMPLEX);
    words.push_back(bits(number.real()));
    words.push_back(bits(number.imag()));
  } else if (value.isDevice()) {
    const auto device = value.toDevice();
    put(words, Tag::DEVICE);
    words.push_back(static_cast<uint64_t>(device.type()) << 8 | static_cast<uint8_t>(device.index()));
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    put(words, Tag::STRING, text.size());
    for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
      words.push_back(word);
    }
  } else {
    return false;
  }
  return true;
}

// ---- What is known of an op, and of a state ----

struct OpInfo {
  explicit OpInfo(const c10::FunctionSchema& schema) : schema(schema) {
    for (const auto& argument : schema.arguments()) {
      const auto& written = argument.default_value();
      Words words;
      const bool known = written.has_value() && put_static(words, *written);
      defaults.push_back(known ? std::optional<Words>(std::move(words)) : std::nullopt);
      n_positional += !argument.kwarg_only();
    }
    is_number.resize(schema.arguments().size());
    is_note = schema.operator_name().getNamespace() == "profiler";
  }
  const c10::FunctionSchema& schema;
  std::vector<std::optional<Words>> defaults;
  std::vector<bool> is_number;  // arguments whose numbers may become run-time inputs
  size_t n_positional = 0;
  bool is_note = false;       // a mark in a profile, which no value has to do with
  bool is_described = false;  // what follows is known
  bool is_recorded = false;  // it was recorded before: its tensors may enter traces
  bool is_alias = false;     // it gives another handle on its argument's value
  bool is_composite = false; // it has an implementation in terms of other ops
  bool needs_care = false;   // it can't simply run below dispatch (see rules.needs_care)
  bool reshapes = false;     // it may change the size of an argument
  bool writes_list = false;  // it writes the tensors of its first argument, which nobody counts
  Ref function;              // the OpOverload; null if Python wants to see all its calls
};

struct Output {
  bool is_defined = false;
  c10::SmallVector<int64_t, 6> size, stride;
  int64_t offset = 0;
  size_t n_bytes = 0;
  DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::Device device = c10::kCPU;
  Ref slot;
};

// One step of the trie, ready to be taken.
struct Step {
  std::vector<uint64_t> words;
  Ref state;
  int kind = 0;
  bool closes = false;
  std::vector<Output> outputs;
  std::optional<std::pair<int64_t, int64_t>> rebase;  // a leaf, and the offset that was recorded
  Ref slot;  // of a leaf
};

struct Children {
  std::unordered_multimap<uint64_t, std::unique_ptr<Step>> steps;

  const Step* find(const Words& words) const {
    if (steps.empty()) return nullptr;
    const auto [first, last] = steps.equal_range(hash_of(words.data(), words.size()));
    for (auto it = first; it != last; ++it) {
      const auto& known = it->second->words;
      if (known.size() == words.size() &&
          std::memcmp(known.data(), words.data(), known.size() * sizeof(uint64_t)) == 0) {
        return it->second.get();
      }
    }
    return nullptr;
  }
  void add(const Words& words, std::unique_ptr<Step> step) {
    step->words.assign(words.begin(), words.end());
    steps.emplace(hash_of(words.data(), words.size()), std::move(step));
  }
};

// What `State.edges` holds: the calls that followed, by their exact words, by words without the
// numbers that are run-time inputs, and leaves by their metadata.
struct Edges {
  PyObject_HEAD
  Children exact, generic;
};

int visit_edges(PyObject* self, visitproc visit, void* arg) {
  auto* edges = reinterpret_cast<Edges*>(self);
  for (auto* children : {&edges->exact, &edges->generic}) {
    for (auto& [_, step] : children->steps) Py_VISIT(step->state.get());
  }
  return 0;
}

int clear_edges(PyObject* self) {
  auto* edges = reinterpret_cast<Edges*>(self);
  auto exact = std::move(edges->exact.steps);
  auto generic = std::move(edges->generic.steps);
  edges->exact.steps.clear();
  edges->generic.steps.clear();
  return 0;
}

void delete_edges(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_edges(self);
  auto* edges = reinterpret_cast<Edges*>(self);
  edges->exact.~Children();
  edges->generic.~Children();
  PyObject_GC_Del(self);
}

PyTypeObject edges_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

Edges* edges_of(PyObject* state) {
  PyObject* found = of_state.edges.in(state);
  return found == nullptr || found == Py_None ? nullptr : reinterpret_cast<Edges*>(found);
}

Edges* make_edges(PyObject* state) {
  if (Edges* known = edges_of(state)) return known;
  auto* made = PyObject_GC_New(Edges, &edges_type);
  sure(reinterpret_cast<PyObject*>(made));
  new (&made->exact) Children();
  new (&made->generic) Children();
  PyObject_GC_Track(made);
  of_state.edges.set(state, reinterpret_cast<PyObject*>(made));
  Py_DECREF(made);
  return made;
}

// ---- One call ----

// A tensor among a call's arguments that the trace does not hold yet.
struct Newcomer {
  const at::Tensor* tensor;  // its data
  Ref object;                // the Python object of `tensor`
  Ref value;                 // of a lazy tensor
  size_t place;              // of its word in the key
};

int64_t index_of(PyObject* slot) { return PyLong_AsLongLong(of_slot.index.in(slot)); }

class Call {
 public:
  Call(const OpInfo& info, PyObject* trace, bool in_mode) : info_(info), trace_(trace), in_mode_(in_mode) {}

  // Build the key; false if something in it is not for here.
  bool read(const IValue* arguments, bool lets_in) {
    words_.clear();
    words_.push_back(reinterpret_cast<uint64_t>(&info_));
    lets_in_ = lets_in;
    const size_t n = info_.schema.arguments().size();
    for (size_t i = 0; i < n; ++i) {
      if (!put_argument(arguments[i])) return false;
    }
    return true;
  }

  // The same key with the numbers that the call spells out replaced by their types.
  Words without_numbers(const IValue* arguments, std::vector<IValue>& numbers) {
    const size_t n = info_.schema.arguments().size();
    size_t n_given = info_.n_positional;  // torch leaves out trailing defaults
    while (n_given > 0 && is_default(n_given - 1, arguments[n_given - 1])) --n_given;
    Words plain = words_;  // keeps the slots
    Words result;
    size_t at = 0;
    result.push_back(plain[at++]);
    for (size_t i = 0; i < n; ++i) {
      const bool is_given = i < info_.n_positional ? i < n_given : !is_default(i, arguments[i]);
      mask(plain, at, result, info_.is_number[i] && is_given, numbers);
    }
    return result;
  }

  Words& words() { return words_; }
  std::vector<Newcomer>& newcomers() { return newcomers_; }
  bool any_lazy() const { return any_lazy_; }
  bool any_known() const { return any_known_; }

 private:
  bool is_default(size_t i, const IValue& value) const {
    if (!info_.defaults[i].has_value()) return false;
    Words words;
    return put_static(words, value) && words == *info_.defaults[i];
  }

  // Copy one argument's words from `plain`, `at` on, to `result`.
  static void mask(const Words& plain, size_t& at, Words& result, bool hides, std::vector<IValue>& numbers) {
    const auto tag = static_cast<Tag>(plain[at] >> 56);
    const uint64_t more = plain[at] & ((uint64_t{1} << 56) - 1);
    size_t n_payload = 0;
    switch (tag) {
      case Tag::INT: case Tag::DOUBLE: case Tag::DEVICE: n_payload = 1; break;
      case Tag::COMPLEX: n_payload = 2; break;
      case Tag::STRING: n_payload = (more + 7) / 8; break;
      default: break;
    }
    if (hides && (tag == Tag::INT || tag == Tag::DOUBLE || tag == Tag::COMPLEX)) {
      double parts[2];
      std::memcpy(parts, &plain[at + 1], n_payload * sizeof(double));
      if (tag == Tag::INT) {
        put(result, Tag::INT_AT_RUN_TIME);
        numbers.emplace_back(static_cast<int64_t>(plain[at + 1]));
      } else if (tag == Tag::DOUBLE) {
        put(result, Tag::DOUBLE_AT_RUN_TIME);
        numbers.emplace_back(parts[0]);
      } else {
        put(result, Tag::COMPLEX_AT_RUN_TIME);
        numbers.emplace_back(c10::complex<double>(parts[0], parts[1]));
      }
      at += 1 + n_payload;
      return;
    }
    for (size_t i = 0; i <= n_payload; ++i) result.push_back(plain[at++]);
    if (tag == Tag::LIST) {
      for (uint64_t i = 0; i < more; ++i) mask(plain, at, result, hides, numbers);
    }
  }

  bool put_argument(const IValue& value) {
    if (value.isTensor()) return put_tensor(value.toTensor());
    if (value.isIntList()) {
      const auto items = value.toIntVector();
      put(words_, Tag::LIST, items.size());
      for (const int64_t item : items) {
        put(words_, Tag::INT);
        words_.push_back(static_cast<uint64_t>(item));
      }
      return true;
    }
    if (value.isList()) {
      const auto items = value.toListRef();
      put(words_, Tag::LIST, items.size());
      for (const IValue& item : items) {
        if (!put_argument(item)) return false;
      }
      return true;
    }
    return put_static(words_, value);
  }

  bool put_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      put(words_, Tag::NONE);
      return true;
    }
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return put_number(tensor);
    Ref object;
    Ref value = value_of(tensor, object);
    if (value.get() != nullptr) {
      any_lazy_ = true;
      const Ref slot = slot_in(value.get());
      if (slot.get() != Py_None) {
        if (of_slot.trace.in(slot.get()) != trace_) return false;
        put_slot(slot.get());
        return true;
      }
      if (!lets_in_) return false;
      Ref data = data_in(value.get());
      if (data.get() == Py_None) return false;  // it failed
      for (const Newcomer& newcomer : newcomers_) {
        if (newcomer.value.get() == value.get()) return put_again(newcomer);
      }
      const at::Tensor& computed = THPVariable_Unpack(data.get());
      if (is_in(exposed, computed) || is_in(shared, computed)) return false;
      return put_new(computed, std::move(data), std::move(value));
    }
    if (!THPVariable_CheckExact(object.get())) return false;
    Ref id(sure(PyLong_FromVoidPtr(object.get())));
    if (PyObject* slot = PyDict_GetItemWithError(of_trace.leaf_slots.in(trace_), id.get())) {
      put_slot(slot);
      return true;
    }
    if (!lets_in_ || !in_mode_) return false;
    for (const Newcomer& newcomer : newcomers_) {
      if (newcomer.object.get() == object.get()) return put_again(newcomer);
    }
    return put_new(tensor, std::move(object), Ref());
  }

  // A Python number among tensors, which torch hands to Python as the number it was.
  bool put_number(const at::Tensor& tensor) {
    if (!tensor.is_cpu()) return false;
    switch (tensor.scalar_type()) {
      case c10::kLong: return put_static(words_, *tensor.const_data_ptr<int64_t>());
      case c10::kDouble: return put_static(words_, *tensor.const_data_ptr<double>());
      case c10::kBool: return put_static(words_, *tensor.const_data_ptr<bool>());
      case c10::kComplexDouble: return put_static(words_, *tensor.const_data_ptr<c10::complex<double>>());
      default: return false;
    }
  }

  void put_slot(PyObject* slot) {
    any_known_ = true;
    put(words_, Tag::TENSOR, index_of(slot));
  }

  bool put_new(const at::Tensor& tensor, Ref object, Ref value) {
    if (tensor.layout() != c10::kStrided || tensor.is_nested() || tensor._is_zerotensor() ||
        tensor.is_neg() || tensor.is_conj() || tensor.is_quantized() || !tensor.has_storage()) {
      return false;
    }
    // only torch may write the memory of what is not a parameter
    if (in_mode_ && Py_TYPE(object.get()) != reinterpret_cast<PyTypeObject*>(ParameterClass) &&
        !tensor.storage().resizable()) {
      return false;
    }
    const size_t place = words_.size();
    put(words_, Tag::TENSOR);
    newcomers_.push_back({&tensor, std::move(object), std::move(value), place});
    return true;
  }

  // A tensor that came in the same call before: its slot is not known yet, so it is named later.
  bool put_again(const Newcomer& first) {
    repeats_.push_back({words_.size(), first.place});
    put(words_, Tag::TENSOR);
    return true;
  }

  static bool is_in(PyObject* storages, const at::Tensor& tensor) {
    if (PySet_GET_SIZE(storages) == 0) return false;
    Ref id(sure(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl())));
    const int found = PySet_Contains(storages, id.get());
    sure(found);
    return found == 1;
  }

  const OpInfo& info_;
  PyObject* trace_;
  bool in_mode_, lets_in_ = false;
  bool any_lazy_ = false, any_known_ = false;
  Words words_;
  std::vector<Newcomer> newcomers_;

 public:
  std::vector<std::pair<size_t, size_t>> repeats_;
};

void put_leaf(Words& words, c10::IntArrayRef size, c10::IntArrayRef stride, bool has_offset,
              c10::ScalarType dtype, c10::Device device, int64_t shares) {
  put(words, Tag::LEAF, size.size() << 1 | has_offset);
  for (const int64_t n : size) words.push_back(static_cast<uint64_t>(n));
  for (const int64_t n : stride) words.push_back(static_cast<uint64_t>(n));
  words.push_back(static_cast<uint64_t>(dtype) << 32 | static_cast<uint64_t>(device.type()) << 16 |
                  static_cast<uint16_t>(device.index()));
  words.push_back(static_cast<uint64_t>(shares));
}

// Let a tensor in where the same one followed before; false if none did.
bool enter(PyObject* trace, Newcomer& newcomer) {
  const at::Tensor& tensor = *newcomer.tensor;
  Edges* edges = edges_of(of_trace.state.in(trace));
  if (edges == nullptr) return false;
  Ref storage(sure(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl())));
  PyObject* storages = of_trace.storages.in(trace);
  PyObject* sharer = PyDict_GetItemWithError(storages, storage.get());
  const int64_t offset = tensor.storage_offset();
  Words words;
  put_leaf(words, tensor.sizes(), tensor.strides(), offset != 0, tensor.scalar_type(),
           tensor.device(), sharer == nullptr ? -1 : PyLong_AsLongLong(sharer));
  const Step* step = edges->exact.find(words);
  if (step == nullptr) return false;
  PyObject* slot = step->slot.get();
  PyObject* index = of_slot.index.in(slot);
  if (sharer == nullptr) sure(PyDict_SetItem(storages, storage.get(), index));
  if (offset != 0) {
    Ref number(sure(PyLong_FromLongLong(offset)));
    sure(PyDict_SetItem(of_trace.leaf_offsets.in(trace), index, number.get()));
  }
  if (newcomer.value.get() != nullptr) {
    sure(PyObject_SetAttr(newcomer.value.get(), name_slot, slot));
    sure(PyList_Append(of_trace.leaf_values.in(trace), newcomer.value.get()));
  } else {
    Ref id(sure(PyLong_FromVoidPtr(newcomer.object.get())));
    sure(PyDict_SetItem(of_trace.leaf_slots.in(trace), id.get(), slot));
  }
  sure(PyList_Append(of_trace.leaves.in(trace), newcomer.object.get()));
  of_trace.state.set(trace, step->state.get());
  return true;
}

// ---- Results ----

// A lazy tensor on `value`.
at::Tensor lazy(const Output& like, int64_t offset, PyObject* value) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), like.n_bytes, c10::DataPtr(nullptr, like.device),
      c10::GetAllocator(c10::kMeta), /*resizable=*/true);
  auto impl = c10::make_intrusive<LazyImpl>(c10::Storage(std::move(storage)), like.keys, like.dtype);
  impl->set_sizes_and_strides(like.size, like.stride, offset);
  impl->set_python_dispatch(true);
  impl->value = Ref::to(value).release();
  at::Tensor made(std::move(impl));
  const Ref object(sure(THPVariable_Wrap(made, tensor_class)));
  return made;
}

// A new lazy tensor; its value goes to `values`.
at::Tensor fresh(PyObject* trace, const Step& step, const Output& like, std::vector<Ref>& values) {
  Ref value = new_value();
  auto* held = reinterpret_cast<Value*>(value.get());
  held->slot = Ref::to(like.slot.get()).release();
  int64_t offset = like.offset;
  if (step.rebase.has_value()) {
    Ref leaf(sure(PyLong_FromLongLong(step.rebase->first)));
    held->leaf = Ref::to(leaf.get()).release();
    PyObject* now = PyDict_GetItemWithError(of_trace.leaf_offsets.in(trace), leaf.get());
    offset += (now == nullptr ? 0 : PyLong_AsLongLong(now)) - step.rebase->second;
  }
  at::Tensor made = lazy(like, offset, value.get());
  values.push_back(std::move(value));
  return made;
}

class OrdinaryTensors {  // in inference mode too, as `torch_private.new_wrapper`
 public:
  OrdinaryTensors() {
    if (c10::InferenceMode::is_enabled()) guard_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> guard_;
};

// The numbers of a call, as Python's.
void append_numbers(PyObject* trace, const std::vector<IValue>& numbers) {
  PyObject* scalars = of_trace.scalars.in(trace);
  for (const IValue& number : numbers) {
    Ref item;
    if (number.isInt()) {
      item = Ref(sure(PyLong_FromLongLong(number.toInt())));
    } else if (number.isDouble()) {
      item = Ref(sure(PyFloat_FromDouble(number.toDouble())));
    } else {
      const auto pair = number.toComplexDouble();
      item = Ref(sure(PyComplex_FromDoubles(pair.real(), pair.imag())));
    }
    sure(PyList_Append(scalars, item.get()));
  }
}

void replace_arguments(Stack* stack, size_t n, c10::ArrayRef<at::Tensor> results, bool as_list) {
  stack->resize(stack->size() - n);
  if (as_list) {
    stack->emplace_back(std::vector<at::Tensor>(results.begin(), results.end()));
  } else {
    for (const at::Tensor& result : results) stack->emplace_back(result);
  }
}

// Count a write to each of `tensors`, for autograd's check that nothing saved was written.
void count_writes(const IValue& tensors) {
  for (const IValue& item : tensors.toListRef()) {
    const at::Tensor& tensor = item.toTensor();
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

// A lazy tensor on `value`, of the metadata of `tensor`.
at::Tensor another(const at::Tensor& tensor, PyObject* value) {
  const OrdinaryTensors ordinary;
  Output like;
  like.size.assign(tensor.sizes().begin(), tensor.sizes().end());
  like.stride.assign(tensor.strides().begin(), tensor.strides().end());
  like.n_bytes = tensor.storage().nbytes();
  like.keys = DispatchKeySet(tensor.options().computeDispatchKey());
  like.dtype = tensor.dtype();
  like.device = tensor.device();
  at::Tensor made = lazy(like, tensor.storage_offset(), value);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// Take a step: the trace stands behind it, the stack holds what the call gives. False, and nothing
// changed, if the trace moved meanwhile: making objects may collect garbage, whose finalizers may
// call anything.
bool take(PyObject* trace, const OpInfo& info, const Step& step, const std::vector<IValue>& numbers, Stack* stack) {
  const size_t n = info.schema.arguments().size();
  IValue* arguments = stack->data() + (stack->size() - n);
  const Ref state = Ref::to(step.state.get());  // `step` may go with the trie while Python runs
  const int kind = step.kind;
  const bool closes = step.closes;
  c10::SmallVector<at::Tensor, 4> results;
  if (kind == SELF) {
    results.push_back(arguments[0].toTensor());
  } else if (kind == NOTHING) {
    if (info.writes_list) count_writes(arguments[0]);
  } else {
    const OrdinaryTensors ordinary;
    const Ref before = Ref::to(of_trace.state.in(trace));
    std::vector<Ref> values;
    for (const Output& output : step.outputs) {
      results.push_back(output.is_defined ? fresh(trace, step, output, values) : at::Tensor());
    }
    if (of_trace.state.in(trace) != before.get()) return false;
    for (const Ref& value : values) sure(PyList_Append(of_trace.values.in(trace), value.get()));
  }
  append_numbers(trace, numbers);
  of_trace.state.set(trace, state.get());
  replace_arguments(stack, n, results, kind == MANY && info.schema.returns().size() == 1);
  if (closes) Ref(sure(PyObject_CallOneArg(close_segment, trace)));
  return true;
}

// ---- The kernel ----

const DispatchKeySet PYTHON_AND_ABOVE =
    DispatchKeySet(DispatchKeySet::FULL) ^ DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python);
const DispatchKeySet ABOVE_PYTHON = (PYTHON_AND_ABOVE - DispatchKeySet(DispatchKey::Python))
    .remove(DispatchKey::ZeroTensor)
    .remove(DispatchKey::Conjugate)
    .remove(DispatchKey::Negative);

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// The call as if nobody listened.
void run_below(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(
      ABOVE_PYTHON | DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot}));
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python), stack);
}

// The arguments of calls on their way through Python, the innermost last.
struct Frame {
  OpInfo* info;
  std::vector<IValue> arguments;
  bool in_mode;
};
thread_local std::vector<Frame> frames;

// What torch does for this key: `__torch_dispatch__` of the mode, or of the tensors' class.
void to_python(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(ABOVE_PYTHON);
  (*c10::impl::getGlobalPyInterpreter())->dispatch(op, stack);
}

bool is_here(const at::Tensor& tensor, PyObject* trace) {
  PyObject* storages = of_trace.storages.in(trace);
  if (PyDict_GET_SIZE(storages) == 0) return false;
  Ref id(sure(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl())));
  return PyDict_GetItemWithError(storages, id.get()) != nullptr;
}

// A call on computed 0-dim tensors, its arguments without lazy ones.
struct Tiny {
  std::vector<IValue> arguments;
  bool any = false, any_lazy = false;
};

class Kernel : public c10::OperatorKernel {
 public:
  explicit Kernel(const c10::OperatorHandle& op) : info_(op.schema()) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const WithGil gil;
    bool in_mode = false;
    if (!is_ours(in_mode) || !is_described()) return to_python(op, stack);
    PyObject* trace = trace_here;
    if (trace != nullptr) {
      if (of_trace.claimed.in(trace) == Py_True || of_trace.busy.in(trace) == Py_True) {
        return to_python(op, stack);
      }
      if (handle(op, keys, stack, trace, in_mode)) return;
    }
    const long n = static_cast<long>(info_.schema.arguments().size());
    frames.push_back({&info_, {stack->end() - n, stack->end()}, in_mode});
    struct Pop {
      ~Pop() { frames.pop_back(); }
    } pop;
    to_python(op, stack);
  }

  OpInfo info_;

 private:
  // Ask Python about the op, once.
  bool is_described() {
    if (!info_.is_described) {
      const auto& name = info_.schema.operator_name();
      Ref facts(sure(PyObject_CallFunction(describe, "ss", name.name.c_str(), name.overload_name.c_str())));
      info_.is_described = true;
      if (facts.get() == Py_None) return false;
      const auto item = [&facts](Py_ssize_t i) { return PyTuple_GET_ITEM(facts.get(), i); };
      info_.function = Ref::to(item(0));
      info_.is_alias = item(1) == Py_True;
      info_.is_composite = item(2) == Py_True;
      info_.needs_care = item(3) == Py_True;
      info_.reshapes = item(4) == Py_True;
      info_.writes_list = item(5) == Py_True;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(item(6)); ++i) {
        info_.is_number[PyLong_AsSize_t(PyTuple_GET_ITEM(item(6), i))] = true;
      }
    }
    return info_.function.get() != nullptr;
  }

  // Do the call here; false leaves it to Python, the stack as it was.
  bool handle(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack, PyObject* trace, bool in_mode) {
    const size_t n = info_.schema.arguments().size();
    const IValue* arguments = stack->data() + (stack->size() - n);
    PyObject* budget = of_trace.budget.in(trace);
    const long cold = PyLong_AsLong(cold_of_budget.in(budget));
    if (cold != 0) return cold > 1 && in_mode && run_cold(op, keys, stack, trace, cold);
    if (of_trace.is_outdated.in(trace) == Py_True) return false;
    if (info_.is_alias && alias(stack, arguments)) return true;
    if (info_.is_note && in_mode) {
      run_below(op, keys, stack);
      return true;
    }
    if (info_.is_composite && decompose(op, stack, arguments, in_mode)) return true;
    if (!(info_.needs_care && !info_.writes_list) && run_tiny(op, keys, stack, trace, in_mode)) return true;
    if (!info_.is_recorded) return false;
    of_trace.busy.set(trace, Py_True);
    struct Done {
      PyObject* trace;
      ~Done() { of_trace.busy.set(trace, Py_False); }
    } done{trace};
    Call call(info_, trace, in_mode);
    if (!call.read(arguments, true) || !(in_mode || call.any_lazy())) return false;
    auto& newcomers = call.newcomers();
    if (!newcomers.empty()) {
      if (!call.any_known() && all_tiny(newcomers)) return false;
      for (Newcomer& newcomer : newcomers) {
        if (!enter(trace, newcomer)) return false;
        name(call.words(), newcomer, trace);
      }
      for (const auto& [place, first] : call.repeats_) call.words()[place] = call.words()[first];
    }
    Edges* edges = edges_of(of_trace.state.in(trace));
    if (edges == nullptr) return false;
    std::vector<IValue> numbers;
    const Step* step = edges->exact.find(call.words());
    if (step == nullptr && !edges->generic.steps.empty()) {
      step = edges->generic.find(call.without_numbers(arguments, numbers));
    }
    return step != nullptr && take(trace, info_, *step, numbers, stack);
  }

  static void name(Words& words, const Newcomer& newcomer, PyObject* trace) {
    Words word;
    PyObject* state = of_trace.state.in(trace);
    put(word, Tag::TENSOR, PyLong_AsLongLong(of_state.n_slots.in(state)) - 1);
    words[newcomer.place] = word[0];
  }

  static bool all_tiny(const std::vector<Newcomer>& newcomers) {
    for (const Newcomer& newcomer : newcomers) {
      if (newcomer.tensor->dim() != 0 || !newcomer.tensor->is_cpu()) return false;
    }
    return true;
  }

  // Whether `value` holds no tensors but computed 0-dim CPU ones that nothing pending uses. Adds it
  // to `plain`, lazy tensors replaced by their data.
  bool put_tiny(const IValue& value, PyObject* trace, Tiny& tiny) const {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined()) return false;
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        tiny.arguments.push_back(value);
        return true;
      }
      if (!has_python(tensor) && (tensor.dim() != 0 || !tensor.is_cpu())) return false;
      Ref object;
      const Ref held = value_of(tensor, object);
      if (held.get() != nullptr) {
        const Ref data = data_in(held.get());
        if (data.get() == Py_None || slot_in(held.get()).get() != Py_None) return false;
        tiny.arguments.emplace_back(THPVariable_Unpack(data.get()));
        tiny.any_lazy = true;
      } else if (Py_TYPE(object.get()) == reinterpret_cast<PyTypeObject*>(THPVariableClass)) {
        tiny.arguments.push_back(value);
      } else {
        return false;
      }
      tiny.any = true;
      const at::Tensor& computed = tiny.arguments.back().toTensor();
      return computed.dim() == 0 && computed.is_cpu() && computed.layout() == c10::kStrided && !computed.is_quantized() && !computed.is_nested() &&
          !computed._is_zerotensor() && computed.has_storage() && !is_here(computed, trace);
    }
    if (value.isTensorList()) {
      if (!info_.writes_list) return false;
      Tiny items;
      c10::List<at::Tensor> tensors;
      for (const IValue& item : value.toListRef()) {
        if (!put_tiny(item, trace, items)) return false;
      }
      for (const IValue& item : items.arguments) tensors.push_back(item.toTensor());
      tiny.any |= items.any;
      tiny.any_lazy |= items.any_lazy;
      tiny.arguments.emplace_back(std::move(tensors));
      return true;
    }
    tiny.arguments.push_back(value);
    return value.isInt() || value.isDouble() || value.isBool() || value.isNone() ||
        (info_.writes_list && value.isList());
  }

  // What optimizers do to every parameter's step count, run at once (see `admit.is_tiny`).
  bool run_tiny(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack, PyObject* trace, bool in_mode) const {
    const size_t n = info_.schema.arguments().size();
    const IValue* arguments = stack->data() + (stack->size() - n);
    Tiny tiny;
    for (size_t i = 0; i < n; ++i) {
      if (!put_tiny(arguments[i], trace, tiny)) return false;
    }
    const auto& returns = info_.schema.returns();
    if (!tiny.any || !(in_mode || tiny.any_lazy) || (tiny.any_lazy && (info_.reshapes || returns.size() > 1))) {
      return false;
    }
    const IValue first = arguments[0];
    const IValue data = tiny.arguments[0];
    std::move(tiny.arguments.begin(), tiny.arguments.end(), stack->end() - static_cast<long>(n));
    run_below(op, keys, stack);
    if (info_.writes_list) count_writes(first);
    if (!tiny.any_lazy || returns.empty() || !stack->back().isTensor()) return true;
    const at::Tensor result = stack->back().toTensor();
    if (data.isTensor() && result.is_same(data.toTensor())) {
      stack->back() = first;
    } else {
      const Ref value = new_value();
      sure(PyObject_SetAttr(value.get(), name_data, object_of(result).get()));
      stack->back() = another(result, value.get());
    }
    return true;
  }

  // An op that autograd would have taken apart, seen whole in inference mode: what it is made of is
  // recorded, as `special._decompose` has it.
  bool decompose(const c10::OperatorHandle& op, Stack* stack, const IValue* arguments, bool in_mode) const {
    constexpr auto COMPOSITE = DispatchKey::CompositeImplicitAutograd;
    if (!op.hasKernelForDispatchKey(COMPOSITE)) return false;
    bool any_lazy = false;
    for (size_t i = 0; i < info_.schema.arguments().size(); ++i) {
      if (!is_taken_apart(op, arguments[i], any_lazy)) return false;
    }
    if (!in_mode && !any_lazy) return false;
    const auto before = c10::impl::tls_local_dispatch_key_set();
    auto excluded = before.excluded_ | ABOVE_PYTHON;
    bool aliases = false;
    for (const auto& result : info_.schema.returns()) aliases |= result.alias_info() != nullptr;
    if (!aliases) excluded = excluded.remove(DispatchKey::ADInplaceOrView);
    const c10::impl::ForceDispatchKeyGuard guard(before.included_, excluded);
    const WithoutGil released;
    op.callBoxedForDispatchKey(COMPOSITE, *stack);
    return true;
  }

  static bool is_taken_apart(const c10::OperatorHandle& op, const IValue& value, bool& any_lazy) {
    if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const IValue& item : value.toListRef()) {
        if (!is_taken_apart(op, item, any_lazy)) return false;
      }
    }
    if (!value.isTensor() || !value.toTensor().defined()) return true;
    const at::Tensor& tensor = value.toTensor();
    const Ref object = object_of(tensor);
    PyTypeObject* type = Py_TYPE(object.get());
    any_lazy |= type == tensor_class;
    return (type == tensor_class || THPVariable_CheckTypeExact(type)) && tensor.layout() == c10::kStrided &&
        !tensor.is_nested() && !tensor.is_quantized() && !tensor.is_meta() && !tensor._is_zerotensor() &&
        !op.hasKernelForDispatchKey(c10::computeDispatchKey(std::nullopt, std::nullopt, tensor.device()));
  }

  // `detach` and its like of a lazy tensor: another handle on the same value.
  static bool alias(Stack* stack, const IValue* arguments) {
    if (!arguments[0].isTensor()) return false;
    const at::Tensor tensor = arguments[0].toTensor();
    if (!tensor.defined() || tensor.is_conj() || tensor.is_neg()) return false;
    Ref object;
    const Ref value = value_of(tensor, object);
    if (value.get() == nullptr) return false;
    const Ref slot = slot_in(value.get());
    if (slot.get() != Py_None && of_slot.trace.in(slot.get()) != trace_here) return false;
    const at::Tensor made = another(tensor, value.get());
    replace_arguments(stack, 1, {made}, false);
    return true;
  }

  // Nothing is pending and no argument lazy: run it, at the price of the mode.
  bool run_cold(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack, PyObject* trace, long cold) {
    if (info_.needs_care) return false;
    const size_t n = info_.schema.arguments().size();
    const IValue* arguments = stack->data() + (stack->size() - n);
    for (size_t i = 0; i < n; ++i) {
      if (!is_ordinary(arguments[i])) return false;
    }
    Ref left(sure(PyLong_FromLong(cold - 1)));
    cold_of_budget.set(of_trace.budget.in(trace), left.get());
    Ref ran(sure(PyTuple_Pack(2, info_.function.get(), of_trace.state.in(trace))));
    of_trace.ran.set(trace, ran.get());
    const WithoutGil released;
    run_below(op, keys, stack);
    return true;
  }

  // Whether some class in Python has the tensor's ops, lazy or not. It may have its size and its
  // layout too, and asking for those would dispatch.
  static bool has_python(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->key_set().has(DispatchKey::Python);
  }

  static bool is_ordinary(const IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      return !tensor.defined() || !has_python(tensor);
    }
    if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const IValue& item : value.toListRef()) {
        if (!item.isNone() && !is_ordinary(item)) return false;
      }
    }
    return true;
  }
};

// ---- Learning ----

std::vector<int64_t> integers(PyObject* sequence) {
  Ref items(sure(PySequence_Tuple(sequence)));
  std::vector<int64_t> result;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    result.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(items.get(), i)));
    if (PyErr_Occurred()) throw python_error();
  }
  return result;
}

// `meta` as `make_wrapper` takes it.
Output output_of(PyObject* meta, PyObject* slot) {
  Output result;
  if (meta == Py_None) return result;
  const auto item = [meta](Py_ssize_t i) { return PyTuple_GET_ITEM(meta, i); };
  result.is_defined = true;
  const auto size = integers(item(0));
  result.size.assign(size.begin(), size.end());
  if (item(1) == Py_None) {
    result.stride.resize(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0;) {
      result.stride[i] = step;
      step *= std::max<int64_t>(size[i], 1);
    }
  } else {
    const auto stride = integers(item(1));
    result.stride.assign(stride.begin(), stride.end());
  }
  result.offset = item(2) == Py_None ? 0 : PyLong_AsLongLong(item(2));
  const auto dtype = reinterpret_cast<THPDtype*>(item(4))->scalar_type;
  result.device = reinterpret_cast<THPDevice*>(item(6))->device;
  result.dtype = c10::scalarTypeToTypeMeta(dtype);
  const auto options = at::TensorOptions().dtype(dtype).device(result.device).layout(c10::kStrided);
  result.keys = DispatchKeySet(options.computeDispatchKey());
  result.n_bytes = at::detail::computeStorageNbytes(result.size, result.stride, result.dtype.itemsize(), result.offset);
  result.slot = Ref::to(slot);
  return result;
}

// What `state` holds, ready to be taken; null if only Python can take it.
std::unique_ptr<Step> step_to(PyObject* state) {
  auto step = std::make_unique<Step>();
  const long kind = PyLong_AsLong(of_state.kind.in(state));
  step->kind = static_cast<int>(kind & (SLOW - 1));
  step->closes = of_state.closes.in(state) == Py_True;
  step->state = Ref::to(state);
  PyObject* meta = of_state.meta.in(state);
  PyObject* slot = of_state.slot.in(state);
  switch (step->kind) {
    case ONE:
      step->outputs.push_back(output_of(meta, slot));
      break;
    case MANY: {
      PyObject* metas = PyTuple_GET_ITEM(meta, 1);
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(metas); ++i) {
        step->outputs.push_back(output_of(PyTuple_GET_ITEM(metas, i), PyTuple_GET_ITEM(slot, i)));
      }
      break;
    }
    case NOTHING: case SELF: break;
    default: return nullptr;
  }
  PyObject* rebase = of_state.rebase.in(state);
  if (rebase != nullptr && rebase != Py_None) {
    step->rebase = {PyLong_AsLongLong(PyTuple_GET_ITEM(rebase, 0)), PyLong_AsLongLong(PyTuple_GET_ITEM(rebase, 1))};
  }
  return step;
}

// Learn the leaves that lead to `state`, as far as they are not known.
void learn_leaves(PyObject* trace, PyObject* state) {
  while (Py_TYPE(of_state.step.in(state)) == leaf_class) {
    PyObject* parent = of_state.parent.in(state);
    PyObject* key = of_state.key.in(state);  // ("leaf", size, stride, has_offset, dtype, device, shares)
    const auto item = [key](Py_ssize_t i) { return PyTuple_GET_ITEM(key, i); };
    Words words;
    put_leaf(words, integers(item(1)), integers(item(2)), item(3) == Py_True,
             reinterpret_cast<THPDtype*>(item(4))->scalar_type,
             reinterpret_cast<THPDevice*>(item(5))->device,
             item(6) == Py_None ? -1 : PyLong_AsLongLong(item(6)));
    Edges* edges = make_edges(parent);
    if (edges->exact.find(words) != nullptr) return;
    auto step = std::make_unique<Step>();
    step->state = Ref::to(state);
    const auto index = PyLong_AsLongLong(of_state.n_slots.in(state)) - 1;
    step->slot = Ref::to(sure(PyList_GetItem(of_trace.slots.in(trace), index)));
    edges->exact.add(words, std::move(step));
    state = parent;
  }
}

// Note that the call of `function` under way leads `trace` to `state`. Its tensors have their slots.
void learn(PyObject* trace, PyObject* function, PyObject* state) {
  trace_here = trace;  // traces live as long as the process
  PyObject* parent = of_state.parent.in(state);
  if (frames.empty() || frames.back().info->function.get() != function) return;
  Frame& frame = frames.back();
  OpInfo& info = *frame.info;
  info.is_recorded = true;
  learn_leaves(trace, parent);
  Call call(info, trace, frame.in_mode);
  if (!call.read(frame.arguments.data(), false)) return;
  auto step = step_to(state);
  if (step == nullptr) return;
  Edges* edges = make_edges(parent);
  PyObject* generic = of_state.generic.in(parent);
  if (generic != nullptr && generic != Py_None && PyDict_GetItemWithError(generic, of_state.key.in(state)) == state) {
    std::vector<IValue> numbers;
    const Words words = call.without_numbers(frame.arguments.data(), numbers);
    const auto expected = PyLong_AsLongLong(of_state.n_scalars.in(state)) - PyLong_AsLongLong(of_state.n_scalars.in(parent));
    if (static_cast<int64_t>(numbers.size()) != expected) return;
    if (edges->generic.find(words) == nullptr) edges->generic.add(words, std::move(step));
  } else if (edges->exact.find(call.words()) == nullptr) {
    edges->exact.add(call.words(), std::move(step));
  }
}

// ---- The module ----

// learn(trace, function, state)
PyObject* py_learn(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *trace, *function, *state;
  if (!PyArg_ParseTuple(args, "OOO", &trace, &function, &state)) return nullptr;
  learn(trace, function, state);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// listen(namespace): take the hits of all its ops, for as long as the process lives.
PyObject* py_listen(PyObject*, PyObject* name) {
  HANDLE_TH_ERRORS
  const std::string space = PyUnicode_AsUTF8(name);
  auto* library = new torch::Library(torch::Library::IMPL, space, DispatchKey::Python, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op_name : dispatcher.getAllOpNames()) {
    if (op_name.getNamespace() != space) continue;
    const auto op = dispatcher.findSchema(op_name);
    if (!op.has_value() || op->hasKernelForDispatchKey(DispatchKey::Python)) continue;
    std::string local = op_name.name.substr(space.size() + 2);
    if (!op_name.overload_name.empty()) local += "." + op_name.overload_name;
    library->impl(local.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(*op)));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// install(classes, exposed, shared, describe, close_segment)
PyObject* py_install(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *tensor, *mode, *trace, *state, *slot, *budget, *leaf;
  if (!PyArg_ParseTuple(args, "(OOOOOOO)OOOO", &tensor, &mode, &trace, &state, &slot,
                        &budget, &leaf, &exposed, &shared, &describe, &close_segment)) {
    return nullptr;
  }
  for (PyObject* kept : {tensor, mode, leaf, exposed, shared, describe, close_segment}) Py_INCREF(kept);
  tensor_class = reinterpret_cast<PyTypeObject*>(tensor);
  mode_class = reinterpret_cast<PyTypeObject*>(mode);
  leaf_class = reinterpret_cast<PyTypeObject*>(leaf);
#define FIND(group, cls, name) group.name.find(cls, #name)
  FIND(of_trace, trace, state); FIND(of_trace, trace, values); FIND(of_trace, trace, leaves);
  FIND(of_trace, trace, leaf_values); FIND(of_trace, trace, leaf_slots);
  FIND(of_trace, trace, leaf_offsets); FIND(of_trace, trace, storages);
  FIND(of_trace, trace, scalars); FIND(of_trace, trace, budget); FIND(of_trace, trace, claimed);
  FIND(of_trace, trace, is_outdated); FIND(of_trace, trace, busy); FIND(of_trace, trace, ran);
  FIND(of_trace, trace, slots);
  FIND(of_state, state, edges); FIND(of_state, state, generic); FIND(of_state, state, key);
  FIND(of_state, state, kind); FIND(of_state, state, meta); FIND(of_state, state, slot);
  FIND(of_state, state, parent); FIND(of_state, state, step); FIND(of_state, state, rebase);
  FIND(of_state, state, closes); FIND(of_state, state, n_slots); FIND(of_state, state, n_scalars);
  FIND(of_slot, slot, index); FIND(of_slot, slot, trace);
#undef FIND
  cold_of_budget.find(budget, "cold");
  name_value = sure(PyUnicode_InternFromString("_value"));
  name_slot = sure(PyUnicode_InternFromString("slot"));
  name_data = sure(PyUnicode_InternFromString("data"));
  visit_attributes = tensor_class->tp_traverse;
  tensor_class->tp_traverse = visit_tensor;
  const Ref descriptor(sure(PyDescr_NewGetSet(tensor_class, &value_of_tensor)));
  sure(PyObject_SetAttrString(tensor, "_value", descriptor.get()));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"install", py_install, METH_VARARGS, nullptr},
    {"listen", py_listen, METH_O, nullptr},
    {"learn", py_learn, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "lazy_tensor_hits", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_lazy_tensor_hits() {
  edges_type.tp_name = "lazy_tensor.dispatch.hits.Edges";
  edges_type.tp_basicsize = sizeof(Edges);
  edges_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  edges_type.tp_traverse = visit_edges;
  edges_type.tp_clear = clear_edges;
  edges_type.tp_dealloc = delete_edges;
  value_type.tp_name = "lazy_tensor.dispatch.hits.Value";
  value_type.tp_basicsize = sizeof(Value);
  value_type.tp_flags = Py_TPFLAGS_DEFAULT;
  value_type.tp_getset = value_members;
  value_type.tp_dealloc = delete_value;
  if (PyType_Ready(&edges_type) < 0 || PyType_Ready(&value_type) < 0) return nullptr;
  return PyModule_Create(&module);
}
