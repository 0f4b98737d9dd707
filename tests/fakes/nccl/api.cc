// The functions of libnccl.so.2 and librccl.so (nccl.h): arguments are checked as there, then become a part of a group.
#include <climits>
#include <cstring>
#include <map>

#include "group.h"
#include "settings.h"

#define FAKE_API extern "C" __attribute__((visibility("default")))

using namespace fake;
using namespace fake::nccl;

namespace {

struct Comms {
  std::mutex mutex;
  std::map<const Comm*, std::shared_ptr<Comm>> all;
};

Comms& comms() {
  static auto* const all = new Comms;
  return *all;
}

thread_local std::string last_error;

Result refuse(Result result, const std::string& why) {
  last_error = why;
  return result;
}

Comm* publish(const std::shared_ptr<Comm>& comm) {
  std::lock_guard lock(comms().mutex);
  comms().all[comm.get()] = comm;
  return comm.get();
}

std::shared_ptr<Comm> find(const Comm* handle) {
  std::lock_guard lock(comms().mutex);
  auto found = comms().all.find(handle);
  return found == comms().all.end() ? nullptr : found->second;
}

std::shared_ptr<Comm> take(const Comm* handle) {
  std::lock_guard lock(comms().mutex);
  auto found = comms().all.find(handle);
  if (found == comms().all.end()) return nullptr;
  std::shared_ptr<Comm> comm = found->second;
  comms().all.erase(found);
  return comm;
}

// The communicator of a handle, when it is ready for another operation.
Result ready(const Comm* handle, std::shared_ptr<Comm>* comm) {
  *comm = find(handle);
  if (!*comm) return refuse(kInvalidArgument, "not a communicator");
  Result state = (*comm)->state();
  if (state == kInProgress) {
    return refuse(kInvalidArgument, "communicator used before the previous operation returned ncclSuccess");
  }
  if (state != kSuccess) return refuse(state, (*comm)->last_error);
  return kSuccess;
}

#define BEGIN() \
  if (int begun = enter(__func__)) return begun
#define READY(name, handle)   \
  std::shared_ptr<Comm> name; \
  if (Result found = ready(handle, &name)) return found

struct Config {  // the head of ncclConfig_t, which all versions share
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

Result read_config(const Config* config, bool* blocking) {
  if (!config) return kSuccess;
  if (config->magic != 0xcafebeef || config->size < sizeof(Config)) {
    return refuse(kInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  }
  if (config->blocking != INT_MIN && config->blocking != 0 && config->blocking != 1) {
    return refuse(kInvalidArgument, "config blocking must be 0 or 1");
  }
  if (config->blocking != INT_MIN) *blocking = config->blocking != 0;
  return kSuccess;
}

Result init(Comm** out, Device& device, int size, const Id& id, int rank, bool blocking) {
  if (!out || size < 1 || rank < 0 || rank >= size) return refuse(kInvalidArgument, "invalid rank or number of ranks");
  auto comm = std::make_shared<Comm>(device, size, rank, blocking);
  *out = publish(comm);  // before anyone has come, so that another thread can abort it
  return add(comm, [comm, id, out] {
    Result result = comm->meet(id);
    if (result != kSuccess) last_error = comm->last_error;
    if (result != kSuccess && comm->blocking()) {
      take(comm.get());
      *out = nullptr;
    }
    return result;
  });
}

Result init_here(Comm** out, int size, const Id& id, int rank, const Config* config) {
  bool blocking = true;
  if (Result result = read_config(config, &blocking)) return result;
  Device* device = nullptr;
  if (driver().current(&device) != kOk) return refuse(kUnhandledCudaError, "no device is current");
  return init(out, *device, size, id, rank, blocking);
}

}  // namespace

FAKE_API int ncclGetVersion(int* version) {
  BEGIN();
  *version = kVendor.name[0] == 'C' ? 22809 : 22707;
  return kSuccess;
}

FAKE_API int ncclGetUniqueId(Id* id) {
  BEGIN();
  return Segment::make(id) ? kSuccess : refuse(kSystemError, "no memory to share");
}

FAKE_API const char* ncclGetErrorString(int result) {
  static const char* const texts[] = {"no error",
                                      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                                      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                                      "internal error - please report this issue to the NCCL developers",
                                      "invalid argument (run with NCCL_DEBUG=WARN for details)",
                                      "invalid usage (run with NCCL_DEBUG=WARN for details)",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return result >= 0 && result <= kInProgress ? texts[result] : "unknown result code";
}

FAKE_API const char* ncclGetLastError(const Comm*) { return last_error.c_str(); }

FAKE_API int ncclCommInitRank(Comm** comm, int size, Id id, int rank) {
  BEGIN();
  return init_here(comm, size, id, rank, nullptr);
}

FAKE_API int ncclCommInitRankConfig(Comm** comm, int size, Id id, int rank, const Config* config) {
  BEGIN();
  return init_here(comm, size, id, rank, config);
}

FAKE_API int ncclCommInitRankScalable(Comm** comm, int size, int rank, int ids, const Id* id, const Config* config) {
  BEGIN();
  if (ids < 1) return refuse(kInvalidArgument, "no unique id");
  return init_here(comm, size, id[0], rank, config);
}

FAKE_API int ncclCommFinalize(const Comm* handle) {
  BEGIN();
  READY(comm, handle);
  if (comm->blocking()) {
    comm->drain();
    return kSuccess;
  }
  comm->in_background([comm] {
    comm->drain();
    return kSuccess;
  });
  return kInProgress;
}

FAKE_API int ncclCommDestroy(const Comm* handle) {
  BEGIN();
  std::shared_ptr<Comm> comm = take(handle);
  if (!comm) return handle ? refuse(kInvalidArgument, "not a communicator") : kSuccess;
  comm->drain();
  return kSuccess;
}

FAKE_API int ncclCommAbort(const Comm* handle) {
  BEGIN();
  std::shared_ptr<Comm> comm = take(handle);
  if (!comm) return handle ? refuse(kInvalidArgument, "not a communicator") : kSuccess;
  comm->abort();
  comm->drain();
  return kSuccess;
}

FAKE_API int ncclCommSplit(const Comm* handle, int color, int key, Comm** out, const Config* config) {
  BEGIN();
  READY(comm, handle);
  bool blocking = comm->blocking();
  if (color < -1) return refuse(kInvalidArgument, "invalid color");
  if (Result result = read_config(config, &blocking)) return result;
  *out = nullptr;
  return add(comm, [=] {
    std::shared_ptr<Comm> part;
    Result result = comm->split(color, key, &part, blocking);
    if (part) *out = publish(part);
    return result;
  });
}

FAKE_API int ncclCommGetAsyncError(const Comm* handle, int* result) {
  BEGIN();
  std::shared_ptr<Comm> comm = find(handle);
  if (!comm) return refuse(kInvalidArgument, "not a communicator");
  *result = comm->state();
  comm->ask();
  return kSuccess;
}

FAKE_API int ncclCommCount(const Comm* handle, int* size) {
  BEGIN();
  READY(comm, handle);
  *size = comm->size();
  return kSuccess;
}

FAKE_API int ncclCommCuDevice(const Comm* handle, int* device) {
  BEGIN();
  READY(comm, handle);
  *device = comm->device().ordinal;
  return kSuccess;
}

FAKE_API int ncclCommUserRank(const Comm* handle, int* rank) {
  BEGIN();
  READY(comm, handle);
  *rank = comm->rank();
  return kSuccess;
}

FAKE_API int ncclMemAlloc(void** out, std::size_t nbytes) {
  BEGIN();
  Device* device = nullptr;
  std::uintptr_t base = 0;
  if (driver().current(&device) != kOk || driver().allocate(*device, nbytes, &base) != kOk) return kUnhandledCudaError;
  *out = reinterpret_cast<void*>(base);
  return kSuccess;
}

FAKE_API int ncclMemFree(void* base) {
  BEGIN();
  Device* device = nullptr;
  if (driver().current(&device) != kOk) return kUnhandledCudaError;
  return driver().release(*device, reinterpret_cast<std::uintptr_t>(base)) == kOk ? kSuccess : kInvalidArgument;
}

FAKE_API int ncclCommRegister(const Comm* handle, void* buffer, std::size_t nbytes, void** registration) {
  BEGIN();
  READY(comm, handle);
  bool ours = driver().reaches(comm->device(), reinterpret_cast<std::uintptr_t>(buffer), nbytes);
  *registration = ours ? buffer : nullptr;
  return ours ? kSuccess : refuse(kInvalidArgument, "not memory of this device");
}

FAKE_API int ncclCommDeregister(const Comm* handle, void*) {
  BEGIN();
  READY(comm, handle);
  return comm ? kSuccess : kInvalidArgument;
}

FAKE_API int ncclRedOpCreatePreMulSum(int* op, void* factor, int dtype, int residence, const Comm* handle) {
  BEGIN();
  READY(comm, handle);
  if (!op || !factor || dtype < 0 || dtype >= kTypes) return refuse(kInvalidArgument, "invalid operator");
  if (residence != 1) return refuse(kInvalidArgument, "scalars in device memory are not supported by the fake");
  *op = comm->add_operator(scalar(factor, dtype), dtype);
  return kSuccess;
}

FAKE_API int ncclRedOpDestroy(int op, const Comm* handle) {
  BEGIN();
  READY(comm, handle);
  return comm->remove_operator(op) ? kSuccess : refuse(kInvalidArgument, "not an operator of this communicator");
}

FAKE_API int ncclGroupStart() {
  BEGIN();
  return group_start();
}

FAKE_API int ncclGroupEnd() {
  BEGIN();
  return group_end();
}

namespace {

int call(Kind kind, const void* send, void* recv, std::size_t count, int dtype, int op, int root, const Comm* handle,
         void* stream) {
  READY(comm, handle);
  if (dtype < 0 || dtype >= kTypes) return refuse(kInvalidArgument, "invalid type");
  if (root < 0 || root >= comm->size()) return refuse(kInvalidArgument, "invalid root");
  Collective collective{kind,
                        reinterpret_cast<std::uintptr_t>(send),
                        reinterpret_cast<std::uintptr_t>(recv),
                        count,
                        dtype,
                        op,
                        root,
                        1,
                        take_late_error()};
  if (!comm->resolve(op, dtype, &collective.op, &collective.factor))
    return refuse(kInvalidArgument, "invalid operator");
  return count == 0 ? kSuccess : add(comm, collective, stream);
}

int message(bool sends, std::uintptr_t buffer, std::size_t count, int dtype, int peer, const Comm* handle,
            void* stream) {
  READY(comm, handle);
  if (dtype < 0 || dtype >= kTypes) return refuse(kInvalidArgument, "invalid type");
  if (peer < 0 || peer >= comm->size()) return refuse(kInvalidArgument, "invalid peer");
  return add(comm, Message{sends, buffer, count * itemsize(dtype), peer}, stream);
}

}  // namespace

FAKE_API int ncclAllReduce(const void* send, void* recv, std::size_t count, int dtype, int op, const Comm* comm,
                           void* stream) {
  BEGIN();
  return call(kAllReduce, send, recv, count, dtype, op, 0, comm, stream);
}

FAKE_API int ncclReduce(const void* send, void* recv, std::size_t count, int dtype, int op, int root, const Comm* comm,
                        void* stream) {
  BEGIN();
  return call(kReduce, send, recv, count, dtype, op, root, comm, stream);
}

FAKE_API int ncclBroadcast(const void* send, void* recv, std::size_t count, int dtype, int root, const Comm* comm,
                           void* stream) {
  BEGIN();
  return call(kBroadcast, send, recv, count, dtype, kSum, root, comm, stream);
}

FAKE_API int ncclBcast(void* buffer, std::size_t count, int dtype, int root, const Comm* comm, void* stream) {
  BEGIN();
  return call(kBroadcast, buffer, buffer, count, dtype, kSum, root, comm, stream);
}

FAKE_API int ncclAllGather(const void* send, void* recv, std::size_t count, int dtype, const Comm* comm, void* stream) {
  BEGIN();
  return call(kAllGather, send, recv, count, dtype, kSum, 0, comm, stream);
}

FAKE_API int ncclReduceScatter(const void* send, void* recv, std::size_t count, int dtype, int op, const Comm* comm,
                               void* stream) {
  BEGIN();
  return call(kReduceScatter, send, recv, count, dtype, op, 0, comm, stream);
}

FAKE_API int ncclAlltoAll(const void* send, void* recv, std::size_t count, int dtype, const Comm* comm, void* stream) {
  BEGIN();
  return call(kAllToAll, send, recv, count, dtype, kSum, 0, comm, stream);
}

FAKE_API int ncclAllToAll(const void* send, void* recv, std::size_t count, int dtype, const Comm* comm,
                          void* stream) {  // RCCL's spelling
  BEGIN();
  return call(kAllToAll, send, recv, count, dtype, kSum, 0, comm, stream);
}

FAKE_API int ncclGather(const void* send, void* recv, std::size_t count, int dtype, int root, const Comm* comm,
                        void* stream) {
  BEGIN();
  return call(kGather, send, recv, count, dtype, kSum, root, comm, stream);
}

FAKE_API int ncclScatter(const void* send, void* recv, std::size_t count, int dtype, int root, const Comm* comm,
                         void* stream) {
  BEGIN();
  return call(kScatter, send, recv, count, dtype, kSum, root, comm, stream);
}

FAKE_API int ncclSend(const void* send, std::size_t count, int dtype, int peer, const Comm* comm, void* stream) {
  BEGIN();
  return message(true, reinterpret_cast<std::uintptr_t>(send), count, dtype, peer, comm, stream);
}

FAKE_API int ncclRecv(void* recv, std::size_t count, int dtype, int peer, const Comm* comm, void* stream) {
  BEGIN();
  return message(false, reinterpret_cast<std::uintptr_t>(recv), count, dtype, peer, comm, stream);
}
