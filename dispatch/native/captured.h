// A call that `replay` has captured. `find` checks whether it may be repeated, and finds the leaves
// of its plan; `run` runs the plan and puts the results where the call would have put them.
// `capture/captured_call.py` fills in the fields, and handles the rare cases.

#pragma once

#include <algorithm>
#include <chrono>

#include "flush.h"
#include "results.h"
#include "watch.h"

namespace hits {

PyObject* obstacle_class;  // `watched_object.Obstacle`

[[noreturn]] void throw_changed(const char* what) {
  PyErr_SetString(obstacle_class, what);
  throw python_error();
}

// The place of a name among these, which is its value in an enum.
template <size_t n>
int number_of(const std::array<const char*, n>& names, PyObject* told) {
  const std::string name = PyUnicode_AsUTF8(told);
  const auto found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK(found != names.end(), "a captured call knows no ", name);
  return static_cast<int>(found - names.begin());
}

// Where a tensor lies when a call begins: (kind, holder, key, number), as in `captured_call.Way`,
// which says what each kind means.
struct Place {
  enum Kind { OBJECT, ARGUMENT, OPEN, ITEM, GRADIENT, ASK } kind = OBJECT;
  PyObject* holder = nullptr;
  PyObject* key = nullptr;
  Py_ssize_t number = -1;

  Place() = default;
  explicit Place(PyObject* told)
      : holder(PyTuple_GET_ITEM(told, 1)),
        key(PyTuple_GET_ITEM(told, 2)),
        number(PyLong_AsSsize_t(PyTuple_GET_ITEM(told, 3))) {
    static constexpr std::array names = {"object", "argument", "open", "item", "gradient", "ask"};
    kind = static_cast<Kind>(number_of(names, PyTuple_GET_ITEM(told, 0)));
  }

  // What lies there; `tensors` are those among the arguments, `open` those at open places.
  Ref get(PyObject* tensors, PyObject* open) const {
    PyObject* found = nullptr;
    switch (kind) {
      case OBJECT:
        found = holder;
        break;
      case ARGUMENT:
        found = PyList_GET_ITEM(tensors, number);
        break;
      case OPEN:
        found = PyList_GET_ITEM(open, number);
        break;
      case ITEM:
        found = PyDict_GetItemWithError(holder, key);
        if (found == nullptr && PyErr_Occurred()) throw python_error();
        break;
      case GRADIENT: {
        PyObject* of = number < 0 ? holder : PyList_GET_ITEM(tensors, number);
        const at::Tensor gradient = THPVariable_Unpack(of).grad();
        return gradient.defined() ? object_of(gradient) : Ref::to(Py_None);
      }
      case ASK:
        return Ref(sure(PyObject_CallOneArg(holder, tensors)));
    }
    if (found == nullptr) throw_changed("what it reads is no longer there");
    return Ref::to(found);
  }

  // Put a tensor there; false if only Python can.
  bool put(const at::Tensor& made, PyObject* tensors) const {
    if (kind == ITEM) {
      sure(PyDict_SetItem(holder, key, object_of(made).get()));
    } else if (kind == GRADIENT) {
      PyObject* of = number < 0 ? holder : PyList_GET_ITEM(tensors, number);
      THPVariable_Unpack(of).mutable_grad() = made;
    } else {
      return false;
    }
    return true;
  }
};

// Whether only the place in question, and the caller's variable, hold a tensor, so that nobody can
// see whether another tensor takes its place or it gets another value.
bool is_only_at(const Place& place, PyObject* object) {
  // whether a tensor that C++ holds also holds its object depends on torch's version
  static const Py_ssize_t n_of_gradient = [] {
    const at::Tensor leaf = at::zeros({1});
    leaf.mutable_grad() = at::zeros({1});
    { const Ref first = object_of(leaf.grad()); }
    return Py_REFCNT(object_of(leaf.grad()).get());
  }();
  const bool is_gradient = place.kind == Place::GRADIENT;
  return THPVariable_Unpack(object).use_count() == (is_gradient ? 2 : 1) &&
         Py_REFCNT(object) <= (is_gradient ? n_of_gradient : 2);
}

// Where the call puts one of the plan's results, or a tensor from another place: (result, layout,
// like, place, requires_grad), as `captured_call._targets` gives it.
struct Target {
  Py_ssize_t result;  // or -1 - k: the tensor that lay at open place k
  PyObject* layout;  // of the sharded tensor that lies there, or None
  PyObject* like;    // a lazy tensor with the new one's metadata; None: its data has the same
  Place place;       // OBJECT: nothing can be put there
  bool requires_grad;

