// A libamdhip64 over the CUDA driver: NVIDIA's GPUs pose as AMD's. Here: which there are, and what they say.
//
// HIP_VISIBLE_DEVICES chooses among what CUDA sees. They claim to be of an architecture whose 8-bit floats are OCP's,
// as NVIDIA's are, since NCCL is what poses as RCCL.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "cuda.h"

using namespace posing;
using fake::hip::Properties;
using fake::hip::Status;

namespace posing {
namespace {

constexpr char kArch[] = "gfx950";
constexpr int kNoDevice = 100;
constexpr int kInvalidDevice = 101;

thread_local int ordinal = 0;

const Cuda* load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    std::fprintf(stderr, "posing as HIP: %s\n", dlerror());
    return nullptr;
  }
  static Cuda found;
#define F(name, arguments)                                                  \
  found.name = reinterpret_cast<int(*) arguments>(dlsym(library, #name));   \
  if (found.name == nullptr) {                                              \
    std::fprintf(stderr, "posing as HIP: libcuda.so.1 has no %s\n", #name); \
    return nullptr;                                                         \
  }
  POSING_CUDA(F)
#undef F
  return found.cuInit(0) == 0 ? &found : nullptr;
}

// The CUDA ordinals of HIP's devices, in order.
const std::vector<int>& visible() {
  static const std::vector<int> list = [] {
    std::vector<int> chosen;
    int count = 0;
    if (cuda() == nullptr || CU(cuDeviceGetCount)(&count) != 0) return chosen;
    const char* wanted = std::getenv("HIP_VISIBLE_DEVICES");
    if (wanted == nullptr) {
      for (int i = 0; i < count; ++i) chosen.push_back(i);
      return chosen;
    }
    for (const char* at = wanted; *at != 0;) {
      char* end = nullptr;
      const long number = std::strtol(at, &end, 10);
      if (end == at || number < 0 || number >= count) break;  // whatever follows is not seen, as HIP has it
      chosen.push_back(static_cast<int>(number));
      at = *end == ',' ? end + 1 : end;
    }
    return chosen;
  }();
  return list;
}

void* context_of(int hip) {
  static std::mutex mutex;
  static std::vector<void*> contexts;
  const std::lock_guard lock(mutex);
  contexts.resize(visible().size());
  void*& context = contexts[static_cast<std::size_t>(hip)];
  if (context == nullptr) CU(cuDevicePrimaryCtxRetain)(&context, visible()[static_cast<std::size_t>(hip)]);
  return context;
}

int attribute(int which, int hip) {
  int value = 0;
  CU(cuDeviceGetAttribute)(&value, which, cuda_ordinal(hip));
  return value;
}

// CUDA's number of an attribute by HIP's; -1 where there is none.
int cuda_attribute(int hip) {
  struct Pair {
    int hip, cuda;
  };
  static constexpr Pair kSame[] = {{2, 40},   {3, 19},      {4, 91},    {5, 13},  {8, 31},  {19, 38},  {23, 75},
                                   {24, 83},  {25, 106},    {26, 2},    {27, 3},  {28, 4},  {29, 5},   {30, 6},
                                   {31, 7},   {56, 1},      {57, 39},   {61, 76}, {63, 16}, {67, 33},  {68, 34},
                                   {69, 50},  {74, 8},      {78, 78},   {85, 41}, {87, 10}, {88, 115}, {90, 99},
                                   {93, 124}, {10013, 122}, {10015, 16}};
  for (const Pair& pair : kSame) {
    if (pair.hip == hip) return pair.cuda;
  }
  return -1;
}

}  // namespace

const Cuda* cuda() {
  static const Cuda* const found = load();
  return found;
}

int activate() {
  if (cuda() == nullptr || visible().empty()) return kNoDevice;
  void* context = nullptr;
  int number = 0;
  if (CU(cuCtxGetCurrent)(&context) == 0 && context != nullptr && CU(cuCtxGetDevice)(&number) == 0 &&
      hip_ordinal(number) >= 0) {
    ordinal = hip_ordinal(number);  // CUDA's libraries in the process have chosen it
    return 0;
  }
  context = context_of(ordinal);
  return context == nullptr ? kInvalidDevice : CU(cuCtxSetCurrent)(context);
}

int current_ordinal() { return ordinal; }

int cuda_ordinal(int hip) {
  return hip >= 0 && static_cast<std::size_t>(hip) < visible().size() ? visible()[static_cast<std::size_t>(hip)] : -1;
}

int hip_ordinal(int number) {
  for (std::size_t i = 0; i < visible().size(); ++i) {
    if (visible()[i] == number) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace posing

#define DEVICE(name, hip)             \
  BEGIN();                            \
  const int name = cuda_ordinal(hip); \
  if (name < 0) return status(kInvalidDevice)

FAKE_API hipInit(unsigned flags) {
  BEGIN();
  return status(flags == 0 ? 0 : 1);
}

FAKE_API hipDriverGetVersion(int* version) {
  *version = 70000000;
  return status(0);
}

FAKE_API hipRuntimeGetVersion(int* version) { return hipDriverGetVersion(version); }

FAKE_API hipGetDeviceCount(int* count) {
  *count = 0;
  BEGIN();
  *count = static_cast<int>(visible().size());
  return status(0);
}

FAKE_API hipSetDevice(int hip) {
  DEVICE(number, hip);
  ordinal = hip;
  void* context = context_of(hip);
  return status(context == nullptr ? kInvalidDevice : CU(cuCtxSetCurrent)(context));
}

FAKE_API hipGetDevice(int* hip) {
  BEGIN();  // whoever asks will use it, and CUDA's libraries look at the context
  *hip = ordinal;
  return status(0);
}

FAKE_API hipDeviceGet(int* device, int hip) {
  DEVICE(number, hip);
  *device = hip;
  return status(0);
}

FAKE_API hipDeviceReset() {
  BEGIN();
  return status(CU(cuDevicePrimaryCtxReset_v2)(cuda_ordinal(ordinal)));
}

FAKE_API hipDeviceSynchronize() {
  BEGIN();
  return status(CU(cuCtxSynchronize)());
}

FAKE_API hipDeviceGetName(char* name, int length, int hip) {
  DEVICE(number, hip);
  return status(CU(cuDeviceGetName)(name, length, number));
}

FAKE_API hipDeviceGetUuid(char* uuid, int hip) {
  DEVICE(number, hip);
  return status(CU(cuDeviceGetUuid_v2)(uuid, number));
}

FAKE_API hipDeviceTotalMem(std::size_t* nbytes, int hip) {
  DEVICE(number, hip);
  return status(CU(cuDeviceTotalMem_v2)(nbytes, number));
}

FAKE_API hipDeviceGetPCIBusId(char* text, int length, int hip) {
  DEVICE(number, hip);
  return status(CU(cuDeviceGetPCIBusId)(text, length, number));
}

FAKE_API hipDeviceGetByPCIBusId(int* hip, const char* text) {
  BEGIN();
  int number = 0;
  const int code = CU(cuDeviceGetByPCIBusId)(&number, text);
  if (code == 0) *hip = hip_ordinal(number);
  return status(code == 0 && *hip < 0 ? 1 : code);
}

FAKE_API hipDeviceGetAttribute(int* value, int which, int hip) {
  DEVICE(number, hip);
  *value = 0;
  if (which == 10016) *value = 1;  // FineGrainSupport: mapped host memory is coherent
  const int theirs = cuda_attribute(which);
  return status(theirs < 0 ? 0 : CU(cuDeviceGetAttribute)(value, theirs, number));
}

FAKE_API hipGetDevicePropertiesR0600(Properties* properties, int hip) {
  DEVICE(number, hip);
  *properties = {};
  Properties& p = *properties;
  CU(cuDeviceGetName)(p.name, sizeof p.name, number);
  CU(cuDeviceGetUuid_v2)(p.uuid, number);
  CU(cuDeviceTotalMem_v2)(&p.total_memory, number);
  std::strncpy(p.arch, kArch, sizeof p.arch - 1);
  p.major = 9;
  p.minor = 5;
  p.shared_per_block = static_cast<std::size_t>(attribute(8, hip));
  p.warp_size = attribute(10, hip);
  p.threads_per_block = attribute(1, hip);
  p.threads_per_multiprocessor = attribute(39, hip);
  for (int i = 0; i < 3; ++i) p.block[i] = attribute(2 + i, hip), p.grid[i] = attribute(5 + i, hip);
  p.multiprocessors = attribute(16, hip);
  p.l2 = attribute(38, hip);
  p.bus = attribute(33, hip);
  p.device = attribute(34, hip);
  p.domain = attribute(50, hip);
  p.maps_host_memory = p.concurrent_kernels = p.unified = p.managed = p.host_pointers = 1;
  p.registers_host = p.ipc_events = 1;
  return status(0);
}

FAKE_API hipDeviceCanAccessPeer(int* can, int hip, int peer) {
  DEVICE(number, hip);
  if (cuda_ordinal(peer) < 0) return status(kInvalidDevice);
  return status(CU(cuDeviceCanAccessPeer)(can, number, cuda_ordinal(peer)));
}

FAKE_API hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  BEGIN();
  if (cuda_ordinal(peer) < 0) return status(kInvalidDevice);
  return status(CU(cuCtxEnablePeerAccess)(context_of(peer), flags));
}

FAKE_API hipDeviceDisablePeerAccess(int peer) {
  BEGIN();
  if (cuda_ordinal(peer) < 0) return status(kInvalidDevice);
  return status(CU(cuCtxDisablePeerAccess)(context_of(peer)));
}

FAKE_API hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  BEGIN();
  return status(CU(cuCtxGetStreamPriorityRange)(least, greatest));
}
