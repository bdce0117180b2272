// One call: how its key is built, and how tensors enter the trace that it does not hold yet. What
// `keys.exact_key` and `inputs.admit` do in Python.

#pragma once

#include <c10/core/impl/COW.h>

#include "trie.h"

namespace hits {

// A tensor among a call's arguments that the trace does not hold yet.
struct Newcomer {
  const at::Tensor* tensor;  // of a lazy tensor the data; `object` or the stack keeps it
  Ref object;                // the Python object of `tensor`
  Ref value;                 // of a lazy tensor, else null
  size_t place;              // where its word in the key is, which names its slot once it has one
  // A plain tensor outside the mode: a snapshot of it enters, as later writes to it are not seen.
  bool is_snapshot = false;
  Ref storage;                 // the number of its storage
  const Step* step = nullptr;  // to its leaf, once it was found
  int64_t shares = -1;         // the slot of the first leaf on its storage, if that isn't its own
};

int64_t index_of(PyObject* slot) { return PyLong_AsLongLong(of_slot.index.in(slot)); }

// The words of a leaf, the same facts as in `inputs._leaf_key`. `shares` is the slot of the trace's
// first leaf on the same storage, or -1.
void put_leaf(Words& words, c10::IntArrayRef size, c10::IntArrayRef stride, bool has_offset,
              c10::ScalarType dtype, c10::Device device, int64_t shares) {
  put(words, Tag::LEAF, size.size() << 1 | has_offset);
  for (const int64_t n : size) words.push_back(static_cast<uint64_t>(n));
  for (const int64_t n : stride) words.push_back(static_cast<uint64_t>(n));
  words.push_back(static_cast<uint64_t>(dtype) << 32 | static_cast<uint64_t>(device.type()) << 16 |
                  static_cast<uint16_t>(device.index()));
  words.push_back(static_cast<uint64_t>(shares));
}

// The step from a state to a leaf with the tensor's metadata; null if none is known. `shares` and
// `has_offset` as in `put_leaf`.
const Step* step_to_leaf(const Edges* edges, const at::Tensor& tensor, int64_t shares,
                         bool has_offset) {
  if (edges == nullptr) return nullptr;
  Words words;
  put_leaf(words, tensor.sizes(), tensor.strides(), has_offset, tensor.scalar_type(),
           tensor.device(), shares);
  return edges->exact.find(words);
}

// Make the newcomer a leaf of the trace by its `step`.
void enter(PyObject* trace, const Newcomer& newcomer) {
  const at::Tensor& tensor = *newcomer.tensor;
  PyObject* slot = newcomer.step->slot.get();
  PyObject* index = of_slot.index.in(slot);
  if (newcomer.shares < 0) {
    sure(PyDict_SetItem(of_trace.storages.in(trace), newcomer.storage.get(), index));
  }
  const int64_t offset = tensor.storage_offset();
  if (offset != 0) {
    const auto n_bytes = static_cast<int64_t>(tensor.itemsize());
    Ref number(sure(PyLong_FromLongLong(offset * n_bytes)));
    sure(PyDict_SetItem(of_trace.leaf_offsets.in(trace), index, number.get()));
  }
  if (newcomer.value.get() != nullptr) {
    sure(PyObject_SetAttr(newcomer.value.get(), name_slot, slot));
    sure(PyList_Append(of_trace.leaf_values.in(trace), newcomer.value.get()));
  } else if (!newcomer.is_snapshot) {
    // `leaves` holds the tensor from here on, so no other object can have its id()
    Ref id(sure(PyLong_FromVoidPtr(newcomer.object.get())));
    sure(PyDict_SetItem(of_trace.leaf_slots.in(trace), id.get(), slot));
  }
  sure(PyList_Append(of_trace.leaves.in(trace), newcomer.object.get()));
  of_trace.state.set(trace, newcomer.step->state.get());
}

// Whether pending ops may read or write the tensor's storage.
bool is_here(const at::Tensor& tensor, PyObject* trace) {
  PyObject* storages = of_trace.storages.in(trace);
  if (PyDict_GET_SIZE(storages) == 0) return false;
  return PyDict_GetItemWithError(storages, storage_id(tensor).get()) != nullptr;
}

// The slot of the trace's latest copy of a tensor whose memory others may write; null if there is
// none, if the memory was written since, or if it is a leaf, too, and a pending op may write it: each
// read compares all bits (see `input_snapshots.known`).
PyObject* slot_of_copy(PyObject* trace, const at::Tensor& tensor) {
  PyObject* copies = of_trace.copies.in(trace);
  if (PyDict_GET_SIZE(copies) == 0 || !tensor.is_non_overlapping_and_dense()) return nullptr;
  PyObject* of_memory = PyDict_GetItemWithError(copies, storage_id(tensor).get());
  if (of_memory == nullptr || is_here(tensor, trace)) return nullptr;
  for (Py_ssize_t i = PyList_GET_SIZE(of_memory); i-- > 0;) {
    const auto item = [copy = PyList_GET_ITEM(of_memory, i)](Py_ssize_t place) {
      return PyTuple_GET_ITEM(copy, place);  // (tensor, offset, data, slot)
    };
    const at::Tensor& data = THPVariable_Unpack(item(2));
    if (PyLong_AsLongLong(item(1)) == tensor.storage_offset() &&
        data.scalar_type() == tensor.scalar_type() && data.sizes().equals(tensor.sizes()) &&
        data.strides().equals(tensor.strides())) {
      const bool agree =
          std::memcmp(tensor.const_data_ptr(), data.const_data_ptr(), tensor.nbytes()) == 0;
      return agree ? item(3) : nullptr;
    }
  }
  return nullptr;
}

// The key of one call, its newcomers, and the step that it takes. Used once: `read`, `find`, `let_in`.
class Call {
 public:
  Call(const OpInfo& info, PyObject* trace, bool in_mode)
      : info_(info), trace_(trace), in_mode_(in_mode) {}