  explicit Target(PyObject* told)
      : result(PyLong_AsSsize_t(PyTuple_GET_ITEM(told, 0))),
        layout(PyTuple_GET_ITEM(told, 1)),
        like(PyTuple_GET_ITEM(told, 2)),
        place(PyTuple_GET_ITEM(told, 3)),
        requires_grad(PyTuple_GET_ITEM(told, 4) == Py_True) {}
};

// One leaf of what the call returns: (kind, number, object, finish), as `captured_call._given`
// gives it. PLAIN is a result of the plan, LAZY a lazy tensor on one, PLACE what lies at a place,
// AGAIN an object that an earlier leaf returned, ASK the result of `object` on the leaves.
struct Given {
  enum Kind { PLAIN, LAZY, PLACE, AGAIN, ASK } kind;
  Py_ssize_t number;  // of the plan's result, or of what was returned before
  PyObject* object;   // of LAZY a tensor with the same metadata; None: its data has the same
  PyObject* finish;   // called with the tensor, or None
  Place place;

  explicit Given(PyObject* told)
      : number(PyLong_AsSsize_t(PyTuple_GET_ITEM(told, 1))),
        object(PyTuple_GET_ITEM(told, 2)),
        finish(PyTuple_GET_ITEM(told, 3)) {
    static constexpr std::array names = {"plain", "lazy", "place", "again", "ask"};
    kind = static_cast<Kind>(number_of(names, PyTuple_GET_ITEM(told, 0)));
    if (kind == PLACE) place = Place(object);
  }
};

// A tensor that the call writes in place, with the writes that autograd counts.
struct Written {
  Place place;
  Py_ssize_t n;

  explicit Written(PyObject* told)
      : place(PyTuple_GET_ITEM(told, 0)), n(PyLong_AsSsize_t(PyTuple_GET_ITEM(told, 1))) {}
};

// Give a lazy tensor a new value, with this data, or without any for None. False, and nothing done,
// if the tensor isn't lazy, if its layout is another, or if the data has other metadata. The old
// value stays as it is: an alias of the tensor may own it, too.
bool renew(PyObject* object, PyObject* data, PyObject* layout) {
  const Ref its_layout = layout_in(object);
  if (Py_TYPE(object) != tensor_class && its_layout.get() != layout) return false;
  if (its_layout.get() == nullptr && data != Py_None) {
    const at::Tensor &old = THPVariable_Unpack(object), &now = THPVariable_Unpack(data);
    if (old.sizes() != now.sizes() || old.strides() != now.strides() ||
        old.scalar_type() != now.scalar_type() || old.device() != now.device() ||
        old.storage_offset() != now.storage_offset()) {
      return false;
    }
  }
  sure(value_of_tensor.set(object, value_with(data).get(), nullptr));
  return true;
}

// An object with attributes, which must keep its class and the dict of its attributes.
struct Instance {
  PyObject *object, *type, *dict;

  explicit Instance(PyObject* found)
      : object(found), type(reinterpret_cast<PyObject*>(Py_TYPE(found))), dict(dict_now()) {}

  PyObject* dict_now() const {
    PyObject** at = _PyObject_GetDictPtr(object);
    return at == nullptr ? nullptr : *at;
  }

  bool is_unchanged() const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type && dict_now() == dict;
  }
};

class CapturedCall {
 public:
  // `fields` is a dict that lives as long as this, and that nobody changes: the pointers here are
  // borrowed from it. So the garbage collector has to see the dict alone.
  explicit CapturedCall(PyObject* fields) : fields_(Ref::to(fields)) {}

