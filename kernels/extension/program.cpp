// The extension module `lazy_tensor_program`: programs, which are lists of instructions on numbered
// slots. A plan is one; so is what a plan runs for a segment, op by op or as a kernel. `program.py`
// describes the instructions and the class.
//
// An instruction is over before Python looks for signals, and before the next one begins. So it is
// known after an exception which instructions have run. `failure` has that, and the values by then.

#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "pool.h"

namespace program {
namespace {

using c10::IValue;
using Stack = std::vector<IValue>;
using Slots = std::vector<int64_t>;

// Throw where Python's error is set already.
[[noreturn]] void raise() { throw python_error(); }

PyObject* sure(PyObject* object) {
  if (object == nullptr) raise();
  return object;
}

py::object owned(PyObject* object) { return py::reinterpret_steal<py::object>(sure(object)); }

py::object wrapped(const at::Tensor& tensor) { return owned(THPVariable_Wrap(tensor)); }

// `kernels.segment.Ref` and `ScalarRef`
PyTypeObject* ref_type = nullptr;
PyTypeObject* number_type = nullptr;

int64_t index_of(py::handle ref) { return ref.attr("index").cast<int64_t>(); }

// An argument of an op. A CONSTANT is converted once, when the program is made. OTHER holds numbers
// that are known at run time only, and is converted at every run.
struct Argument {
  enum { CONSTANT, TENSOR, TENSORS, MAYBE_TENSORS, OTHER } kind = CONSTANT;
  IValue constant;
  Slots slots;        // of tensors; -1 where there is none
  py::object object;  // of OTHER
};

// Whether an argument is of this type, or a tuple with one within: `ref_type` names slots,
// `number_type` run-time numbers.
bool has_any(PyTypeObject* type, py::handle object) {
  if (Py_TYPE(object.ptr()) == type) return true;
  if (!PyTuple_Check(object.ptr())) return false;
  for (py::handle item : py::reinterpret_borrow<py::tuple>(object)) {
    if (has_any(type, item)) return true;
  }
  return false;
}

// As torch's binding for Python converts an argument, to the type that the schema has there.
IValue converted(const c10::FunctionSchema& schema, size_t place, py::handle object) {
  // a number may stand where a tensor is wanted: `mul_(x, 0.5)`
  const torch::jit::ToIValueAllowNumbersAsTensors as_python_does(true);
  return torch::jit::argumentToIValue(schema, place, object);
}

Argument argument_of(const c10::FunctionSchema& schema, size_t place, py::handle object) {
  Argument made;
  if (Py_TYPE(object.ptr()) == ref_type) {
    made.kind = Argument::TENSOR;
    made.slots = {index_of(object)};
  } else if (has_any(ref_type, object)) {
    auto type = schema.arguments()[place].type();
    if (auto maybe = type->cast<c10::OptionalType>()) type = maybe->getElementType();
    const auto item_type = type->expect<c10::ListType>()->getElementType();
    const bool may_lack = item_type->kind() == c10::TypeKind::OptionalType;
    made.kind = may_lack ? Argument::MAYBE_TENSORS : Argument::TENSORS;
    for (py::handle item : py::reinterpret_borrow<py::tuple>(object)) {
      made.slots.push_back(item.is_none() ? -1 : index_of(item));
    }
  } else if (has_any(number_type, object)) {
    made.kind = Argument::OTHER;
    made.object = py::reinterpret_borrow<py::object>(object);
  } else {
    made.constant = converted(schema, place, object);
  }
  return made;
}

// The kinds of instructions; what a kernel gets as an argument.
enum class Kind { OP, SEGMENT, ALLOCATE, VIEW, KERNEL, CHECK };
enum class Takes { TENSOR, NUMBER, SIZE };

// One instruction. Below those that all kinds have are the fields of each kind.
struct Instruction {
  Kind kind = Kind::OP;
  Slots made;  // that it sets; -1 for a result that nobody wants
  Slots dead;  // that no later instruction reads
  bool lets_go = false;  // it releases the GIL: it takes long
  // OP
  std::optional<c10::OperatorHandle> op;
  std::vector<Argument> arguments;
  bool gives_list = false;
  std::vector<std::optional<Slots>> strides;  // that results must have, where given
  // SEGMENT; VIEW and CHECK of `inputs[0]`
  Slots inputs;
  Slots numbers;
  py::object fusion;  // the `Fusion` of a segment
  // ALLOCATE and VIEW
  Slots size, stride;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  // KERNEL
  void* kernel = nullptr;
  std::vector<std::pair<Takes, int64_t>> takes;
};

struct Program;

// The program whose run in this thread raised last.
struct Failure {
  const Program* program = nullptr;
  size_t at = 0;                   // the first instruction that is not over
  std::vector<at::Tensor> values;  // by slot
  int64_t inner = -1;              // in a segment that ran op by op, which of its calls raised
};
thread_local Failure failure;

constexpr size_t MOST_ARGUMENTS = 1024;  // as in torch_inductor.py

template <size_t>
using Pointer = void*;

// Call a function with as many pointers as there are numbers I.
template <size_t... I>
void call_with(void* kernel, void* const* arguments, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(Pointer<I>...)>(kernel)(arguments[I]...);
}

// Call a C function that takes `n` pointers, or integers as wide, with N or more. `arguments` has
// room for MOST_ARGUMENTS. On x86-64 and AArch64 it does no harm to pass more than a function
// takes: the caller removes arguments from the stack, and the function looks at its own alone.
template <size_t N = 8>
void call_kernel(void* kernel, size_t n, void* const* arguments) {
  if constexpr (N < MOST_ARGUMENTS) {
    if (n > N) return call_kernel<2 * N>(kernel, n, arguments);
  }
  call_with(kernel, arguments, std::make_index_sequence<N>());
}

// A run of a program: the values by slot, and how each kind of instruction runs on them.
struct Run {
  std::vector<at::Tensor> values;
  py::handle numbers;  // a list, which the caller keeps
  Stack stack;

