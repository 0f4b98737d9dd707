// libcuda: streams, events, values in memory that streams wait for, host functions, graphs.
#include <cstring>

#include "capture.h"
#include "driver.h"
#include "event.h"
#include "operations.h"

using namespace fake;
using namespace fake::cuda;

#define EVENT(name, handle)                 \
  auto* name = static_cast<Event*>(handle); \
  if (!name || !known_event(name)) return kInvalidHandle

FAKE_API cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
  BEGIN();
  DEVICE(device);
  if (flags > 1) return kInvalidValue;
  Stream* stream = nullptr;
  Error error = create_stream(*device, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority, &stream);
  *out = stream;
  return error;
}

FAKE_API cuStreamCreate(CUstream* out, unsigned flags) {
  BEGIN();
  DEVICE(device);
  if (flags > 1) return kInvalidValue;
  Stream* stream = nullptr;
  Error error = create_stream(*device, flags, 0, &stream);
  *out = stream;
  return error;
}

FAKE_API cuStreamDestroy_v2(CUstream handle) {
  BEGIN();
  if (reinterpret_cast<std::uintptr_t>(handle) <= 2) return kInvalidHandle;
  STREAM(stream, handle);
  return destroy_stream(stream);
}

FAKE_API cuStreamQuery(CUstream handle) {
  BEGIN();
  STREAM(stream, handle);
  return query_stream(stream);
}

FAKE_API cuStreamSynchronize(CUstream handle) {
  BEGIN();
  STREAM(stream, handle);
  return synchronize_stream(stream);
}

FAKE_API cuStreamGetPriority(CUstream handle, int* priority) {
  BEGIN();
  STREAM(stream, handle);
  *priority = stream->priority;
  return kOk;
}

FAKE_API cuStreamGetFlags(CUstream handle, unsigned* flags) {
  BEGIN();
  STREAM(stream, handle);
  *flags = stream->flags;
  return kOk;
}

FAKE_API cuStreamGetId(CUstream handle, unsigned long long* id) {
  BEGIN();
  STREAM(stream, handle);
  *id = static_cast<unsigned long long>(stream->id);
  return kOk;
}

FAKE_API cuStreamGetCtx(CUstream handle, void** context) {
  BEGIN();
  STREAM(stream, handle);
  *context = primary(*stream->device);
  return kOk;
}

FAKE_API cuStreamGetDevice(CUstream handle, CUdevice* ordinal) {
  BEGIN();
  STREAM(stream, handle);
  *ordinal = stream->device->ordinal;
  return kOk;
}

FAKE_API cuStreamWaitEvent(CUstream handle, void* event_handle, unsigned) {
  BEGIN();
  STREAM(stream, handle);
  EVENT(event, event_handle);
  return wait_event(stream, event);
}

FAKE_API cuEventCreate(void** out, unsigned flags) {
  BEGIN();
  DEVICE(device);
  Event* event = nullptr;
  Error error = create_event(*device, flags, &event);
  *out = event;
  return error;
}

FAKE_API cuEventDestroy_v2(void* handle) {
  BEGIN();
  EVENT(event, handle);
  return destroy_event(event);
}

FAKE_API cuEventRecord(void* handle, CUstream stream_handle) {
  BEGIN();
  EVENT(event, handle);
  STREAM(stream, stream_handle);
  return record_event(event, stream);
}

FAKE_API cuEventRecordWithFlags(void* handle, CUstream stream_handle, unsigned flags) {
  BEGIN();
  if (flags != 0) return flags == 1 ? kNotSupported : kInvalidValue;  // 1: a record node of a graph
  EVENT(event, handle);
  STREAM(stream, stream_handle);
  return record_event(event, stream);
}

FAKE_API cuEventQuery(void* handle) {
  BEGIN();
  EVENT(event, handle);
  return query_event(event);
}

FAKE_API cuEventSynchronize(void* handle) {
  BEGIN();
  EVENT(event, handle);
  return synchronize_event(event);
}

FAKE_API cuEventElapsedTime_v2(float* milliseconds, void* start_handle, void* end_handle) {
  BEGIN();
  EVENT(start, start_handle);
  EVENT(end, end_handle);
  return elapsed(start, end, milliseconds);
}

FAKE_API cuIpcGetEventHandle(char* out, void* handle) {
  BEGIN();
  EVENT(event, handle);
  return export_event(event, out);
}

struct IpcEventHandle {  // passed by value
  char bytes[64];
};

FAKE_API cuIpcOpenEventHandle(void** out, IpcEventHandle handle) {
  BEGIN();
  DEVICE(device);
  Event* event = nullptr;
  Error error = import_event(*device, handle.bytes, &event);
  *out = event;
  return error;
}

namespace {

constexpr unsigned kFlush = 1u << 30;

Error wait_word(CUstream handle, CUdeviceptr address, std::uint64_t value, unsigned flags, std::size_t width) {
  STREAM(stream, handle);
  if ((flags & ~kFlush) > 3) return kInvalidValue;
  return wait_value(stream, address, value, static_cast<Compare>(flags & 3), ~0ull, width);
}

Error write_word(CUstream handle, CUdeviceptr address, std::uint64_t value, unsigned flags, std::size_t width) {
  STREAM(stream, handle);
  if (flags > 1) return kInvalidValue;
  return write_value(stream, address, value, width);
}

}  // namespace

FAKE_API cuStreamWaitValue32_v2(CUstream handle, CUdeviceptr address, std::uint32_t value, unsigned flags) {
  BEGIN();
  return wait_word(handle, address, value, flags, 4);
}

FAKE_API cuStreamWaitValue64_v2(CUstream handle, CUdeviceptr address, std::uint64_t value, unsigned flags) {
  BEGIN();
  return wait_word(handle, address, value, flags, 8);
}

