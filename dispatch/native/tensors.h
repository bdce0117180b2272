// Lazy tensors that C++ makes (`LazyImpl`) and the values that they own (`Value`): how Python reads
// them, and what the garbage collector sees of them.

#pragma once

#include "objects.h"

namespace hits {

// The tensor's Python object; a new one of torch's own class if it has none.
Ref object_of(const at::Tensor& tensor) { return Ref(sure(THPVariable_Wrap(tensor))); }

// The address of the storage, as `torch_private.storage_id` gives it.
Ref storage_id(const at::Tensor& tensor) {
  return Ref(sure(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl())));
}

// Whether a trace can hold the tensor, as `infer.is_recordable` says. Only for plain tensors and
// lazy ones: any other subclass may answer these questions in Python.
bool is_dense(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_quantized() &&
         !tensor.is_nested() && !tensor.is_meta() && !tensor._is_zerotensor() &&
         tensor.has_storage();
}

// As `trace.Value`, which Python makes, with the same attributes. The garbage collector doesn't
// track it: a collection starts after so many tracked objects were made, and a long trace makes
// thousands. `visit_tensor` shows the collector what a value holds, as if its tensor held that.
//
// The tensors and the trace's list of values own it. Nothing else may keep one: reference counts
// tell which values are alive (see `Live` in flush.h).
struct Value {
  PyObject_HEAD PyObject *slot, *leaf, *data, *failure, *watch;
};

void delete_value(PyObject* self) {
  auto* value = reinterpret_cast<Value*>(self);
  Py_CLEAR(value->slot);
  Py_CLEAR(value->leaf);
  Py_CLEAR(value->data);
  Py_CLEAR(value->failure);
  Py_CLEAR(value->watch);
  PyObject_Free(self);
}

template <PyObject* Value::* member>
PyObject* get_member(PyObject* self, void*) {
  PyObject* held = reinterpret_cast<Value*>(self)->*member;
  return Ref::to(held == nullptr ? Py_None : held).release();
}

template <PyObject* Value::* member>
int set_member(PyObject* self, PyObject* held, void*) {
  const Ref before(std::exchange(reinterpret_cast<Value*>(self)->*member, Ref::to(held).release()));
  return 0;
}

PyGetSetDef value_members[] = {
    {"slot", get_member<&Value::slot>, set_member<&Value::slot>, nullptr, nullptr},
    {"leaf", get_member<&Value::leaf>, set_member<&Value::leaf>, nullptr, nullptr},
    {"data", get_member<&Value::data>, set_member<&Value::data>, nullptr, nullptr},
    {"failure", get_member<&Value::failure>, set_member<&Value::failure>, nullptr, nullptr},
    {"watch", get_member<&Value::watch>, set_member<&Value::watch>, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyTypeObject value_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

Ref new_value() {
  auto* made = PyObject_New(Value, &value_type);
  sure(reinterpret_cast<PyObject*>(made));
  made->slot = made->leaf = made->data = made->failure = made->watch = nullptr;
  return Ref(reinterpret_cast<PyObject*>(made));
}

// A value with this data; without any for None.
Ref value_with(PyObject* data) {
  Ref value = new_value();
  if (data != Py_None) reinterpret_cast<Value*>(value.get())->data = Ref::to(data).release();
  return value;
}

// An attribute of a value of either kind; None if it was never set.
Ref in_value(PyObject* value, PyObject* Value::* member, PyObject* name) {
  if (Py_TYPE(value) != &value_type) return Ref(sure(PyObject_GetAttr(value, name)));
  PyObject* held = reinterpret_cast<Value*>(value)->*member;
  return Ref::to(held == nullptr ? Py_None : held);
}

Ref slot_in(PyObject* value) { return in_value(value, &Value::slot, name_slot); }
Ref data_in(PyObject* value) { return in_value(value, &Value::data, name_data); }

// The class of lazy tensors with this layout: null for those that aren't sharded.
PyTypeObject* class_with(PyObject* layout) {
  return layout == nullptr ? tensor_class : sharded_class;
}

bool is_lazy_class(PyTypeObject* type) {
  return type == tensor_class || (type == sharded_class && sharded_class != nullptr);
}

// A storage that has a size, but no memory.
c10::Storage without_memory(size_t n_bytes, c10::Device device) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), n_bytes, c10::DataPtr(nullptr, device),
      c10::GetAllocator(c10::kMeta), /*resizable=*/true);
  // asking for memory to write is an error; pointers to read may be asked for, to find aliases
  storage->set_throw_on_mutable_data_ptr();
  return c10::Storage(std::move(storage));
}

