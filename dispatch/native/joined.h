// The autograd node that stands for the graph that a replayed module's forward would have made: see
// `capture/replay_module.py`, which calls `joined`.

#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include "sharded.h"

namespace hits {

// Its backward is `function(saved, gradients)`: from the outputs' gradients to those of the tensors
// that the module's graph began with. None stands for no gradient, on both sides.
class ReplayBackward : public PythonNode {
 public:
  using PythonNode::PythonNode;

  // Save tensors for backward. `function` gets the first `n_given`. The others are saved only so
  // that backward raises autograd's error if one of them was written.
  void save(PyObject* tensors, Py_ssize_t n_given) {
    n_given_ = n_given;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
      saved_.emplace_back(THPVariable_Unpack(PyList_GET_ITEM(tensors, i)), /*is_output=*/false);
    }
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    TORCH_CHECK(!is_released_, torch::autograd::ERR_BACKWARD_TWICE);
    const WithGil gil;
    const Ref saved(sure(PyList_New(n_given_)));
    for (size_t i = 0; i < saved_.size(); ++i) {
      // raises if the tensor was written, so it is done for all
      const at::Tensor tensor = saved_[i].unpack();
      const auto place = static_cast<Py_ssize_t>(i);
      if (place < n_given_) PyList_SET_ITEM(saved.get(), place, object_of(tensor).release());
    }
    const Ref given = taken(gradients);
    return tensors_in(call(saved.get(), given.get()).get());
  }

  void release_variables() override {
    const WithGil gil;
    is_released_ = true;
    saved_.clear();
    forget();
  }

  std::string name() const override { return "ReplayBackward"; }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
  Py_ssize_t n_given_ = 0;
  bool is_released_ = false;
};

// joined(function, saved, n_given, outputs, wanted): new tensors on the memory of the outputs,
// whose graph is one node that leads to the tensors `wanted`. Each shares its output's version
// counter, so autograd, where it saved the output, notices a write to the new tensor.
PyObject* py_joined(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *function, *saved, *outputs, *wanted;
  Py_ssize_t n_given;
  if (!PyArg_ParseTuple(args, "OO!nO!O!", &function, &PyList_Type, &saved, &n_given, &PyList_Type,
                        &outputs, &PyList_Type, &wanted)) {
    return nullptr;
  }
  using Function = decltype(torch::autograd::Edge::function);
  const auto node = make_node<Function, ReplayBackward>(function, Py_None);
  torch::autograd::edge_list edges;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(wanted); ++i) {
    edges.push_back(
        torch::autograd::impl::gradient_edge(THPVariable_Unpack(PyList_GET_ITEM(wanted, i))));
  }
  node->set_next_edges(std::move(edges));
  static_cast<ReplayBackward&>(*node).save(saved, n_given);
  const Py_ssize_t n = PyList_GET_SIZE(outputs);
  Ref given(sure(PyList_New(n)));
  for (Py_ssize_t i = 0; i < n; ++i) {
    const at::Tensor& output = THPVariable_Unpack(PyList_GET_ITEM(outputs, i));
    const at::Tensor made(output.unsafeGetTensorImpl()->shallow_copy_and_detach(
        torch::autograd::impl::version_counter(output), /*allow_tensor_metadata_change=*/false));
    torch::autograd::set_history(made, node);
    PyList_SET_ITEM(given.get(), i, object_of(made).release());
  }
  return given.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace hits
