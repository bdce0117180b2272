// Lazy tensors that are made below Python, and their values.

#pragma once

#include "objects.h"

namespace hits {

Ref object_of(const at::Tensor& tensor) { return Ref(sure(THPVariable_Wrap(tensor))); }

// What `torch_private.storage_id` gives.
Ref storage_id(const at::Tensor& tensor) {
  return Ref(sure(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl())));
}

// Whether traces hold such a tensor (see `infer.is_recordable`). Not to be asked of strangers'
// tensors, whose classes may answer in Python.
bool is_dense(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_quantized() &&
         !tensor.is_nested() && !tensor.is_meta() && !tensor._is_zerotensor() &&
         tensor.has_storage();
}

// As `trace.Value`, which Python makes, but unknown to garbage collections: a long trace would set
// them off. What it holds they see as the tensor's that owns it.
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

Ref in_value(PyObject* value, PyObject* Value::* member, PyObject* name) {
  if (Py_TYPE(value) != &value_type) return Ref(sure(PyObject_GetAttr(value, name)));
  PyObject* held = reinterpret_cast<Value*>(value)->*member;
  return Ref::to(held == nullptr ? Py_None : held);
}

Ref slot_in(PyObject* value) { return in_value(value, &Value::slot, name_slot); }
Ref data_in(PyObject* value) { return in_value(value, &Value::data, name_data); }

PyTypeObject* class_with(PyObject* layout) {
  return layout == nullptr ? tensor_class : sharded_class;
}

bool is_lazy_class(PyTypeObject* type) {
  return type == tensor_class || (type == sharded_class && sharded_class != nullptr);
}

// A lazy tensor that was made here: it has its value with it, where Python's has it among its
// attributes. And autograd detaches what it saved by a method, not by an op that a kernel could
// take.
class LazyImpl final : public c10::TensorImpl {
 public:
  using TensorImpl::TensorImpl;
  PyObject* value = nullptr;
  PyObject* layout = nullptr;  // of a sharded tensor

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
  void release_value() {
    if (value != nullptr && python_goes_on()) {
      const WithGil gil;
      Py_CLEAR(value);
      Py_CLEAR(layout);
    }
  }
  c10::intrusive_ptr<TensorImpl> detached(const c10::VariableVersion& version,
                                          bool allows_change) const {
    bool in_mode = false;
    if (value == nullptr || c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python) ||
        !is_ours(in_mode)) {
      return TensorImpl::shallow_copy_and_detach(version, allows_change);
    }
    const WithGil gil;
    auto made = c10::make_intrusive<LazyImpl>(c10::Storage(storage_), key_set_, data_type_);
    copy_tensor_metadata(this, made.get(), version, allows_change);
    made->set_python_dispatch(true);
    made->value = Ref::to(value).release();
    made->layout = Ref::to(layout).release();
    const Ref object(sure(THPVariable_Wrap(at::Tensor(made), class_with(layout))));
    return made;
  }
};

// Whether some class in Python has the tensor's ops, lazy or not. It may have its size and its
// layout too, and asking for those would dispatch.
bool has_python(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(DispatchKey::Python);
}

LazyImpl* made_here(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return &typeid(*impl) == &typeid(LazyImpl) ? static_cast<LazyImpl*>(impl) : nullptr;
}

// The value of a tensor if it is a lazy one; else none. `object` becomes the tensor's Python object
// where that had to be looked at.
Ref value_of(const at::Tensor& tensor, Ref& object) {
  const LazyImpl* impl = made_here(tensor);
  if (impl != nullptr && impl->value != nullptr) return Ref::to(impl->value);
  object = object_of(tensor);
  if (!is_lazy_class(Py_TYPE(object.get()))) return Ref();
  return Ref(sure(PyObject_GetAttr(object.get(), name_value)));
}

// The layout of a sharded tensor; none if it is another.
Ref layout_in(PyObject* object) {
  if (sharded_class == nullptr || Py_TYPE(object) != sharded_class) return Ref();
  return Ref(sure(PyObject_GetAttr(object, name_layout)));
}

// The same of a lazy tensor. `object` is what `value_of` has left there.
Ref layout_of(const at::Tensor& tensor, const Ref& object) {
  return object.get() == nullptr ? Ref::to(made_here(tensor)->layout) : layout_in(object.get());
}

// `LazyTensor._value`, `DTensor._layout`
template <PyObject* LazyImpl::* member, PyObject** name>
PyObject* get_held(PyObject* self, void*) {
  if (const LazyImpl* impl = made_here(THPVariable_Unpack(self));
      impl != nullptr && impl->*member != nullptr) {
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

// What garbage collections see of a lazy tensor: what Python knows of it, and its value.
// The class whose tensors have their attributes visited, and how.
struct Visited {
  PyTypeObject* cls;
  traverseproc attributes;
};
Visited of_lazy, of_sharded;

template <Visited* visited>
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
  visited->cls->tp_traverse = visited->attributes;  // it looks for the first base with another
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
