// A stand-in for CUDA's runtime, its driver and cuBLAS, for machines without a GPU.
//
// Preloaded, it is what torch and nvFuser find in place of libcudart, libcuda and libcublas: one
// device like an H200, whose memory is the host's. Copies and fills are done; kernels are not: a
// launch is written down (`stand_in_entry`) and leaves memory as it was. All else is real: torch's
// allocator, streams, events and graphs on the host's side, and all of nvFuser but the kernels' run:
// it segments, schedules, and compiles to the device's machine code.
//
// What CUDA forbids while a stream is captured is forbidden here. Signatures are checked by CUDA's
// headers, cuBLAS's are not (its header needs a CUDA compiler).

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// What the device was asked to do, in order.
enum Kind : char { KERNEL = 'k', COPY = 'c', FILL = 'f', SYNC = 's', LOAD = 'l' };

struct Entry {
  Kind kind;
  const char* name;  // lives as long as the process
  cudaStream_t stream = nullptr;
};

struct Graph {
  std::vector<Entry> entries;
  std::vector<std::function<void()>> work;
};

struct Event {
  std::chrono::steady_clock::time_point recorded;
  Graph* captured = nullptr;
};

struct Launch {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

std::mutex mutex_;
std::vector<Entry> entries;
std::unordered_map<const void*, const char*> kernel_names;  // of torch, by their host functions
std::map<uintptr_t, size_t> allocated;
std::unordered_map<cudaStream_t, Graph*> captures;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::vector<Launch> launches;  // between <<<...>>> and the launch itself
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

constexpr size_t MEMORY_BYTES = size_t(140) << 30;
constexpr size_t PAGE = 4096;
constexpr int CUDA_VERSION_ = 12080;

constexpr int MAX_THREADS = 1024, WARP = 32, N_PROCESSORS = 132, REGISTERS = 65536, N_BLOCKS = 32;
constexpr int SHARED_PER_BLOCK = 48 << 10, SHARED_PER_BLOCK_OPTIN = 227 << 10;
constexpr int SHARED_PER_PROCESSOR = 228 << 10, L2_BYTES = 60 << 20;
constexpr int THREADS_PER_PROCESSOR = 2048, CLOCK_KHZ = 1980000, MEMORY_KHZ = 3201000;
constexpr int MEMORY_BITS = 6144, MAX_GRID = 2147483647, MAX_GRID_YZ = 65535;

int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return MAX_THREADS;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return MAX_GRID;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return MAX_GRID_YZ;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return SHARED_PER_BLOCK;
    case cudaDevAttrTotalConstantMemory:
      return 65536;
    case cudaDevAttrWarpSize:
      return WARP;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return REGISTERS;
    case cudaDevAttrClockRate:
      return CLOCK_KHZ;
    case cudaDevAttrTextureAlignment:
      return 512;
    case cudaDevAttrMultiProcessorCount:
      return N_PROCESSORS;
    case cudaDevAttrMemoryClockRate:
      return MEMORY_KHZ;
    case cudaDevAttrGlobalMemoryBusWidth:
      return MEMORY_BITS;
    case cudaDevAttrL2CacheSize:
      return L2_BYTES;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return THREADS_PER_PROCESSOR;
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return SHARED_PER_PROCESSOR;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return SHARED_PER_BLOCK_OPTIN;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return N_BLOCKS;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return 1024;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrClusterLaunch:
      return 1;
    default:
      return 0;
  }
}

cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

// Done now, or by the graph that `stream` is captured into.
cudaError_t enqueue(cudaStream_t stream, Entry entry, std::function<void()> work = nullptr) {
  entry.stream = stream;
  std::lock_guard<std::mutex> guard(mutex_);
  const auto capture = captures.find(stream);
  if (capture != captures.end()) {
    capture->second->entries.push_back(entry);
    if (work) {
      capture->second->work.push_back(std::move(work));
    }
    return cudaSuccess;
  }
  entries.push_back(entry);
  if (work) {
    work();
  }
  return cudaSuccess;
}

// What waits for the device is illegal while any stream is captured, unless the thread is relaxed.
cudaError_t wait_for_device(const char* name) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!captures.empty() && capture_mode != cudaStreamCaptureModeRelaxed) {
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  entries.push_back({SYNC, name});
  return cudaSuccess;
}

