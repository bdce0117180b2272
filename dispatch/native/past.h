// The past: which sequences of calls a program has made before, each counted from a sync point on.
// The policy records a region if its sequence is known. `PastObject` has the methods of the class
// `call_history.Past`, which stands in for it where this library isn't loaded.

#pragma once

#include "trie.h"

namespace hits {

// Each call has a number (`CallNumber`). A hash of the numbers since the last sync point stands for
// the sequence, and a set keeps the hashes of all sequences so far, one after each call. So one
// look-up a call tells whether everything up to it came in this order before.
//
// A loop may have no sync points. Then a turn of it ends where the calls that began it come again:
// a second hash, of the latest FIRST calls, is compared with that of the first ones.
class Past {
 public:
  // Hashes that are kept. An epoch of a large model, on batches of twenty lengths, has 65,000.
  static constexpr uint64_t N_KEPT = 1 << 17;
  // Calls at the start of a loop's turn by which the next turn is recognized.
  static constexpr uint64_t FIRST = 8;
  // Calls without a sync point from which on calls that come again are a loop's. Before, they may
  // be those of layers that are alike, or the optimizer's for each parameter.
  static constexpr uint64_t LOOPS_FROM = 4096;
  // If the first calls have not come again after so many, they are taken for the loop's set-up, and
  // the latest calls for the start of a turn.
  static constexpr uint64_t BEGINS_ANEW_AT = 8 * LOOPS_FROM;
  // The least calls that a turn may have: each turn ends in a flush, which takes time.
  static constexpr uint64_t TURN_AT_LEAST = 256;
  // 2**64 over the golden ratio, as in Knuth's multiplicative hashing.
  static constexpr uint64_t FACTOR = 0x9E3779B97F4A7C15u;

  Past() : seen_(N_KEPT) {}

  // Forget all. The memory is overwritten, not freed: another thread may call this while the
  // owner's thread adds a call without the GIL.
  void clear() {
    std::fill(seen_.begin(), seen_.end(), 0);
    at_sync_point();
  }

  // Begin a new sequence. Whether the one that ends here is known; false if it has no calls.
  bool at_sync_point() {
    const bool known = is_known();
    n_ = hash_ = first_ = recent_hash_ = n_seen_ = n_to_skip_ = 0;
    least_ = LOOPS_FROM;
    is_known_ = ends_turn_ = false;
    return known;
  }

  // Add a call. Whether it ends a turn of a loop whose calls before it were all known.
  bool note(uint64_t call) {
    const bool was_known = is_known_;
    recent_hash_ = (recent_hash_ + call) * FACTOR;
    // The call that is FIRST calls old leaves the hash. Its number has been multiplied FIRST + 1
    // times.
    const uint64_t out = std::exchange(recent_[n_all_++ % FIRST], call);
    if (n_ >= FIRST) recent_hash_ -= out * FACTOR_OUT;
    hash_ = (hash_ + call) * FACTOR;
    ++n_;
    if (n_ == FIRST) first_ = recent_hash_;
    ends_turn_ = n_ >= least_ && recent_hash_ == first_;
    if (ends_turn_) {
      turn_ = n_seen_;
      least_ = TURN_AT_LEAST;
    }
    // the latest FIRST calls are the first ones of the next turn: go on as if only they had come
    if (ends_turn_ || n_ == BEGINS_ANEW_AT) {
      n_seen_ = 0;
      n_ = FIRST;
      hash_ = first_ = recent_hash_;
    }
    is_known_ = was_seen(hash_);
    return ends_turn_ && was_known;
  }

  // Take the next calls for known, as many as `n` turns like the last one have.
  void skip_turns(uint64_t n) { n_to_skip_ = n * turn_; }

  // Whether the call that comes is one of these, which need not be noted. Asked once for each call,
  // those included that have no number: so all of a turn are counted.
  bool skips() {
    if (n_to_skip_ == 0) ++n_seen_;
    return n_to_skip_ != 0 && n_to_skip_-- != 0;
  }

