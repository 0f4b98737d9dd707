// libamdhip64: streams, events, values in memory that streams wait for, host functions, graphs, modules.
#include <cstring>

#include "capture.h"
#include "event.h"
#include "hip.h"
#include "module.h"
#include "operations.h"
#include "properties.h"

using namespace fake;
using namespace fake::hip;

#define EVENT(name, handle)                 \
  auto* name = static_cast<Event*>(handle); \
  if (!name || !known_event(name)) return kInvalidHandle
#define GRAPH(name, handle, executable)     \
  auto* name = static_cast<Graph*>(handle); \
  if (!known_graph(name, executable)) return kInvalidValue
#define MODULE(name, handle)                 \
  auto* name = static_cast<Module*>(handle); \
  if (!known_module(name)) return kInvalidHandle
#define FUNCTION(name, handle)                 \
  auto* name = static_cast<Function*>(handle); \
  if (!known_function(name)) return kInvalidHandle

FAKE_API hipStreamCreateWithPriority(hipStream_t* out, unsigned flags, int priority) {
  BEGIN();
  DEVICE(device);
  if (flags > 1) return kInvalidValue;
  Stream* stream = nullptr;
  Error error = create_stream(*device, flags, priority > 1 ? 1 : priority < -1 ? -1 : priority, &stream);
  *out = stream;
  return error;
}

FAKE_API hipStreamCreateWithFlags(hipStream_t* out, unsigned flags) {
  return hipStreamCreateWithPriority(out, flags, 0);
}

FAKE_API hipStreamCreate(hipStream_t* out) { return hipStreamCreateWithPriority(out, 0, 0); }

FAKE_API hipStreamDestroy(hipStream_t handle) {
  BEGIN();
  if (reinterpret_cast<std::uintptr_t>(handle) <= 2) return kInvalidHandle;
  STREAM(stream, handle);
  return destroy_stream(stream);
}

FAKE_API hipStreamQuery(hipStream_t handle) {
  BEGIN();
  STREAM(stream, handle);
  return query_stream(stream);
}

FAKE_API hipStreamSynchronize(hipStream_t handle) {
  BEGIN();
  STREAM(stream, handle);
  return synchronize_stream(stream);
}

FAKE_API hipStreamGetPriority(hipStream_t handle, int* priority) {
  BEGIN();
  STREAM(stream, handle);
  *priority = stream->priority;
  return kOk;
}

FAKE_API hipStreamGetFlags(hipStream_t handle, unsigned* flags) {
  BEGIN();
  STREAM(stream, handle);
  *flags = stream->flags;
  return kOk;
}

FAKE_API hipStreamGetDevice(hipStream_t handle, int* ordinal) {
  BEGIN();
  STREAM(stream, handle);
  *ordinal = stream->device->ordinal;
  return kOk;
}

FAKE_API hipStreamWaitEvent(hipStream_t handle, void* event_handle, unsigned) {
  BEGIN();
  STREAM(stream, handle);
  EVENT(event, event_handle);
  return wait_event(stream, event);
}

FAKE_API hipEventCreateWithFlags(void** out, unsigned flags) {
  BEGIN();
  DEVICE(device);
  Event* event = nullptr;
  Error error = create_event(*device, flags & 0x1FFFFFFF, &event);  // the highest ones choose fences
  *out = event;
  return error;
}

FAKE_API hipEventCreate(void** out) { return hipEventCreateWithFlags(out, 0); }

FAKE_API hipEventDestroy(void* handle) {
  BEGIN();
  EVENT(event, handle);
  return destroy_event(event);
}

FAKE_API hipEventRecord(void* handle, hipStream_t stream_handle) {
  BEGIN();
  EVENT(event, handle);
  STREAM(stream, stream_handle);
  return record_event(event, stream);
}

FAKE_API hipEventQuery(void* handle) {
  BEGIN();
  EVENT(event, handle);
  return query_event(event);
}

FAKE_API hipEventSynchronize(void* handle) {
  BEGIN();
  EVENT(event, handle);
  return synchronize_event(event);
}

FAKE_API hipEventElapsedTime(float* milliseconds, void* start_handle, void* end_handle) {
  BEGIN();
  EVENT(start, start_handle);
  EVENT(end, end_handle);
  return elapsed(start, end, milliseconds);
}

FAKE_API hipIpcGetEventHandle(char* out, void* handle) {
  BEGIN();
  EVENT(event, handle);
  return export_event(event, out);
}

FAKE_API hipIpcOpenEventHandle(void** out, Handle handle) {
  BEGIN();
  DEVICE(device);
  Event* event = nullptr;
  Error error = import_event(*device, handle.bytes, &event);
  *out = event;
  return error;
}

namespace {

Error wait_word(hipStream_t handle, void* address, std::uint64_t value, unsigned flags, std::uint64_t mask,
                std::size_t width) {
  STREAM(stream, handle);
  if (flags > 3) return kInvalidValue;
  auto at = reinterpret_cast<std::uintptr_t>(address);
  return wait_value(stream, at, value, static_cast<Compare>(flags), mask, width);
}

Error write_word(hipStream_t handle, void* address, std::uint64_t value, unsigned flags, std::size_t width) {
  STREAM(stream, handle);
  if (flags != 0) return kInvalidValue;
  return write_value(stream, reinterpret_cast<std::uintptr_t>(address), value, width);
}

}  // namespace

FAKE_API hipStreamWaitValue32(hipStream_t handle, void* address, std::uint32_t value, unsigned flags,
                                 std::uint32_t mask) {
  BEGIN();
  return wait_word(handle, address, value, flags, mask, 4);
}