  void call(const Instruction& at) {
    stack.clear();  // a call that raised may have left something
    for (size_t i = 0; i < at.arguments.size(); ++i) push(at, i);
    {
      std::optional<py::gil_scoped_release> released;
      if (at.lets_go) released.emplace();
      at.op->callBoxed(stack);
    }
    if (at.gives_list && !at.made.empty()) {
      const auto items = stack.back().toTensorVector();
      TORCH_CHECK(items.size() == at.made.size(), "as many results as were recorded");
      for (size_t i = 0; i < items.size(); ++i) keep(at, i, items[i]);
    } else {
      for (size_t i = 0; i < at.made.size(); ++i) {
        if (at.made[i] >= 0) keep(at, i, std::move(stack[i]).toTensor());
      }
    }
    stack.clear();  // else it would keep tensors alive after their last use
  }

  // Run a segment by its fusion's `program`, or by its `run` in Python.
  void run_segment(const Instruction& at);

  void allocate(const Instruction& at) {
    values[at.made[0]] = at::detail::empty_strided_cpu(at.size, at.stride, at.dtype);
  }

  void view(const Instruction& at) {
    const at::Tensor& base = values[at.inputs[0]];
    // without an op: to dispatch one takes longer than all of this
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(at.size, at.stride,
                                                      base.storage_offset() + at.offset);
    values[at.made[0]] = std::move(made);
  }

  void run_kernel(const Instruction& at) {
    // a kernel gets a number by its address
    union Number {
      double real;
      int64_t integer;
    };
    std::array<void*, MOST_ARGUMENTS> arguments;
    std::array<Number, MOST_ARGUMENTS> given;
    for (size_t i = 0; i < at.takes.size(); ++i) {
      const auto [what, which] = at.takes[i];
      if (what == Takes::TENSOR) {
        arguments[i] = values[which].mutable_data_ptr();
      } else if (what == Takes::SIZE) {
        arguments[i] = reinterpret_cast<void*>(which);
      } else {
        PyObject* object = PyList_GET_ITEM(numbers.ptr(), which);
        if (PyFloat_Check(object)) {
          given[i].real = PyFloat_AS_DOUBLE(object);
        } else {
          given[i].integer = PyLong_AsLongLong(object);
          if (given[i].integer == -1 && PyErr_Occurred()) raise();
        }
        arguments[i] = &given[i];
      }
    }
    std::optional<py::gil_scoped_release> released;
    if (at.lets_go) released.emplace();
    call_kernel(at.kernel, at.takes.size(), arguments.data());
  }

  void check(const Instruction& at) const {
    TORCH_CHECK_INDEX(!values[at.inputs[0]].item<bool>(),
                      "index out of range in a compiled segment");
  }

  py::object number(int64_t i) const {
    return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(numbers.ptr(), i));
  }

