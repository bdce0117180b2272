// The cache lines of the objects that `replay` looks at before a call. A plan that streams more than
// the caches hold has driven them out, and looked at one after the other each costs a trip to memory;
// asked for all at once they come ten at a time.

#pragma once

#include <unordered_set>

#include "tensors.h"

namespace hits {

class Lines {
 public:
  void add(PyObject* object) {
    if (PyTuple_CheckExact(object)) {
      add_memory(object, sizeof(PyTupleObject) + sizeof(PyObject*) * PyTuple_GET_SIZE(object));
    } else if (PyDict_Check(object)) {
      add_memory(object, sizeof(PyDictObject));
      // about what its table takes: a head, and for each item a hash, a key and a value
      add_memory(reinterpret_cast<PyDictObject*>(object)->ma_keys,
                 LINE / 2 + 3 * sizeof(PyObject*) * PyDict_GET_SIZE(object));
    } else if (THPVariable_CheckTypeExact(Py_TYPE(object)) || is_lazy_class(Py_TYPE(object))) {
      add_tensor(object);
    } else {
      add_memory(object, sizeof(PyObject));
    }
  }

  PyObject* addresses() const {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(addresses_.data()),
                                     static_cast<Py_ssize_t>(addresses_.size() * sizeof(uintptr_t)));
  }

 private:
  static constexpr size_t LINE = 64;
  static constexpr size_t MOST = 1 << 14;  // a megabyte: more would drive itself out

  void add_memory(const void* start, size_t n_bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(start);
    for (auto line = begin / LINE * LINE; line < begin + n_bytes; line += LINE) {
      if (addresses_.size() < MOST && seen_.insert(line).second) addresses_.push_back(line);
    }
  }

  void add_tensor(PyObject* object) {
    add_memory(object, sizeof(THPVariable));
    const at::Tensor& tensor = THPVariable_Unpack(object);
    add_memory(tensor.unsafeGetTensorImpl(), sizeof(LazyImpl));
    if (const auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
      add_memory(meta, sizeof(*meta));
    }
    if (is_lazy_class(Py_TYPE(object))) {
      Ref made_in_python;
      const Ref value = value_of(tensor, made_in_python);
      if (made_in_python.get() != nullptr) {
        add(Ref(sure(PyObject_GenericGetDict(object, nullptr))).get());
      }
      add_memory(value.get(), sizeof(Value));
      add(data_in(value.get()).get());
    } else if (tensor.has_storage()) {
      add_memory(tensor.storage().unsafeGetStorageImpl(), sizeof(c10::StorageImpl));
    }
  }

  std::vector<uintptr_t> addresses_;
  std::unordered_set<uintptr_t> seen_;
};

// lines(objects): their lines, and those of what tensors and dicts consist of, as bytes for `fetch`.
PyObject* py_lines(PyObject*, PyObject* objects) {
  HANDLE_TH_ERRORS
  Lines lines;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); ++i) lines.add(PyList_GET_ITEM(objects, i));
  return lines.addresses();
  END_HANDLE_TH_ERRORS
}

// fetch(lines): have them on their way to the cache. Nothing is read: they may be others' by now.
PyObject* py_fetch(PyObject*, PyObject* lines) {
  const auto* first = reinterpret_cast<const uintptr_t*>(PyBytes_AS_STRING(lines));
  const auto* last = first + PyBytes_GET_SIZE(lines) / sizeof(uintptr_t);
  for (; first != last; ++first) __builtin_prefetch(reinterpret_cast<const void*>(*first));
  Py_RETURN_NONE;
}

}  // namespace hits
