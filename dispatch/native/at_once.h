// Calls on sharded tensors while nothing is recorded. A known one runs at once, as the same op on
// this rank's memory. `sharding/ops/at_once.py` teaches the calls for which that is all.

#pragma once

#include "results.h"

namespace hits {

// What tells known calls apart: the op, the layouts of its tensors, its other arguments, and the
// default dtype. Numbers that are operands count by their type. The sizes of results follow from
// these, too.
class LocalKey {
 public:
  LocalKey(const OpInfo& info, const IValue* arguments) {
    words_.push_back(reinterpret_cast<uint64_t>(&info));
    words_.push_back(static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()));
    for (size_t i = 0; i < info.schema.arguments().size() && is_whole_; ++i) {
      is_whole_ = put(arguments[i], info.is_number[i]);
    }
  }

  // Whether a tensor of the call is sharded, and none is plain.
  bool may_be_known() const { return is_whole_ && is_sharded_; }
  const Words& words() const { return words_; }

 private:
  bool put(const IValue& value, bool is_operand) {
    if (value.isTensor()) return put_tensor(value.toTensor(), is_operand);
    if (value.isOptionalTensorList()) return false;  // indices, some of which may be left out
    if (value.isList()) {
      const auto items = value.toListRef();
      hits::put(words_, Tag::LIST, items.size());
      return std::all_of(items.begin(), items.end(),
                         [&](const IValue& item) { return put(item, is_operand); });
    }
    if (is_operand && (value.isInt() || value.isDouble() || value.isComplexDouble())) {
      hits::put(words_, value.isInt()      ? Tag::INT_AT_RUN_TIME
                        : value.isDouble() ? Tag::DOUBLE_AT_RUN_TIME
                                           : Tag::COMPLEX_AT_RUN_TIME);
      return true;
    }
    return put_static(words_, value);
  }

  bool put_tensor(const at::Tensor& tensor, bool is_operand) {
    if (!tensor.defined()) {
      hits::put(words_, Tag::NONE);
      return true;
    }
    if (is_number(tensor)) {
      hits::put(words_, Tag::TENSOR, static_cast<uint64_t>(tensor.scalar_type()));
      return is_operand;
    }
    Ref object;
    if (!has_python(tensor) || value_of(tensor, object).get() == nullptr) return false;
    const Ref layout = layout_of(tensor, object);
    if (layout.get() == nullptr) return false;
    is_sharded_ = true;
    hits::put(words_, Tag::LAYOUT, PyLong_AsUnsignedLongLong(of_layout.number.in(layout.get())));
    return true;
  }

  Words words_;
  bool is_whole_ = true, is_sharded_ = false;
};

// What a known call passes to the op besides its own arguments, and what it gives.
struct LocalCall {
  // By argument: sizes of this rank's part, where the call has those of the whole tensor.
  std::vector<std::pair<size_t, std::vector<int64_t>>> sizes;
  std::vector<Output> outputs;  // the new tensors; none if the call writes
  bool gives_list = false;
  std::optional<size_t> returned;  // the argument that it gives back
};

// The known calls of all threads. Used with the GIL held.
class LocalCalls {
 public:
  // Null if the call isn't known. A finalizer may forget it while it runs.
  std::shared_ptr<const LocalCall> find(const LocalKey& key) const {
    const auto found = calls_.find(key.words());
    return found == calls_.end() ? nullptr : found->second;
  }
  // Emptied when it is full: an LRU's bookkeeping would cost each call.
  void add(const LocalKey& key, LocalCall call) {
    if (calls_.size() >= MOST) forget();
    calls_[key.words()] = std::make_shared<const LocalCall>(std::move(call));
  }
  void forget() { std::exchange(calls_, {}).clear(); }
  bool empty() const { return calls_.empty(); }

