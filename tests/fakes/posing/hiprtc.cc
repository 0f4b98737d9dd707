// hipRTC's names over NVRTC, for devices that pose as AMD's: what they run is cubins.
//
// FAKE_NVRTC is NVRTC's path, where the loader does not know it.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr int kInternal = 11;

void* open(const char* asked, const char* const* names) {
  if (asked != nullptr) return dlopen(asked, RTLD_NOW | RTLD_GLOBAL);
  for (; *names != nullptr; ++names) {
    if (void* library = dlopen(*names, RTLD_NOW | RTLD_GLOBAL)) return library;
  }
  return nullptr;
}

template <class Function>
Function* nvrtc(const char* name) {
  static constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", nullptr};
  static void* const library = open(std::getenv("FAKE_NVRTC"), kNames);
  void* found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) std::fprintf(stderr, "posing as hipRTC: no %s: set FAKE_NVRTC to NVRTC's path\n", name);
  return reinterpret_cast<Function*>(found);
}

// Of the first GPU: all of a host are of one kind. 0 where there is none.
int architecture() {
  static const int found = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return 0;
    const auto attribute = reinterpret_cast<int (*)(int*, int, int)>(dlsym(library, "cuDeviceGetAttribute"));
    const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
    int major = 0;
    int minor = 0;
    const bool known = init(0) == 0 && attribute(&major, 75, 0) == 0 && attribute(&minor, 76, 0) == 0;
    return known ? 10 * major + minor : 0;
  }();
  return found;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Of no hipRTC, and other for each kind of GPU: a cache of compiled kernels keeps them apart.
int hiprtcVersion(int* major, int* minor) {
  auto* call = nvrtc<int(int*, int*)>("nvrtcVersion");
  if (call == nullptr || call(major, minor) != 0) return kInternal;
  *minor += 1000 * architecture();
  *major += 1000;
  return 0;
}

int hiprtcCompileProgram(void* program, int, const char* const*) {
  auto* call = nvrtc<int(void*, int, const char* const*)>("nvrtcCompileProgram");
  if (call == nullptr || architecture() == 0) return kInternal;
  const std::string target = "--gpu-architecture=sm_" + std::to_string(architecture());
  const char* const options[] = {target.c_str(), "--std=c++17", "--fmad=false", "-default-device"};
  return call(program, 4, options);
}

#define SAME(hip, cuda, parameters, ...)                    \
  int hip parameters {                                      \
    auto* call = nvrtc<int parameters>(cuda);               \
    return call == nullptr ? kInternal : call(__VA_ARGS__); \
  }
SAME(hiprtcCreateProgram, "nvrtcCreateProgram",
     (void** program, const char* source, const char* name, int count, const char* const* headers,
      const char* const* names),
     program, source, name, count, headers, names)
SAME(hiprtcDestroyProgram, "nvrtcDestroyProgram", (void** program), program)
SAME(hiprtcGetCodeSize, "nvrtcGetCUBINSize", (void* program, std::size_t* nbytes), program, nbytes)
SAME(hiprtcGetCode, "nvrtcGetCUBIN", (void* program, char* code), program, code)
SAME(hiprtcGetProgramLogSize, "nvrtcGetProgramLogSize", (void* program, std::size_t* nbytes), program, nbytes)
SAME(hiprtcGetProgramLog, "nvrtcGetProgramLog", (void* program, char* log), program, log)
SAME(hiprtcAddNameExpression, "nvrtcAddNameExpression", (void* program, const char* name), program, name)
SAME(hiprtcGetLoweredName, "nvrtcGetLoweredName", (void* program, const char* name, const char** lowered), program,
     name, lowered)
#undef SAME

const char* hiprtcGetErrorString(int code) {
  auto* call = nvrtc<const char*(int)>("nvrtcGetErrorString");
  return call == nullptr ? "NVRTC cannot be loaded" : call(code);
}

}  // extern "C"
#pragma GCC visibility pop