// Note that plain tensors may have the memory, too, unless that is noted already.
void note_shared(const at::Tensor& data) {
  const Ref storage(PyLong_FromVoidPtr(data.storage().unsafeGetStorageImpl()));
  if (PySet_Contains(shared, storage.get()) != 1) {
    Ref(sure(PyObject_CallOneArg(share, object_of(data).get())));
  }
}

// A lazy tensor that C++ made. It owns its value itself; one that Python made has it in its
// `__dict__`.
//
// While nothing is recorded, ops may pass it by: it has its data's memory then, and lacks the key
// that brings ops here, so that they cost what they cost in eager (see `PassedBy` in below.h).
//
// Autograd detaches what it saves by `shallow_copy_and_detach`, not by an op, so no kernel sees
// that. torch's version of the method would call `__torch_dispatch__` each time. This one makes
// another tensor on the same value.
class LazyImpl final : public c10::TensorImpl {
 public:
  using TensorImpl::TensorImpl;
  PyObject* value = nullptr;
  PyObject* layout = nullptr;  // of a sharded tensor

  // Those that ops pass by, of all threads. Each leaves when it goes: weak pointers would keep
  // `torch.utils.swap_tensors` from taking it.
  static inline std::unordered_set<LazyImpl*> passed_by;

  bool is_passed_by() const { return !key_set_.has(DispatchKey::Python); }

  // Let ops pass, on `data`, unless the tensor has other metadata or another value by now.
  void let_pass(const at::Tensor& data) {
    const Ref held = value == nullptr ? Ref::to(Py_None) : data_in(value);
    if (held.get() == Py_None || !THPVariable_Unpack(held.get()).is_same(data)) return;
    if (!has_metadata_of(data)) return;
    use(data.storage());
    set_python_dispatch(false);
    passed_by.insert(this);
  }

  // Have ops come again. The tensor keeps the memory, as an op of another thread may be using it.
  void stop_passing() {
    current_value();
    set_python_dispatch(true);
  }

  // Have ops come again, and let go of the memory: the tensor gets another value.
  void leave_memory() {
    set_python_dispatch(true);
    if (!used_.has_value()) return;
    passed_by.erase(this);
    stop_using();
    storage_ = without_memory(storage_.nbytes(), storage_.device());
  }

  // The value. An op that passed, such as `t_`, may have given the tensor itself other metadata or
  // other memory: then the value gets data that has them.
  PyObject* current_value() {
    if (value == nullptr || !is_passed_by()) return value;
    const Ref held = data_in(value);
    if (held.get() == Py_None) return value;
    const at::Tensor& data = THPVariable_Unpack(held.get());
    if (data.storage().is_alias_of(storage_) && has_metadata_of(data)) return value;
    use(storage_);
    // Writes are counted on the tensor and on its data: each has a count of its own.
    const c10::VariableVersion own = is_inference()
                                         ? c10::VariableVersion(c10::VariableVersion::DISABLED)
                                         : c10::VariableVersion(0);
    const at::Tensor now(TensorImpl::shallow_copy_and_detach(own, true));
    note_shared(now);
    const Ref before(std::exchange(value, value_with(object_of(now).get()).release()));
    return value;
  }

