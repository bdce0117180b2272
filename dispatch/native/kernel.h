// `Kernel`: what an op has for the dispatch key "Python". The dispatcher calls it under our mode
// and for lazy tensors, where torch's own kernel would call `__torch_dispatch__`. It does the call
// here if it can. Else it passes the call on to Python, and `learn` notes what came of it.

#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/PythonFallbackKernel.h>

#include "at_once.h"
#include "below.h"
#include "routes.h"

namespace hits {

// A call that was passed on to Python and has not returned, with what `learn` must know of it.
struct Frame {
  OpInfo* info;  // null: there is nothing to learn
  std::vector<IValue> arguments;
  bool in_mode;
  uint64_t number;  // of the call in the past
};
// The innermost call last. A deque, as `learn` holds a reference to a frame while Python may call
// more ops: others put at the end of it don't move the frame.
thread_local std::deque<Frame> frames;

// Keeps a frame in `frames` for as long as its call is in Python.
class FrameGuard {
 public:
  explicit FrameGuard(Frame frame) { frames.push_back(std::move(frame)); }
  ~FrameGuard() { frames.pop_back(); }
};

// Put numbers for lazy zeros that are marked like a number (see `is_number`): torch would read them.
void put_numbers_for_zeros(const c10::OperatorHandle& op, Stack* stack) {
  const auto n = static_cast<long>(op.schema().arguments().size());
  for (auto value = stack->end() - n; value != stack->end(); ++value) {
    if (!value->isTensor() || !value->toTensor().defined()) continue;
    const at::Tensor zeros = value->toTensor();
    if (!zeros.unsafeGetTensorImpl()->is_wrapped_number() || is_number(zeros)) continue;
    const at::Tensor number = at::detail::scalar_tensor_static(0, zeros.scalar_type(), c10::kCPU);
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    *value = number;
  }
}

// What torch does for this key: `__torch_dispatch__` of the mode, or of the tensors' class.
void to_python(const c10::OperatorHandle& op, Stack* stack) {
  put_numbers_for_zeros(op, stack);
  // The thread's keys when the program called the op, for `torch.overrides.enable_reentrant_dispatch`
  // in somebody else's handler: autograd has excluded itself since. `listen` says why torch hasn't
  // noted them.
  std::optional<at::impl::MaybeSetTLSOnEntryGuard> noted;
  {
    const auto now = c10::impl::tls_local_dispatch_key_set();
    const auto by_autograd = c10::InferenceMode::is_enabled()
                                 ? DispatchKeySet()
                                 : c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    const c10::impl::ForceDispatchKeyGuard before(now.included_, now.excluded_ - by_autograd);
    noted.emplace();
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(ABOVE_PYTHON);
  (*c10::impl::getGlobalPyInterpreter())->dispatch(op, stack);
}

// A call on computed 0-dim CPU tensors: its arguments, with data in place of lazy tensors.
struct Tiny {
  std::vector<IValue> arguments;
  bool any = false, any_lazy = false;
};

// The op that ran last below Python while the trace was cold, noted without the GIL. It is written
// to `Trace.ran` before Python may ask for that.
thread_local OpInfo* ran_cold = nullptr;

void note_last_unrecorded(PyObject* trace) {
  const OpInfo* last = std::exchange(ran_cold, nullptr);
  if (last == nullptr) return;
  const Ref ran(sure(PyTuple_Pack(2, last->function.get(), of_trace.state.in(trace))));
  of_trace.ran.set(trace, ran.get());
}

// Whether the call under way ends a turn of a loop that runs as in eager. Python is told when the
// call is over, as that may begin to record.
thread_local bool ends_turn = false;

void notify_turn_end() {
  ends_turn = false;
  const WithGil gil;
  Ref(sure(PyObject_CallOneArg(at_turn, trace_here)));
}

class Kernel : public c10::OperatorKernel {
 public:
  explicit Kernel(const c10::OperatorHandle& op)
      : info_(op.schema()), is_matmul_(op.operator_name() == c10::OperatorName("aten::matmul", "")) {
    if (info_.is_copy) of_copy_ = this;
  }

  // First without the GIL, where the trace is cold; then with it.
  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (cold_here != nullptr && *cold_here != 0 && run_cold(op, keys, stack)) {
      if (ends_turn) notify_turn_end();
      return;
    }
    // An op within this one, such as the copy that autograd makes for `mul_`, may have let ops pass
    // its tensors by: they are ordinary now.
    if (is_without_mode() && is_all_ordinary(*stack)) return run_below(op, keys, stack);
    WithGil gil;
    bool in_mode = false;
    if (!is_ours(in_mode) || !is_described()) return to_python(op, stack);
    if (trace_here == nullptr) set_current_trace(Ref(sure(PyObject_CallNoArgs(current))).get());
    PyObject* trace = trace_here;
    if (trace != nullptr) {
      // Python handles the call if another thread has claimed the trace, if a call is being
      // recorded (this one is a part of it, or a finalizer makes it), or if a tape takes down all
      // calls. None of these is learnt as a step.
      if (of_trace.claimed.in(trace) == Py_True || of_trace.busy.in(trace) == Py_True ||
          of_trace.tape.in(trace) != Py_None) {
        const FrameGuard nothing_to_learn({nullptr, {}, in_mode, number(*stack)});
        return to_python(op, stack);
      }
      const bool is_done = *cold_here == 0 ? record(op, keys, stack, trace, in_mode)
                                           : run_unrecorded(op, keys, stack, trace, in_mode, gil);
      if (ends_turn) notify_turn_end();
      if (is_done) return;
      note_last_unrecorded(trace);
    }
    put_numbers_for_zeros(op, stack);
    const long n = static_cast<long>(info_.schema.arguments().size());
    const FrameGuard call({&info_, {stack->end() - n, stack->end()}, in_mode, number(*stack)});
    to_python(op, stack);
  }

  // What is known of `copy_`; null if Python has to handle all its calls.
  static const OpInfo* copy_info() {
    return of_copy_ != nullptr && of_copy_->is_described() ? &of_copy_->info_ : nullptr;
  }

  // The key of `copy_` to the tensor in `slot` from the leaf that led to `state`.
  static Words copy_words(const OpInfo& copy, PyObject* slot, PyObject* state) {
    Words words;
    words.push_back(reinterpret_cast<uint64_t>(&copy));
    put(words, Tag::TENSOR, index_of(slot));
    put(words, Tag::TENSOR, PyLong_AsLongLong(of_state.n_slots.in(state)) - 1);
    put_static(words, IValue(false));
    return words;
  }

 private:
  static inline Kernel* of_copy_ = nullptr;  // the one for `copy_`
  OpInfo info_;
  const bool is_matmul_;

  // Ask Python about the op, once. False if it has no object in Python, which has to handle its
  // calls.
  bool is_described() {
    if (!info_.is_described) {
      const auto& name = info_.schema.operator_name();
      Ref facts(sure(
          PyObject_CallFunction(describe, "ss", name.name.c_str(), name.overload_name.c_str())));
      if (facts.get() == Py_None) {
        info_.is_described = true;
        return false;
      }
      // in the order of `hits._described`
      const auto item = [&facts](Py_ssize_t i) { return PyTuple_GET_ITEM(facts.get(), i); };
      info_.function = Ref::to(item(0));
      info_.is_alias = item(1) == Py_True;
      info_.is_composite = item(2) == Py_True;
      info_.needs_care = item(3) == Py_True;
      info_.reshapes = item(4) == Py_True;
      info_.writes_list = item(5) == Py_True;
      info_.lets_in = item(6) == Py_True;
      info_.reads = item(7) == Py_True;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(item(8)); ++i) {
        info_.is_number[PyLong_AsSize_t(PyTuple_GET_ITEM(item(8), i))] = true;
      }
      info_.draws_into = item(9) == Py_True;
      info_.draws = item(10) == Py_True;
      info_.is_same = item(11) == Py_True;
      info_.reads_copies = item(12) == Py_True;
      if (item(13) != Py_None) info_.view = Ref::to(item(13));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(item(14)); ++i) {
        info_.writes[PyLong_AsSize_t(PyTuple_GET_ITEM(item(14), i))] = true;
      }
      info_.is_counted &= !(info_.draws || info_.is_same);
      // last: `run_cold` reads it in other threads, without the GIL, and then what is above
      info_.is_described = true;
    }
    return info_.function.get() != nullptr;
  }

  const IValue* arguments_on(const Stack& stack) const {
    return stack.data() + (stack.size() - info_.schema.arguments().size());
  }

  uint64_t number(const Stack& stack) const { return CallNumber(info_, arguments_on(stack)).get(); }

  // Note in the past a call that is about to run unrecorded. False if it ends a region: Python
  // decides whether the program records again from there on.
  bool count_cold(const Stack& stack) const {
    if (*cold_here == ASLEEP) return true;
    if (is_sync_point(info_, arguments_on(stack))) {
      if (*cold_here != PAUSED) return false;  // nothing is decided while recording is paused
      in_past(past_here).at_sync_point();
      // the same calls as `sync_points.begin` notes
    } else if (!info_.reads && !info_.is_alias && info_.is_counted && frames.empty()) {
      if (in_past(past_here).skips()) return true;
      const uint64_t call = number(stack);
      // a turn that was known has come round: record from the next call on, or tell Python
      if (call != 0 && in_past(past_here).note(call)) {
        if (*cold_here == 1) *cold_here = 0;
        ends_turn = *cold_here == BYPASSED_TURNS;
      }
    }
    return true;
  }

  // Whether no other mode lies below ours: it would not see what runs below Python here.
  static bool is_alone() { return c10::impl::TorchDispatchModeTLS::stack_len() <= 1; }

  // Do the call here while the trace is cold; false leaves it to Python, the stack as it was.
  bool run_unrecorded(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                      PyObject* trace, bool in_mode, WithGil& gil) {
    // torch's own modes and tensors take the program apart: Python gives them plain tensors
    if (*cold_here == PAUSED) return false;
    const IValue* arguments = arguments_on(*stack);
    if (info_.is_alias) return alias(stack, arguments);
    if (info_.is_composite && decompose(op, stack, arguments, in_mode)) return true;
    return is_alone() && (run_computed(op, keys, stack, trace, in_mode, gil) ||
                          run_at_once(op, stack, trace, gil));
  }

  // The same of a known call on sharded tensors, where nothing is pending that goes first.
  bool run_at_once(const c10::OperatorHandle& op, Stack* stack, PyObject* trace, WithGil& gil) {
    if (local_calls.empty() || of_trace.state.in(trace) != of_trace.root.in(trace)) return false;
    const IValue* arguments = arguments_on(*stack);
    const LocalKey key(info_, arguments);
    const auto known = key.may_be_known() ? local_calls.find(key) : nullptr;
    if (known == nullptr) return false;
    auto local = local_arguments(*known, arguments, info_.schema.arguments().size());
    if (!local.has_value() || !count_cold(*stack)) return false;
    ran_cold = &info_;
    run_local(op, info_, *known, std::move(*local), stack, gil);
    return true;
  }

  // Do the call here while the trace records; false leaves it to Python, the stack as it was.
  bool record(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack, PyObject* trace,
              bool in_mode) {
    const IValue* arguments = arguments_on(*stack);
    const bool alone = is_alone();
    note_last_unrecorded(trace);
    // its root is for settings that are out of force: Python begins at another one
    if (of_trace.is_outdated.in(trace) == Py_True) return false;
    if (info_.is_alias && alias(stack, arguments)) return true;
    if (info_.is_item && alone && frames.empty() && read_number(op, stack, trace)) return true;
    if (info_.is_note && in_mode && alone && !at::hasCallbacks()) {  // nobody profiles
      run_below(op, keys, stack);
      return true;
    }
    if (info_.is_composite && decompose(op, stack, arguments, in_mode)) return true;
    if (alone && !(info_.needs_care && !info_.writes_list) &&
        run_tiny(op, keys, stack, trace, in_mode)) {
      return true;
    }
    if (info_.is_same && in_mode) return true;
    if (info_.draws && alone) return draw(op, keys, stack, trace, in_mode);
    if (!info_.is_recorded && !info_.draws_into) return false;
    // First `busy`, then a look at `claimed`. Who claims the trace does it the other way round, so
    // that one of two threads that do so at once sees the other (see `trace.begin`).
    of_trace.busy.set(trace, Py_True);
    struct Done {
      PyObject* trace;
      ~Done() { of_trace.busy.set(trace, Py_False); }
    } done{trace};
    if (of_trace.claimed.in(trace) == Py_True) return false;
    if (info_.draws_into) return alone && draw_into(op, keys, stack, trace);
    const Ref before = Ref::to(of_trace.state.in(trace));
    Call call(info_, trace, in_mode);
    if (!call.read(arguments, info_.lets_in) || !(in_mode || call.any_lazy())) return false;
    // reading made Python objects, and so may have run finalizers, which may call ops
    if (of_trace.state.in(trace) != before.get()) return false;
    if (!call.find(arguments) || !call.let_in()) return false;
    if (info_.view.get() != nullptr) return become_view(trace, call.step(), stack);
    return take(trace, info_, call.step(), call.numbers(), stack);
  }

  // Give the number in a lazy tensor, once all that it waits for has run. False for other tensors.
  bool read_number(const c10::OperatorHandle& op, Stack* stack, PyObject* trace) const {
    const Ref tensor = object_of(stack->back().toTensor());
    if (Py_TYPE(tensor.get()) != tensor_class) return false;
    const Ref data(sure(PyObject_CallFunctionObjArgs(to_read, trace, tensor.get(), nullptr)));
    stack->back() = THPVariable_Unpack(data.get());
    const c10::impl::ForceDispatchKeyGuard guard(keys_included, keys_excluded);
    op.callBoxed(stack);
    return true;
  }

  // Take a step that gives a view of a pending tensor, and make the tensor that view, as
  // `op_handlers._view_in_place` does.
  bool become_view(PyObject* trace, const Step& step, Stack* stack) const {
    const at::Tensor tensor = arguments_on(*stack)[0].toTensor();
    LazyImpl* impl = made_here(tensor);
    if (impl == nullptr || impl->value == nullptr || !impl->allow_tensor_metadata_change() ||
        tensor.is_conj() || tensor.is_neg() || data_in(impl->value).get() != Py_None) {
      return false;
    }
    if (!take(trace, info_, step, {}, stack)) return false;
    const at::Tensor view = stack->back().toTensor();
    impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    const Ref before(std::exchange(impl->value, Ref::to(made_here(view)->value).release()));
    stack->back() = tensor;
    return true;
  }

  // Draw random numbers now, in program order. Of a tensor that they are to be like, the metadata
  // alone is asked for.
  bool draw(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack, PyObject* trace,
            bool in_mode) const {
    const size_t n = info_.schema.arguments().size();
    Stack call(stack->end() - static_cast<long>(n), stack->end());
    const bool has_like = call[0].isTensor();
    for (size_t i = 1; i < n; ++i) {
      if (call[i].isTensor()) return false;
    }
    if (has_like) {
      const at::Tensor like = call[0].toTensor();
      if (has_python(like)) {
        Ref object;
        const Ref value = value_of(like, object);
        if (value.get() == nullptr || layout_of(like, object).get() != nullptr) return false;
      } else if (!in_mode) {
        return false;
      }
      if (!is_dense(like) || like.is_conj() || like.is_neg()) return false;
      const c10::impl::ExcludeDispatchKeyGuard guard(PYTHON_TOO);
      call[0] = at::empty_strided(like.sizes(), like.strides(), like.options());
    }
    // a sharded call in which something ran at once isn't known by its steps (see sharding's calls.py)
    const Ref ran(sure(PyTuple_Pack(2, info_.function.get(), of_trace.state.in(trace))));
    of_trace.ran.set(trace, ran.get());
    run_below(op, keys, &call);
    const at::Tensor drawn = call.back().toTensor();
    torch::jit::drop(*stack, n);
    stack->emplace_back(is_dense(drawn) ? lazy_with(drawn) : drawn);
    return true;
  }

  // Run an in-place random op on a pending tensor: draw now, in program order, into new memory, and
  // take the step that copies it (see `op_handlers._draw_into`). False where no such step is known.
  bool draw_into(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                 PyObject* trace) const {
    const size_t n = info_.schema.arguments().size();
    Stack draw(stack->end() - static_cast<long>(n), stack->end());
    for (size_t i = 1; i < n; ++i) {
      if (draw[i].isTensor()) return false;
    }
    const at::Tensor target = draw[0].toTensor();
    const OpInfo* copy = copy_info();
    if (copy == nullptr || target.is_conj() || target.is_neg() ||
        !target.is_non_overlapping_and_dense()) {
      return false;
    }
    Ref object;
    const Ref value = value_of(target, object);
    if (value.get() == nullptr || layout_of(target, object).get() != nullptr) return false;
    const Ref slot = slot_in(value.get());
    if (slot.get() == Py_None || of_slot.trace.in(slot.get()) != trace) return false;
    // the step of the copy, behind that of the numbers, which come in as a leaf
    const Step* leaf = nullptr;
    const auto step = [&]() -> const Step* {
      leaf = step_to_leaf(edges_of(of_trace.state.in(trace)), target, -1, /*has_offset=*/false);
      Edges* copies = leaf == nullptr ? nullptr : edges_of(leaf->state.get());
      if (copies == nullptr) return nullptr;
      const Step* found = copies->exact.find(copy_words(*copy, slot.get(), leaf->state.get()));
      return found != nullptr && found->kind == SELF ? found : nullptr;
    };
    if (step() == nullptr) return false;
    const at::Tensor numbers = [&target] {
      const c10::impl::ExcludeDispatchKeyGuard guard(PYTHON_TOO);
      return at::empty_strided(target.sizes(), target.strides(), target.options());
    }();
    Ref data = object_of(numbers), held = value_with(data.get());
    // Making objects may have run finalizers, which may have changed the trie. From here on the
    // call must not fail: Python would draw again, other numbers than eager has.
    const Step* known = step();
    if (known == nullptr) return false;
    draw[0] = numbers;
    run_below(op, keys, &draw);
    Newcomer newcomer{&numbers, std::move(data), std::move(held), 0};
    newcomer.storage = storage_id(numbers);
    newcomer.step = leaf;
    enter(trace, newcomer);
    torch::jit::drop(*stack, n);
    torch::jit::push(*stack, target, numbers, false);
    return take(trace, *copy, *known, {}, stack);
  }

  // While the trace is cold: run the call on the data of its lazy tensors, as
  // `eager_fallback.run_cold`.
  bool run_computed(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                    PyObject* trace, bool in_mode, WithGil& gil) {
    // if the trace uses any memory, what is pending may be about to write what the call reads
    if (info_.reshapes ||
        (info_.needs_care && !info_.writes_list) ||
        PyDict_GET_SIZE(of_trace.storages.in(trace)) != 0) {
      return false;
    }
    const size_t n = info_.schema.arguments().size();
    Computed call;
    for (size_t i = 0; i < n; ++i) {
      if (!call.put(torch::jit::peek(*stack, i, n), info_.writes[i])) return false;
    }
    if (!call.any_lazy() || (info_.is_view && call.any_plain())) return false;
    // the parts of a sparse tensor may be pending
    if (call.any_sparse() && of_trace.state.in(trace) != of_trace.root.in(trace)) return false;
    if (info_.is_copy && !torch::jit::peek(*stack, 0, n).toTensor().sizes().equals(
                             torch::jit::peek(*stack, 1, n).toTensor().sizes())) {
      return false;  // its source may be there already: `memory_overlap.is_there_already` looks
    }
    if (!count_cold(*stack)) return false;
    ran_cold = &info_;
    const IValue first = torch::jit::peek(*stack, 0, n);
    // In the mode results may be plain: plain tensors are recorded there, too. Outside it, while the
    // thread is asleep, results for wrapped tensors may. A view stays lazy: nobody would see a
    // pending write to a plain tensor that shares a wrapped one's memory.
    const bool may_be_plain = in_mode || (*cold_here == ASLEEP && !info_.is_view);
    call.run(op, keys, stack, n, !may_be_plain, may_be_plain && info_.is_view, gil);
    if (info_.writes_list) count_writes(first);
    return true;
  }

  // Whether `value` holds no tensors but computed 0-dim CPU ones that nothing pending uses. Adds it
  // to `tiny`, lazy tensors replaced by their data.
  bool put_tiny(const IValue& value, PyObject* trace, Tiny& tiny) const {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined()) return false;
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        tiny.arguments.push_back(value);
        return is_number(tensor);
      }
      // a tensor of another class may dispatch when it is asked for its dimensions
      const bool answers_itself = made_here(tensor) != nullptr || !has_python(tensor);
      if (answers_itself && (tensor.dim() != 0 || !tensor.is_cpu())) return false;
      Ref object;
      const Ref held = value_of(tensor, object);
      if (held.get() != nullptr && layout_of(tensor, object).get() != nullptr) return false;
      if (held.get() != nullptr) {
        const Ref data = data_in(held.get());
        if (data.get() == Py_None || slot_in(held.get()).get() != Py_None) return false;
        tiny.arguments.emplace_back(THPVariable_Unpack(data.get()));
        tiny.any_lazy = true;
      } else if (Py_TYPE(object.get()) == reinterpret_cast<PyTypeObject*>(THPVariableClass)) {
        tiny.arguments.push_back(value);
      } else {
        return false;
      }
      tiny.any = true;
      const at::Tensor& computed = tiny.arguments.back().toTensor();
      return computed.dim() == 0 && computed.is_cpu() && is_dense(computed) &&
             !is_here(computed, trace);
    }
    if (value.isTensorList()) {
      if (!info_.writes_list) return false;
      Tiny items;
      c10::List<at::Tensor> tensors;
      for (const IValue& item : value.toListRef()) {
        if (!put_tiny(item, trace, items)) return false;
      }
      for (const IValue& item : items.arguments) tensors.push_back(item.toTensor());
      tiny.any |= items.any;
      tiny.any_lazy |= items.any_lazy;
      tiny.arguments.emplace_back(std::move(tensors));
      return true;
    }
    tiny.arguments.push_back(value);
    return value.isInt() || value.isDouble() || value.isBool() || value.isNone() ||
           (info_.writes_list && value.isList());
  }

  // Run a call on 0-dim CPU tensors at once, as optimizers make it on each parameter's step count
  // (see `inputs.is_tiny`). False, and nothing done, if it is no such call.
  bool run_tiny(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack, PyObject* trace,
                bool in_mode) const {
    const size_t n = info_.schema.arguments().size();
    const IValue* arguments = stack->data() + (stack->size() - n);
    Tiny tiny;
    for (size_t i = 0; i < n; ++i) {
      if (!put_tiny(arguments[i], trace, tiny)) return false;
    }
    const auto& returns = info_.schema.returns();
    if (!tiny.any || !(in_mode || tiny.any_lazy) ||
        (tiny.any_lazy && (info_.reshapes || returns.size() > 1))) {
      return false;
    }
    const IValue first = arguments[0];
    const IValue data = tiny.arguments[0];
    std::move(tiny.arguments.begin(), tiny.arguments.end(), stack->end() - static_cast<long>(n));
    run_below(op, keys, stack);
    if (info_.writes_list) count_writes(first);
    if (!tiny.any_lazy || returns.empty() || !stack->back().isTensor()) return true;
    const at::Tensor result = stack->back().toTensor();
    if (data.isTensor() && result.is_same(data.toTensor())) {
      stack->back() = first;
    } else if (is_dense(result)) {
      stack->back() = lazy_with(result);
    }
    return true;
  }

  // In inference mode autograd takes no composite op apart, so it comes here whole. Record the ops
  // that it is made of, as `op_handlers._decompose` does.
  bool decompose(const c10::OperatorHandle& op, Stack* stack, const IValue* arguments,
                 bool in_mode) const {
    constexpr auto COMPOSITE = DispatchKey::CompositeImplicitAutograd;
    if (!op.hasKernelForDispatchKey(COMPOSITE)) return false;
    bool any_lazy = false;
    for (size_t i = 0; i < info_.schema.arguments().size(); ++i) {
      if (!is_taken_apart(op, arguments[i], any_lazy)) return false;
    }
    if (!in_mode && !any_lazy) return false;
    // Views inside are marked as views, as they are above dispatch. A view that the op itself gives
    // is marked by its caller (see `torch_private.decompose`).
    const auto before = c10::impl::tls_local_dispatch_key_set();
    auto excluded = before.excluded_ | ABOVE_PYTHON;
    bool aliases = false;
    for (const auto& result : info_.schema.returns()) aliases |= result.alias_info() != nullptr;
    if (!aliases) excluded = excluded.remove(DispatchKey::ADInplaceOrView);
    const c10::impl::ForceDispatchKeyGuard guard(before.included_, excluded);
    const bool is_multiplied =
        is_matmul_ && is_multiplied_here(arguments[0].toTensor(), arguments[1].toTensor(), false);
    // its parts come here as calls of their own, which acquire the GIL
    const WithoutGil released;
    if (is_multiplied) {
      multiply(stack, false);
    } else {
      op.callBoxedForDispatchKey(COMPOSITE, *stack);
    }
    return true;
  }

  // Whether an argument lets the op be taken apart: all tensors are plain or lazy ones that traces
  // hold, for whose devices the op has no kernel of its own.
  static bool is_taken_apart(const c10::OperatorHandle& op, const IValue& value, bool& any_lazy) {
    if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const IValue& item : value.toListRef()) {
        if (!is_taken_apart(op, item, any_lazy)) return false;
      }
    }
    if (!value.isTensor() || !value.toTensor().defined()) return true;
    const at::Tensor& tensor = value.toTensor();
    const Ref object = object_of(tensor);
    PyTypeObject* type = Py_TYPE(object.get());
    any_lazy |= is_lazy_class(type);
    return (is_lazy_class(type) || THPVariable_CheckTypeExact(type)) && is_dense(tensor) &&
           !op.hasKernelForDispatchKey(
               c10::computeDispatchKey(std::nullopt, std::nullopt, tensor.device()));
  }

  // `detach`, or `alias`, of a lazy tensor: another tensor on the same value.
  static bool alias(Stack* stack, const IValue* arguments) {
    if (!arguments[0].isTensor()) return false;
    const at::Tensor tensor = arguments[0].toTensor();
    if (!tensor.defined() || tensor.is_conj() || tensor.is_neg()) return false;
    Ref object;
    const Ref value = value_of(tensor, object);
    if (value.get() == nullptr) return false;
    const Ref slot = slot_in(value.get());
    if (slot.get() != Py_None && of_slot.trace.in(slot.get()) != trace_here) return false;
    const at::Tensor made = another(tensor, value.get(), layout_of(tensor, object));
    replace_arguments(stack, 1, {made}, false);
    return true;
  }

  // While the trace is cold: run a call on plain tensors, which costs no more than being in a mode.
  // Called without the GIL: pointers to Python objects may be compared here, but no reference may
  // be counted and no object read. False if the call is not of this kind, or ends a region.
  bool run_cold(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    bool in_mode = false;
    if (c10::impl::TorchDispatchModeTLS::stack_len() != 1 || !is_ours(in_mode) || !in_mode ||
        !info_.is_described || info_.function.get() == nullptr || info_.needs_care ||
        (info_.is_composite &&
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd))) {
      return false;
    }
    if (!is_all_ordinary(*stack)) return false;
    if (!count_cold(*stack)) return false;
    ran_cold = &info_;
    run_below(op, keys, stack);
    // from the next op on the mode isn't asked
    if (*cold_here == ASLEEP) fall_asleep();
    return true;
  }

  // Whether no tensor in the call has its ops in a class of Python's.
  bool is_all_ordinary(const Stack& stack) const {
    const IValue* arguments = arguments_on(stack);
    return std::all_of(arguments, arguments + info_.schema.arguments().size(), is_ordinary);
  }

  // The same of one argument.
  static bool is_ordinary(const IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      return !tensor.defined() || !has_python(tensor);
    }
    if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const IValue& item : value.toListRef()) {
        if (!item.isNone() && !is_ordinary(item)) return false;
      }
    }
    return true;
  }
};

}  // namespace hits
