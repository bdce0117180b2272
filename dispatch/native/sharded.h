// From a local tensor to a sharded one and back. Both have the same value, so nothing is recorded;
// the nodes here tell autograd that one was made of the other. Called by `sharding/tensor.py`. Also
// what `sharding/ops/at_once.py` calls, for at_once.h.

#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "learning.h"

namespace hits {

// A node of autograd's graph whose backward is a function in Python.
class PythonNode : public torch::autograd::Node {
 public:
  PythonNode(PyObject* function, PyObject* argument)
      : function_(Ref::to(function)), argument_(Ref::to(argument)) {}
  PythonNode(PyObject* function, PyObject* argument, uint64_t sequence_nr)
      : Node(sequence_nr), function_(Ref::to(function)), argument_(Ref::to(argument)) {}
  // Whoever drops the last reference to a node may not have the GIL: autograd's engine, for one.
  ~PythonNode() override {
    if (!python_goes_on()) {
      function_.release();
      argument_.release();
      return;
    }
    const WithGil gil;
    forget();
  }
  std::string name() const override { return "ShardingBackward"; }

 protected:
  Ref call(PyObject* given) const { return call(given, argument_.get()); }
  Ref call(PyObject* given, PyObject* also) const {
    return Ref(sure(PyObject_CallFunctionObjArgs(function_.get(), given, also, nullptr)));
  }
  void forget() {
    function_ = Ref();
    argument_ = Ref();
  }

  // Move the gradients into a list, with None for undefined ones. Nothing else keeps them, so
  // Python may free each as soon as it is used.
  static Ref taken(torch::autograd::variable_list& gradients) {
    Ref given(sure(PyList_New(static_cast<Py_ssize_t>(gradients.size()))));
    for (size_t i = 0; i < gradients.size(); ++i) {
      Ref item = gradients[i].defined() ? object_of(gradients[i]) : Ref::to(Py_None);
      PyList_SET_ITEM(given.get(), static_cast<Py_ssize_t>(i), item.release());
    }
    gradients.clear();
    return given;
  }

  // The tensors of a sequence, undefined ones for None.
  static torch::autograd::variable_list tensors_in(PyObject* sequence) {
    torch::autograd::variable_list found;
    const Py_ssize_t n = PySequence_Size(sequence);
    for (Py_ssize_t i = 0; i < n; ++i) {
      const Ref item(sure(PySequence_GetItem(sequence, i)));
      found.push_back(item.get() == Py_None ? at::Tensor() : THPVariable_Unpack(item.get()));
    }
    return found;
  }

 private:
  Ref function_, argument_;
};

// For one input and one output: `function(gradient, argument)` is the input's gradient.
class Linked : public PythonNode {
 public:
  using PythonNode::PythonNode;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    const WithGil gil;
    const Ref gradient = object_of(gradients[0]);
    const Ref result = call(gradient.get());
    return {THPVariable_Unpack(result.get())};
  }
};

// For as many inputs as outputs: `function(gradients, argument)` gives the inputs' gradients. None
// stands for no gradient, on both sides. Of the nodes that are ready the engine runs the one with
// the highest sequence number first; this one has the highest that there is.
class LinkedAll : public PythonNode {
 public:
  LinkedAll(PyObject* function, PyObject* argument) : PythonNode(function, argument, UINT64_MAX) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const WithGil gil;
    return tensors_in(call(taken(gradients).get()).get());
  }
};

// Nodes are held by an `intrusive_ptr` in torch 2.13, by a `shared_ptr` in 2.10.
template <class Pointer, class Kind>
Pointer make_node(PyObject* function, PyObject* argument) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Kind>(function, argument);
  } else {
    return Pointer(c10::make_intrusive<Kind>(function, argument));
  }
}

// linked(output, input, function, argument): tell autograd that `output`, of which it knows
// nothing, was made of `input`, whose gradient is `function(gradient, argument)`. Gives `output`.
PyObject* py_linked(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *output, *input, *function, *argument;
  if (!PyArg_ParseTuple(args, "OOOO", &output, &input, &function, &argument)) return nullptr;
  const at::Tensor &made = THPVariable_Unpack(output), &from = THPVariable_Unpack(input);
  if (c10::GradMode::is_enabled() && from.requires_grad()) {
    const auto node = make_node<decltype(torch::autograd::Edge::function), Linked>(function, argument);
    node->set_next_edges(torch::autograd::collect_next_edges(from));
    torch::autograd::set_history(at::Tensor(made), node);
  }
  return Ref::to(output).release();
  END_HANDLE_TH_ERRORS
}