  // Build the key; false if Python has to handle the call. Tensors that the trace does not hold are
  // noted as newcomers if it `lets_in`; else they, too, are left to Python. `is_recorded`: Python has
  // recorded the call, so all its tensors have slots.
  bool read(const IValue* arguments, bool lets_in, bool is_recorded = false) {
    words_.clear();
    words_.push_back(reinterpret_cast<uint64_t>(&info_));
    lets_in_ = lets_in;
    is_recorded_ = is_recorded;
    const size_t n = info_.schema.arguments().size();
    for (size_t i = 0; i < n; ++i) {
      argument_ = i;
      if (!put_argument(arguments[i])) return false;
    }
    return true;
  }

  // The same key with numbers replaced by their types; `numbers` gets them, in order. These must be
  // the numbers that `keys.generic_key` takes out of the arguments that Python gets. torch leaves
  // out trailing arguments there that equal their defaults.
  Words without_numbers(const IValue* arguments, std::vector<IValue>& numbers) const {
    const size_t n = info_.schema.arguments().size();
    size_t n_given = info_.n_positional;
    while (n_given > 0 && is_default(n_given - 1, arguments[n_given - 1])) --n_given;
    Words result;
    size_t at = 0;
    result.push_back(words_[at++]);
    for (size_t i = 0; i < n; ++i) {
      const bool is_given = i < info_.n_positional ? i < n_given : !is_default(i, arguments[i]);
      mask(words_, at, result, info_.is_number[i] && is_given, numbers);
    }
    return result;
  }

  // Find the step of the call, behind those of its newcomers. False if any of these isn't known; the
  // trace is as before.
  bool find(const IValue* arguments) {
    PyObject* state = of_trace.state.in(trace_);
    if (!newcomers_.empty()) {
      // a call on 0-dim CPU tensors alone runs at once: Python says so (`inputs.is_tiny`)
      if (!any_known_ && all_tiny()) return false;
      for (Newcomer& newcomer : newcomers_) {
        if (!newcomer.is_snapshot) newcomer.shares = slot_of_storage(newcomer);
        newcomer.step = step_to_leaf(edges_from(state), *newcomer.tensor, newcomer.shares,
                                     newcomer.tensor->storage_offset() != 0);
        if (newcomer.step == nullptr) return false;
        Words word;
        put(word, Tag::TENSOR, index_of(newcomer.step->slot.get()));
        words_[newcomer.place] = word[0];
        state = newcomer.step->state.get();
      }
      for (const auto& [place, first] : repeats_) words_[place] = words_[first];
    }
    const Edges* edges = edges_from(state);
    if (edges == nullptr) return false;
    step_ = edges->exact.find(words_);
    if (step_ == nullptr && !edges->generic.steps.empty()) {
      step_ = edges->generic.find(without_numbers(arguments, numbers_));
    }
    return step_ != nullptr;
  }

  // Make the newcomers leaves, once `find` has found all steps. False if Python has to handle the
  // call.
  bool let_in() {
    if (newcomers_.empty()) return true;
    const Ref before = Ref::to(of_trace.state.in(trace_));
    for (Newcomer& newcomer : newcomers_) {
      if (newcomer.is_snapshot && !take_snapshot(newcomer)) return false;
    }
    // Meanwhile finalizers may have called ops, and other threads may have recorded ops on a value.
    if (of_trace.state.in(trace_) != before.get()) return false;
    for (const Newcomer& newcomer : newcomers_) {
      PyObject* value = newcomer.value.get();
      if (value != nullptr && (slot_in(value).get() != Py_None ||
                               data_in(value).get() != newcomer.object.get())) {
        return false;
      }
    }
    for (const Newcomer& newcomer : newcomers_) enter(trace_, newcomer);
    return true;
  }