  bool is_known() const { return is_known_; }
  bool has_begun() const { return n_ > 0; }
  bool ends_turn() const { return ends_turn_; }
  uint64_t region() const { return hash_; }

 private:
  static constexpr uint64_t FACTOR_2 = FACTOR * FACTOR, FACTOR_4 = FACTOR_2 * FACTOR_2;
  static constexpr uint64_t FACTOR_OUT = FACTOR_4 * FACTOR_4 * FACTOR;  // to the power of FIRST + 1
  static constexpr uint64_t WAYS = 4;

  // Whether the hash is in the set; it is from now on. The set is a table in which WAYS hashes have
  // one place, the latest first: with one hash a place, collisions would lose first calls of a
  // region. The place is in the upper half of the hash, as the lowest bits of a product are the
  // worst mixed.
  bool was_seen(uint64_t hash) {
    uint64_t* const ways = &seen_[hash >> 32 & (N_KEPT - WAYS)];
    uint64_t* found = std::find(ways, ways + WAYS, hash);
    const bool seen = found != ways + WAYS;
    if (!seen) *(found = ways + WAYS - 1) = hash;
    std::rotate(ways, found, found + 1);
    return seen;
  }

  std::vector<uint64_t> seen_;
  std::array<uint64_t, FIRST> recent_{};
  uint64_t n_ = 0, n_all_ = 0, hash_ = 0, first_ = 0, recent_hash_ = 0, least_ = LOOPS_FROM;
  // Calls of the last turn, of the one under way, and still to skip: also those that are never
  // noted.
  uint64_t turn_ = 0, n_seen_ = 0, n_to_skip_ = 0;
  bool is_known_ = false, ends_turn_ = false;
};

struct PastObject {
  PyObject_HEAD Past* past;  // 1 MiB, made when the first call is noted
};

Past& in_past(PyObject* self) {
  auto& past = reinterpret_cast<PastObject*>(self)->past;
  if (past == nullptr) past = new Past();
  return *past;
}

PyObject* new_past(PyTypeObject* type, PyObject*, PyObject*) { return type->tp_alloc(type, 0); }

void delete_past(PyObject* self) {
  delete reinterpret_cast<PastObject*>(self)->past;
  Py_TYPE(self)->tp_free(self);
}

PyObject* past_clear(PyObject* self, PyObject*) {
  if (reinterpret_cast<PastObject*>(self)->past != nullptr) in_past(self).clear();
  Py_RETURN_NONE;
}

PyObject* past_note(PyObject* self, PyObject* call) {
  const auto number = PyLong_AsUnsignedLongLongMask(call);
  if (PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(in_past(self).note(number));
}

template <auto member>
PyObject* ask_past(PyObject* self, PyObject*) {
  const Past* past = reinterpret_cast<PastObject*>(self)->past;
  return PyBool_FromLong(past != nullptr && (in_past(self).*member)());
}

PyObject* past_skip_turns(PyObject* self, PyObject* n) {
  const auto n_turns = PyLong_AsUnsignedLongLong(n);
  if (PyErr_Occurred()) return nullptr;
  in_past(self).skip_turns(n_turns);
  Py_RETURN_NONE;
}

PyObject* past_region(PyObject* self, PyObject*) {
  return PyLong_FromUnsignedLongLong(in_past(self).region());
}

PyMethodDef past_methods[] = {
    {"clear", past_clear, METH_NOARGS, nullptr},
    {"note", past_note, METH_O, nullptr},
    {"at_sync_point", ask_past<&Past::at_sync_point>, METH_NOARGS, nullptr},
    {"region", past_region, METH_NOARGS, nullptr},
    {"skip_turns", past_skip_turns, METH_O, nullptr},
    {"is_known", ask_past<&Past::is_known>, METH_NOARGS, nullptr},
    {"has_begun", ask_past<&Past::has_begun>, METH_NOARGS, nullptr},
    {"ends_turn", ask_past<&Past::ends_turn>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyTypeObject past_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Whether reading the tensor's values ends a region of the program. Reading a step count does not,
// as optimizers do that for each parameter (see `sync_points.ends_region`). A step count has no
// dimensions, is written in place, and has a storage of its own, unlike an element of a parameter.
bool ends_region(const at::Tensor& tensor) {
  if (tensor.dim() != 0 || tensor.is_inference() || tensor._version() == 0) return true;
  Ref object, held;
  // only callers that hold the GIL come with such a tensor: `run_cold` has looked
  if (has_python(tensor)) {
    const Ref value = value_of(tensor, object);
    if (value.get() == nullptr) return false;
    held = data_in(value.get());
    if (held.get() == Py_None) return false;
  }
  const at::Tensor& data = held.get() == nullptr ? tensor : THPVariable_Unpack(held.get());
  return data.storage().nbytes() > data.itemsize();
}

// Whether the call reads values, and reading those of its first tensor ends a region.
bool is_sync_point(const OpInfo& info, const IValue* arguments) {
  if (!info.reads) return false;
  for (size_t i = 0; i < info.schema.arguments().size(); ++i) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    return ends_region(arguments[i].toTensor());
  }
  return false;
}

// The number of a call in the past: a hash of the op, of its tensors' sizes and dtypes, and of ints
// and bools among its arguments. It must be the same whether the call is recorded or not, and
// wherever it comes: so it leaves out slots, numbers that are run-time inputs, and where `X[i]` and
// `X[a:b]` begin.
class CallNumber {
 public:
  // The argument of `select`, and of `slice`, that says where the part begins.
  static constexpr size_t INDEX = 2;
  CallNumber(const OpInfo& info, const IValue* arguments) : hash_(reinterpret_cast<uint64_t>(&info)) {
    const size_t n = info.schema.arguments().size();
    for (size_t i = 0; i < n; ++i) {
      if (info.is_select && i == INDEX) continue;
      if (info.is_slice && i == INDEX && arguments[i].isInt() && arguments[i + 1].isInt()) {
        mix(static_cast<uint64_t>(arguments[i + 1].toInt() - arguments[i].toInt()));
        ++i;
        continue;
      }
      put(arguments[i], info.is_number[i]);
    }
  }
  // 0, which is not noted, of a call on 0-dim CPU tensors alone: even while the trace records it
  // may run at once. Other numbers are odd, so none is 0 by chance.
  uint64_t get() const { return most_dims_ == 0 ? 0 : hash_ | 1; }

 private:
  void mix(uint64_t word) {
    hash_ = (hash_ ^ word) * Past::FACTOR;
    hash_ ^= hash_ >> 29;
  }

  void put(const IValue& value, bool is_run_time) {
    if (value.isNone()) {
      mix(1);
    } else if (value.isTensor()) {
      put_tensor(value.toTensor());
    } else if (value.isInt()) {
      if (!is_run_time) mix(static_cast<uint64_t>(value.toInt()));
    } else if (value.isBool()) {
      mix(value.toBool());
    } else if (value.isIntList()) {
      for (const int64_t item : value.toDimVector()) mix(static_cast<uint64_t>(item));
    } else if (value.isList()) {
      for (const IValue& item : value.toListRef()) put(item, is_run_time);
    }
  }

  void put_tensor(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
    const bool is_strange = has_python(tensor) && made_here(tensor) == nullptr && !is_lazy(tensor);
    // asking such a tensor for its sizes may raise, or call its class
    if (is_strange || tensor.is_nested()) {
      most_dims_ = 1;
      return;
    }
    for (const int64_t size : tensor.sizes()) mix(static_cast<uint64_t>(size));
    mix(static_cast<uint64_t>(tensor.scalar_type()));
    most_dims_ = std::max(most_dims_, tensor.is_cpu() ? tensor.dim() : 1);
  }

  static bool is_lazy(const at::Tensor& tensor) {
    return is_lazy_class(Py_TYPE(object_of(tensor).get()));
  }

  uint64_t hash_;
  // Most dimensions of its tensors, of one that is not on the CPU at least 1; -1 without any.
  int64_t most_dims_ = -1;
};

}  // namespace hits