  // `Tensor.data` is set: the tensor gets another's metadata and memory.
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& other) override {
    if (used_.has_value()) {
      const WithGil gil;
      stop_using();
    }
    TensorImpl::shallow_copy_from(other);
  }

  // torch calls `release_resources`, too, if weak pointers to the tensor are left.
  ~LazyImpl() override { release_value(); }
  void release_resources() override {
    release_value();
    TensorImpl::release_resources();
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allows_change) const override {
    return detached(version, allows_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allows_change) const override {
    return detached(version, allows_change);
  }

 private:
  // At the interpreter's end the value is leaked: the GIL can't be had any more.
  void release_value() {
    if (value != nullptr && python_goes_on()) {
      const WithGil gil;
      passed_by.erase(this);
      stop_using();
      Py_CLEAR(value);
      Py_CLEAR(layout);
    }
  }
  c10::intrusive_ptr<TensorImpl> detached(const c10::VariableVersion& version,
                                          bool allows_change) const {
    bool in_mode = false;
    // torch's version asks another's mode, or makes a plain copy where Python's key is excluded or
    // ops pass
    if (value == nullptr || is_passed_by() ||
        c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python) || !is_ours(in_mode)) {
      return TensorImpl::shallow_copy_and_detach(version, allows_change);
    }
    const WithGil gil;
    auto made = c10::make_intrusive<LazyImpl>(c10::Storage(storage_), key_set_, data_type_);
    copy_tensor_metadata(this, made.get(), version, allows_change);
    if (used_.has_value()) made->use(storage_);
    made->set_python_dispatch(true);
    made->value = Ref::to(value).release();
    made->layout = Ref::to(layout).release();
    // its Python object is made now, as torch would make one of its own class later
    const Ref object(sure(THPVariable_Wrap(at::Tensor(made), class_with(layout))));
    return made;
  }

  bool has_metadata_of(const at::Tensor& data) const {
    return data.sizes() == sizes() && data.strides() == strides() &&
           data.storage_offset() == storage_offset_ && data.dtype() == data_type_;
  }

  // Have this memory, and count the tensor among its lazy users (see `memory_sharing._lazy_users`).
  void use(const c10::Storage& memory) {
    auto* now = memory.unsafeGetStorageImpl();
    if (used_.has_value() && used_->_unsafe_get_target() == now) return;
    stop_using();
    if (now != storage_.unsafeGetStorageImpl()) storage_ = memory;
    used_.emplace(memory.getWeakStorageImpl());
    count_user(1);
  }
  void stop_using() {
    if (used_.has_value()) count_user(-1);
    used_.reset();
  }
  void count_user(int change) const {
    const Ref id(PyLong_FromVoidPtr(used_->_unsafe_get_target()));
    PyObject* before = PyDict_GetItemWithError(lazy_users, id.get());
    const Ref now(PyLong_FromLong(change + (before == nullptr ? 0 : PyLong_AsLong(before))));
    if (PyObject_IsTrue(now.get())) {
      PyDict_SetItem(lazy_users, id.get(), now.get());
    } else {
      PyDict_DelItem(lazy_users, id.get());
    }
  }

  // The memory whose user this is. A weak pointer keeps the address from being another's.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> used_;
};

// Whether ops on the tensor go to a class in Python: ours, or somebody else's. Such a class may
// answer for the tensor's sizes and layout, too, so that even asking for them would dispatch.
bool has_python(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(DispatchKey::Python);
}

// Whether kernels take the tensor as it is: it is dense, of no class in Python, and its memory holds
// its values.
bool is_for_kernels(const at::Tensor& tensor) {
  return !has_python(tensor) && is_dense(tensor) && !tensor.is_conj() && !tensor.is_neg();
}

// Whether torch has made the tensor of a Python number. Forward-mode differentiation marks the zeros
// that are a number's tangent like a number, and they are lazy.
bool is_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() && !has_python(tensor);
}

// The impl of a lazy tensor that C++ made; null for any other tensor.
LazyImpl* made_here(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return &typeid(*impl) == &typeid(LazyImpl) ? static_cast<LazyImpl*>(impl) : nullptr;
}

// The value of a lazy tensor; null for any other. `object` becomes the tensor's Python object. It
// stays null for a tensor that C++ made, as that object need not be looked at.
Ref value_of(const at::Tensor& tensor, Ref& object) {
  LazyImpl* impl = made_here(tensor);
  if (impl != nullptr && impl->value != nullptr) return Ref::to(impl->current_value());
  object = object_of(tensor);
  if (!is_lazy_class(Py_TYPE(object.get()))) return Ref();
  return Ref(sure(PyObject_GetAttr(object.get(), name_value)));
}