  PyObject* fields() const { return fields_.get(); }

  // What the plan is to run on: (leaves, numbers, the tensors at open places). Raises `Obstacle` if
  // the call might do something else than it did when it was captured.
  Ref find(PyObject* tensors) const {
    check_objects(tensors);
    Ref open(sure(PyList_New(static_cast<Py_ssize_t>(open_.size()))));
    for (size_t i = 0; i < open_.size(); ++i) {
      PyList_SET_ITEM(open.get(), i, open_[i].get(tensors, nullptr).release());
    }
    if (!have_autograd_fields(open.get(), open_fields_)) {
      throw_changed("hooks or attributes of a tensor that it replaces came or went");
    }
    if (!equals(words_of(watched_, open.get(), any_size_), words_)) {
      throw_changed("a tensor's class, size, strides, dtype, device or graph changed, or tensors "
                    "that were one object are two now, or the other way round");
    }
    for (size_t i = 0; i < n_renewed_; ++i) {
      const Place& place = targets_[i].place;
      if (place.kind == Place::OBJECT && !is_only_at(place, PyList_GET_ITEM(open.get(), i))) {
        throw_changed("a tensor in a tuple that it makes anew is held elsewhere, too");
      }
    }
    Ref leaves(sure(PyList_New(static_cast<Py_ssize_t>(leaves_.size()))));
    for (size_t i = 0; i < leaves_.size(); ++i) {
      Ref found = leaves_[i].get(tensors, open.get());
      PyList_SET_ITEM(leaves.get(), i, data_of(std::move(found)).release());
    }
    if (!any_size_ && !equals(words_of_leaves(leaves.get()), leaf_words_)) {
      throw_changed("tensors share memory with others than they did");
    }
    Ref numbers = Ref::to(scalars_);
    Ref drawn = Ref::to(Py_None);
    if (ask_reads_ != Py_None) {
      // the numbers of this call: others are put among them
      numbers = Ref(sure(PyList_GetSlice(scalars_, 0, PyList_GET_SIZE(scalars_))));
      drawn = Ref(
          sure(PyObject_CallFunctionObjArgs(ask_reads_, leaves.get(), numbers.get(), nullptr)));
    }
    return Ref(sure(PyTuple_Pack(4, leaves.get(), numbers.get(), open.get(), drawn.get())));
  }