  const Words& words() const { return words_; }
  const Step& step() const { return *step_; }
  const std::vector<IValue>& numbers() const { return numbers_; }  // run-time inputs of the step
  bool any_lazy() const { return any_lazy_; }

 private:
  // Whether an argument equals its default; false for defaults that no key can hold.
  bool is_default(size_t i, const IValue& value) const {
    if (!info_.defaults[i].has_value()) return false;
    Words words;
    return put_static(words, value) && words == *info_.defaults[i];
  }

  // Copy the words of one argument, which begin at `plain[at]`, to `result`, and move `at` behind
  // them. If it `hides` numbers, the type takes a number's place, and `numbers` gets the number.
  // How many words follow each tag is as in `put_static`.
  static void mask(const Words& plain, size_t& at, Words& result, bool hides,
                   std::vector<IValue>& numbers) {
    const auto tag = static_cast<Tag>(plain[at] >> 56);
    const uint64_t more = plain[at] & ((uint64_t{1} << 56) - 1);
    size_t n_payload = 0;
    switch (tag) {
      case Tag::INT:
      case Tag::DOUBLE:
      case Tag::DEVICE:
        n_payload = 1;
        break;
      case Tag::COMPLEX:
        n_payload = 2;
        break;
      case Tag::STRING:
        n_payload = (more + 7) / 8;
        break;
      default:
        break;
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
    // a sharded tensor has two words: behind its layout comes its slot
    if (tag == Tag::LAYOUT) mask(plain, at, result, hides, numbers);
  }

  // Append an argument's words; false if Python has to handle the call. The same for those below.
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
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return is_number(tensor) && put_number(tensor);
    }
    Ref object;
    Ref value = value_of(tensor, object);
    if (value.get() != nullptr) {
      any_lazy_ = true;
      const Ref layout = layout_of(tensor, object);
      if (layout.get() != nullptr) {
        // ranks may have parts of different sizes, and all must record the call or none
        any_known_ = true;
        put(words_, Tag::LAYOUT, PyLong_AsUnsignedLongLong(of_layout.number.in(layout.get())));
      }
      const Ref slot = slot_in(value.get());
      if (slot.get() != Py_None) {
        if (of_slot.trace.in(slot.get()) != trace_) return false;  // another thread recorded it
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
      if (is_in(externally_writable, computed)) return layout.get() == nullptr && put_copy(computed);
      // outside the mode nobody would see a plain op that writes this memory
      if (!in_mode_ && is_in(shared, computed)) return false;
      return put_new(computed, std::move(data), std::move(value));
    }
    if (!THPVariable_CheckExact(object.get())) return false;  // neither Tensor nor Parameter
    // Outside the mode a plain tensor enters anew for each call. Its slot is that of a call which
    // Python has recorded just now.
    if (in_mode_ || is_recorded_) {
      Ref id(sure(PyLong_FromVoidPtr(object.get())));
      PyObject* slots = (in_mode_ ? of_trace.leaf_slots : of_trace.snapshot_slots).in(trace_);
      if (PyObject* slot = PyDict_GetItemWithError(slots, id.get())) {
        put_slot(slot);
        return true;
      }
    }
    if (!lets_in_) return false;
    for (const Newcomer& newcomer : newcomers_) {
      if (newcomer.object.get() == object.get()) return put_again(newcomer);
    }
    return put_new(tensor, std::move(object), Ref());
  }

  // A Python number in a tensor's place, as in `x * 2`. torch makes a 0-dim tensor of it, and hands
  // it to Python as the number, so it is a number in the keys of both sides.
  bool put_number(const at::Tensor& tensor) {
    if (!tensor.is_cpu()) return false;
    switch (tensor.scalar_type()) {
      case c10::kLong:
        return put_static(words_, *tensor.const_data_ptr<int64_t>());
      case c10::kDouble:
        return put_static(words_, *tensor.const_data_ptr<double>());
      case c10::kBool:
        return put_static(words_, *tensor.const_data_ptr<bool>());
      case c10::kComplexDouble:
        return put_static(words_, *tensor.const_data_ptr<c10::complex<double>>());
      default:
        return false;
    }
  }

  void put_slot(PyObject* slot) {
    any_known_ = true;
    put(words_, Tag::TENSOR, index_of(slot));
  }

