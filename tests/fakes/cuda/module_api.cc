// libcuda: modules, libraries and kernels. A kernel and its function are one thing here, and so are a library and its
// module: there is one context a device.
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "driver.h"
#include "module.h"

using namespace fake;
using namespace fake::cuda;

#define MODULE(name, handle)                 \
  auto* name = static_cast<Module*>(handle); \
  if (!known_module(name)) return kInvalidHandle
#define FUNCTION(name, handle)                 \
  auto* name = static_cast<Function*>(handle); \
  if (!known_function(name)) return kInvalidHandle

namespace {

int load(void** out, const void* image) {
  Device* device = nullptr;
  if (current_device(&device) == kOk) {  // a library needs none
    if (Error error = may_synchronize(*device)) return error;
  }
  Module* module = nullptr;
  Error error = load_module(image, &module);
  *out = module;
  return error;
}

int find(void** out, void* module_handle, const char* name) {
  MODULE(module, module_handle);
  Function* function = nullptr;
  Error error = get_function(module, name, &function);
  *out = function;
  return error;
}

// By the numbers of CUfunction_attribute.
int function_attribute(int* value, int which) {
  if (which < 0 || which > 15) return kInvalidValue;
  int arch = std::atoi(settings().arch.c_str() + 3);
  *value = which == 0 ? 1024 : which == 4 ? 32 : which == 5 || which == 6 ? arch : which == 8 ? 49152 : 0;
  return kOk;
}

int parameter(const Function& function, std::size_t index, std::size_t* offset, std::size_t* nbytes) {
  if (index >= function.kernel->parameters) return kInvalidValue;
  std::size_t at = 0;
  for (std::size_t i = 0;; ++i) {
    std::size_t unit = function.kernel->alignments[i];
    at = (at + unit - 1) / unit * unit;
    if (i == index) break;
    at += function.kernel->sizes[i];
  }
  *offset = at;
  if (nbytes) *nbytes = function.kernel->sizes[index];
  return kOk;
}

}  // namespace

FAKE_API cuModuleLoadData(void** out, const void* image) {
  BEGIN();
  DEVICE(device);
  return device ? load(out, image) : kInvalidContext;
}

FAKE_API cuModuleLoadDataEx(void** out, const void* image, unsigned, int*, void**) {
  BEGIN();
  DEVICE(device);
  return device ? load(out, image) : kInvalidContext;
}

FAKE_API cuModuleLoad(void** out, const char* path) {
  BEGIN();
  DEVICE(device);
  std::ifstream file(path, std::ios::binary);
  if (!device || !file) return 301;  // FILE_NOT_FOUND
  std::string image{std::istreambuf_iterator<char>(file), {}};
  return load(out, image.data());
}

FAKE_API cuModuleUnload(void* handle) {
  BEGIN();
  MODULE(module, handle);
  return unload_module(module);
}

FAKE_API cuModuleGetFunction(void** out, void* handle, const char* name) {
  BEGIN();
  return find(out, handle, name);
}

FAKE_API cuModuleGetGlobal_v2(CUdeviceptr* address, std::size_t* nbytes, void* handle, const char* name) {
  BEGIN();
  MODULE(module, handle);
  std::uintptr_t at = 0;
  std::size_t size = 0;
  if (Error error = get_global(module, name, &at, &size)) return error;
  if (address) *address = at;
  if (nbytes) *nbytes = size;
  return kOk;
}

FAKE_API cuModuleGetLoadingMode(int* mode) {
  BEGIN();
  *mode = 1;  // eager
  return kOk;
}

FAKE_API cuLibraryLoadData(void** out, const void* image, int*, void**, unsigned, int*, void**, unsigned) {
  BEGIN();
  return load(out, image);
}

FAKE_API cuLibraryUnload(void* handle) {
  BEGIN();
  MODULE(module, handle);
  return unload_module(module);
}

FAKE_API cuLibraryGetKernel(void** out, void* handle, const char* name) {
  BEGIN();
  return find(out, handle, name);
}

FAKE_API cuLibraryGetModule(void** out, void* handle) {
  BEGIN();
  MODULE(module, handle);
  *out = module;
  return kOk;
}

FAKE_API cuKernelGetFunction(void** out, void* handle) {
  BEGIN();
  FUNCTION(function, handle);
  *out = function;
  return kOk;
}

FAKE_API cuKernelGetAttribute(int* value, int which, void* handle, CUdevice) {
  BEGIN();
  FUNCTION(function, handle);
  return function ? function_attribute(value, which) : kInvalidHandle;
}

FAKE_API cuFuncGetAttribute(int* value, int which, void* handle) {
  BEGIN();
  FUNCTION(function, handle);
  return function ? function_attribute(value, which) : kInvalidHandle;
}

FAKE_API cuFuncSetAttribute(void* handle, int which, int) {
  BEGIN();
  FUNCTION(function, handle);
  return function && which >= 8 && which <= 15 ? kOk : kInvalidValue;
}

FAKE_API cuKernelSetAttribute(int which, int value, void* handle, CUdevice) {
  return cuFuncSetAttribute(handle, which, value);
}

FAKE_API cuKernelGetParamInfo(void* handle, std::size_t index, std::size_t* offset, std::size_t* nbytes) {
  BEGIN();
  FUNCTION(function, handle);
  return parameter(*function, index, offset, nbytes);
}

FAKE_API cuFuncGetParamInfo(void* handle, std::size_t index, std::size_t* offset, std::size_t* nbytes) {
  BEGIN();
  FUNCTION(function, handle);
  return parameter(*function, index, offset, nbytes);
}

FAKE_API cuFuncGetName(const char** name, void* handle) {
  BEGIN();
  FUNCTION(function, handle);
  *name = function->name.c_str();
  return kOk;
}

FAKE_API cuKernelGetName(const char** name, void* handle) { return cuFuncGetName(name, handle); }

FAKE_API cuFuncLoad(void* handle) {
  BEGIN();
  FUNCTION(function, handle);
  return function ? kOk : kInvalidHandle;
}

FAKE_API cuFuncIsLoaded(int* state, void* handle) {
  BEGIN();
  FUNCTION(function, handle);
  *state = function != nullptr;
  return kOk;
}

FAKE_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* handle, int threads, std::size_t) {
  BEGIN();
  FUNCTION(function, handle);
  if (!function || threads < 1 || threads > 1024) return kInvalidValue;
  *blocks = 2048 / threads;
  return kOk;
}

FAKE_API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, void* handle, int threads,
                                                                 std::size_t shared, unsigned) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, handle, threads, shared);
}

FAKE_API cuLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                           unsigned shared, CUstream stream_handle, void** parameters, void** extra) {
  BEGIN();
  STREAM(stream, stream_handle);
  FUNCTION(function, handle);
  return launch(stream, function, {{gx, gy, gz}, {bx, by, bz}, shared}, parameters, extra);
}

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  CUstream stream;
  const void* attributes;
  unsigned count;
};

FAKE_API cuLaunchKernelEx(const LaunchConfig* config, void* handle, void** parameters, void** extra) {
  BEGIN();
  STREAM(stream, config->stream);
  FUNCTION(function, handle);
  const unsigned *g = config->grid, *b = config->block;
  return launch(stream, function, {{g[0], g[1], g[2]}, {b[0], b[1], b[2]}, config->shared}, parameters, extra);
}