cudaError_t allocate(void** pointer, size_t n_bytes) {
  n_bytes = std::max((n_bytes + PAGE - 1) / PAGE * PAGE, PAGE);
  // never touched until it is used: the device has more memory than the host
  void* made = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) {
    return failed(cudaErrorMemoryAllocation);
  }
  std::lock_guard<std::mutex> guard(mutex_);
  allocated[reinterpret_cast<uintptr_t>(made)] = n_bytes;
  *pointer = made;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = allocated.find(reinterpret_cast<uintptr_t>(pointer));
  if (found != allocated.end()) {
    munmap(pointer, found->second);
    allocated.erase(found);
  }
  return cudaSuccess;
}

bool is_allocated(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> guard(mutex_);
  auto after = allocated.upper_bound(address);
  return after != allocated.begin() && (--after, address < after->first + after->second);
}

// An opaque handle.
template <class Handle>
int make(Handle* handle) {
  *handle = static_cast<Handle>(calloc(1, 64));
  return 0;
}

}  // namespace

extern "C" {

// ---- what tests read

size_t stand_in_count() {
  std::lock_guard<std::mutex> guard(mutex_);
  return entries.size();
}

const char* stand_in_entry(size_t i, char* kind, uintptr_t* stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  *kind = entries[i].kind;
  *stream = reinterpret_cast<uintptr_t>(entries[i].stream);
  return entries[i].name;
}

// ---- kernels

void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  kernel_names[host] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  launches.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Launch launch = launches.back();
  launches.pop_back();
  *grid = launch.grid;
  *block = launch.block;
  *shared = launch.shared;
  *static_cast<cudaStream_t*>(stream) = launch.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return enqueue(stream, {KERNEL, kernel_names[function]});
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return enqueue(config->stream, {KERNEL, kernel_names[function]});
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = MAX_THREADS;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes = SHARED_PER_BLOCK_OPTIN;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int threads,
                                                                   size_t, unsigned) {
  *n = THREADS_PER_PROCESSOR / std::max(threads, 1);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char symbols[1 << 16];
  *address = symbols;
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

// ---- the device

cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* device, int) {
  *device = {};
  std::snprintf(device->name, sizeof device->name, "a stand-in for an H200");
  device->totalGlobalMem = MEMORY_BYTES;
  device->sharedMemPerBlock = SHARED_PER_BLOCK;
  device->sharedMemPerBlockOptin = SHARED_PER_BLOCK_OPTIN;
  device->sharedMemPerMultiprocessor = SHARED_PER_PROCESSOR;
  device->reservedSharedMemPerBlock = 1024;
  device->regsPerBlock = device->regsPerMultiprocessor = REGISTERS;
  device->warpSize = WARP;
  device->maxThreadsPerBlock = device->maxThreadsDim[0] = device->maxThreadsDim[1] = MAX_THREADS;
  device->maxThreadsDim[2] = 64;
  device->maxGridSize[0] = MAX_GRID;
  device->maxGridSize[1] = device->maxGridSize[2] = MAX_GRID_YZ;
  device->maxThreadsPerMultiProcessor = THREADS_PER_PROCESSOR;
  device->maxBlocksPerMultiProcessor = N_BLOCKS;
  device->major = 9;
  device->multiProcessorCount = N_PROCESSORS;
  device->clockRate = CLOCK_KHZ;
  device->memoryClockRate = MEMORY_KHZ;
  device->memoryBusWidth = MEMORY_BITS;
  device->l2CacheSize = L2_BYTES;
  device->totalConstMem = 65536;
  device->textureAlignment = 512;
  device->concurrentKernels = device->unifiedAddressing = device->cooperativeLaunch = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int) {
  std::snprintf(text, n, "0000:00:00.0");
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return wait_for_device("device"); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION_;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDA_VERSION_;
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "cudaErrorOfTheStandIn";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    default:
      return "the stand-in for CUDA can't do that";
  }
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- memory

