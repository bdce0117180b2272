// What is known of an op, and of what followed a state of the trie.

#pragma once

#include "keys.h"
#include "tensors.h"

namespace hits {

struct OpInfo {
  explicit OpInfo(const c10::FunctionSchema& schema) : schema(schema) {
    for (const auto& argument : schema.arguments()) {
      const auto& written = argument.default_value();
      Words words;
      const bool known = written.has_value() && put_static(words, *written);
      defaults.push_back(known ? std::optional<Words>(std::move(words)) : std::nullopt);
      n_positional += !argument.kwarg_only();
    }
    is_number.resize(schema.arguments().size());
    for (const auto& result : schema.returns()) {
      is_view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    }
    const auto space = schema.operator_name().getNamespace();
    is_note = space == "profiler";
    is_counted = !is_note && space != "lazy_tensor";
    is_copy = schema.name() == "aten::copy_";
    is_select = schema.name() == "aten::select" && schema.overload_name() == "int";
    is_slice = schema.name() == "aten::slice" && schema.overload_name() == "Tensor";
    const std::string name = schema.name().substr(space->size() + 2);
    begins_state = name == "clone" || name == "_to_copy" || name.rfind("new_", 0) == 0 ||
                   (name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0);
  }
  const c10::FunctionSchema& schema;
  std::vector<std::optional<Words>> defaults;
  std::vector<bool> is_number;  // arguments whose numbers may become run-time inputs
  size_t n_positional = 0;
  bool is_view = false;       // what it gives shares its argument's memory
  bool is_copy = false;       // it copies to its first argument
  bool is_select = false, is_slice = false;  // it takes a part of its argument, by an index
  bool begins_state = false;  // what it gives is often written later: copies, blanks
  bool is_note = false;       // a mark in a profile, which no value has to do with
  bool is_counted = true;     // it is part of the past (see `sync_points.begin`)
  std::atomic<bool> is_described = false;  // what follows is known; read without the GIL
  bool is_recorded = false;   // it was recorded before
  bool is_alias = false;      // it gives another handle on its argument's value
  bool is_composite = false;  // it has an implementation in terms of other ops
  bool needs_care = false;    // it can't simply run below dispatch (see rules.needs_care)
  bool reshapes = false;      // it may change the size of an argument
  bool reads = false;         // it gives what only a tensor's values say
  bool lets_in = false;       // its tensors may enter a trace without being looked at in Python
  bool writes_list = false;   // it writes the tensors of its first argument, which nobody counts
  bool draws_into = false;    // it writes random numbers to its first argument
  bool reads_copies = false;  // of memory that others may write it may read a copy
  Ref function;               // the OpOverload; null if Python wants to see all its calls
};

struct Output {
  bool is_defined = false;
  c10::SmallVector<int64_t, 6> size, stride;
  int64_t offset = 0;
  size_t n_bytes = 0;
  DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::Device device = c10::kCPU;
  Ref slot;
  Ref layout;  // of a sharded tensor
};

// One step of the trie, ready to be taken.
struct Step {
  std::vector<uint64_t> words;
  Ref state;
  int kind = 0;
  bool closes = false;
  std::vector<Output> outputs;
  std::optional<std::pair<int64_t, int64_t>> offset_fixup;  // a leaf, and its recorded offset
  Ref slot;                                                 // of a leaf
};

struct Children {
  std::unordered_multimap<uint64_t, std::unique_ptr<Step>> steps;

  const Step* find(const Words& words) const {
    if (steps.empty()) return nullptr;
    const auto [first, last] = steps.equal_range(hash_of(words.data(), words.size()));
    for (auto it = first; it != last; ++it) {
      const auto& known = it->second->words;
      if (known.size() == words.size() &&
          std::memcmp(known.data(), words.data(), known.size() * sizeof(uint64_t)) == 0) {
        return it->second.get();
      }
    }
    return nullptr;
  }
  void add(const Words& words, std::unique_ptr<Step> step) {
    step->words.assign(words.begin(), words.end());
    steps.emplace(hash_of(words.data(), words.size()), std::move(step));
  }
};

// What `State.edges` holds: the calls that followed, by their exact words, by words without the
// numbers that are run-time inputs, and leaves by their metadata.
struct Edges {
  PyObject_HEAD Children exact, generic;
};

int visit_edges(PyObject* self, visitproc visit, void* arg) {
  auto* edges = reinterpret_cast<Edges*>(self);
  for (auto* children : {&edges->exact, &edges->generic}) {
    for (auto& [_, step] : children->steps) Py_VISIT(step->state.get());
  }
  return 0;
}

int clear_edges(PyObject* self) {
  auto* edges = reinterpret_cast<Edges*>(self);
  auto exact = std::move(edges->exact.steps);
  auto generic = std::move(edges->generic.steps);
  edges->exact.steps.clear();
  edges->generic.steps.clear();
  return 0;
}

void delete_edges(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_edges(self);
  auto* edges = reinterpret_cast<Edges*>(self);
  edges->exact.~Children();
  edges->generic.~Children();
  PyObject_GC_Del(self);
}

PyTypeObject edges_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

Edges* edges_of(PyObject* state) {
  PyObject* found = of_state.edges.in(state);
  return found == nullptr || found == Py_None ? nullptr : reinterpret_cast<Edges*>(found);
}

Edges* make_edges(PyObject* state) {
  if (Edges* known = edges_of(state)) return known;
  auto* made = PyObject_GC_New(Edges, &edges_type);
  sure(reinterpret_cast<PyObject*>(made));
  new (&made->exact) Children();
  new (&made->generic) Children();
  PyObject_GC_Track(made);
  of_state.edges.set(state, reinterpret_cast<PyObject*>(made));
  Py_DECREF(made);
  return made;
}

}  // namespace hits
