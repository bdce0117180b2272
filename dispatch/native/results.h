// Taking a step of the trie (`take`): the call's results are made as lazy tensors, and the trace
// stands at the next state.

#pragma once

#include "call.h"

namespace hits {

// A new lazy tensor on `value`.
at::Tensor lazy(const Output& like, int64_t offset, PyObject* value) {
  auto impl = c10::make_intrusive<LazyImpl>(without_memory(like.n_bytes, like.device), like.keys,
                                            like.dtype);
  impl->set_sizes_and_strides(like.size, like.stride, offset);
  impl->set_python_dispatch(true);
  impl->value = Ref::to(value).release();
  impl->layout = Ref::to(like.layout.get()).release();
  at::Tensor made(std::move(impl));
  // Its Python object is made now, of our class: torch keeps it as long as the tensor lives.
  const Ref object(sure(THPVariable_Wrap(made, class_with(like.layout.get()))));
  return made;
}

using Values = c10::SmallVector<Ref, 4>;

// A new lazy tensor for an output of a step; its value goes to `values`.
at::Tensor fresh(PyObject* trace, const Step& step, const Output& like, Values& values) {
  Ref value = new_value();
  auto* held = reinterpret_cast<Value*>(value.get());
  held->slot = Ref::to(like.slot.get()).release();
  int64_t offset = like.offset;
  // A view of a leaf was recorded with the storage offset that the leaf had then. It is moved by as
  // many bytes as the leaf's offset differs now.
  if (step.offset_fixup.has_value()) {
    Ref leaf(sure(PyLong_FromLongLong(step.offset_fixup->first)));
    held->leaf = Ref::to(leaf.get()).release();
    PyObject* now = PyDict_GetItemWithError(of_trace.leaf_offsets.in(trace), leaf.get());
    const int64_t n_bytes =
        (now == nullptr ? 0 : PyLong_AsLongLong(now)) - step.offset_fixup->second;
    offset += n_bytes / static_cast<int64_t>(like.dtype.itemsize());
  }
  at::Tensor made = lazy(like, offset, value.get());
  values.push_back(std::move(value));
  return made;
}

// Makes new tensors in its scope inference tensors, or ordinary ones, as `is_meant` says.
class Inference {
 public:
  explicit Inference(bool is_meant) {
    if (is_meant != c10::InferenceMode::is_enabled()) guard_.emplace(is_meant);
  }

 private:
  std::optional<c10::InferenceMode> guard_;
};

// Append a call's run-time numbers to the trace's.
void append_numbers(PyObject* trace, const std::vector<IValue>& numbers) {
  PyObject* scalars = of_trace.scalars.in(trace);
  for (const IValue& number : numbers) {
    Ref item;
    if (number.isInt()) {
      item = Ref(sure(PyLong_FromLongLong(number.toInt())));
    } else if (number.isDouble()) {
      item = Ref(sure(PyFloat_FromDouble(number.toDouble())));
    } else {
      const auto pair = number.toComplexDouble();
      item = Ref(sure(PyComplex_FromDoubles(pair.real(), pair.imag())));
    }
    sure(PyList_Append(scalars, item.get()));
  }
}

// Take the call's `n` arguments off the stack, and put its results there.
void replace_arguments(Stack* stack, size_t n, c10::ArrayRef<at::Tensor> results, bool as_list) {
  stack->resize(stack->size() - n);
  if (as_list) {
    stack->emplace_back(std::vector<at::Tensor>(results.begin(), results.end()));
  } else {
    for (const at::Tensor& result : results) stack->emplace_back(result);
  }
}

// Count a write to a tensor: autograd checks that what it saved was not written.
void count_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void count_writes(const IValue& tensors) {
  for (const IValue& item : tensors.toListRef()) count_write(item.toTensor());
}

// A lazy tensor on `value` with the metadata of `tensor`; a sharded one if there is a layout.
at::Tensor another(const at::Tensor& tensor, PyObject* value, Ref layout = Ref()) {
  const Inference same(tensor.is_inference());
  Output like;
  like.layout = std::move(layout);
  like.size.assign(tensor.sizes().begin(), tensor.sizes().end());
  like.stride.assign(tensor.strides().begin(), tensor.strides().end());
  like.n_bytes = tensor.storage().nbytes();
  like.keys = DispatchKeySet(tensor.options().computeDispatchKey());
  like.dtype = tensor.dtype();
  like.device = tensor.device();
  at::Tensor made = lazy(like, tensor.storage_offset(), value);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// A lazy tensor that has its value, which is `data`.
at::Tensor lazy_with(const at::Tensor& data) {
  return another(data, value_with(object_of(data).get()).get());
}

// Take a step: afterwards the trace stands at its state, and the stack holds the call's results.
// False, with nothing changed, if the trace moved meanwhile: making Python objects may start a
// garbage collection, and its finalizers may call ops.
bool take(PyObject* trace, const OpInfo& info, const Step& step, const std::vector<IValue>& numbers,
          Stack* stack) {
  const size_t n = info.schema.arguments().size();
  IValue* arguments = stack->data() + (stack->size() - n);
  // a finalizer may drop the trie, and `step` with it
  const Ref state = Ref::to(step.state.get());
  const int kind = step.kind;
  const bool closes = step.closes;
  c10::SmallVector<at::Tensor, 4> results;
  if (kind == SELF) {
    results.push_back(arguments[info.returned].toTensor());
  } else if (kind == NOTHING) {
    if (info.writes_list) count_writes(arguments[0]);
  } else {
    // a view is an inference tensor if its base is one; other results are if the mode is on
    const Inference as_in_eager(info.is_view && arguments[0].isTensor()
                                    ? arguments[0].toTensor().is_inference()
                                    : c10::InferenceMode::is_enabled());
    const Ref before = Ref::to(of_trace.state.in(trace));
    Values values;
    for (const Output& output : step.outputs) {
      results.push_back(output.is_defined ? fresh(trace, step, output, values) : at::Tensor());
    }
    // What follows makes no object that the collector tracks, so no finalizer runs until the step
    // is taken: values, numbers and state change together.
    if (of_trace.state.in(trace) != before.get()) return false;
    for (const Ref& value : values) sure(PyList_Append(of_trace.values.in(trace), value.get()));
  }
  append_numbers(trace, numbers);
  of_trace.state.set(trace, state.get());
  replace_arguments(stack, n, results, kind == MANY && info.schema.returns().size() == 1);
  if (closes) Ref(sure(PyObject_CallOneArg(close_segment, trace)));
  return true;
}

}  // namespace hits