cudaError_t cudaMalloc(void** pointer, size_t n) { return allocate(pointer, n); }
cudaError_t cudaHostAlloc(void** pointer, size_t n, unsigned) { return allocate(pointer, n); }
cudaError_t cudaFree(void* pointer) { return release(pointer); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  size_t n_bytes = 0;
  std::lock_guard<std::mutex> guard(mutex_);
  for (const auto& block : allocated) {
    n_bytes += block.second;
  }
  *total = MEMORY_BYTES;
  *free = MEMORY_BYTES - std::min(n_bytes, MEMORY_BYTES);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  if (is_allocated(pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind,
                            cudaStream_t stream) {
  return enqueue(stream, {COPY, "copy"}, [=] { std::memmove(to, from, n); });
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
  const cudaError_t error = wait_for_device("copy");
  return error != cudaSuccess ? error : cudaMemcpyAsync(to, from, n, kind, nullptr);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t stream) {
  return enqueue(stream, {FILL, "fill"}, [=] { std::memset(to, value, n); });
}

cudaError_t cudaMemset(void* to, int value, size_t n) {
  return cudaMemsetAsync(to, value, n, nullptr);
}

// ---- streams, events, graphs

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return static_cast<cudaError_t>(make(reinterpret_cast<void**>(stream)));
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  free(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait_for_device("stream"); }

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto* own = reinterpret_cast<Event*>(event);
  own->recorded = std::chrono::steady_clock::now();
  std::lock_guard<std::mutex> guard(mutex_);
  const auto capture = captures.find(stream);
  own->captured = capture == captures.end() ? nullptr : capture->second;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const bool captured = reinterpret_cast<Event*>(event)->captured != nullptr;
  return captured ? failed(cudaErrorCapturedEvent) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait_for_device("event"); }

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  const auto passed =
      reinterpret_cast<Event*>(end)->recorded - reinterpret_cast<Event*>(start)->recorded;
  *ms = std::chrono::duration<float, std::milli>(passed).count();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Graph* captured = reinterpret_cast<Event*>(event)->captured;
  std::lock_guard<std::mutex> guard(mutex_);
  if (captured != nullptr) {
    captures[stream] = captured;  // it is captured from here on, too
  }
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard<std::mutex> guard(mutex_);
  captures[stream] = new Graph;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard<std::mutex> guard(mutex_);
  Graph* captured = captures[stream];
  for (auto it = captures.begin(); it != captures.end();) {
    it = it->second == captured ? captures.erase(it) : std::next(it);
  }
  *graph = reinterpret_cast<cudaGraph_t>(captured);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  std::lock_guard<std::mutex> guard(mutex_);
  *status = captures.count(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t** nodes, size_t* n_nodes) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto capture = captures.find(stream);
  const bool is_active = capture != captures.end();
  *status = is_active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  Graph* captured = is_active ? capture->second : nullptr;
  if (id != nullptr) {
    *id = reinterpret_cast<unsigned long long>(captured);
  }
  if (graph != nullptr) {
    *graph = reinterpret_cast<cudaGraph_t>(captured);
  }
  if (nodes != nullptr) {
    *nodes = nullptr;
  }
  if (n_nodes != nullptr) {
    *n_nodes = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) {
  *n = reinterpret_cast<Graph*>(graph)->entries.size();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  auto* own = reinterpret_cast<Graph*>(graph);
  std::lock_guard<std::mutex> guard(mutex_);
  entries.insert(entries.end(), own->entries.begin(), own->entries.end());
  for (const auto& work : own->work) {
    work();
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

// ---- the driver: nvFuser and Triton launch their own kernels by it

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION_;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int i) {
  *device = i;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* n) {
  *n = 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* text, int n, CUdevice) {
  std::snprintf(text, n, "a stand-in for an H200");
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = attribute(which);  // the driver's numbers are the runtime's
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, 0); }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 8 << 20;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR_OF_THE_STAND_IN";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "the stand-in for CUDA can't do that";
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void*) {
  enqueue(nullptr, {LOAD, "module"});
  return static_cast<CUresult>(make(reinterpret_cast<void**>(module)));
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}

CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }

