// What C++ knows of an op (`OpInfo`) and of the calls that followed a state of the trie (`Edges`).
// It is copied from Python's objects, so that a hit has to ask none of them.

#pragma once

#include "keys.h"
#include "tensors.h"

namespace hits {

// One op. The constructor reads the schema; `hits._described` gives the rest at the op's first
// call.
struct OpInfo {
  explicit OpInfo(const c10::FunctionSchema& schema) : schema(schema) {
    for (const auto& argument : schema.arguments()) {
      const auto& written = argument.default_value();
      Words words;
      const bool known = written.has_value() && put_static(words, *written);
      defaults.push_back(known ? std::optional<Words>(std::move(words)) : std::nullopt);
      n_positional += !argument.kwarg_only();
      if (argument.is_out()) returned = defaults.size() - 1;
    }
    is_number.resize(schema.arguments().size());
    writes.resize(schema.arguments().size());
    for (const auto& result : schema.returns()) {
      is_view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    }
    const auto space = schema.operator_name().getNamespace();
    is_note = space == "profiler";
    is_counted = !is_note && space != "lazy_tensor";
    is_copy = schema.name() == "aten::copy_";
    is_item = schema.name() == "aten::_local_scalar_dense";
    is_select = schema.name() == "aten::select" && schema.overload_name() == "int";
    is_slice = schema.name() == "aten::slice" && schema.overload_name() == "Tensor";
  }
  const c10::FunctionSchema& schema;
  // By argument: the words of its default; whether its numbers may become run-time inputs; whether
  // the op writes it, which schemas don't always mark.
  std::vector<std::optional<Words>> defaults;
  std::vector<bool> is_number, writes;
  size_t n_positional = 0;
  size_t returned = 0;  // the argument that it gives back, if it gives one back
  bool is_view = false;  // its result shares its argument's memory
  bool is_copy = false;  // `copy_`
  bool is_item = false;  // it gives the number in its argument
  // It takes a part of its argument by an index, which may change at every call.
  bool is_select = false, is_slice = false;
  bool is_note = false;       // it marks a range for profilers
  bool is_counted = true;     // its calls are part of the past (see `sync_points.begin`)
  // The fields below are filled in. `run_cold` asks without the GIL.
  std::atomic<bool> is_described = false;
  bool is_recorded = false;   // a call was recorded before: else no state knows it
  bool is_alias = false;      // it gives another handle on its argument's value
  bool is_composite = false;  // it is recorded as the ops that it is made of
  bool needs_care = false;    // it can't simply run below dispatch (see `rules.needs_care`)
  bool reshapes = false;      // it may change an argument's size: `resize_`, `out=`
  bool reads = false;         // its result depends on values alone, as that of `item` does
  bool lets_in = false;       // tensors may enter a trace for it without a look in Python
  bool writes_list = false;   // a foreach op in place: its kernel counts no write for autograd
  bool draws_into = false;    // it writes random numbers to its first argument
  bool draws = false;         // it gives random numbers, and reads no tensor's values
  bool is_same = false;       // it gives its argument back
  bool reads_copies = false;  // it may read a copy of memory that others may write
  Ref view;                   // of `t_` and its like the op that gives the view; else null
  Ref function;               // the OpOverload; null if Python has to handle all its calls
};

// One tensor that a step gives: its metadata and its slot. Undefined if the op leaves it out.
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

// A step from a state of the trie to the next: the key that leads there, and what it gives.
struct Step {
  std::vector<uint64_t> words;
  Ref state;  // the next one
  int kind = 0;
  bool closes = false;  // it ends a segment, which `close_segment` runs
  std::vector<Output> outputs;
  // Of a view: the leaf that it is of, and the storage offset that this had when it was recorded.
  std::optional<std::pair<int64_t, int64_t>> offset_fixup;
  Ref slot;  // of a leaf
};

// Steps by their key. Keys of the same hash are compared word by word.
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

// What `State.edges` holds: the steps from a state that C++ has learnt. `exact` has calls by their
// key and leaves by their metadata. `generic` has calls by their key without the numbers that are
// run-time inputs. Python may drop it at any time (`trace._prune`); the steps are then learnt
// again.
struct Edges {
  PyObject_HEAD Children exact, generic;
};

// Slots too: each knows its trace, which has the trie that these steps are of.
int visit_edges(PyObject* self, visitproc visit, void* arg) {
  auto* edges = reinterpret_cast<Edges*>(self);
  for (auto* children : {&edges->exact, &edges->generic}) {
    for (auto& [_, step] : children->steps) {
      Py_VISIT(step->state.get());
      Py_VISIT(step->slot.get());
      for (const Output& output : step->outputs) {
        Py_VISIT(output.slot.get());
        Py_VISIT(output.layout.get());
      }
    }
  }
  return 0;
}

int clear_edges(PyObject* self) {
  auto* edges = reinterpret_cast<Edges*>(self);
  // The steps go when this function ends, when the edges are empty already: freeing a state may run
  // a finalizer, and that may come here again.
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

// The steps that are known from a state; null if there are none.
Edges* edges_of(PyObject* state) {
  PyObject* found = of_state.edges.in(state);
  return found == nullptr || found == Py_None ? nullptr : reinterpret_cast<Edges*>(found);
}

// The same, made if there are none; the state owns them.
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