  // Replay the call on the leaves that `find` found: run the plan, write the state that the call
  // writes, and return the call's result. If an op raises, all that doesn't depend on it is done.
  PyObject* run(PyObject* found, PyObject* tensors, bool is_looked_at) const {
    PyObject* leaves = PyTuple_GET_ITEM(found, 0);
    PyObject* open = PyTuple_GET_ITEM(found, 2);
    // found now: afterwards other tensors may lie at these places
    std::vector<Ref> written;
    for (const Written& one : written_) written.push_back(one.place.get(tensors, open));
    // These places get new tensors, and the call doesn't read the old ones: their memory is freed
    // for the plan to use. The first open places are those of `targets_`, in the same order.
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(unread_); ++k) {
      const Py_ssize_t i = PyLong_AsSsize_t(PyList_GET_ITEM(unread_, k));
      PyObject* old = PyList_GET_ITEM(open, i);
      if (is_only_at(targets_[i].place, old)) renew(old, Py_None, targets_[i].layout);
    }
    const Ref results = results_of(found, tensors, is_looked_at);
    if (results.get() == nullptr) return nullptr;
    if (share_ != Py_None) Ref(sure(PyObject_CallOneArg(share_, results.get())));
    leave(results.get(), open, tensors);
    if (!written.empty()) note_writes(written);
    return given(results.get(), leaves, tensors, open);
  }

  // Put results where the call would have put them. A result that was not computed is None, and its
  // place stays as it is.
  void leave(PyObject* results, PyObject* open, PyObject* tensors) const {
    // Moves come first. A moved tensor then has two holders, so its old place gets a new tensor and
    // not a new value. If that wasn't computed, the tensor stays where it is.
    for (size_t i = 0; i < targets_.size(); ++i) {
      if (targets_[i].result >= 0 || !is_computed(i, results)) continue;
      const at::Tensor& moved = THPVariable_Unpack(PyList_GET_ITEM(open, -1 - targets_[i].result));
      if (!targets_[i].place.put(moved, tensors)) put(i, moved, tensors);
    }
    std::vector<std::pair<PyObject*, at::Tensor>> replaced;  // what lay at places, and lies there now
    for (size_t i = 0; i < targets_.size(); ++i) {
      const Target& target = targets_[i];
      if (target.result < 0) continue;
      PyObject* data = PyList_GET_ITEM(results, target.result);
      if (data == Py_None) continue;
      PyObject* old = i < n_renewed_ ? PyList_GET_ITEM(open, i) : nullptr;
      // a tensor that nobody else holds takes the value; else another tensor takes its place
      if (old != nullptr && is_only_at(target.place, old) && renew(old, data, target.layout)) {
        continue;
      }
      const auto known = std::find_if(replaced.begin(), replaced.end(), [old](const auto& pair) {
        return old != nullptr && pair.first == old;
      });
      at::Tensor made;
      if (known != replaced.end()) {
        made = known->second;
      } else {
        const Ref value = value_with(data);
        made = target.like == Py_None ? another(THPVariable_Unpack(data), value.get())
                                      : like(target.like, value.get());
        if (target.requires_grad) made.requires_grad_(true);
        replaced.emplace_back(old, made);
      }
      if (!target.place.put(made, tensors)) put(i, made, tensors);
    }
  }

 private:
  // Whether the `i`-th place gets a tensor: its result was computed or, if a tensor is moved there,
  // that of the place where the chain of moves begins. A ring of moves needs no result.
  bool is_computed(size_t i, PyObject* results) const {
    for (size_t n = 0; targets_[i].result < 0; ++n) {
      if (n == targets_.size()) return true;
      i = -1 - targets_[i].result;
    }
    return PyList_GET_ITEM(results, targets_[i].result) != Py_None;
  }

  PyObject* field(const char* name) const {
    PyObject* found = PyDict_GetItemString(fields_.get(), name);
    TORCH_CHECK(found != nullptr, "a captured call has no ", name);
    return found;
  }

  // The items of a list, each made of what Python tells.
  template <class T>
  std::vector<T> all(const char* name) const {
    PyObject* items = field(name);
    std::vector<T> made;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); ++i) {
      made.emplace_back(PyList_GET_ITEM(items, i));
    }
    return made;
  }

  static bool equals(const std::vector<uint64_t>& words, PyObject* bytes) {
    const size_t n = words.size() * sizeof(uint64_t);
    return static_cast<size_t>(PyBytes_GET_SIZE(bytes)) == n &&
           std::memcmp(PyBytes_AS_STRING(bytes), words.data(), n) == 0;
  }

  // Raise `Obstacle` unless all is as it was that the call sees besides tensors' metadata.
  void check_objects(PyObject* tensors) const {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(pinned_); ++i) {
      PyObject* pair = PyList_GET_ITEM(pinned_, i);
      if (PyList_GET_ITEM(tensors, PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0))) !=
          PyTuple_GET_ITEM(pair, 1)) {
        throw_changed("an argument is another tensor, which it also finds elsewhere");
      }
    }
    // The other arguments must not be tensors that are watched. So there must be as many of these
    // among the arguments as are pinned.
    Py_ssize_t n_watched = 0;
    for (Py_ssize_t i = 0; PySet_GET_SIZE(watched_ids_) > 0 && i < PyList_GET_SIZE(tensors); ++i) {
      const Ref id(sure(PyLong_FromVoidPtr(PyList_GET_ITEM(tensors, i))));
      n_watched += PySet_Contains(watched_ids_, id.get()) == 1;
    }
    if (n_watched > PyList_GET_SIZE(pinned_)) {
      throw_changed("an argument is a tensor that it also finds elsewhere");
    }
    for (const Instance& one : instances_) {
      if (!one.is_unchanged()) throw_changed("the class or the __dict__ of an object changed");
    }
    if (watch_asks_always_ || first_change(watch_list_) >= 0) {
      Ref(sure(PyObject_CallNoArgs(ask_watch_)));
    }
    if (!have_autograd_fields(tensors, autograd_fields_)) {
      throw_changed("an argument's gradient or hooks came or went");
    }
  }

  // The plan's results, then the tensors that were drawn; null if the plan raised. Where somebody
  // wants to see the steps, or the plan needs more than a call of its `run`, Python runs it.
  Ref results_of(PyObject* found, PyObject* tensors, bool is_looked_at) const {
    PyObject* leaves = PyTuple_GET_ITEM(found, 0);
    PyObject* numbers = PyTuple_GET_ITEM(found, 1);
    PyObject* drawn_before = PyTuple_GET_ITEM(found, 3);
    const bool has_drawn = drawn_before != Py_None;
    const Ref given(sure(PyList_New(0)));
    const Ref drawn = has_drawn ? Ref::to(PyTuple_GET_ITEM(drawn_before, 0))
                                : Ref(sure(PyList_New(0)));
    const double start = seconds_now();
    const bool is_simple = !is_looked_at && !runs_otherwise_ &&
                           of_plan.is_checked.in(plan_) == Py_True;
    Ref kept;
    bool has_run = false;
    {
      std::optional<c10::InferenceMode> ordinary;
      if (c10::InferenceMode::is_enabled()) ordinary.emplace(false);
      const c10::impl::ForceDispatchKeyGuard guard(keys_included, keys_excluded);
      // drawn before the plan runs, in the order in which the call drew
      for (Py_ssize_t i = 0; !has_drawn && i < PyList_GET_SIZE(draws_); ++i) {
        PyObject* draw = PyList_GET_ITEM(draws_, i);
        Ref made(sure(PyObject_CallNoArgs(PyTuple_GET_ITEM(draw, 1))));
        sure(PyList_Append(drawn.get(), made.get()));
        const auto leaf = PyLong_AsSsize_t(PyTuple_GET_ITEM(draw, 0));
        if (leaf >= 0) sure(PyList_SetItem(leaves, leaf, made.release()));
      }
      // the plan empties the list, so that each leaf is freed at its last use
      if (keeps_leaves_) kept = Ref(sure(PyList_GetSlice(leaves, 0, PyList_GET_SIZE(leaves))));
      Ref done;
      if (is_simple) {
        done = Ref(PyObject_CallMethodObjArgs(plan_, name_run, leaves, numbers, given.get(),
                                              nullptr));
      } else {
        done = Ref(PyObject_CallFunctionObjArgs(run_otherwise_, leaves, numbers, given.get(),
                                                nullptr));
      }
      has_run = done.get() != nullptr;
    }
    if (!has_run) {
      fail(found, given.get(), drawn.get(), tensors, start);
      return Ref();
    }
    account(start, "");
    if (keeps_leaves_) sure(PyList_SetSlice(leaves, 0, PyList_GET_SIZE(leaves), kept.get()));
    TORCH_CHECK(PyList_GET_SIZE(given.get()) == 1, "a plan gives its results once");
    Ref results(sure(PySequence_List(PyList_GET_ITEM(given.get(), 0))));
    const Py_ssize_t n = PyList_GET_SIZE(results.get());
    sure(PyList_SetSlice(results.get(), n, n, drawn.get()));
    return results;
  }

  // Make an entry in the flush log.
  void account(double start, const char* raised) const {
    const Ref began(sure(PyFloat_FromDouble(start)));
    const Ref took(sure(PyFloat_FromDouble(seconds_now() - start)));
    const Ref error(sure(PyUnicode_FromString(raised)));
    Ref(sure(PyObject_CallFunctionObjArgs(account_, began.get(), took.get(), error.get(),
                                          nullptr)));
  }

  // Have Python keep what was computed before its error, which stays set; a second one takes its
  // place.
  void fail(PyObject* found, PyObject* given, PyObject* drawn, PyObject* tensors,
            double start) const {
    PyObject *type, *error, *place;
    PyErr_Fetch(&type, &error, &place);
    PyErr_NormalizeException(&type, &error, &place);
    if (place != nullptr) PyException_SetTraceback(error, place);
    const Ref kept(PyObject_CallFunctionObjArgs(fail_, error, found, given, drawn, tensors,
                                                nullptr));
    if (kept.get() != nullptr) {
      account(start, Py_TYPE(error)->tp_name);
      PyErr_Restore(type, error, place);
      return;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(place);
  }

  // Have Python put a tensor in the `i`-th place that the call leaves one in.
  void put(size_t i, const at::Tensor& made, PyObject* tensors) const {
    const Ref number(sure(PyLong_FromSize_t(i))), object = object_of(made);
    Ref(sure(PyObject_CallFunctionObjArgs(put_, number.get(), object.get(), tensors, nullptr)));
  }

  // Count the writes to tensors that the call wrote in place, for autograd and for
  // `dispatch.run.watch`.
  void note_writes(const std::vector<Ref>& written) const {
    const Ref all(sure(PyList_New(0)));
    for (size_t i = 0; i < written.size(); ++i) {
      for (Py_ssize_t n = 0; n < written_[i].n; ++n) {
        count_write(THPVariable_Unpack(written[i].get()));
      }
      sure(PyList_Append(all.get(), written[i].get()));
    }
    Ref(sure(PyObject_CallOneArg(note_writes_, all.get())));
  }

  // A lazy tensor on `value` with the metadata and the layout of `object`.
  static at::Tensor like(PyObject* object, PyObject* value) {
    return another(THPVariable_Unpack(object), value, layout_in(object));
  }

  // What the call returns. Lazy tensors on one result share a value, as aliases do.
  PyObject* given(PyObject* results, PyObject* leaves, PyObject* tensors, PyObject* open) const {
    const auto n = static_cast<Py_ssize_t>(given_.size());
    Ref all(sure(PyList_New(n)));
    std::vector<std::pair<Py_ssize_t, Ref>> values;
    for (Py_ssize_t i = 0; i < n; ++i) {
      const Given& one = given_[i];
      Ref made;
      switch (one.kind) {
        case Given::PLAIN:
          made = Ref::to(PyList_GET_ITEM(results, one.number));
          break;
        case Given::LAZY: {
          auto known = std::find_if(values.begin(), values.end(), [&one](const auto& pair) {
            return pair.first == one.number;
          });
          if (known == values.end()) {
            values.emplace_back(one.number, value_with(PyList_GET_ITEM(results, one.number)));
            known = values.end() - 1;
          }
          const at::Tensor& data = THPVariable_Unpack(PyList_GET_ITEM(results, one.number));
          at::Tensor tensor;
          if (one.object == Py_None) {
            tensor = another(data, known->second.get());
          } else {
            tensor = like(one.object, known->second.get());
            // a view begins where its base now does
            if (layout_in(one.object).get() == nullptr) {
              tensor.unsafeGetTensorImpl()->set_storage_offset(data.storage_offset());
            }
          }
          made = object_of(tensor);
          break;
        }
        case Given::PLACE:
          made = one.place.get(tensors, open);
          break;
        case Given::AGAIN:
          made = Ref::to(PyList_GET_ITEM(all.get(), one.number));
          break;
        case Given::ASK:
          made = Ref(sure(PyObject_CallOneArg(one.object, leaves)));
      }
      if (one.finish != Py_None) made = Ref(sure(PyObject_CallOneArg(one.finish, made.get())));
      PyList_SET_ITEM(all.get(), i, made.release());
    }
    // None: a single leaf; True: a flat list; else what puts the leaves together
    if (structure_ == Py_None) return Ref::to(PyList_GET_ITEM(all.get(), 0)).release();
    if (structure_ == Py_True) return all.release();
    return sure(PyObject_CallOneArg(structure_, all.get()));
  }

  Ref fields_;
  // For what these are see `captured_call.py`, which has them under the same names.
  PyObject* const pinned_ = field("pinned");
  PyObject* const watched_ids_ = field("watched_ids");
  PyObject* const watch_list_ = field("watch_list");
  PyObject* const ask_watch_ = field("ask_watch");
  PyObject* const autograd_fields_ = field("autograd_fields");
  PyObject* const open_fields_ = field("open_fields");
  PyObject* const watched_ = field("watched");
  PyObject* const words_ = field("words");
  PyObject* const leaf_words_ = field("leaf_words");
  PyObject* const scalars_ = field("scalars");
  PyObject* const ask_reads_ = field("ask_reads");
  PyObject* const draws_ = field("draws");
  PyObject* const plan_ = field("plan");
  PyObject* const run_otherwise_ = field("run_otherwise");
  PyObject* const fail_ = field("fail");
  PyObject* const account_ = field("account");
  PyObject* const put_ = field("put");
  PyObject* const note_writes_ = field("note_writes");
  PyObject* const share_ = field("share");
  PyObject* const structure_ = field("structure");
  PyObject* const unread_ = field("unread");
  const bool watch_asks_always_ = field("watch_asks_always") == Py_True;
  const bool keeps_leaves_ = field("keeps_leaves") == Py_True;
  const bool any_size_ = field("any_size") == Py_True;  // then `ask_reads_` looks at sizes
  const bool runs_otherwise_ = field("runs_otherwise") == Py_True;
  const std::vector<Place> open_ = all<Place>("open"), leaves_ = all<Place>("leaves");
  const std::vector<Instance> instances_ = all<Instance>("instances");
  const std::vector<Written> written_ = all<Written>("written");
  const std::vector<Target> targets_ = all<Target>("targets");  // the renewed ones first
  const size_t n_renewed_ = PyLong_AsSize_t(field("n_renewed"));
  const std::vector<Given> given_ = all<Given>("given");
};

