// Which tensors are aliases for autograd, and how to make one: so that a tensor which `replay`
// returns is as much another tensor's view as the one that the captured call returned.

#pragma once

#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "objects.h"

namespace hits {

constexpr long NO_VIEW = -1;  // an alias as `detach()` gives: only the writes are counted together

// Whether a write to one of the tensors counts as a write to the other.
bool counts_writes_with(const at::Tensor& one, const at::Tensor& other) {
  using torch::autograd::impl::version_counter;
  // torch compares no counters: each is a pointer to a shared number
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(&version_counter(one), &version_counter(other), sizeof(void*)) == 0;
}

// The tensor that autograd knows this one as a view of; null if there is none.
const at::Tensor* base_of(const at::Tensor& tensor) {
  const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  return view != nullptr && view->has_bw_view() ? &view->get_backward_view().base_ : nullptr;
}

// Make a new tensor an alias of `original`. `creation` is torch's `CreationMeta` of a view.
void make_alias(const at::Tensor& made, const at::Tensor& original, long creation) {
  if (made.is_inference() || original.is_inference()) return;
  if (creation == NO_VIEW || made.unsafeGetTensorImpl()->autograd_meta() != nullptr) {
    torch::autograd::impl::set_version_counter(
        made, torch::autograd::impl::version_counter(original));
    return;
  }
  torch::autograd::as_view(original, made, /*is_bw_differentiable=*/true,
                           /*is_fw_differentiable=*/true, nullptr, nullptr,
                           static_cast<torch::autograd::CreationMeta>(creation));
}

// alias_among(tensor, others, n_kept): (number, creation) of that of `others` which autograd knows
// the tensor as an alias of, or None. Those behind the first `n_kept` are not there at a replay
// until it makes them: a view of one of them is told only if its base is among them.
PyObject* py_alias_among(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *object, *others;
  Py_ssize_t n_kept;
  if (!PyArg_ParseTuple(args, "OO!n", &object, &PyList_Type, &others, &n_kept)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (torch::autograd::impl::version_counter(tensor).unique()) Py_RETURN_NONE;
  const at::Tensor* base = base_of(tensor);
  Py_ssize_t first = -1;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(others); ++i) {
    const at::Tensor& other = THPVariable_Unpack(PyList_GET_ITEM(others, i));
    if (other.is_same(tensor) || !counts_writes_with(tensor, other)) continue;
    const at::Tensor* base_of_other = base_of(other);
    if (base != nullptr &&
        (base->is_same(other) ||
         (i < n_kept && base_of_other != nullptr && base->is_same(*base_of_other)))) {
      const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
      return Py_BuildValue("nl", i, static_cast<long>(view->get_creation_meta()));
    }
    const bool is_view_of_it = base_of_other != nullptr && base_of_other->is_same(tensor);
    if (first < 0 && !is_view_of_it) first = i;
  }
  if (first < 0) Py_RETURN_NONE;
  return Py_BuildValue("nl", first, NO_VIEW);
  END_HANDLE_TH_ERRORS
}

}  // namespace hits
