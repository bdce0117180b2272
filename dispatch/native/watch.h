// What `replay` checks before it repeats a call: whether the objects that the function can reach
// hold what they held (`capture/watched_object.py`), and whether tensors have the same metadata
// (rows of words).

#pragma once

#include <ATen/autocast_mode.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include "call.h"

namespace hits {

// Kinds of holders, by the numbers that watched_object.py gives them.
enum Holder { ITEMS, ATTRIBUTES, ELEMENTS, CELL, AUTOGRAD_FIELDS, FUNCTION };

// `MISSING` and `OPEN` of watched_object.py: what is expected where nothing, or any tensor, may lie.
PyObject *nothing, *any_tensor;

// What a holder should hold, a tuple. Objects are compared by identity: for an equal number in a
// new object Python is asked (`Watch.change`).
struct Expected {
  PyObject* values;

  bool is(Py_ssize_t i, PyObject* now) const {
    PyObject* expected = PyTuple_GET_ITEM(values, i);
    if (now == nullptr) return expected == nothing;
    return expected == now || (expected == any_tensor && THPVariable_Check(now));
  }
};

PyObject* or_none(PyObject* field) { return field == nullptr ? Py_None : field; }

// Whether a dict has as many keys as before, and the same one last. `newest` has both: how many, and
// the last; their number is -1 if other keys don't matter. A key that comes is the last one.
bool has_newest(PyObject* dict, PyObject* newest) {
  const Py_ssize_t n = PyLong_AsSsize_t(PyTuple_GET_ITEM(newest, 0));
  if (n < 0) return true;
  if (PyDict_GET_SIZE(dict) != n) return false;
  if (n == 0) return true;
  // there may be gaps before the last key, so it is the n-th entry or a later one
  Py_ssize_t at = n - 1;
  PyObject *key = nullptr, *value;
  while (PyDict_Next(dict, &at, &key, &value)) {
  }
  return key == PyTuple_GET_ITEM(newest, 1);
}

// The same for the attributes of an object.
bool has_newest_attribute(PyObject* object, PyObject* newest) {
  return has_newest(Ref(sure(PyObject_GenericGetDict(object, nullptr))).get(), newest);
}

// Whether the first four of a tensor's `AUTOGRAD_FIELDS` (watched_object.py) are as expected. torch
// warns if others than leaves are asked for their gradient.
bool has_autograd_fields(PyObject* holder, const Expected& expected) {
  const auto* object = reinterpret_cast<THPVariable*>(holder);
  const at::Tensor& tensor = THPVariable_Unpack(holder);
  const at::Tensor gradient = tensor.is_leaf() ? tensor.grad() : at::Tensor();
  return expected.is(0, gradient.defined() ? object_of(gradient).get() : Py_None) &&
         expected.is(1, tensor.requires_grad() ? Py_True : Py_False) &&
         expected.is(2, or_none(object->backward_hooks)) &&
         expected.is(3, or_none(object->post_accumulate_grad_hooks));
}

// Whether an `OrderedDict` of the right size holds these values under `keys`, in this order.
bool holds_in_order(PyObject* holder, PyObject* keys, const Expected& expected) {
  const Ref iterator(sure(PyObject_GetIter(holder)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys); ++i) {
    const Ref key(PyIter_Next(iterator.get()));
    PyObject* value = nullptr;
    if (key.get() != nullptr) value = PyDict_GetItemWithError(holder, key.get());
    if (PyErr_Occurred()) throw python_error();
    if (key.get() != PyTuple_GET_ITEM(keys, i) || !expected.is(i, value)) return false;
  }
  return true;
}

// Whether a holder holds just these values under `keys`. False, too, where only Python can tell.
// `newest` is for the attributes of an object or a tensor: see `has_newest`.
bool holds(long kind, PyObject* holder, PyObject* keys, const Expected& expected,
           PyObject* newest) {
  const Py_ssize_t n = PyTuple_GET_SIZE(expected.values);
  switch (kind) {
    case ITEMS: {
      if (PyDict_GET_SIZE(holder) != n) return false;
      // an `OrderedDict` keeps an order of its own, which `move_to_end` changes and PyDict_Next
      // ignores
      if (n > 0 && PyODict_Check(holder)) return holds_in_order(holder, keys, expected);
      Py_ssize_t at = 0, i = 0;
      PyObject *key, *value;
      while (PyDict_Next(holder, &at, &key, &value)) {
        if (key != PyTuple_GET_ITEM(keys, i) || !expected.is(i, value)) return false;
        ++i;
      }
      return true;
    }
    case ATTRIBUTES:
      if (!has_newest(holder, newest)) return false;
      for (Py_ssize_t i = 0; i < n; ++i) {
        PyObject* value = PyDict_GetItemWithError(holder, PyTuple_GET_ITEM(keys, i));
        if (value == nullptr && PyErr_Occurred()) throw python_error();
        if (!expected.is(i, value)) return false;
      }
      return true;
    case ELEMENTS:
      if (PyAnySet_Check(holder)) return n == 0 && PySet_GET_SIZE(holder) == 0;
      if (PyList_GET_SIZE(holder) != n) return false;
      for (Py_ssize_t i = 0; i < n; ++i) {
        if (!expected.is(i, PyList_GET_ITEM(holder, i))) return false;
      }
      return true;
    case CELL:
      return expected.is(0, PyCell_GET(holder));
    case AUTOGRAD_FIELDS:
      return has_newest_attribute(holder, newest) && has_autograd_fields(holder, expected);
    case FUNCTION:
      return expected.is(0, PyFunction_GET_CODE(holder)) &&
             expected.is(1, or_none(PyFunction_GET_DEFAULTS(holder))) &&
             expected.is(2, or_none(PyFunction_GET_KW_DEFAULTS(holder)));
    default:
      return false;
  }
}

// The number of the first holder in `watched`, from `start` on, that doesn't hold what is expected;
// -1 if all do. Each is (kind, holder, keys, values, newest), as `WatchedObject.for_native` gives it.
Py_ssize_t first_change(PyObject* watched, Py_ssize_t start = 0) {
  for (Py_ssize_t i = start; i < PyList_GET_SIZE(watched); ++i) {
    const Ref one = Ref::to(PyList_GET_ITEM(watched, i));
    const auto item = [&one](Py_ssize_t at) { return PyTuple_GET_ITEM(one.get(), at); };
    if (!holds(PyLong_AsLong(item(0)), item(1), item(2), {item(3)}, item(4))) {
      return i;
    }
  }
  return -1;
}

// first_change(watched, start)
PyObject* py_first_change(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* watched;
  Py_ssize_t start;
  if (!PyArg_ParseTuple(args, "O!n", &PyList_Type, &watched, &start)) return nullptr;
  return PyLong_FromSsize_t(first_change(watched, start));
  END_HANDLE_TH_ERRORS
}

// Whether tensor i has these autograd fields, and the same newest attribute, for each
// (i, values, newest).
bool have_autograd_fields(PyObject* tensors, PyObject* autograd_fields) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(autograd_fields); ++i) {
    PyObject* one = PyList_GET_ITEM(autograd_fields, i);
    PyObject* tensor = PyList_GET_ITEM(tensors, PyLong_AsSsize_t(PyTuple_GET_ITEM(one, 0)));
    if (!has_newest_attribute(tensor, PyTuple_GET_ITEM(one, 2))) return false;
    if (!has_autograd_fields(tensor, {PyTuple_GET_ITEM(one, 1)})) return false;
  }
  return true;
}

