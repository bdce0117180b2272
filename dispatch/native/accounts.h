// What a known flush, and a region whose calls were all hits, add to the numbers of `Policy` and
// `Stats`. Those classes say what each number is for. These are the simple cases of
// `flush._note_flush` and `sync_points.at_read`: where anything has to be decided, Python does it.

#pragma once

#include <chrono>

#include "past.h"

namespace hits {

// `STATS`, a `FlushRecord` that has nothing but defaults, and `add_tier` of plan_cache.py.
PyObject *stats, *blank_record, *add_tier;
PyObject *recorded, *unknown;  // outcomes of regions
// Constants of `sites` and `stats`.
int64_t reads_in_round;
double round_s, says_so_after_s;
std::vector<Member> slots_of_record;

double seconds_now() {  // as `time.perf_counter`
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Stands for the ops of a region that were flushed before its end, as in `sync_points.at_sync_point`.
constexpr int64_t FLUSHED_BEFORE = 64;

// Numbers in slots. Python may have put an int where a float belongs: `PyFloat_AsDouble` takes both.
double real(const Member& at, PyObject* owner) { return PyFloat_AsDouble(at.in(owner)); }
int64_t whole(const Member& at, PyObject* owner) { return PyLong_AsLongLong(at.in(owner)); }
void put(const Member& at, PyObject* owner, double number) {
  at.set(owner, Ref(sure(PyFloat_FromDouble(number))).get());
}
void put(const Member& at, PyObject* owner, int64_t number) {
  at.set(owner, Ref(sure(PyLong_FromLongLong(number))).get());
}
void add(const Member& at, PyObject* owner, double number) {
  put(at, owner, real(at, owner) + number);
}
void add(const Member& at, PyObject* owner, int64_t number) {
  put(at, owner, whole(at, owner) + number);
}

// Add to what a dict has for a key.
void add_to(PyObject* dict, PyObject* key, const Ref& number) {
  PyObject* before = PyDict_GetItemWithError(dict, key);
  if (before == nullptr && PyErr_Occurred()) throw python_error();
  const Ref sum(before == nullptr ? Py_NewRef(number.get())
                                  : sure(PyNumber_Add(before, number.get())));
  sure(PyDict_SetItem(dict, key, sum.get()));
}

// A record that has nothing but defaults yet.
Ref new_record() {
  PyTypeObject* type = Py_TYPE(blank_record);
  Ref record(sure(type->tp_alloc(type, 0)));
  for (const Member& slot : slots_of_record) slot.set(record.get(), slot.in(blank_record));
  return record;
}

// A flush that is done. Its trace stood at `state`. By `may_choose` the policy may decide by times
// what is recorded.
struct Flush {
  PyObject *trace, *state, *plan, *thread, *cause, *where;
  double began_s;
  bool ends_region, may_choose;
};

// Account for it, as `flush._note_flush` does.
void note_flush(const Flush& flush) {
  const auto& [trace, state, plan, thread, cause, where, began_s, ends_region, may_choose] = flush;
  PyObject* policy = of_trace.policy.in(trace);
  const double seconds = seconds_now() - began_s;
  const Ref took(sure(PyFloat_FromDouble(seconds))), n_ops = Ref::to(of_state.n_ops.in(state));
  if (of_state.remembered.in(state) != of_trace._n_finals.in(trace)) {
    Ref(sure(PyObject_CallMethodOneArg(trace, name_remember, state)));
  }

  // as `Policy.add_flush`
  double gap_s = real(of_policy._gap_s, policy);
  if (ends_region) {
    add(of_policy._began_s, policy, seconds);
    add_to(of_stats.regions_s.in(stats), of_policy._outcome.in(policy), took);
  } else {
    gap_s = began_s - std::max(real(of_policy._began_s, policy), real(of_policy._flushed_s, policy));
    of_policy._is_parted.set(policy, Py_True);
  }
  put(of_policy.grown_s, policy, 0.0);
  add(of_policy._ran_s, policy, seconds);
  add(of_policy._n_flushes, policy, int64_t{1});
  add(of_policy._n_flushed, policy, whole(of_state.n_ops, state));
  put(of_policy._flushed_s, policy, began_s + seconds);

  add(of_plan.spent_s, plan, seconds);
  if (real(of_plan.spent_s, plan) >= real(of_plan.tier_from_s, plan)) {
    Ref(sure(PyObject_CallFunctionObjArgs(add_tier, plan, state, nullptr)));
  }
  const Ref told(sure(PyObject_CallMethodNoArgs(plan, name_told)));
  if (may_choose) Ref(sure(PyObject_CallMethodOneArg(policy, name_note_kernels, plan)));

  const Ref record = new_record();
  PyObject* at = record.get();
  of_record.thread.set(at, thread);
  of_record.cause.set(at, cause);
  of_record.where.set(at, where);
  of_record.n_ops.set(at, n_ops.get());
  put(of_record.began_s, at, began_s);
  of_record.seconds.set(at, took.get());
  put(of_record.gap_s, at, gap_s);
  of_record.state.set(at, state);
  of_record.steps.set(at, of_plan.steps.in(plan));
  of_record.peak_bytes.set(at, of_plan.peak_bytes.in(plan));
  of_record.tier.set(at, of_plan.tier_says.in(plan));
  of_record.statuses.set(at, PyTuple_GET_ITEM(told.get(), 0));
  of_record.reasons.set(at, PyTuple_GET_ITEM(told.get(), 1));
  append(of_stats.log.in(stats), at);

  // as `flush._account`
  const Ref one(sure(PyLong_FromLong(1)));
  const Ref n_segments(sure(PyLong_FromSsize_t(PyTuple_GET_SIZE(PyTuple_GET_ITEM(told.get(), 0)))));
  PyObject* counts = of_stats.counts.in(stats);
  add_to(counts, name_plans_reused, one);
  add_to(counts, name_flushes, one);
  add_to(counts, name_ops, n_ops);
  add_to(counts, name_segments, n_segments);
  add_to(of_stats.causes.in(stats), cause, one);
  add(of_stats.flush_s, stats, seconds);
  const Ref began(sure(PyFloat_FromDouble(began_s)));
  Ref(sure(PyObject_CallMethodObjArgs(stats, name_add_work, began.get(), took.get(), nullptr)));
}

// end_region_of_hits(trace, is_read): end a region, as `sync_points.at_sync_point` does, and
// `sync_points.at_read` where a value is read. False, with nothing changed, leaves it to Python: if a
// call of the region was no hit, if a round ends with the read, or if the trace isn't recording.
PyObject* py_end_region_of_hits(PyObject*, PyObject* const* args, Py_ssize_t n_args) {
  HANDLE_TH_ERRORS
  TORCH_INTERNAL_ASSERT(n_args == 2);
  PyObject* trace = args[0];
  const bool is_read = args[1] == Py_True;
  PyObject* policy = of_trace.policy.in(trace);
  PyObject *state = of_trace.state.in(trace), *unnoted = of_trace.unnoted_hits.in(trace);
  PyObject* seconds_of = of_stats.regions_s.in(stats);
  const auto* cold = static_cast<int64_t*>(PyLong_AsVoidPtr(of_policy.address.in(policy)));
  Past* past = reinterpret_cast<PastObject*>(of_policy.past.in(policy))->past;
  const double now_s = seconds_now(), began_s = real(of_policy._began_s, policy);
  const int64_t n_reads = whole(of_policy._n_reads, policy) + 1;
  const bool ends_round =
      is_read &&
      (n_reads >= reads_in_round || now_s - real(of_policy._round_began_s, policy) >= round_s);
  const double unknown_s = PyFloat_AsDouble(sure(PyDict_GetItem(seconds_of, unknown)));
  if (*cold != 0 || (past != nullptr && past->has_begun()) || ends_round ||
      of_policy.is_bypassed.in(policy) == Py_True || unknown_s >= says_so_after_s) {
    Py_RETURN_FALSE;
  }
  const bool has_flushed = PyObject_Size(unnoted) > 0;
  int64_t n_recorded = whole(of_state.n_ops, state) - whole(of_state.n_ops, of_trace.begun.in(trace));
  if (has_flushed) n_recorded += FLUSHED_BEFORE;
  if (n_recorded > 0) {
    const Ref one(sure(PyLong_FromLong(1))), seconds(sure(PyFloat_FromDouble(now_s - began_s)));
    add_to(of_stats.regions.in(stats), recorded, one);
    add_to(seconds_of, recorded, seconds);
    of_policy._outcome.set(policy, recorded);
    add(of_policy._n_recorded, policy, n_recorded);
    add(of_policy._n_known, policy, int64_t{1});
  }
  put(of_policy._gap_s, policy, now_s - std::max(began_s, real(of_policy._flushed_s, policy)));
  put(of_policy._began_s, policy, now_s);
  for (const Member* none : {&of_policy.n_turns, &of_policy.n_turns_noted}) {
    put(*none, policy, int64_t{0});
  }
  if (is_read) {
    put(of_policy._n_reads, policy, n_reads);
    of_policy.has_read.set(policy, Py_True);
    of_policy._is_parted.set(policy, Py_True);
  }
  if (past != nullptr) past->at_sync_point();
  of_trace.noted.set(trace, state);
  of_trace.begun.set(trace, state);
  if (has_flushed) Ref(sure(PyObject_CallMethodNoArgs(unnoted, name_clear)));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

}  // namespace hits
