// Composite ops that torch takes apart otherwise for subclasses and under modes than in eager, so
// that results round otherwise, or values are read. The kernels here take them apart as in eager.
// They take over from those in Python (`composite_overrides.py`, which has the reasons).

#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/PythonFallbackKernel.h>

#include "tensors.h"

namespace hits {

// Whether eager multiplies the matrices of one side, a batch, one by one with the only matrix of
// the other. It doesn't if that one requires a gradient, as gradients of copies would be added up
// (`_matmul_impl` in torch's LinearAlgebra.cpp).
bool multiplies_one_by_one(const at::Tensor& left, const at::Tensor& right) {
  if (left.dim() != 3 || right.dim() != 3 || left.size(0) == right.size(0)) return false;
  const at::Tensor& one = left.size(0) == 1 ? left : right;
  return one.size(0) == 1 && !one.requires_grad();
}

// Whether `matmul` would expand both to the sizes that they have, and nobody needs a gradient: the
// nodes of these views decide in which order autograd adds the gradients of `x @ x` to others of
// `x`. Nested tensors have no sizes.
bool are_equal_batches(const at::Tensor& left, const at::Tensor& right) {
  const int64_t n_dims = left.dim();
  const bool needs_gradient =
      at::GradMode::is_enabled() && (left.requires_grad() || right.requires_grad());
  return !needs_gradient && n_dims >= 3 && right.dim() == n_dims && !left.is_nested() &&
         !right.is_nested() &&
         left.sizes().slice(0, n_dims - 2) == right.sizes().slice(0, n_dims - 2);
}

// Whether `multiply` does what `matmul`, or `matmul.out`, of these does in eager.
bool is_multiplied_here(const at::Tensor& left, const at::Tensor& right, bool is_out) {
  return multiplies_one_by_one(left, right) || (!is_out && are_equal_batches(left, right));
}

void multiply_one_by_one(Stack* stack, bool is_out) {
  const at::Tensor out = is_out ? torch::jit::pop(*stack).toTensor() : at::Tensor();
  at::Tensor right = torch::jit::pop(*stack).toTensor();
  at::Tensor left = torch::jit::pop(*stack).toTensor();
  const auto n = left.size(0) == 1 ? right.size(0) : left.size(0);
  left = left.expand({n, -1, -1});
  right = right.expand({n, -1, -1});
  if (is_out) {
    at::Tensor target = out;
    stack->emplace_back(at::bmm_out(target, left, right));
  } else {
    stack->emplace_back(left.bmm(right));
  }
}

// What torch makes of it, without the views that change nothing: each of them would cost as much to
// record as the product does.
void multiply_equal_batches(Stack* stack) {
  at::Tensor right = torch::jit::pop(*stack).toTensor();
  at::Tensor left = torch::jit::pop(*stack).toTensor();
  const int64_t n_dims = left.dim(), n_rows = left.size(-2), n_columns = right.size(-1);
  auto sizes = left.sizes().vec();
  sizes[n_dims - 1] = n_columns;
  if (n_dims > 3) {
    const int64_t n = c10::multiply_integers(sizes.begin(), sizes.end() - 2);
    left = left.reshape({n, n_rows, left.size(-1)});
    right = right.reshape({n, right.size(-2), n_columns});
  }
  at::Tensor product = left.bmm(right);
  if (n_dims > 3) product = at::_unsafe_view(product, sizes);
  stack->emplace_back(std::move(product));
}

// Take the arguments of `matmul`, or of `matmul.out`, off the stack, and put the product there.
void multiply(Stack* stack, bool is_out) {
  const size_t n_arguments = is_out ? 3 : 2;
  if (multiplies_one_by_one(torch::jit::peek(*stack, 0, n_arguments).toTensor(),
                            torch::jit::peek(*stack, 1, n_arguments).toTensor())) {
    multiply_one_by_one(stack, is_out);
  } else {
    multiply_equal_batches(stack);
  }
}

// A kernel of a composite op for the key "PythonTLSSnapshot". Calls on subclasses, and all calls
// under modes, come to that key before autograd, and so before torch takes the op apart.
class Routed : public c10::OperatorKernel {
 protected:
  // Do with the call what torch does for this key.
  static void go_on(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const at::impl::MaybeSetTLSOnEntryGuard guard;
    op.redispatchBoxed(
        keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::PythonTLSSnapshot), stack);
  }

  // Whether the tensor is plain, or lazy and not sharded.
  static bool is_ours(const at::Tensor& tensor) {
    if (has_python(tensor)) {
      const LazyImpl* impl = made_here(tensor);
      if (impl != nullptr && impl->value != nullptr) return impl->layout == nullptr;
      const WithGil gil;
      return Py_TYPE(object_of(tensor).get()) == tensor_class;
    }
    return tensor.defined() &&
           (tensor.unsafeGetTensorImpl()->key_set() & at::kTensorSubclassLike).empty();
  }

  // Whether neither another mode nor a transform of `torch.func` wants to see the op.
  static bool only_our_modes_are_active() {
    for (int64_t i = 0; i < c10::impl::TorchDispatchModeTLS::stack_len(); ++i) {
      if (!is_our_mode(c10::impl::TorchDispatchModeTLS::get_stack_at(i))) return false;
    }
    return !c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode);
  }
};

class Matmul : public Routed {
 public:
  explicit Matmul(bool is_out) : is_out_(is_out) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const IValue* arguments = stack->data() + (stack->size() - (is_out_ ? 3 : 2));
    if (is_taken(arguments[0].toTensor(), arguments[1].toTensor()) &&
        (!is_out_ || is_ours(arguments[2].toTensor()))) {
      return multiply(stack, is_out_);
    }
    go_on(op, keys, stack);
  }

 private:
  const bool is_out_;

  bool is_taken(const at::Tensor& left, const at::Tensor& right) const {
    return is_ours(left) && is_ours(right) && is_multiplied_here(left, right, is_out_) &&
           // under autocast the call comes again, on tensors that are cast by then
           (is_out_ || !at::autocast::is_autocast_enabled(left.device().type())) &&
           only_our_modes_are_active();
  }
};

class OneHot : public Routed {
 public:
  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const at::Tensor classes = torch::jit::peek(*stack, 0, 2).toTensor();
    const int64_t n_classes = torch::jit::peek(*stack, 1, 2).toInt();
    // The number of classes is given, so nothing is read to find it. Nor to check the classes:
    // `scatter_` raises for one that is out of bounds.
    if (n_classes <= 0 || !is_ours(classes) || classes.scalar_type() != at::kLong ||
        classes.numel() == 0 || !only_our_modes_are_active()) {
      return go_on(op, keys, stack);
    }
    auto sizes = classes.sizes().vec();
    sizes.push_back(n_classes);
    const at::Tensor made = classes.new_zeros(sizes).scatter_(-1, classes.unsqueeze(-1), 1);
    torch::jit::drop(*stack, 2);
    stack->emplace_back(made);
  }
};

}  // namespace hits