FAKE_API hipStreamWaitValue64(hipStream_t handle, void* address, std::uint64_t value, unsigned flags,
                                 std::uint64_t mask) {
  BEGIN();
  return wait_word(handle, address, value, flags, mask, 8);
}

FAKE_API hipStreamWriteValue32(hipStream_t handle, void* address, std::uint32_t value, unsigned flags) {
  BEGIN();
  return write_word(handle, address, value, flags, 4);
}

FAKE_API hipStreamWriteValue64(hipStream_t handle, void* address, std::uint64_t value, unsigned flags) {
  BEGIN();
  return write_word(handle, address, value, flags, 8);
}

FAKE_API hipLaunchHostFunc(hipStream_t handle, void (*function)(void*), void* argument) {
  BEGIN();
  STREAM(stream, handle);
  return host_function(stream, function, argument);
}

FAKE_API hipStreamBeginCapture(hipStream_t handle, int mode) {
  BEGIN();
  STREAM(stream, handle);
  return begin_capture(stream, mode);
}

FAKE_API hipStreamEndCapture(hipStream_t handle, void** out) {
  BEGIN();
  STREAM(stream, handle);
  Graph* graph = nullptr;
  Error error = end_capture(stream, &graph);
  *out = graph;
  return error;
}

FAKE_API hipStreamIsCapturing(hipStream_t handle, int* status) {
  BEGIN();
  STREAM(stream, handle);
  int id = 0;
  *status = capture_status(stream, &id);
  return kOk;
}

FAKE_API hipStreamGetCaptureInfo(hipStream_t handle, int* status, unsigned long long* id) {
  BEGIN();
  STREAM(stream, handle);
  int number = 0;
  *status = capture_status(stream, &number);
  if (id) *id = static_cast<unsigned long long>(number);
  return kOk;
}

FAKE_API hipThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN();
  return exchange_capture_mode(mode);
}

FAKE_API hipGraphInstantiateWithFlags(void** out, void* handle, unsigned long long) {
  BEGIN();
  GRAPH(graph, handle, false);
  Graph* executable = nullptr;
  Error error = instantiate(graph, &executable);
  *out = executable;
  return error;
}

FAKE_API hipGraphInstantiate(void** out, void* handle, void**, char*, std::size_t) {
  return hipGraphInstantiateWithFlags(out, handle, 0);
}

FAKE_API hipGraphGetNodes(void* handle, void** nodes, std::size_t* count) {
  BEGIN();
  GRAPH(graph, handle, false);
  for (std::size_t i = 0; nodes && i < *count; ++i) {
    nodes[i] = i < graph->nodes.size() ? const_cast<Node*>(graph->nodes[i].get()) : nullptr;
  }
  if (!nodes || *count > graph->nodes.size()) *count = graph->nodes.size();
  return kOk;
}

FAKE_API hipGraphLaunch(void* handle, hipStream_t stream_handle) {
  BEGIN();
  GRAPH(graph, handle, true);
  STREAM(stream, stream_handle);
  return launch_graph(graph, stream);
}

FAKE_API hipGraphExecDestroy(void* handle) {
  BEGIN();
  GRAPH(graph, handle, true);
  return destroy_graph(graph);
}

FAKE_API hipGraphDestroy(void* handle) {
  BEGIN();
  GRAPH(graph, handle, false);
  return destroy_graph(graph);
}

FAKE_API hipModuleLoadData(void** out, const void* image) {
  BEGIN();
  DEVICE(device);
  if (Error error = may_synchronize(*device)) return error;
  Module* module = nullptr;
  Error error = load_module(image, &module);
  *out = module;
  return error;
}

FAKE_API hipModuleLoadDataEx(void** out, const void* image, unsigned, int*, void**) {
  return hipModuleLoadData(out, image);
}

FAKE_API hipModuleUnload(void* handle) {
  BEGIN();
  MODULE(module, handle);
  return unload_module(module);
}

FAKE_API hipModuleGetFunction(void** out, void* handle, const char* name) {
  BEGIN();
  MODULE(module, handle);
  Function* function = nullptr;
  Error error = get_function(module, name, &function);
  *out = function;
  return error;
}

FAKE_API hipModuleGetGlobal(void** address, std::size_t* nbytes, void* handle, const char* name) {
  BEGIN();
  MODULE(module, handle);
  std::uintptr_t at = 0;
  std::size_t size = 0;
  if (Error error = get_global(module, name, &at, &size)) return error;
  if (address) *address = reinterpret_cast<void*>(at);
  if (nbytes) *nbytes = size;
  return kOk;
}

FAKE_API hipFuncGetAttribute(int* value, int which, void* handle) {
  BEGIN();
  FUNCTION(function, handle);
  if (!function || which < 0 || which > 15) return kInvalidValue;
  *value = which == 0 ? 1024 : which == 4 ? 32 : which == 8 ? 49152 : 0;
  return kOk;
}

FAKE_API hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* handle, int threads, std::size_t) {
  BEGIN();
  FUNCTION(function, handle);
  if (!function || threads < 1 || threads > 1024) return kInvalidValue;
  *blocks = 2048 / threads;
  return kOk;
}

FAKE_API hipModuleLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                  unsigned bz, unsigned shared, hipStream_t stream_handle, void** parameters,
                                  void** extra) {
  BEGIN();
  STREAM(stream, stream_handle);
  FUNCTION(function, handle);
  return launch(stream, function, {{gx, gy, gz}, {bx, by, bz}, shared}, parameters, extra);
}
