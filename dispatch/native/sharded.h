// Between local and sharded tensors: both have the same value, so that nothing is recorded. What
// autograd must know of it.

#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "learning.h"

namespace hits {

// A node of the graph whose gradient `function(gradient, argument)` gives.
class Linked : public torch::autograd::Node {
 public:
  Linked(PyObject* function, PyObject* argument)
      : function_(Ref::to(function)), argument_(Ref::to(argument)) {}
  ~Linked() override {
    if (!Py_IsInitialized()) {
      function_.release();
      argument_.release();
      return;
    }
    const WithGil gil;
    function_ = Ref();
    argument_ = Ref();
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    const WithGil gil;
    const Ref gradient = object_of(gradients[0]);
    const Ref result(sure(PyObject_CallFunctionObjArgs(function_.get(), gradient.get(),
                                                       argument_.get(), nullptr)));
    return {THPVariable_Unpack(result.get())};
  }
  std::string name() const override { return "ShardingBackward"; }

 private:
  Ref function_, argument_;
};

// Nodes are counted in one way by torch 2.13, in another by 2.10.
template <class Pointer>
Pointer make_node(PyObject* function, PyObject* argument) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Linked>(function, argument);
  } else {
    return Pointer(c10::make_intrusive<Linked>(function, argument));
  }
}

// linked(output, input, function, argument): `output`, which autograd knows nothing of, as what was
// made of `input`; `function(gradient, argument)` is the gradient of `input`.
PyObject* py_linked(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *output, *input, *function, *argument;
  if (!PyArg_ParseTuple(args, "OOOO", &output, &input, &function, &argument)) return nullptr;
  const at::Tensor &made = THPVariable_Unpack(output), &from = THPVariable_Unpack(input);
  if (c10::GradMode::is_enabled() && from.requires_grad()) {
    const auto node = make_node<decltype(torch::autograd::Edge::function)>(function, argument);
    node->set_next_edges(torch::autograd::collect_next_edges(from));
    torch::autograd::set_history(at::Tensor(made), node);
  }
  return Ref::to(output).release();
  END_HANDLE_TH_ERRORS
}

// sharded(local, layout): the sharded tensor on the value of a lazy one; None if it isn't lazy.
PyObject* py_sharded(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *local, *layout;
  if (!PyArg_ParseTuple(args, "OO", &local, &layout)) return nullptr;
  if (Py_TYPE(local) != tensor_class) Py_RETURN_NONE;
  Ref object;
  const Ref value = value_of(THPVariable_Unpack(local), object);
  const OrdinaryTensors ordinary;
  return object_of(lazy(output_of(meta_of_layout.in(layout), Py_None, layout), 0, value.get()))
      .release();
  END_HANDLE_TH_ERRORS
}

// local(tensor): the local tensor, lazy, of a sharded one; None if traces don't hold such.
PyObject* py_local(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  Ref object;
  const at::Tensor& sharded = THPVariable_Unpack(tensor);
  const Ref value = value_of(sharded, object);
  const Ref layout = layout_of(sharded, object);
  const Ref data = data_in(value.get());
  if (data.get() != Py_None) {
    const at::Tensor& computed = THPVariable_Unpack(data.get());
    if (!is_dense(computed)) Py_RETURN_NONE;
    return object_of(another(computed, value.get())).release();
  }
  const OrdinaryTensors ordinary;
  Output like = output_of(local_of_layout.in(layout.get()), Py_None, nullptr);
  return object_of(lazy(like, like.offset, value.get())).release();
  END_HANDLE_TH_ERRORS
}

}  // namespace hits