 private:
  void push(const Instruction& at, size_t place) {
    const Argument& given = at.arguments[place];
    switch (given.kind) {
      case Argument::CONSTANT:
        stack.push_back(given.constant);
        break;
      case Argument::TENSOR:
        stack.emplace_back(values[given.slots[0]]);
        break;
      case Argument::TENSORS: {
        c10::List<at::Tensor> items;
        items.reserve(given.slots.size());
        for (const int64_t slot : given.slots) items.push_back(values[slot]);
        stack.emplace_back(std::move(items));
        break;
      }
      case Argument::MAYBE_TENSORS: {
        c10::List<std::optional<at::Tensor>> items;
        items.reserve(given.slots.size());
        for (const int64_t slot : given.slots) {
          items.push_back(slot < 0 ? std::nullopt : std::optional<at::Tensor>(values[slot]));
        }
        stack.emplace_back(std::move(items));
        break;
      }
      case Argument::OTHER:
        stack.push_back(converted(at.op->schema(), place, with_numbers(given.object)));
    }
  }

  // An argument with the numbers of this run in it, tuples as lists.
  py::object with_numbers(py::handle object) const {
    if (Py_TYPE(object.ptr()) == number_type) return number(index_of(object));
    if (!PyTuple_Check(object.ptr())) return py::reinterpret_borrow<py::object>(object);
    py::list items;
    for (py::handle item : py::reinterpret_borrow<py::tuple>(object)) {
      items.append(with_numbers(item));
    }
    return items;
  }

  // Set the slot of the `i`-th result. A result of other strides than are asked for is copied.
  void keep(const Instruction& at, size_t i, at::Tensor made) {
    if (i < at.strides.size() && at.strides[i].has_value() && !has_strides(made, *at.strides[i])) {
      at::Tensor laid_out = at::empty_strided(made.sizes(), *at.strides[i], made.options());
      laid_out.copy_(made);
      made = std::move(laid_out);
    }
    values[at.made[i]] = std::move(made);
  }

  // Whether a tensor has these strides, in dims of more than one element: others don't matter.
  static bool has_strides(const at::Tensor& tensor, const Slots& strides) {
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.size(dim) > 1 && tensor.stride(dim) != strides[dim]) return false;
    }
    return true;
  }
};

struct Program {
  size_t n_slots = 0;
  Slots leaves, live;
  std::vector<Instruction> instructions;
  bool is_inner = false;  // it runs within an instruction of another, which no signal interrupts
  bool is_large = false;  // what it makes takes more than MIN_BYTES at its peak
  mutable int64_t runs_left = 0;  // before Python measures its fusion again; 0: it never does

  // Whether it is a segment op by op, as `compile_aten` makes it, by its first instruction.
  bool is_op_by_op() const {
    return instructions.empty() || instructions[0].kind == Kind::OP;
  }
};

struct ProgramObject {
  PyObject_HEAD Program* program;
};
PyTypeObject program_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Run one instruction; false if it raised, with Python's error set.
bool ran(const Instruction& at, Run& run) {
  HANDLE_TH_ERRORS
  switch (at.kind) {
    case Kind::OP:
      run.call(at);
      break;
    case Kind::SEGMENT:
      run.run_segment(at);
      break;
    case Kind::ALLOCATE:
      run.allocate(at);
      break;
    case Kind::VIEW:
      run.view(at);
      break;
    case Kind::KERNEL:
      run.run_kernel(at);
      break;
    case Kind::CHECK:
      run.check(at);
  }
  return true;
  END_HANDLE_TH_ERRORS_RET(false)
}

// Free the values that the instruction was the last to read.
void free_dead(const Instruction& at, Run& run) {
  for (const int64_t slot : at.dead) run.values[slot].reset();
}

// Run a program within the instruction `at` of another; false if it raised.
bool ran_inner(const Program& program, const Instruction& at, Run& outer) {
  Run run;
  run.values.resize(program.n_slots);
  for (size_t i = 0; i < at.inputs.size(); ++i) {
    run.values[program.leaves[i]] = outer.values[at.inputs[i]];
  }
  const py::list numbers(at.numbers.size());
  for (size_t i = 0; i < at.numbers.size(); ++i) numbers[i] = outer.number(at.numbers[i]);
  run.numbers = numbers;
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    if (!ran(program.instructions[i], run)) {
      // which call raised, for the note on the error
      if (program.is_op_by_op()) failure = {&program, i, {}, -1};
      return false;
    }
    free_dead(program.instructions[i], run);
  }
  for (size_t i = 0; i < at.made.size(); ++i) {
    outer.values[at.made[i]] = run.values[program.live[i]];
  }
  return true;
}

