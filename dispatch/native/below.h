// Running a call below Python: as it is, or on the data of its lazy tensors.

#pragma once

#include <chrono>

#include "past.h"
#include "results.h"

namespace hits {

const DispatchKeySet PYTHON_AND_ABOVE =
    DispatchKeySet(DispatchKeySet::FULL) ^
    DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python);
const DispatchKeySet ABOVE_PYTHON = (PYTHON_AND_ABOVE - DispatchKeySet(DispatchKey::Python))
                                        .remove(DispatchKey::ZeroTensor)
                                        .remove(DispatchKey::Conjugate)
                                        .remove(DispatchKey::Negative);
const DispatchKeySet PYTHON_TOO =
    ABOVE_PYTHON | DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot});

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// The call as if nobody listened.
void run_below(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(PYTHON_TOO);
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python), stack);
}

// Lazy tensors that calls met while nothing was recorded. They are kept weakly.
class Met {
 public:
  static constexpr size_t MOST = 4096;
  bool collects = false;

  void add(const at::Tensor& tensor) {
    if (!collects || tensors_.size() == MOST || tensor.requires_grad()) return;
    if (known_.insert(tensor.unsafeGetTensorImpl()).second) {
      tensors_.emplace_back(tensor.getIntrusivePtr());
    }
  }

  bool is_empty() const { return tensors_.empty(); }

  // Those that still live, as a list; they are forgotten.
  PyObject* take() {
    Ref found(sure(PyList_New(0)));
    known_.clear();
    for (const auto& weak : std::exchange(tensors_, {})) {
      const at::Tensor tensor(weak.lock());
      if (tensor.defined()) sure(PyList_Append(found.get(), object_of(tensor).get()));
    }
    return found.release();
  }

 private:
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> tensors_;
  std::unordered_set<const c10::TensorImpl*> known_;
};
thread_local Met met;

// Reads of values by a thread that is asleep, which Python needn't look at: of a round all but the
// last (see `sites.ROUND`).
class PassedReads {
 public:
  bool add() {
    const auto now = Clock::now();
    if (n_in_round_ == 0) began_ = now;
    if (++n_in_round_ == ROUND || now - began_ >= ROUND_LASTS) {
      n_in_round_ = 0;
      return false;
    }
    ++n_;
    return true;
  }

  int64_t take() { return std::exchange(n_, 0); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t ROUND = 16;
  static constexpr std::chrono::milliseconds ROUND_LASTS{100};
  int64_t n_ = 0;
  int64_t n_in_round_ = 0;  // taken or not: an optimizer's step asks for them in between
  Clock::time_point began_;
};
thread_local PassedReads passed_reads;

// A call whose lazy tensors all have their values.
class Computed {
 public:
  bool any_lazy() const { return any_lazy_; }
  bool any_plain() const { return any_plain_; }

  // Take one more argument; false if Python must see the call.
  bool put(const IValue& value, bool is_written) {
    const size_t n_before = stands_for_.size();
    if (!put(value)) return false;
    for (size_t i = n_before; is_written && i < stands_for_.size(); ++i) {
      if (has_python(stands_for_[i].second)) written_.push_back(stands_for_[i].first);
    }
    return true;
  }

  // Run it: the stack holds what it gives, tensors as lazy ones if it `wraps`, and arguments that
  // come back as themselves. The GIL is let go, and taken again only to make objects.
  void run(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack, size_t n, bool wraps,
           WithGil& gil) {
    std::move(arguments_.begin(), arguments_.end(), stack->end() - static_cast<long>(n));
    gil.release();
    run_below(op, keys, stack);
    // autograd counted the write of the lazy tensor; who watches its memory asks that
    for (const at::Tensor& data : written_) {
      if (!data.is_inference()) data.unsafeGetTensorImpl()->bump_version();
    }
    const size_t n_results = op.schema().returns().size();
    for (auto result = stack->end() - static_cast<long>(n_results); result != stack->end(); ++result) {
      if (result->isTensor()) {
        *result = returned(result->toTensor(), wraps);
      } else if (result->isTensorList()) {
        std::vector<at::Tensor> items;
        for (const IValue& item : result->toListRef()) {
          items.push_back(returned(item.toTensor(), wraps));
        }
        *result = std::move(items);
      }
    }
  }

 private:
  bool put(const IValue& value) {
    if (value.isTensor()) {
      at::Tensor data;
      if (!find(value.toTensor(), data)) return false;
      arguments_.emplace_back(std::move(data));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> items;
      for (const IValue& item : value.toListRef()) {
        at::Tensor data;
        if (!find(item.toTensor(), data)) return false;
        items.push_back(std::move(data));
      }
      arguments_.emplace_back(std::move(items));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> items;
      for (const IValue& item : value.toListRef()) {
        at::Tensor data;
        if (item.isTensor() && !find(item.toTensor(), data)) return false;
        items.push_back(item.isTensor() ? std::optional<at::Tensor>(std::move(data)) : std::nullopt);
      }
      arguments_.emplace_back(std::move(items));
    } else {
      arguments_.emplace_back(value);
    }
    return true;
  }

  // What stands for a tensor in the call.
  bool find(const at::Tensor& tensor, at::Tensor& data) {
    data = tensor;
    if (!tensor.defined()) return true;
    if (has_python(tensor)) {
      Ref object;
      const Ref value = value_of(tensor, object);
      if (value.get() == nullptr || layout_of(tensor, object).get() != nullptr) return false;
      const Ref held = data_in(value.get());
      if (held.get() == Py_None || slot_in(value.get()).get() != Py_None) return false;
      data = THPVariable_Unpack(held.get());
      any_lazy_ = true;
      met.add(tensor);
    } else {
      any_plain_ |= !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    }
    if (has_python(data) || !is_dense(data) || data.is_conj() || data.is_neg()) return false;
    stands_for_.emplace_back(data, tensor);
    return true;
  }

  at::Tensor returned(const at::Tensor& result, bool wraps) const {
    if (!result.defined()) return result;
    for (const auto& [data, given] : stands_for_) {
      if (result.is_same(data)) return given;
    }
    if (is_dense(result) && !wraps) return result;
    const WithGil gil;
    if (!is_dense(result)) {  // its parts may be the arguments' memory
      Ref given(sure(PyList_New(0)));
      for (const auto& [_, tensor] : stands_for_) {
        sure(PyList_Append(given.get(), object_of(tensor).get()));
      }
      Ref(sure(PyObject_CallOneArg(share_with_parts, given.get())));
      return result;
    }
    const Ref value = new_value();
    reinterpret_cast<Value*>(value.get())->data = object_of(result).release();
    return another(result, value.get());
  }

  c10::SmallVector<IValue, 8> arguments_;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 4> stands_for_;  // data, and the argument
  c10::SmallVector<at::Tensor, 1> written_;  // the data of lazy tensors that the call writes
  bool any_lazy_ = false, any_plain_ = false;
};

}  // namespace hits