CUresult cuModuleUnload(CUmodule module) {
  free(module);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(strdup(name));
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK             ? MAX_THREADS
           : which == CU_FUNC_ATTRIBUTE_NUM_REGS                        ? 32
           : which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? SHARED_PER_BLOCK
                                                                        : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, CUstream stream, void**, void**) {
  enqueue(stream, {KERNEL, reinterpret_cast<const char*>(function)});
  return CUDA_SUCCESS;
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, unsigned, unsigned, CUstream stream, void**) {
  enqueue(stream, {KERNEL, reinterpret_cast<const char*>(function)});
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  enqueue(config->hStream, {KERNEL, reinterpret_cast<const char*>(function)});
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int threads, size_t) {
  *n = THREADS_PER_PROCESSOR / std::max(threads, 1);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* n_bytes, CUfunction, int, int) {
  *n_bytes = SHARED_PER_BLOCK_OPTIN;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 1;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

CUresult stand_in_absent() { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState*) { return stand_in_absent(); }
CUresult cuLinkComplete(CUlinkState, void**, size_t*) { return stand_in_absent(); }
CUresult cuLinkAddData_v2(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned,
                          CUjit_option*, void**) {
  return stand_in_absent();
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute which, CUdeviceptr pointer) {
  if (which != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    return stand_in_absent();
  }
  *static_cast<CUdeviceptr*>(data) = pointer;
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
#define ENTRY(f) {#f, reinterpret_cast<void*>(&f)}
  static const std::unordered_map<std::string, void*> functions{
      ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName), ENTRY(cuDeviceGetAttribute),
      ENTRY(cuDevicePrimaryCtxGetState), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString),
      ENTRY(cuModuleLoadData), ENTRY(cuModuleLoadDataEx), ENTRY(cuModuleUnload),
      ENTRY(cuModuleGetFunction), ENTRY(cuFuncGetAttribute), ENTRY(cuFuncSetAttribute),
      ENTRY(cuLaunchKernel), ENTRY(cuLaunchCooperativeKernel), ENTRY(cuLaunchKernelEx),
      ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor), ENTRY(cuOccupancyMaxActiveClusters),
      ENTRY(cuOccupancyAvailableDynamicSMemPerBlock), ENTRY(cuTensorMapEncodeTiled)};
#undef ENTRY
  const auto found = functions.find(name);
  *function = found == functions.end() ? reinterpret_cast<void*>(&stand_in_absent) : found->second;
  if (result != nullptr) {
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}

// ---- cuBLAS: products are kernels, the rest keeps its books

struct Blas {
  cudaStream_t stream;
};

int cublasCreate_v2(Blas** handle) { return make(handle); }
int cublasLtMatmulDescCreate(void** made, int, int) { return make(made); }
int cublasLtMatmulPreferenceCreate(void** made) { return make(made); }
int cublasLtMatrixLayoutCreate(void** made, int, uint64_t, uint64_t, int64_t) { return make(made); }

int cublasSetStream_v2(Blas* handle, cudaStream_t stream) {
  handle->stream = stream;
  return 0;
}

#define FREES(f)       \
  int f(void* handle) { \
    free(handle);       \
    return 0;           \
  }
FREES(cublasDestroy_v2)
FREES(cublasLtMatmulDescDestroy)
FREES(cublasLtMatmulPreferenceDestroy)
FREES(cublasLtMatrixLayoutDestroy)

int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0; }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* found,
                                   int* n) {
  std::memset(found, 0, 96);  // one cublasLtMatmulHeuristicResult_t
  *n = 1;
  return 0;
}

#define IGNORED(f) \
  int f() { return 0; }
IGNORED(cublasSetMathMode)
IGNORED(cublasSetPointerMode_v2)
IGNORED(cublasSetWorkspace_v2)
IGNORED(cublasLtMatmulDescSetAttribute)
IGNORED(cublasLtMatmulPreferenceSetAttribute)
IGNORED(cublasLtMatrixLayoutSetAttribute)

#define PRODUCT(f) \
  int f(Blas* handle) { return enqueue(handle->stream, {KERNEL, #f}); }
#define OF_EACH_TYPE(f)      \
  PRODUCT(cublasS##f)        \
  PRODUCT(cublasD##f)        \
  PRODUCT(cublasC##f)        \
  PRODUCT(cublasZ##f)
OF_EACH_TYPE(gemm_v2)
OF_EACH_TYPE(gemmStridedBatched)
OF_EACH_TYPE(gemv_v2)
OF_EACH_TYPE(trsm_v2)
OF_EACH_TYPE(trsmBatched)
OF_EACH_TYPE(gelsBatched)
OF_EACH_TYPE(geqrfBatched)
OF_EACH_TYPE(getrfBatched)
OF_EACH_TYPE(getrsBatched)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasCdotc_v2)
PRODUCT(cublasCdotu_v2)
PRODUCT(cublasZdotc_v2)
PRODUCT(cublasZdotu_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasLtMatmul)
}