  bool put_new(const at::Tensor& tensor, Ref object, Ref value) {
    if (!is_dense(tensor) || tensor.is_neg() || tensor.is_conj()) return false;
    // Memory that can't be resized belongs to an array or a file as well, which others may write.
    // Parameters are let in all the same (see `inputs._is_private`).
    if (in_mode_ && Py_TYPE(object.get()) != reinterpret_cast<PyTypeObject*>(ParameterClass) &&
        !tensor.storage().resizable()) {
      return put_copy(tensor);
    }
    const bool is_snapshot = !in_mode_ && value.get() == nullptr;
    if (is_snapshot && !can_be_snapshot(tensor)) return false;
    const size_t place = words_.size();
    put(words_, Tag::TENSOR);
    newcomers_.push_back({&tensor, std::move(object), std::move(value), place, is_snapshot});
    return true;
  }

  // Whether the call may read a snapshot of the tensor that shares its memory until either is
  // written. The call must not write the tensor or give a view of it.
  bool can_be_snapshot(const at::Tensor& tensor) const {
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    return !info_.is_view && !is_written() && storage->resizable() &&
           (c10::impl::cow::is_cow_data_ptr(storage->data_ptr()) ||
            c10::impl::cow::has_simple_data_ptr(*storage));
  }

  // Put a snapshot in the place of a newcomer. False if it was copied to a layout of its own.
  static bool take_snapshot(Newcomer& newcomer) {
    const at::Tensor& tensor = *newcomer.tensor;
    Ref taken(sure(PyObject_CallOneArg(snapshot, newcomer.object.get())));
    const at::Tensor& data = THPVariable_Unpack(taken.get());
    if (data.strides() != tensor.strides() || data.storage_offset() != tensor.storage_offset()) {
      return false;
    }
    newcomer.tensor = &data;
    newcomer.storage = storage_id(data);
    newcomer.object = std::move(taken);
    return true;
  }

  // The slot of the first leaf on the newcomer's storage, or -1. Not for snapshots, which have a
  // storage of their own.
  int64_t slot_of_storage(Newcomer& newcomer) const {
    newcomer.storage = storage_id(*newcomer.tensor);
    PyObject* index =
        PyDict_GetItemWithError(of_trace.storages.in(trace_), newcomer.storage.get());
    if (index != nullptr) return PyLong_AsLongLong(index);
    for (const Newcomer& other : newcomers_) {
      if (&other == &newcomer) break;
      if (!other.is_snapshot && other.tensor->storage().unsafeGetStorageImpl() ==
                                    newcomer.tensor->storage().unsafeGetStorageImpl()) {
        return other.shares < 0 ? index_of(other.step->slot.get()) : other.shares;
      }
    }
    return -1;
  }

  // The edges of a state, which are kept: a finalizer may drop them from the trie while their steps
  // are taken.
  const Edges* edges_from(PyObject* state) {
    Edges* edges = edges_of(state);
    kept_.push_back(Ref::to(reinterpret_cast<PyObject*>(edges)));
    return edges;
  }

  // Whether the call writes the argument that is being read.
  bool is_written() const { return info_.writes[argument_]; }

  // Name the trace's copy of memory that others may write. The call must not write the memory or
  // give a view of it: that would be of the copy.
  bool put_copy(const at::Tensor& tensor) {
    if (!info_.reads_copies || is_written()) return false;
    PyObject* slot = slot_of_copy(trace_, tensor);
    if (slot != nullptr) put_slot(slot);
    return slot != nullptr;
  }

  // A newcomer that is an argument for the second time: `find` copies the word of the first.
  bool put_again(const Newcomer& first) {
    if (first.is_snapshot && is_written()) return false;
    repeats_.push_back({words_.size(), first.place});
    put(words_, Tag::TENSOR);
    return true;
  }

  bool all_tiny() const {
    for (const Newcomer& newcomer : newcomers_) {
      if (newcomer.tensor->dim() != 0 || !newcomer.tensor->is_cpu()) return false;
    }
    return true;
  }

  static bool is_in(PyObject* storages, const at::Tensor& tensor) {
    if (PySet_GET_SIZE(storages) == 0) return false;
    const int found = PySet_Contains(storages, storage_id(tensor).get());
    sure(found);
    return found == 1;
  }

  const OpInfo& info_;
  PyObject* trace_;
  bool in_mode_, lets_in_ = false, is_recorded_ = false;
  size_t argument_ = 0;                        // the one that is being read
  bool any_lazy_ = false, any_known_ = false;  // an argument is lazy; one has a slot, or is sharded
  Words words_;
  std::vector<Newcomer> newcomers_;
  std::vector<std::pair<size_t, size_t>> repeats_;  // places of words that are to be the same
  c10::SmallVector<Ref, 4> kept_;                   // edges that the steps lie in
  const Step* step_ = nullptr;
  std::vector<IValue> numbers_;
};

}  // namespace hits