void Run::run_segment(const Instruction& at) {
  // asked each time, and held: a kernel may have come, and may come while this one runs
  const py::object native = at.fusion.attr("program");
  if (Py_TYPE(native.ptr()) == &program_type) {
    const Program& program = *reinterpret_cast<ProgramObject*>(native.ptr())->program;
    if (program.runs_left > 0 && --program.runs_left == 0) {
      at.fusion.attr("measure_again")();
    } else if (ran_inner(program, at, *this)) {
      return;
    } else if (program.is_op_by_op() || at.fusion.attr("writes").cast<bool>()) {
      raise();
    } else {
      // The error of a kernel is not eager's: `fusion.run` runs the segment again, op by op at
      // last. Not if the kernel may have written already.
      PyErr_Clear();
    }
  }
  py::tuple tensors(at.inputs.size()), scalars(at.numbers.size());
  for (size_t i = 0; i < at.inputs.size(); ++i) tensors[i] = wrapped(values[at.inputs[i]]);
  for (size_t i = 0; i < at.numbers.size(); ++i) scalars[i] = number(at.numbers[i]);
  const py::object run = at.fusion.attr("run");
  PyObject* both[] = {tensors.ptr(), scalars.ptr()};
  const py::object results = owned(PyObject_Vectorcall(run.ptr(), both, 2, nullptr));
  const py::object items = owned(PySequence_Fast(results.ptr(), "a kernel gives a sequence"));
  TORCH_CHECK(static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())) == at.made.size(),
              "a kernel gives as many results as its segment has outputs");
  for (size_t i = 0; i < at.made.size(); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
    TORCH_CHECK(THPVariable_Check(item), "a kernel gives tensors");
    values[at.made[i]] = THPVariable_Unpack(item);
  }
  // of a kernel that failed within `fusion.run`, in whose place the ops have run
  if (failure.program != nullptr) failure = {};
}

// What each instruction runs within, and what looks at its results; either may be None. See
// `Program.run` in program.py.
struct Observer {
  py::object around, check;
};

// Run one instruction under an observer; false if the instruction or `check` raised. If the
// observer raised when the instruction was over, this is true, but Python's error is set.
bool ran_observed(const Instruction& at, size_t number, Run& run, const Observer& observer) {
  py::object range;
  if (!observer.around.is_none()) {
    const py::int_ n(number);
    range = py::reinterpret_steal<py::object>(PyObject_CallOneArg(observer.around.ptr(), n.ptr()));
    if (!range) return false;
    if (!py::reinterpret_steal<py::object>(PyObject_CallMethod(range.ptr(), "__enter__", nullptr)))
      return false;
  }
  const bool has_run = ran(at, run);
  if (range) {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    const auto left = py::reinterpret_steal<py::object>(
        PyObject_CallMethod(range.ptr(), "__exit__", "OOO", Py_None, Py_None, Py_None));
    if (!has_run) {
      PyErr_Clear();
      PyErr_Restore(type, value, trace);
      return false;
    }
    if (!left) return true;  // an interrupt came as the range ended: the instruction is over
  }
  if (!has_run) return false;
  if (observer.check.is_none() || at.kind != Kind::OP || at.made.empty()) return true;
  HANDLE_TH_ERRORS
  py::list results;
  for (const int64_t slot : at.made) {
    if (slot >= 0) results.append(wrapped(run.values[slot]));
  }
  const auto checked = py::reinterpret_steal<py::object>(
      PyObject_CallFunction(observer.check.ptr(), "nO", static_cast<Py_ssize_t>(number),
                            results.ptr()));
  if (!checked) return false;
  size_t i = 0;
  for (const int64_t slot : at.made) {
    if (slot >= 0) run.values[slot] = THPVariable_Unpack(PyList_GetItem(checked.ptr(), i++));
  }
  return true;
  END_HANDLE_TH_ERRORS_RET(false)
}

// Note in `failure` that the instruction `at` is the first that is not over.
void note_failure(const Program* program, size_t at, Run&& run) {
  // a segment that runs op by op has noted which of its calls raised
  const bool was_inner = failure.program != nullptr && failure.program->is_inner;
  const int64_t inner = was_inner ? static_cast<int64_t>(failure.at) : -1;
  failure = {program, at, std::move(run.values), inner};
}

