// The calls that a program made lately, and whether those of now came in this order before: what
// `past.py` does, as a Python object with the same methods, for calls that run unrecorded here.

#pragma once

#include "trie.h"

namespace hits {

class Past {
 public:
  // Values are explained in past.py, which has them, too.
  static constexpr uint64_t N_KEPT = 1 << 16, LOOP_FROM = 4096, LOOP_AT_LEAST = 256;
  static constexpr uint64_t CONTEXT = 8, MOST_APART = 16, WAYS = 4, NONE = ~uint64_t{0};
  static constexpr uint64_t FACTOR = 0x9E3779B97F4A7C15u;

  Past() : calls_(N_KEPT), places_(N_KEPT / 2) {}

  // Forget all. Its memory stays: the thread that it belongs to may be adding a call.
  void clear() {
    std::fill(places_.begin(), places_.end(), 0);
    n_ = begun_ = placed_ = matched_ = context_ = period_ = stretch_ = 0;
    next_ = NONE;
  }

  // Add a call; whether a loop that has no break has just come round.
  bool note(uint64_t call) {
    call = (call & ~uint64_t{1}) | (n_ == begun_);
    if (next_ != NONE && is_kept(next_) && kept(next_) == call) {
      ++next_;
      ++matched_;
    } else {
      next_ = NONE;
      matched_ = 0;
    }
    context_ = (context_ + call) * FACTOR;
    if (n_ - begun_ >= CONTEXT) context_ -= kept(n_ - CONTEXT) * FACTOR_OUT;
    stretch_ = (stretch_ + call) * FACTOR;
    calls_[n_++ % N_KEPT] = call;
    if (n_ - begun_ <= CONTEXT || context_ >> 62 == 0 || n_ - placed_ >= MOST_APART) {
      uint64_t& place = place_of(&places_[context_ >> 32 & (N_KEPT / 2 - WAYS)]);
      if (next_ == NONE && leads_here(place)) {
        next_ = place;
        matched_ = n_alike(place, n_ - begun_);
      }
      place = placed_ = n_;
    }
    return is_round();
  }

  // Begin anew behind a break; whether all calls since the last one, if any, are known.
  bool at_break() {
    const bool known = all_known();
    begun_ = n_;
    context_ = period_ = stretch_ = 0;
    return known;
  }

  bool all_known() const { return n_ > begun_ && n_ - begun_ <= matched_; }
  bool is_known() const { return next_ != NONE; }
  uint64_t stretch() const { return stretch_; }
  bool has_begun() const { return n_ > begun_; }
  bool ends_loop() const { return period_ != 0 && (n_ - begun_) % period_ == 0; }

 private:
  static constexpr uint64_t FACTOR_2 = FACTOR * FACTOR, FACTOR_4 = FACTOR_2 * FACTOR_2;
  static constexpr uint64_t FACTOR_OUT = FACTOR_4 * FACTOR_4 * FACTOR;  // to the power of CONTEXT + 1

  bool is_kept(uint64_t place) const { return place + N_KEPT > n_; }
  uint64_t kept(uint64_t place) const { return calls_[place % N_KEPT]; }

  // How many calls before `place` are those before now, `most` at most.
  uint64_t n_alike(uint64_t place, uint64_t most) const {
    uint64_t n = 0;
    while (n < most && n < place && is_kept(place - 1 - n) &&
           kept(place - 1 - n) == kept(n_ - 1 - n)) {
      ++n;
    }
    return n;
  }

  bool leads_here(uint64_t place) const {
    const uint64_t needed = std::min(n_ - begun_, CONTEXT);
    return place != 0 && is_kept(place) && n_alike(place, needed) == needed;
  }

  // Of places whose contexts share a slot, the one that led here before, else the oldest.
  uint64_t& place_of(uint64_t* ways) const {
    uint64_t* oldest = ways;
    for (uint64_t i = 0; i < WAYS; ++i) {
      if (leads_here(ways[i])) return ways[i];
      if (ways[i] < *oldest) oldest = &ways[i];
    }
    return *oldest;
  }

  bool is_round() {
    if (next_ == NONE || matched_ < LOOP_FROM || n_ - begun_ < matched_) return false;
    const uint64_t distance = n_ - next_;
    if (matched_ < distance) return false;
    period_ = (LOOP_AT_LEAST + distance - 1) / distance * distance;
    return true;
  }

  std::vector<uint64_t> calls_, places_;
  uint64_t n_ = 0, begun_ = 0, placed_ = 0, next_ = NONE, matched_ = 0, context_ = 0, period_ = 0,
           stretch_ = 0;
};

struct PastObject {
  PyObject_HEAD Past* past;  // made when the first call is noted: a trace that records needs none
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
  return PyBool_FromLong((in_past(self).*member)());
}

PyObject* past_stretch(PyObject* self, PyObject*) {
  return PyLong_FromUnsignedLongLong(in_past(self).stretch());
}

PyMethodDef past_methods[] = {
    {"clear", past_clear, METH_NOARGS, nullptr},
    {"note", past_note, METH_O, nullptr},
    {"at_break", ask_past<&Past::at_break>, METH_NOARGS, nullptr},
    {"stretch", past_stretch, METH_NOARGS, nullptr},
    {"all_known", ask_past<&Past::all_known>, METH_NOARGS, nullptr},
    {"is_known", ask_past<&Past::is_known>, METH_NOARGS, nullptr},
    {"has_begun", ask_past<&Past::has_begun>, METH_NOARGS, nullptr},
    {"ends_loop", ask_past<&Past::ends_loop>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyTypeObject past_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Whether reading the tensor's values ends a stretch of the program (see `noting.ends_stretch`).
bool ends_stretch(const at::Tensor& tensor) {
  if (tensor.dim() != 0 || tensor.is_inference() || tensor._version() == 0) return true;
  Ref object, held;
  if (has_python(tensor)) {  // it is one of those that others see to, with the GIL
    const Ref value = value_of(tensor, object);
    if (value.get() == nullptr) return false;
    held = data_in(value.get());
    if (held.get() == Py_None) return false;
  }
  const at::Tensor& data = held.get() == nullptr ? tensor : THPVariable_Unpack(held.get());
  return data.storage().nbytes() > data.itemsize();
}

// Whether the call reads values, and its first tensor's end a stretch.
bool is_break(const OpInfo& info, const IValue* arguments) {
  if (!info.reads) return false;
  for (size_t i = 0; i < info.schema.arguments().size(); ++i) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    return ends_stretch(arguments[i].toTensor());
  }
  return false;
}

// What of a call is part of the past (see `past.number_of`).
class CallNumber {
 public:
  static constexpr size_t INDEX = 2;  // the argument of `select`, and of `slice`, where it begins
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
  // 0 of a call on 0-dim tensors of the CPU alone, which may run at once.
  uint64_t get() const { return most_dims_ == 0 ? 0 : hash_ | 2; }

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
    if (is_strange || tensor.is_nested()) {  // it may have no sizes, or a class that has them
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
  int64_t most_dims_ = -1;
};

}  // namespace hits