// call_environment(): the settings that a call's ops depend on besides its arguments, as the bits
// of one number: those of `torch_private.environment`, of autograd and of autocast. `replay` adds
// what `parametrize` caches.
PyObject* py_call_environment(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  const at::Context& context = at::globalContext();
  uint64_t bits = 0;
  const auto put = [&bits](uint64_t value, int width) { bits = bits << width | value; };
  put(static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()), 8);
  put(context.deterministicAlgorithms(), 1);
  put(context.deterministicAlgorithmsWarnOnly(), 1);
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  put(static_cast<uint64_t>(context.float32Precision(Backend::GENERIC, Op::ALL)), 3);
  for (const auto backend : {Backend::CUDA, Backend::MKLDNN}) {
    for (const auto op : {Op::MATMUL, Op::CONV, Op::RNN}) {
      put(static_cast<uint64_t>(context.float32Precision(backend, op)), 3);
    }
  }
  put(context.userEnabledMkldnn(), 1);
  put(context.userEnabledFlashSDP(), 1);
  put(context.userEnabledMemEfficientSDP(), 1);
  put(context.userEnabledMathSDP(), 1);
  put(c10::InferenceMode::is_enabled(), 1);
  put(at::GradMode::is_enabled(), 1);
  put(torch::autograd::AnomalyMode::is_enabled(), 1);
  put(at::autocast::is_autocast_cache_enabled(), 1);
  for (const auto device : {at::kCPU, at::kCUDA}) {
    put(at::autocast::is_autocast_enabled(device), 1);
    put(static_cast<uint64_t>(at::autocast::get_autocast_dtype(device)), 8);
  }
  return PyLong_FromUnsignedLongLong(bits);
  END_HANDLE_TH_ERRORS
}