// Run a program: its results as a tuple; null if an instruction raised, or a signal's handler did
// so between two.
PyObject* results_of(const Program& program, PyObject* leaves, PyObject* numbers,
                     const Observer* observer) {
  HANDLE_TH_ERRORS
  failure = {};
  if (!PyList_Check(leaves) || !PyList_Check(numbers) ||
      static_cast<size_t>(PyList_GET_SIZE(leaves)) != program.leaves.size()) {
    PyErr_SetString(PyExc_TypeError, "a program takes a list of its leaves and one of numbers");
    return nullptr;
  }
  const PooledRun pooled{program.is_large};
  Run run;
  run.values.resize(program.n_slots);
  run.numbers = numbers;
  for (size_t i = 0; i < program.leaves.size(); ++i) {
    run.values[program.leaves[i]] =
        THPVariable_Unpack(PyList_GET_ITEM(leaves, static_cast<Py_ssize_t>(i)));
  }
  // the caller's list must not keep a leaf alive after its last use
  if (!program.is_inner) {
    if (PyList_SetSlice(leaves, 0, PyList_GET_SIZE(leaves), nullptr) != 0) return nullptr;
  }
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& at = program.instructions[i];
    const bool has_run = observer == nullptr ? ran(at, run) : ran_observed(at, i, run, *observer);
    if (has_run) free_dead(at, run);
    // an observer may have set an error though the instruction is over
    if (!has_run || PyErr_Occurred() != nullptr ||
        (!program.is_inner && PyErr_CheckSignals() != 0)) {
      note_failure(&program, has_run ? i + 1 : i, std::move(run));
      return nullptr;
    }
  }
  py::tuple results(program.live.size());
  for (size_t i = 0; i < program.live.size(); ++i) {
    results[i] = wrapped(run.values[program.live[i]]);
  }
  return results.release().ptr();
  END_HANDLE_TH_ERRORS
}

const Program& of(PyObject* self) { return *reinterpret_cast<ProgramObject*>(self)->program; }

// run(leaves, numbers, given[, around, check]): append the tuple of results to `given`. They are
// not returned: an interrupt that comes as this call ends would lose them. With the other two the
// program runs under an observer.
PyObject* py_run(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if ((n != 3 && n != 5) || !PyList_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "run(leaves, numbers, given[, around, check])");
    return nullptr;
  }
  Observer observer;
  if (n == 5) {
    observer = {py::reinterpret_borrow<py::object>(args[3]),
                py::reinterpret_borrow<py::object>(args[4])};
  }
  const auto results = py::reinterpret_steal<py::object>(
      results_of(of(self), args[0], args[1], n == 5 ? &observer : nullptr));
  if (!results || PyList_Append(args[2], results.ptr()) != 0) return nullptr;
  Py_RETURN_NONE;
}

// program(tensors, numbers): the results, as a kernel gives them.
PyObject* py_call(PyObject* self, PyObject* args, PyObject*) {
  PyObject *tensors, *numbers;
  if (!PyArg_ParseTuple(args, "OO", &tensors, &numbers)) return nullptr;
  const auto inputs = py::reinterpret_steal<py::object>(PySequence_List(tensors));
  const auto listed = py::reinterpret_steal<py::object>(PySequence_List(numbers));
  if (!inputs || !listed) return nullptr;
  return results_of(of(self), inputs.ptr(), listed.ptr(), nullptr);
}