// The layout of a sharded tensor; null for any other.
Ref layout_in(PyObject* object) {
  if (sharded_class == nullptr || Py_TYPE(object) != sharded_class) return Ref();
  return Ref(sure(PyObject_GetAttr(object, name_layout)));
}

// The same of a tensor for which `value_of` gave a value and this `object`.
Ref layout_of(const at::Tensor& tensor, const Ref& object) {
  return object.get() == nullptr ? Ref::to(made_here(tensor)->layout) : layout_in(object.get());
}

// Getter and setter of `LazyTensor._value` and `DTensor._layout`. They are in the `LazyImpl` if C++
// made the tensor, else in the `__dict__`, before which Python asks a descriptor such as this.
template <PyObject* LazyImpl::* member, PyObject** name>
PyObject* get_held(PyObject* self, void*) {
  if (LazyImpl* impl = made_here(THPVariable_Unpack(self));
      impl != nullptr && impl->*member != nullptr) {
    impl->current_value();
    return Ref::to(impl->*member).release();
  }
  const Ref attributes(PyObject_GenericGetDict(self, nullptr));
  if (attributes.get() == nullptr) return nullptr;
  PyObject* found = PyDict_GetItemWithError(attributes.get(), *name);
  if (found == nullptr && !PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, *name);
  return Ref::to(found).release();
}

template <PyObject* LazyImpl::* member, PyObject** name>
int set_held(PyObject* self, PyObject* held, void*) {
  if (LazyImpl* impl = made_here(THPVariable_Unpack(self))) {
    impl->leave_memory();  // it is the old value's
    const Ref before(std::exchange(impl->*member, Ref::to(held).release()));
    return 0;
  }
  const Ref attributes(PyObject_GenericGetDict(self, nullptr));
  if (attributes.get() == nullptr) return -1;
  return held == nullptr ? PyDict_DelItem(attributes.get(), *name)
                         : PyDict_SetItem(attributes.get(), *name, held);
}

PyGetSetDef value_of_tensor = {"_value", get_held<&LazyImpl::value, &name_value>,
                               set_held<&LazyImpl::value, &name_value>, nullptr, nullptr};
PyGetSetDef layout_of_tensor = {"_layout", get_held<&LazyImpl::layout, &name_layout>,
                                set_held<&LazyImpl::layout, &name_layout>, nullptr, nullptr};

// A class of lazy tensors, and its own `tp_traverse`, which shows the garbage collector the
// attributes. `visit_tensor` stands in its place and adds what the value holds.
struct Visited {
  PyTypeObject* cls;
  traverseproc attributes;
};
Visited of_lazy, of_sharded;

template <Visited* visited>
int visit_tensor(PyObject* self, visitproc visit, void* arg) {
  const at::Tensor& tensor = THPVariable_Unpack(self);
  // If C++ owns the tensor too, that outlives its Python object, and so does what it holds. To show
  // that to the collector would let it free what is still used.
  if (tensor.defined() && tensor.use_count() == 1) {
    const LazyImpl* impl = made_here(tensor);
    PyObject* value = impl == nullptr ? nullptr : impl->value;
    if (value != nullptr && Py_TYPE(value) != &value_type) {
      Py_VISIT(value);  // Python's is tracked itself
      // if several tensors own the value, each would show the same, and the collector count it
      // twice
    } else if (value != nullptr && Py_REFCNT(value) == 1) {
      Py_VISIT(reinterpret_cast<Value*>(value)->data);
      Py_VISIT(reinterpret_cast<Value*>(value)->failure);
    }
  }
  // The class's own function looks for the first base whose `tp_traverse` is another, and calls
  // that. It begins at the class itself: it must find itself there, not this function, which calls
  // it.
  visited->cls->tp_traverse = visited->attributes;
  const int status = visited->attributes(self, visit, arg);
  visited->cls->tp_traverse = visit_tensor<visited>;
  return status;
}

template <Visited* visited>
void visit_values_of(PyTypeObject* cls) {
  *visited = {cls, cls->tp_traverse};
  cls->tp_traverse = visit_tensor<visited>;
}

}  // namespace hits
