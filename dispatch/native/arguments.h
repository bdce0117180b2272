// Reading the arguments of a call that `replay` may know: a flat list of `parts`, by which
// `capture/replay.py` looks the call up, and a list of the tensors among them.

#pragma once

#include "watch.h"

namespace hits {

PyObject* atoms;           // `capture.watched_object.ATOMS`
PyObject* own_attributes;  // `tensor_types.OWN_ATTRIBUTES`

// Where a value lies among the arguments. It stays on the stack, and becomes text only where Python
// is asked.
struct Path {
  const Path* outer;  // of what it lies in, or null
  PyObject* key;      // in a dict, or the name of a keyword; none in a sequence
  Py_ssize_t number;  // in a sequence

  // As one would write it.
  Ref label() const {
    const Ref at(key == nullptr ? sure(PyLong_FromSsize_t(number)) : Ref::to(key).release());
    if (outer != nullptr) {
      return Ref(sure(PyUnicode_FromFormat("%U[%R]", outer->label().get(), at.get())));
    }
    if (key != nullptr) return Ref::to(key);
    return Ref(sure(PyUnicode_FromFormat("argument %zd", number + 1)));
  }
};

// Appends to `parts` what tells a value from others: its class, and besides that nothing of a
// tensor; the value itself of a number or the like; the size, the keys and the items' parts of a
// list, tuple or dict. Any other value is left to `ask(label, value, parts)`.
class ArgumentReader {
 public:
  ArgumentReader(PyObject* parts, PyObject* tensors, PyObject* ask)
      : parts_(parts), tensors_(tensors), ask_(ask) {}

  void read(PyObject* value, const Path& path) {
    PyTypeObject* type = Py_TYPE(value);
    if ((is_lazy_class(type) || THPVariable_CheckTypeExact(type)) && has_no_attributes(value)) {
      append(reinterpret_cast<PyObject*>(type));
      sure(PyList_Append(tensors_, value));
    } else if (type == &PyList_Type || type == &PyTuple_Type || type == &PyDict_Type) {
      append(reinterpret_cast<PyObject*>(type));
      read_items(value, path);
    } else if (type == &PyFloat_Type || type == &PyComplex_Type || type == &PySlice_Type ||
               type == &PyRange_Type) {
      // As text: 0.0 == -0.0 though they differ, nan != nan, and equal ranges may have other ends.
      append(reinterpret_cast<PyObject*>(type));
      const Ref text(sure(PyObject_Repr(value)));
      append(text.get());
    } else if (is_atom(type)) {
      append(reinterpret_cast<PyObject*>(type));
      append(value);
    } else {
      Ref(sure(PyObject_CallFunctionObjArgs(ask_, path.label().get(), value, parts_, nullptr)));
    }
  }

 private:
  // Marks a container while its items are read. `is_again`: they are being read already, as the
  // container holds itself.
  struct Inside {
    explicit Inside(PyObject* entered) : container(entered) {
      if (Py_EnterRecursiveCall(" while replay reads a call's arguments") != 0) {
        throw python_error();
      }
      is_again = Py_ReprEnter(container);
      if (is_again < 0) {
        Py_LeaveRecursiveCall();
        throw python_error();
      }
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    ~Inside() {
      if (is_again == 0) Py_ReprLeave(container);
      Py_LeaveRecursiveCall();
    }
    PyObject* container;
    int is_again;
  };

  void read_items(PyObject* value, const Path& path) {
    const Ref size(sure(PyLong_FromSsize_t(PyObject_Size(value))));
    append(size.get());
    const Inside inside(value);
    if (inside.is_again) return append(Py_Ellipsis);
    read_each(value, path);
  }

  void append(PyObject* part) { sure(PyList_Append(parts_, part)); }

  void read_each(PyObject* value, const Path& path) {
    if (PyDict_Check(value)) {
      Py_ssize_t at = 0;
      PyObject *key, *item;
      while (PyDict_Next(value, &at, &key, &item)) {
        // keys of different classes may be equal: 1 and True
        if (!PyUnicode_CheckExact(key)) append(reinterpret_cast<PyObject*>(Py_TYPE(key)));
        append(key);
        const Ref held = Ref::to(item);  // `ask` may take it out of the dict
        read(held.get(), {&path, key, 0});
      }
    } else {
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
        const Ref item = Ref::to(PySequence_Fast_GET_ITEM(value, i));
        read(item.get(), {&path, nullptr, i});
      }
    }
  }

  // Python reads attributes that the user gave a tensor: all but those that a lazy one has itself.
  static bool has_no_attributes(PyObject* tensor) {
    const Ref attributes(sure(PyObject_GenericGetDict(tensor, nullptr)));
    Py_ssize_t at = 0;
    PyObject *name, *value;
    while (PyDict_Next(attributes.get(), &at, &name, &value)) {
      if (PySequence_Contains(own_attributes, name) != 1) return false;
    }
    return true;
  }

  // Whether values of the type never change and are compared as they are.
  static bool is_atom(PyTypeObject* type) {
    return type == &PyLong_Type || type == &PyUnicode_Type || type == &PyBool_Type ||
           PySet_Contains(atoms, reinterpret_cast<PyObject*>(type)) == 1;
  }

  PyObject *parts_, *tensors_, *ask_;
};

// read_arguments(args, kwargs, parts, tensors, ask): read all arguments of a call.
PyObject* py_read_arguments(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *given, *named, *parts, *tensors, *ask;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O", &PyTuple_Type, &given, &PyDict_Type, &named,
                        &PyList_Type, &parts, &PyList_Type, &tensors, &ask)) {
    return nullptr;
  }
  ArgumentReader reader(parts, tensors, ask);
  const Ref size(sure(PyLong_FromSsize_t(PyTuple_GET_SIZE(given))));
  sure(PyList_Append(parts, size.get()));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i) {
    reader.read(PyTuple_GET_ITEM(given, i), {nullptr, nullptr, i});
  }
  Py_ssize_t at = 0;
  PyObject *name, *value;
  while (PyDict_Next(named, &at, &name, &value)) {
    sure(PyList_Append(parts, name));
    reader.read(value, {nullptr, name, 0});
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// read_argument(label, value, parts, tensors, ask): read a value that `ask` has found within
// another.
PyObject* py_read_argument(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *label, *value, *parts, *tensors, *ask;
  if (!PyArg_ParseTuple(args, "UOO!O!O", &label, &value, &PyList_Type, &parts, &PyList_Type,
                        &tensors, &ask)) {
    return nullptr;
  }
  ArgumentReader(parts, tensors, ask).read(value, {nullptr, label, 0});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace hits