// step(i, values, numbers): run instruction `i` on `values`, a dict by slot, and add what it makes.
PyObject* py_step(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  Py_ssize_t i;
  PyObject *values, *numbers;
  if (!PyArg_ParseTuple(args, "nO!O!", &i, &PyDict_Type, &values, &PyList_Type, &numbers))
    return nullptr;
  const Instruction& at = of(self).instructions.at(static_cast<size_t>(i));
  Run run;
  run.values.resize(of(self).n_slots);
  run.numbers = numbers;
  PyObject *slot, *tensor;
  for (Py_ssize_t place = 0; PyDict_Next(values, &place, &slot, &tensor);) {
    run.values.at(PyLong_AsSize_t(slot)) = THPVariable_Unpack(tensor);
  }
  if (!ran(at, run)) return nullptr;
  for (const int64_t made : at.made) {
    if (made < 0) continue;
    const py::int_ key(made);
    if (PyDict_SetItem(values, key.ptr(), wrapped(run.values[made]).ptr()) != 0) return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// take_failure(): what `failure` has of this program, which is then forgotten: the first
// instruction that is not over, the values by slot, and which call of a segment raised, or -1. None
// if this thread's last run was another program's, or did not raise.
PyObject* py_take_failure(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  if (failure.program != &of(self)) Py_RETURN_NONE;
  const Failure taken = std::exchange(failure, {});
  py::dict values;
  for (size_t slot = 0; slot < taken.values.size(); ++slot) {
    if (taken.values[slot].defined()) values[py::int_(slot)] = wrapped(taken.values[slot]);
  }
  return py::make_tuple(taken.at, values, taken.inner).release().ptr();
  END_HANDLE_TH_ERRORS
}

// Slots from a sequence; -1 for None.
Slots slots_of(py::handle items) {
  Slots slots;
  for (py::handle item : py::reinterpret_borrow<py::sequence>(items)) {
    slots.push_back(item.is_none() ? -1 : item.cast<int64_t>());
  }
  return slots;
}

// From ("call", name, overload, args, kwargs, made, dead, lets_go, strides), as `program.call`
// makes it.
Instruction op_of(const py::tuple& given) {
  Instruction made;
  made.op = c10::Dispatcher::singleton().findSchemaOrThrow(given[1].cast<std::string>().c_str(),
                                                           given[2].cast<std::string>().c_str());
  const auto& schema = made.op->schema();
  const auto args = given[3].cast<py::tuple>();
  const auto kwargs = given[4].cast<py::dict>();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const py::str name(argument.name());
    if (i < args.size()) {
      made.arguments.push_back(argument_of(schema, i, args[i]));
    } else if (kwargs.contains(name)) {
      made.arguments.push_back(argument_of(schema, i, kwargs[name]));
    } else {
      TORCH_CHECK(argument.default_value().has_value(), "no value for ", argument.name());
      made.arguments.emplace_back();
      made.arguments.back().constant = *argument.default_value();
    }
  }
  made.made = slots_of(given[5]);
  made.dead = slots_of(given[6]);
  made.lets_go = given[7].cast<bool>();
  for (py::handle strides : given[8].cast<py::tuple>()) {
    made.strides.push_back(strides.is_none() ? std::nullopt
                                             : std::optional<Slots>(slots_of(strides)));
  }
  const auto& returns = schema.returns();
  made.gives_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
  TORCH_CHECK(made.made.empty() || made.gives_list || made.made.size() == returns.size(),
              "results that are tensors");
  return made;
}

// An instruction from a tuple that a function of program.py has made: its first item is the
// function's name, the others are in the order in which that returns them.
Instruction instruction_of(const py::tuple& given) {
  const auto name = given[0].cast<std::string>();
  if (name == "call") return op_of(given);
  Instruction made;
  if (name == "segment") {
    made.kind = Kind::SEGMENT;
    made.fusion = given[1];
    made.inputs = slots_of(given[2]);
    made.numbers = slots_of(given[3]);
    made.made = slots_of(given[4]);
    made.dead = slots_of(given[5]);
  } else if (name == "allocate") {
    made.kind = Kind::ALLOCATE;
    made.made = {given[1].cast<int64_t>()};
    made.size = slots_of(given[2]);
    made.stride = slots_of(given[3]);
    TORCH_CHECK(THPDtype_Check(py::object(given[4]).ptr()), "a dtype");
    made.dtype = reinterpret_cast<THPDtype*>(py::object(given[4]).ptr())->scalar_type;
  } else if (name == "view") {
    made.kind = Kind::VIEW;
    made.made = {given[1].cast<int64_t>()};
    made.inputs = {given[2].cast<int64_t>()};
    made.size = slots_of(given[3]);
    made.stride = slots_of(given[4]);
    made.offset = given[5].cast<int64_t>();
    made.dead = slots_of(given[6]);
  } else if (name == "kernel") {
    made.kind = Kind::KERNEL;
    made.kernel = reinterpret_cast<void*>(given[1].cast<uintptr_t>());
    for (py::handle item : given[2].cast<py::list>()) {
      const auto [what, which] = item.cast<std::pair<std::string, int64_t>>();
      const auto takes = what == "tensor"   ? Takes::TENSOR
                         : what == "number" ? Takes::NUMBER
                                            : Takes::SIZE;
      made.takes.emplace_back(takes, which);
    }
    made.dead = slots_of(given[3]);
    made.lets_go = given[4].cast<bool>();
    TORCH_CHECK(made.takes.size() <= MOST_ARGUMENTS, "a kernel of too many arguments");
  } else {
    TORCH_CHECK(name == "check", "no instruction: ", name);
    made.kind = Kind::CHECK;
    made.inputs = {given[1].cast<int64_t>()};
  }
  return made;
}

// Program(n_slots, leaves, live, instructions, is_inner, peak_bytes)
PyObject* new_program(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  Py_ssize_t n_slots, peak_bytes;
  PyObject *leaves, *live, *instructions;
  int is_inner;
  if (!PyArg_ParseTuple(args, "nOOOpn", &n_slots, &leaves, &live, &instructions, &is_inner,
                        &peak_bytes))
    return nullptr;
  auto made = std::make_unique<Program>();
  made->n_slots = static_cast<size_t>(n_slots);
  made->leaves = slots_of(leaves);
  made->live = slots_of(live);
  made->is_inner = is_inner != 0;
  made->is_large = peak_bytes > static_cast<Py_ssize_t>(MIN_BYTES);
  if (made->is_large) install_pool();
  for (py::handle item : py::reinterpret_borrow<py::list>(instructions)) {
    made->instructions.push_back(instruction_of(py::reinterpret_borrow<py::tuple>(item)));
  }
  PyObject* self = sure(type->tp_alloc(type, 0));
  reinterpret_cast<ProgramObject*>(self)->program = made.release();
  return self;
  END_HANDLE_TH_ERRORS
}

void delete_program(PyObject* self) {
  delete reinterpret_cast<ProgramObject*>(self)->program;
  Py_TYPE(self)->tp_free(self);
}

// measure_after(n): call `measure_again` of the segment's fusion at the n-th run from now on; never
// for 0.
PyObject* py_measure_after(PyObject* self, PyObject* n) {
  of(self).runs_left = PyLong_AsLongLong(n);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef program_methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_run)), METH_FASTCALL,
     nullptr},
    {"measure_after", py_measure_after, METH_O, nullptr},
    {"step", py_step, METH_VARARGS, nullptr},
    {"take_failure", py_take_failure, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// install(ref_type, number_type): name the classes `Ref` and `ScalarRef`.
PyObject* py_install(PyObject*, PyObject* args) {
  PyObject *ref, *number;
  if (!PyArg_ParseTuple(args, "OO", &ref, &number)) return nullptr;
  ref_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(ref));
  number_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(number));
  Py_RETURN_NONE;
}

