// Learning from Python: when a call that Python handled has led to a state of the trie, the step
// there is noted in the `Edges` of the state before. The next such call is then a hit below Python.
// `recorder._follow` calls `learn`; for sharded calls `sharding/ops/calls.py` does.

#pragma once

#include "call.h"
#include "kernel.h"

namespace hits {

std::vector<int64_t> integers(PyObject* sequence) {
  Ref items(sure(PySequence_Tuple(sequence)));
  std::vector<int64_t> result;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    result.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(items.get(), i)));
    if (PyErr_Occurred()) throw python_error();
  }
  return result;
}

// An output of this metadata: `make_wrapper`'s arguments, which are (size, stride, offset, memory
// format, dtype, layout, device). None as the stride means dense, None as the offset 0.
Output output_of(PyObject* meta, PyObject* slot, PyObject* layout) {
  Output result;
  if (meta == Py_None) return result;
  const auto item = [meta](Py_ssize_t i) { return PyTuple_GET_ITEM(meta, i); };
  result.is_defined = true;
  const auto size = integers(item(0));
  result.size.assign(size.begin(), size.end());
  if (item(1) == Py_None) {
    result.stride.resize(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0;) {
      result.stride[i] = step;
      step *= std::max<int64_t>(size[i], 1);
    }
  } else {
    const auto stride = integers(item(1));
    result.stride.assign(stride.begin(), stride.end());
  }
  result.offset = item(2) == Py_None ? 0 : PyLong_AsLongLong(item(2));
  const auto dtype = reinterpret_cast<THPDtype*>(item(4))->scalar_type;
  result.device = reinterpret_cast<THPDevice*>(item(6))->device;
  result.dtype = c10::scalarTypeToTypeMeta(dtype);
  const auto options = at::TensorOptions().dtype(dtype).device(result.device).layout(c10::kStrided);
  result.keys = DispatchKeySet(options.computeDispatchKey());
  result.n_bytes = at::detail::computeStorageNbytes(result.size, result.stride,
                                                    result.dtype.itemsize(), result.offset);
  result.slot = Ref::to(slot);
  if (layout != nullptr && layout != Py_None) result.layout = Ref::to(layout);
  return result;
}

// The step to a state; null if only Python can take it: for an alias, and for views with the
// conjugate or the negative bit.
std::unique_ptr<Step> step_to(PyObject* state) {
  auto step = std::make_unique<Step>();
  step->kind = static_cast<int>(PyLong_AsLong(of_state.kind.in(state)));
  step->closes = of_state.closes.in(state) == Py_True;
  step->state = Ref::to(state);
  PyObject* meta = of_state.meta.in(state);
  PyObject* slot = of_state.slot.in(state);
  PyObject* layout = of_state.layout.in(state);
  if (layout != nullptr && layout != Py_None && sharded_class == nullptr) return nullptr;
  switch (step->kind) {
    case ONE:
      step->outputs.push_back(output_of(meta, slot, layout));
      break;
    case MANY: {
      PyObject* metas = PyTuple_GET_ITEM(meta, 1);
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(metas); ++i) {
        step->outputs.push_back(
            output_of(PyTuple_GET_ITEM(metas, i), PyTuple_GET_ITEM(slot, i),
                      layout == Py_None ? nullptr : PyTuple_GET_ITEM(layout, i)));
      }
      break;
    }
    case NOTHING:
    case SELF:
      break;
    default:
      return nullptr;
  }
  PyObject* fixup = of_state.offset_fixup.in(state);
  if (fixup != nullptr && fixup != Py_None) {
    step->offset_fixup = {PyLong_AsLongLong(PyTuple_GET_ITEM(fixup, 0)),
                          PyLong_AsLongLong(PyTuple_GET_ITEM(fixup, 1))};
  }
  return step;
}