// The place at which each object was met first.
using Firsts = ska::flat_hash_map<const void*, int64_t>;

PyObject* as_bytes(const std::vector<uint64_t>& words) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words.data()),
                                   static_cast<Py_ssize_t>(words.size() * sizeof(uint64_t)));
}

void append_leaf(std::vector<uint64_t>& words, const at::Tensor& tensor, int64_t shares) {
  Words its;
  put_leaf(its, tensor.sizes(), tensor.strides(), tensor.storage_offset() != 0,
           tensor.scalar_type(), tensor.device(), shares);
  words.insert(words.end(), its.begin(), its.end());
}

// Words that are equal for leaves on which the same plan can run: of each its size, strides, dtype
// and device, whether it has a storage offset, and the first leaf on the same storage. A leaf that
// is not dense, or is None as it is drawn later, is one word.
std::vector<uint64_t> words_of_leaves(PyObject* leaves) {
  std::vector<uint64_t> words;
  Firsts owners;
  owners.reserve(PyList_GET_SIZE(leaves));
  words.reserve(8 * PyList_GET_SIZE(leaves));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaves); ++i) {
    PyObject* leaf = PyList_GET_ITEM(leaves, i);
    if (leaf == Py_None || !is_dense(THPVariable_Unpack(leaf))) {
      words.push_back(leaf == Py_None);
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(leaf);
    const void* storage = tensor.storage().unsafeGetStorageImpl();
    append_leaf(words, tensor, owners.emplace(storage, i).first->second);
  }
  return words;
}

// leaf_words(leaves): these words as bytes.
PyObject* py_leaf_words(PyObject*, PyObject* leaves) {
  HANDLE_TH_ERRORS
  return as_bytes(words_of_leaves(leaves));
  END_HANDLE_TH_ERRORS
}