// empty_like(tensor): another tensor with the same strides, not initialized, from the pool.
PyObject* py_empty_like(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  const at::Tensor& like = THPVariable_Unpack(tensor);
  const Pooled pooled;
  return THPVariable_Wrap(
      at::detail::empty_strided_cpu(like.sizes(), like.strides(), like.scalar_type()));
  END_HANDLE_TH_ERRORS
}

PyObject* py_memory_counts(PyObject*, PyObject*) {
  return py::cast(pool().counts()).release().ptr();
}

PyObject* py_clear_memory(PyObject*, PyObject*) {
  pool().clear();
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"install", py_install, METH_VARARGS, nullptr},
                         {"empty_like", py_empty_like, METH_O, nullptr},
                         {"memory_counts", py_memory_counts, METH_NOARGS, nullptr},
                         {"clear_memory", py_clear_memory, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "lazy_tensor_program", nullptr, -1, methods};

}  // namespace
}  // namespace program

PyMODINIT_FUNC PyInit_lazy_tensor_program() {
  using namespace program;
  program_type.tp_name = "lazy_tensor.kernels.extension.program.Program";
  program_type.tp_basicsize = sizeof(ProgramObject);
  program_type.tp_flags = Py_TPFLAGS_DEFAULT;
  program_type.tp_methods = program_methods;
  program_type.tp_new = new_program;
  program_type.tp_dealloc = delete_program;
  program_type.tp_call = py_call;
  if (PyType_Ready(&program_type) < 0) return nullptr;
  PyObject* made = PyModule_Create(&module);
  if (made != nullptr) {
    PyModule_AddObjectRef(made, "Program", reinterpret_cast<PyObject*>(&program_type));
  }
  return made;
}