// linked_all(outputs, inputs, function, argument): the same for as many outputs as inputs by one
// node, even where gradients are disabled. Outputs of inputs that require no gradient stay as they
// are.
PyObject* py_linked_all(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *outputs, *inputs, *function, *argument;
  if (!PyArg_ParseTuple(args, "O!O!OO", &PyList_Type, &outputs, &PyList_Type, &inputs, &function,
                        &argument)) {
    return nullptr;
  }
  using Pointer = decltype(torch::autograd::Edge::function);
  const auto node = make_node<Pointer, LinkedAll>(function, argument);
  torch::autograd::edge_list edges;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
    const at::Tensor& from = THPVariable_Unpack(PyList_GET_ITEM(inputs, i));
    edges.push_back(from.requires_grad() ? torch::autograd::impl::gradient_edge(from)
                                         : torch::autograd::Edge());
  }
  node->set_next_edges(std::move(edges));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); ++i) {
    const at::Tensor& made = THPVariable_Unpack(PyList_GET_ITEM(outputs, i));
    const auto place = node->add_input_metadata(made);
    if (THPVariable_Unpack(PyList_GET_ITEM(inputs, i)).requires_grad()) {
      torch::autograd::impl::set_gradient_edge(made, {node, place});
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// sharded(local, layout): a sharded tensor on the value of a local one; None if that isn't lazy.
PyObject* py_sharded(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *local, *layout;
  if (!PyArg_ParseTuple(args, "OO", &local, &layout)) return nullptr;
  if (Py_TYPE(local) != tensor_class) Py_RETURN_NONE;
  Ref object;
  const at::Tensor& tensor = THPVariable_Unpack(local);
  const Ref value = value_of(tensor, object);
  const Inference same(tensor.is_inference());
  return object_of(lazy(output_of(of_layout.meta.in(layout), Py_None, layout), 0, value.get()))
      .release();
  END_HANDLE_TH_ERRORS
}

// local(tensor): the local tensor, lazy, on the value of a sharded one; None if its data is of a
// kind that traces don't hold.
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
  const Inference same(sharded.is_inference());
  Output like = output_of(of_layout.local.in(layout.get()), Py_None, nullptr);
  return object_of(lazy(like, like.offset, value.get())).release();
  END_HANDLE_TH_ERRORS
}

// learn_at_once(function, sizes, layouts, returned): note that the innermost call that is in Python, if
// it is one of `function`, is the op on this rank's memory. `sizes` are pairs of an argument's place
// and what it is there. `layouts` are the result's, a list for several results, None for no new
// tensor. `returned` is the place of the argument that the call gives back, or None.
PyObject* py_learn_at_once(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *function, *sizes, *layouts, *returned;
  if (!PyArg_ParseTuple(args, "OO!OO", &function, &PyList_Type, &sizes, &layouts, &returned)) {
    return nullptr;
  }
  if (frames.empty() || frames.back().info == nullptr) Py_RETURN_NONE;
  const Frame& frame = frames.back();
  const LocalKey key(*frame.info, frame.arguments.data());
  if (frame.info->function.get() != function || !key.may_be_known()) Py_RETURN_NONE;
  LocalCall call;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sizes); ++i) {
    PyObject* pair = PyList_GET_ITEM(sizes, i);
    call.sizes.emplace_back(PyLong_AsSize_t(PyTuple_GET_ITEM(pair, 0)),
                            integers(PyTuple_GET_ITEM(pair, 1)));
  }
  const auto add = [&call](PyObject* layout) {
    call.outputs.push_back(output_of(of_layout.meta.in(layout), Py_None, layout));
  };
  call.gives_list = PyList_Check(layouts) && frame.info->schema.returns().size() == 1;
  if (PyList_Check(layouts)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(layouts); ++i) add(PyList_GET_ITEM(layouts, i));
  } else if (layouts != Py_None) {
    add(layouts);
  }
  if (returned != Py_None) call.returned = PyLong_AsSize_t(returned);
  local_calls.add(key, std::move(call));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// forget_at_once(): forget all such calls.
PyObject* py_forget_at_once(PyObject*, PyObject*) {
  local_calls.forget();
  Py_RETURN_NONE;
}

}  // namespace hits