struct CapturedObject {
  PyObject_HEAD CapturedCall* call;
};
PyTypeObject captured_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

const CapturedCall& captured(PyObject* self) {
  const auto* call = reinterpret_cast<CapturedObject*>(self)->call;
  TORCH_CHECK(call != nullptr, "the captured call was freed");
  return *call;
}

// CapturedCall(fields)
PyObject* new_captured(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* fields;
  if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &fields)) return nullptr;
  auto call = std::make_unique<CapturedCall>(fields);
  PyObject* self = sure(type->tp_alloc(type, 0));
  reinterpret_cast<CapturedObject*>(self)->call = call.release();
  return self;
  END_HANDLE_TH_ERRORS
}

int visit_captured(PyObject* self, visitproc visit, void* arg) {
  const auto* call = reinterpret_cast<CapturedObject*>(self)->call;
  if (call != nullptr) Py_VISIT(call->fields());
  return 0;
}

int clear_captured(PyObject* self) {
  delete std::exchange(reinterpret_cast<CapturedObject*>(self)->call, nullptr);
  return 0;
}

void delete_captured(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_captured(self);
  Py_TYPE(self)->tp_free(self);
}

// find(tensors): see `CapturedCall::find`.
PyObject* py_find(PyObject* self, PyObject* tensors) {
  HANDLE_TH_ERRORS
  return captured(self).find(tensors).release();
  END_HANDLE_TH_ERRORS
}

// run(found, tensors, is_looked_at): see `CapturedCall::run`. `is_looked_at`: somebody wants to see
// each step.
PyObject* py_run_captured(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(n == 3, "run(found, tensors, is_looked_at)");
  return captured(self).run(args[0], args[1], args[2] == Py_True);
  END_HANDLE_TH_ERRORS
}

// leave(results, open, tensors): see `CapturedCall::leave`.
PyObject* py_leave(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *results, *open, *tensors;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyList_Type, &results, &PyList_Type, &open, &PyList_Type,
                        &tensors)) {
    return nullptr;
  }
  captured(self).leave(results, open, tensors);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef captured_methods[] = {
    {"find", py_find, METH_O, nullptr},
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_run_captured)),
     METH_FASTCALL, nullptr},
    {"leave", py_leave, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hits
