// Lets other Python threads run while nvFuser compiles: its bindings hold the interpreter's lock.
//
// nvFuser's Python module calls the library by way of a table of addresses, one for each function it
// imports. The entry of FusionExecutorCache::runFusionWithInputs, which compiles what it doesn't know
// yet, is set to `run` below, which gives up the lock in threads that asked for it and goes on to
// the library's function. Needs neither headers nor the layout of any class of nvFuser.

#include <Python.h>

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr const char* NAME =
    "_ZN7nvfuser19FusionExecutorCache19runFusionWithInputsENS_20KernelArgumentHolderESt8optionalINS_"
    "12PrimDataTypeEES2_IaE";

// KernelArgumentHolder runFusionWithInputs(this, KernelArgumentHolder, optional<PrimDataType>,
// optional<int8_t>) as the x86-64 ABI passes it: the result and the first argument by address, as
// they have destructors; the optionals in registers.
using Run = void* (*)(void* result, void* self, void* inputs, uint64_t index, uint64_t device);

Run original = nullptr;
std::atomic<uint64_t> n_released{0};
thread_local bool is_wanted = false;

struct Released {
  PyThreadState* state = PyEval_SaveThread();
  ~Released() { PyEval_RestoreThread(state); }
};

void* run(void* result, void* self, void* inputs, uint64_t index, uint64_t device) {
  if (!is_wanted) {
    return original(result, self, inputs, index, device);
  }
  n_released++;
  const Released released;
  return original(result, self, inputs, index, device);
}

struct Search {
  const char* path;
  void** entry;
};

// Finds the table's entry in the library loaded from `path`.
int look(dl_phdr_info* info, size_t, void* data) {
  auto* search = static_cast<Search*>(data);
  if (std::strcmp(info->dlpi_name, search->path) != 0) {
    return 0;
  }
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    }
  }
  const ElfW(Rela)* relocations = nullptr;
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  size_t n_bytes = 0;
  for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; dynamic++) {
    switch (dynamic->d_tag) {
      case DT_JMPREL:
        relocations = reinterpret_cast<const ElfW(Rela)*>(dynamic->d_un.d_ptr);
        break;
      case DT_SYMTAB:
        symbols = reinterpret_cast<const ElfW(Sym)*>(dynamic->d_un.d_ptr);
        break;
      case DT_STRTAB:
        names = reinterpret_cast<const char*>(dynamic->d_un.d_ptr);
        break;
      case DT_PLTRELSZ:
        n_bytes = dynamic->d_un.d_val;
        break;
      // With DT_FLAGS' BIND_NOW and full RELRO the table is read-only: nothing is changed then.
      case DT_FLAGS:
        if (dynamic->d_un.d_val & DF_BIND_NOW) {
          return 1;
        }
        break;
      default:
        break;
    }
  }
  if (relocations == nullptr || symbols == nullptr || names == nullptr) {
    return 1;
  }
  for (size_t i = 0; i < n_bytes / sizeof(ElfW(Rela)); i++) {
    const auto symbol = ELF64_R_SYM(relocations[i].r_info);
    if (std::strcmp(names + symbols[symbol].st_name, NAME) == 0) {
      search->entry = reinterpret_cast<void**>(info->dlpi_addr + relocations[i].r_offset);
    }
  }
  return 1;
}

}  // namespace

extern "C" {

// Takes the path of nvFuser's Python module; 0 if it doesn't call the function as is expected.
int lazy_tensor_gil_install(const char* path) {
#ifndef __x86_64__
  return 0;
#endif
  void* module = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (module == nullptr) {
    return 0;
  }
  void* found = dlsym(module, NAME);
  Search search{path, nullptr};
  dl_iterate_phdr(look, &search);
  if (found == nullptr || search.entry == nullptr) {
    return 0;
  }
  original = reinterpret_cast<Run>(found);
  *search.entry = reinterpret_cast<void*>(&run);
  return 1;
}

// Whether this thread's next calls give up the lock.
void lazy_tensor_gil_want(int wanted) { is_wanted = wanted != 0; }

uint64_t lazy_tensor_gil_count() { return n_released; }
}