// Words that are equal for tensors that a call treats alike: of each its size, strides, dtype and
// device, whether it requires a gradient, has a graph or a storage offset, or is an inference tensor
// or a conjugate or negative view, the first place of the same object in both lists, and the number
// of its layout. Those of `tensors` have their classes, too; those of `others` no sizes and strides
// if they may have `any_size`.
std::vector<uint64_t> words_of(PyObject* tensors, PyObject* others, bool any_size) {
  std::vector<uint64_t> words;
  const Py_ssize_t n_typed = PyList_GET_SIZE(tensors), n = n_typed + PyList_GET_SIZE(others);
  Firsts first;
  first.reserve(n);
  words.reserve(10 * n);
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* object =
        i < n_typed ? PyList_GET_ITEM(tensors, i) : PyList_GET_ITEM(others, i - n_typed);
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (i < n_typed) words.push_back(reinterpret_cast<uint64_t>(Py_TYPE(object)));
    const int64_t shares = first.emplace(object, i).first->second;
    if (tensor.layout() != c10::kStrided || tensor.is_nested()) {
      words.insert(words.end(), {static_cast<uint64_t>(tensor.layout()) << 8 | tensor.is_nested(),
                                 static_cast<uint64_t>(shares),
                                 static_cast<uint64_t>(tensor.scalar_type()) << 8 |
                                     tensor.requires_grad()});
      if (any_size && i >= n_typed) continue;
      // a nested tensor has sizes of its own for each part; a jagged one has them in an attribute
      at::Tensor of_parts;
      c10::IntArrayRef sizes;
      if (!tensor.is_nested()) {
        sizes = tensor.sizes();
      } else if (tensor.layout() == c10::kStrided) {
        of_parts = tensor._nested_tensor_size();
        sizes = {of_parts.const_data_ptr<int64_t>(), static_cast<size_t>(of_parts.numel())};
      }
      words.push_back(sizes.size());
      words.insert(words.end(), sizes.begin(), sizes.end());
      continue;
    }
    words.push_back(tensor.is_inference() << 4 | !tensor.is_leaf() << 3 |
                    tensor.requires_grad() << 2 | tensor.is_conj() << 1 | tensor.is_neg());
    const Ref layout = layout_in(object);
    words.push_back(layout.get() == nullptr
                        ? 0
                        : 1 + PyLong_AsUnsignedLongLong(of_layout.number.in(layout.get())));
    if (any_size && i >= n_typed) {
      words.insert(words.end(), {static_cast<uint64_t>(tensor.dim()) << 1 |
                                     (tensor.storage_offset() != 0),
                                 static_cast<uint64_t>(tensor.scalar_type()),
                                 static_cast<uint64_t>(tensor.device().type()) << 16 |
                                     static_cast<uint16_t>(tensor.device().index()),
                                 static_cast<uint64_t>(shares)});
    } else {
      append_leaf(words, tensor, shares);
    }
  }
  return words;
}

// argument_words(tensors, others, any_size): these words as bytes.
PyObject* py_argument_words(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *tensors, *others;
  int any_size = 0;
  if (!PyArg_ParseTuple(args, "O!O!|p", &PyList_Type, &tensors, &PyList_Type, &others,
                        &any_size)) {
    return nullptr;
  }
  return as_bytes(words_of(tensors, others, any_size));
  END_HANDLE_TH_ERRORS
}

// A lazy tensor's data; any other tensor as it is.
Ref data_of(Ref tensor) {
  if (!is_lazy_class(Py_TYPE(tensor.get()))) return tensor;
  Ref object;
  return data_in(value_of(THPVariable_Unpack(tensor.get()), object).get());
}

// are_equal(tensors, which): whether the tensors of these numbers are equal bit for bit. They are
// 0-dim tensors of one dtype on the CPU; there is at least one.
PyObject* py_are_equal(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *tensors, *which;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyList_Type, &which)) return nullptr;
  const auto data = [tensors, which](Py_ssize_t i) -> const at::Tensor& {
    const auto number = PyLong_AsSsize_t(PyList_GET_ITEM(which, i));
    return THPVariable_Unpack(PyList_GET_ITEM(tensors, number));
  };
  const at::Tensor& first = data(0);
  for (Py_ssize_t i = 1; i < PyList_GET_SIZE(which); ++i) {
    if (std::memcmp(data(i).const_data_ptr(), first.const_data_ptr(), first.itemsize()) != 0) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

}  // namespace hits