FAKE_API cuStreamWriteValue32_v2(CUstream handle, CUdeviceptr address, std::uint32_t value, unsigned flags) {
  BEGIN();
  return write_word(handle, address, value, flags, 4);
}

FAKE_API cuStreamWriteValue64_v2(CUstream handle, CUdeviceptr address, std::uint64_t value, unsigned flags) {
  BEGIN();
  return write_word(handle, address, value, flags, 8);
}

struct BatchOperation {  // CUstreamBatchMemOpParams
  int operation;
  CUdeviceptr address;
  std::uint64_t value;
  unsigned flags;
  CUdeviceptr alias;
  std::uint64_t unused;
};
static_assert(sizeof(BatchOperation) == 48);

FAKE_API cuStreamBatchMemOp_v2(CUstream handle, unsigned count, BatchOperation* operations, unsigned) {
  BEGIN();
  if (count > 256) return kInvalidValue;
  for (unsigned i = 0; i < count; ++i) {
    const BatchOperation& each = operations[i];
    std::uint64_t low = each.value & 0xFFFFFFFFu;
    Error error = kInvalidValue;
    if (each.operation == 1) error = wait_word(handle, each.address, low, each.flags, 4);
    if (each.operation == 2) error = write_word(handle, each.address, low, each.flags, 4);
    if (each.operation == 4) error = wait_word(handle, each.address, each.value, each.flags, 8);
    if (each.operation == 5) error = write_word(handle, each.address, each.value, each.flags, 8);
    if (each.operation == 3 || each.operation == 6) error = kOk;  // flush, barrier: every operation here is both
    if (error != kOk) return error;
  }
  return kOk;
}

FAKE_API cuFlushGPUDirectRDMAWrites(int, int) {
  BEGIN();
  DEVICE(device);
  return device ? kOk : kInvalidContext;
}

FAKE_API cuLaunchHostFunc(CUstream handle, void (*function)(void*), void* argument) {
  BEGIN();
  STREAM(stream, handle);
  return host_function(stream, function, argument);
}

FAKE_API cuStreamBeginCapture_v2(CUstream handle, int mode) {
  BEGIN();
  STREAM(stream, handle);
  return begin_capture(stream, mode);
}

FAKE_API cuStreamEndCapture(CUstream handle, void** out) {
  BEGIN();
  STREAM(stream, handle);
  Graph* graph = nullptr;
  Error error = end_capture(stream, &graph);
  *out = graph;
  return error;
}

FAKE_API cuStreamIsCapturing(CUstream handle, int* status) {
  BEGIN();
  STREAM(stream, handle);
  int id = 0;
  *status = capture_status(stream, &id);
  return kOk;
}

FAKE_API cuStreamGetCaptureInfo_v3(CUstream handle, int* status, std::uint64_t* id, void** graph, const void** edges,
                                      const void** edge_data, std::size_t* count) {
  BEGIN();
  STREAM(stream, handle);
  int number = 0;
  *status = capture_status(stream, &number);
  if (id) *id = static_cast<std::uint64_t>(number);
  if (graph) *graph = nullptr;
  if (edges) *edges = nullptr;
  if (edge_data) *edge_data = nullptr;
  if (count) *count = 0;
  return kOk;
}

FAKE_API cuStreamGetCaptureInfo_v2(CUstream handle, int* status, std::uint64_t* id, void** graph, const void** edges,
                                      std::size_t* count) {
  return cuStreamGetCaptureInfo_v3(handle, status, id, graph, edges, nullptr, count);
}

FAKE_API cuThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN();
  return exchange_capture_mode(mode);
}

#define GRAPH(name, handle, executable)     \
  auto* name = static_cast<Graph*>(handle); \
  if (!known_graph(name, executable)) return kInvalidValue

FAKE_API cuGraphInstantiateWithFlags(void** out, void* handle, unsigned long long) {
  BEGIN();
  GRAPH(graph, handle, false);
  Graph* executable = nullptr;
  Error error = instantiate(graph, &executable);
  *out = executable;
  return error;
}

FAKE_API cuGraphInstantiateWithParams(void** out, void* handle, std::uint64_t* parameters) {
  int error = cuGraphInstantiateWithFlags(out, handle, parameters[0]);
  parameters[2] = 0;  // no node at fault
  std::uint32_t result = error == kOk ? 0 : 1;
  std::memcpy(&parameters[3], &result, sizeof result);
  return error;
}

FAKE_API cuGraphGetNodes(void* handle, void** nodes, std::size_t* count) {
  BEGIN();
  GRAPH(graph, handle, false);
  for (std::size_t i = 0; nodes && i < *count; ++i) {
    nodes[i] = i < graph->nodes.size() ? const_cast<Node*>(graph->nodes[i].get()) : nullptr;
  }
  if (!nodes || *count > graph->nodes.size()) *count = graph->nodes.size();
  return kOk;
}

FAKE_API cuGraphUpload(void* handle, CUstream stream_handle) {
  BEGIN();
  GRAPH(graph, handle, true);
  STREAM(stream, stream_handle);
  return graph && stream ? kOk : kInvalidValue;
}

FAKE_API cuGraphLaunch(void* handle, CUstream stream_handle) {
  BEGIN();
  GRAPH(graph, handle, true);
  STREAM(stream, stream_handle);
  return launch_graph(graph, stream);
}

FAKE_API cuGraphExecDestroy(void* handle) {
  BEGIN();
  GRAPH(graph, handle, true);
  return destroy_graph(graph);
}

FAKE_API cuGraphDestroy(void* handle) {
  BEGIN();
  GRAPH(graph, handle, false);
  return destroy_graph(graph);
}