// Learn the steps of the leaves that lie between `state` and the call before it.
void learn_leaves(PyObject* trace, PyObject* state) {
  while (Py_TYPE(of_state.step.in(state)) == leaf_class) {
    PyObject* parent = of_state.parent.in(state);
    // ("leaf", size, stride, has_offset, dtype, device, shares), as `inputs._leaf_key` makes it
    PyObject* key = of_state.key.in(state);
    const auto item = [key](Py_ssize_t i) { return PyTuple_GET_ITEM(key, i); };
    Words words;
    put_leaf(words, integers(item(1)), integers(item(2)), item(3) == Py_True,
             reinterpret_cast<THPDtype*>(item(4))->scalar_type,
             reinterpret_cast<THPDevice*>(item(5))->device,
             item(6) == Py_None ? -1 : PyLong_AsLongLong(item(6)));
    Edges* edges = make_edges(parent);
    if (edges->exact.find(words) == nullptr) {
      auto step = std::make_unique<Step>();
      step->state = Ref::to(state);
      const auto index = PyLong_AsLongLong(of_state.n_slots.in(state)) - 1;
      step->slot = Ref::to(sure(PyList_GetItem(of_trace.slots.in(trace), index)));
      edges->exact.add(words, std::move(step));
    }
    // Go on even if this leaf was known: `trace._prune` may have dropped the edges of a state
    // before.
    state = parent;
  }
}

// Note that the innermost call that is in Python leads `trace` to `state`, if it is a call of
// `function`. Its tensors have their slots by now, so no newcomer is left to read.
void learn(PyObject* trace, PyObject* function, PyObject* state) {
  set_current_trace(trace);
  // a sharded call may take several steps at once: it was called at `call_start`
  PyObject* parent = of_state.call_start.in(state);
  if (parent == nullptr || parent == Py_None) parent = of_state.parent.in(state);
  if (frames.empty()) return;
  Frame& frame = frames.back();
  if (frame.info == nullptr) return;
  OpInfo& info = *frame.info;
  const OpInfo* copy = info.draws_into ? Kernel::copy_info() : nullptr;
  const bool is_draw = copy != nullptr && copy->function.get() == function;
  // Python may record another op in the call's place: this call's key must not lead to its state.
  // Two such ops are known here: the copy of random numbers into the call's argument, and the view
  // that the argument becomes.
  if (info.function.get() != function && info.view.get() != function && !is_draw) return;
  info.is_recorded = true;
  // Only a call of the program itself is in the past, not one within another. The state may be of a
  // time without this library, when calls had no numbers.
  if (frames.size() == 1 && info.is_counted) {
    const Ref number(sure(PyLong_FromUnsignedLongLong(frame.number)));
    of_state.call.set(state, number.get());
  }
  learn_leaves(trace, parent);
  if (is_draw) {
    Ref object;
    const Ref value = value_of(frame.arguments[0].toTensor(), object);
    // null: a plain tensor, whose memory something pending writes
    if (value.get() == nullptr) return;
    const Ref slot = slot_in(value.get());
    auto step = step_to(state);
    const Words words = Kernel::copy_words(*copy, slot.get(), parent);
    Edges* edges = make_edges(parent);
    if (step != nullptr && edges->exact.find(words) == nullptr) {
      edges->exact.add(words, std::move(step));
    }
    return;
  }
  Call call(info, trace, frame.in_mode);
  if (!call.read(frame.arguments.data(), false, /*is_recorded=*/true)) return;
  auto step = step_to(state);
  if (step == nullptr) return;
  Edges* edges = make_edges(parent);
  PyObject* generic = of_state.generic.in(parent);
  // learn the step by the kind of key by which Python finds the state
  if (generic != nullptr && generic != Py_None &&
      PyDict_GetItemWithError(generic, of_state.key.in(state)) == state) {
    std::vector<IValue> numbers;
    const Words words = call.without_numbers(frame.arguments.data(), numbers);
    const auto expected = PyLong_AsLongLong(of_state.n_scalars.in(state)) -
                          PyLong_AsLongLong(of_state.n_scalars.in(parent));
    // Python took other numbers out of the call: a hit would give the plan wrong ones
    if (static_cast<int64_t>(numbers.size()) != expected) return;
    if (edges->generic.find(words) == nullptr) edges->generic.add(words, std::move(step));
  } else if (edges->exact.find(call.words()) == nullptr) {
    edges->exact.add(call.words(), std::move(step));
  }
}

}  // namespace hits