 private:
  static constexpr size_t MOST = 4096;
  struct Hash {
    size_t operator()(const Words& words) const { return hash_of(words.data(), words.size()); }
  };
  std::unordered_map<Words, std::shared_ptr<const LocalCall>, Hash> calls_;
};
// Never destroyed: that would be when Python, whose objects it holds, is gone.
LocalCalls& local_calls = *new LocalCalls;

// This rank's memory of a sharded tensor, whose value is computed and of a kind that kernels take.
std::optional<at::Tensor> memory_of(const at::Tensor& tensor) {
  Ref object;
  const Ref value = value_of(tensor, object);
  if (slot_in(value.get()).get() != Py_None) return std::nullopt;
  const Ref data = data_in(value.get());
  if (data.get() == Py_None) return std::nullopt;  // its computation failed
  const at::Tensor& memory = THPVariable_Unpack(data.get());
  return is_for_kernels(memory) ? std::optional<at::Tensor>(memory) : std::nullopt;
}

// An argument with this rank's memory in place of sharded tensors; nothing if one isn't computed.
std::optional<IValue> on_memory(const IValue& value) {
  if (value.isTensor() && value.toTensor().defined() && has_python(value.toTensor())) {
    auto memory = memory_of(value.toTensor());
    return memory.has_value() ? std::optional<IValue>(std::move(*memory)) : std::nullopt;
  }
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> items;
  for (const IValue& item : value.toListRef()) {
    auto memory = memory_of(item.toTensor());
    if (!memory.has_value()) return std::nullopt;
    items.push_back(std::move(*memory));
  }
  return IValue(std::move(items));
}

// The op's arguments on this rank's memory; nothing if a tensor isn't computed.
std::optional<Stack> local_arguments(const LocalCall& call, const IValue* arguments, size_t n) {
  Stack local;
  for (size_t i = 0; i < n; ++i) {
    auto value = on_memory(arguments[i]);
    if (!value.has_value()) return std::nullopt;
    local.push_back(std::move(*value));
  }
  for (const auto& [place, size] : call.sizes) local[place] = size;
  return local;
}

// Tell Python which arguments the op has written: it drops what was derived from them.
void note_writes_to(const OpInfo& info, const IValue* arguments) {
  const Ref written(sure(PyList_New(0)));
  const auto add = [&written](const at::Tensor& tensor) {
    if (tensor.defined()) sure(PyList_Append(written.get(), object_of(tensor).get()));
  };
  for (size_t i = 0; i < info.schema.arguments().size(); ++i) {
    if (!info.writes[i]) continue;
    if (arguments[i].isTensor()) add(arguments[i].toTensor());
    if (!arguments[i].isTensorList()) continue;
    for (const IValue& item : arguments[i].toListRef()) add(item.toTensor());
  }
  if (PyList_GET_SIZE(written.get()) > 0) {
    Ref(sure(PyObject_CallOneArg(note_writes, written.get())));
  }
}

// Run the op on `local`, and put the call's results in place of its arguments.
void run_local(const c10::OperatorHandle& op, const OpInfo& info, const LocalCall& call, Stack local,
               Stack* stack, WithGil& gil) {
  const size_t n = info.schema.arguments().size();
  gil.release();
  {
    // autograd has seen the call on the sharded tensors
    const c10::impl::ForceDispatchKeyGuard guard(keys_included, keys_excluded);
    op.callBoxed(local);
  }
  const WithGil again;
  const IValue* arguments = stack->data() + (stack->size() - n);
  note_writes_to(info, arguments);
  if (info.writes_list) count_writes(arguments[0]);
  c10::SmallVector<at::Tensor, 4> results;
  if (call.returned.has_value()) results.push_back(arguments[*call.returned].toTensor());
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    const at::Tensor made = call.gives_list ? local.back().toListRef()[i].toTensor()
                                            : local[local.size() - call.outputs.size() + i].toTensor();
    const Inference same(made.is_inference());
    const Ref value = value_with(object_of(made).get());
    results.push_back(lazy(call.outputs[i], 0, value.get()));
  }
  replace_arguments(stack, n, results, call.gives_list);
}

}  // namespace hits
