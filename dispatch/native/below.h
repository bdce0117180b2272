// Running a call at once, below Python: as it is (`run_below`), or on the data of its lazy tensors
// (`Computed`). While nothing is recorded, `PassedBy` lets ops pass some tensors by, and
// `PassedReads` counts reads for Python.

#pragma once

#include <chrono>

#include "past.h"
#include "results.h"

namespace hits {

// Dispatch keys of what sees an op before "Python" does (autograd, autocast and so on), to exclude
// them. The keys that resolve conjugate, negative and zero tensors are not among them: kernels may
// use such tensors inside.
const DispatchKeySet PYTHON_AND_ABOVE =
    DispatchKeySet(DispatchKeySet::FULL) ^
    DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python);
const DispatchKeySet ABOVE_PYTHON = (PYTHON_AND_ABOVE - DispatchKeySet(DispatchKey::Python))
                                        .remove(DispatchKey::ZeroTensor)
                                        .remove(DispatchKey::Conjugate)
                                        .remove(DispatchKey::Negative);
// The same, and what calls modes and classes in Python.
const DispatchKeySet PYTHON_TOO =
    ABOVE_PYTHON | DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot});

// Releases the GIL in its scope.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// Run the call as if no mode and no class in Python saw ops. What the kernel calls is unseen, too.
void run_below(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(PYTHON_TOO);
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python), stack);
}

// Lazy tensors that ops pass by, as the thread that met them is asleep: the first op on each comes
// here, and costs a microsecond more than in eager. `Policy.cold` ends that when the thread wakes.
//
// Ops that pass make plain tensors on the memory, unseen. So it is noted as shared from the first
// one on, before any of them can be made.
//
// Only while one thread records: another could record a write to a tensor that ops pass by.
class PassedBy {
 public:
  // Let ops pass the tensor by from the next one on.
  void add(const at::Tensor& tensor, const at::Tensor& data) {
    LazyImpl* impl = made_here(tensor);
    if (*cold_here != ASLEEP || impl == nullptr || tensor.is_conj() || tensor.is_neg()) return;
    const uint64_t n_ends = n_ends_;
    if (asked_at_ != n_ends) {
      may_ = Ref(sure(PyObject_CallNoArgs(may_pass_by))).get() == Py_True;
      asked_at_ = n_ends;
    }
    if (!may_) return;
    note_shared(data);
    // a finalizer, or another thread, may have run meanwhile
    if (*cold_here == ASLEEP && n_ends == n_ends_) impl->let_pass(data);
  }

  // Have ops come to all of them again, and drop the notes where no plain tensor is left.
  void end() {
    ++n_ends_;
    std::vector<at::Tensor> tensors;
    for (LazyImpl* impl : std::exchange(LazyImpl::passed_by, {})) {
      // null if another thread is about to free it, and waits for the GIL
      auto* alive = c10::raw::weak_intrusive_ptr::lock(impl);
      if (alive != nullptr) tensors.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim(alive));
    }
    size_t i = 0;
    try {
      for (; i < tensors.size(); ++i) made_here(tensors[i])->stop_passing();
    } catch (...) {  // an interrupt
      for (; i < tensors.size(); ++i) LazyImpl::passed_by.insert(made_here(tensors[i]));
      throw;
    }
    for (const at::Tensor& tensor : tensors) {
      PyObject* value = made_here(tensor)->value;
      const Ref data = value == nullptr ? Ref::to(Py_None) : data_in(value);
      if (data.get() != Py_None) Ref(sure(PyObject_CallOneArg(is_shared, data.get())));
    }
  }

 private:
  uint64_t n_ends_ = 1, asked_at_ = 0;
  bool may_ = false;  // as answered when `n_ends_` was `asked_at_`
};
PassedBy passed_by;  // of all threads

// Counts reads of values in a thread that is asleep. Python looks at the last read of each round
// alone (see `sites.ROUND`).
class PassedReads {
 public:
  // Whether Python need not look at this read.
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

  // How many reads Python has not been told of.
  int64_t take() { return std::exchange(n_, 0); }

  // Have Python look at the next read.
  void see_next() {
    if (n_in_round_ == 0) began_ = Clock::now();
    n_in_round_ = ROUND - 1;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t ROUND = 16;
  static constexpr std::chrono::milliseconds ROUND_LASTS{100};
  int64_t n_ = 0;
  // `take` doesn't reset this one: an optimizer's step asks for the reads in the middle of a round.
  int64_t n_in_round_ = 0;
  Clock::time_point began_;
};
thread_local PassedReads passed_reads;

// A call whose lazy tensors are computed, with their data in their place.
class Computed {
 public:
  bool any_lazy() const { return any_lazy_; }
  bool any_plain() const { return any_plain_; }
  bool any_sparse() const { return any_sparse_; }

  // Add an argument; false if Python has to handle the call.
  bool put(const IValue& value, bool is_written) {
    const size_t n_before = stands_for_.size();
    if (!put(value)) return false;
    for (size_t i = n_before; is_written && i < stands_for_.size(); ++i) {
      if (has_python(stands_for_[i].second)) written_.push_back(stands_for_[i].first);
    }
    return true;
  }

  // Run the call and put its results on the stack. An argument that it gives back is the tensor
  // that was given. A new tensor becomes lazy if it `wraps`, else it stays plain; a plain view
  // `shares` the memory of lazy tensors. The GIL is released, and acquired again only to make Python
  // objects.
  void run(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack, size_t n, bool wraps,
           bool shares, WithGil& gil) {
    std::move(arguments_.begin(), arguments_.end(), stack->end() - static_cast<long>(n));
    for (const auto& [data, given] : stands_for_) {
      if (!has_python(given)) continue;
      if (shares) note_shared(data);
      passed_by.add(given, data);
    }
    gil.release();
    run_below(op, keys, stack);
    // Autograd has counted the write on the lazy tensor. Its data has a count of its own, which
    // `dispatch.run.watch` reads.
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

  // What stands for a tensor in the call: a lazy one's data, else itself. False for a sharded
  // tensor, for one that is pending or failed, and for what kernels don't take as it is, but for a
  // sparse one.
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
    } else {
      any_plain_ |= !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      any_sparse_ |= tensor.is_sparse();
    }
    if (!is_for_kernels(data) && !data.is_sparse()) return false;
    stands_for_.emplace_back(data, tensor);
    return true;
  }

  // A result as the caller gets it.
  at::Tensor returned(const at::Tensor& result, bool wraps) const {
    if (!result.defined()) return result;
    for (const auto& [data, given] : stands_for_) {
      if (result.is_same(data)) return given;
    }
    if (is_dense(result) && !wraps) return result;
    const WithGil gil;
    // the arguments may be the parts of a sparse result, which plain ops then reach
    if (!is_dense(result)) {
      Ref given(sure(PyList_New(0)));
      for (const auto& [_, tensor] : stands_for_) {
        sure(PyList_Append(given.get(), object_of(tensor).get()));
      }
      Ref(sure(PyObject_CallOneArg(share_with_parts, given.get())));
      return result;
    }
    return lazy_with(result);
  }

  c10::SmallVector<IValue, 8> arguments_;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 4> stands_for_;  // data, and the argument
  c10::SmallVector<at::Tensor, 1> written_;  // the data of lazy tensors that the call writes
  // an argument is; numbers don't count
  bool any_lazy_ = false, any_plain_ = false, any_sparse_ = false;
};

}  // namespace hits
