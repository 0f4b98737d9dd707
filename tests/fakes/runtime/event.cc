#include "event.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <string>

#include "capture.h"
#include "settings.h"

namespace fake {
namespace {

std::set<Event*>& events() {
  static auto* const all = new std::set<Event*>;
  return *all;
}

struct EventHandle {
  char vendor[8];
  std::int32_t process;
  std::int32_t fd;
  std::uint64_t id;
  char unused[40];
};
static_assert(sizeof(EventHandle) == 64);

std::string file_name(const char* kind, int process, std::uint64_t id) {
  return std::string("fake-") + kVendor.name + "-" + kind + "-" + std::to_string(process) + "-" + std::to_string(id);
}

std::shared_ptr<SharedMark> map_mark(int fd) {
  void* memory = mmap(nullptr, sizeof(SharedMark), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<SharedMark*>(memory), [](SharedMark* mark) { munmap(mark, sizeof(SharedMark)); }};
}

Error share(Event& event) {
  static std::uint64_t next = 1;
  event.shared_id = next++;
  int fd = memfd_create(file_name("event", getpid(), event.shared_id).c_str(), MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(SharedMark)) != 0) return kOutOfMemory;
  event.shared_fd = fd;
  event.shared = map_mark(fd);
  return event.shared ? kOk : kOutOfMemory;
}

}  // namespace

bool known_event(Event* event) {
  std::lock_guard lock(state_mutex());
  return events().count(event) != 0;
}

Error create_event(Device& device, unsigned flags, Event** out) {
  if (flags & ~7u) return kInvalidValue;
  if ((flags & kEventInterprocess) && !(flags & kEventNoTiming)) return kInvalidValue;
  std::lock_guard lock(state_mutex());
  auto event = std::make_unique<Event>();
  event->device = &device;
  event->flags = flags;
  if (flags & kEventInterprocess) {
    if (Error error = share(*event)) return error;
  }
  *out = *events().insert(event.release()).first;
  return kOk;
}

Error destroy_event(Event* event) {
  std::lock_guard lock(state_mutex());
  events().erase(event);
  std::unique_ptr<Event> owned(event);
  if (owned->shared_fd >= 0) close(owned->shared_fd);
  return kOk;
}

Error record_event(Event* event, Stream* stream) {
  std::shared_ptr<SharedMark> shared;
  std::uint64_t number = 0;
  {
    std::lock_guard lock(state_mutex());
    if (stream->device != event->device) return kInvalidHandle;
    event->capture = stream->capture;
    if (stream->capture) {
      if (!stream->capture->valid) return kCaptureInvalidated;
      event->nodes = stream->capture->tips[stream];
      return kOk;  // an edge of the graph, not an operation
    }
    shared = event->shared;
    if (shared) number = shared->recorded.fetch_add(1) + 1;
  }
  Body body = [shared, number](Execution&) {
    if (shared) shared->reached.store(number, std::memory_order_release);
    return kOk;
  };
  CompletionPtr mark;
  if (Error error = enqueue(stream, "event record", std::move(body), {}, &mark)) return error;
  std::lock_guard lock(state_mutex());
  event->mark = mark;
  return kOk;
}

Error query_event(Event* event) {
  std::lock_guard lock(state_mutex());
  if (event->capture) {
    invalidate(*event->capture);
    return kCapturedEvent;
  }
  if (Error error = refuse_any_capture()) return error;
  if (int fault = event->device->fault.load()) return static_cast<Error>(fault);
  if (event->shared) return event->shared->reached.load() >= event->shared->recorded.load() ? kOk : kNotReady;
  return !event->mark || event->mark->done() ? kOk : kNotReady;
}

Error synchronize_event(Event* event) {
  CompletionPtr mark;
  std::shared_ptr<SharedMark> shared;
  Device& device = *event->device;
  {
    std::lock_guard lock(state_mutex());
    if (event->capture) {
      invalidate(*event->capture);
      return kCapturedEvent;
    }
    mark = event->mark;
    shared = event->shared;
  }
  if (shared) {
    std::uint64_t wanted = shared->recorded.load();
    Execution host(device, -1);
    return host.until([&] { return shared->reached.load(std::memory_order_acquire) >= wanted; },
                      [] { return std::string("for another process's event"); });
  }
  if (mark) mark->wait();
  return static_cast<Error>(device.fault.load());
}

Error wait_event(Stream* stream, Event* event) {
  CompletionPtr mark;
  std::shared_ptr<SharedMark> shared;
  {
    std::lock_guard lock(state_mutex());
    if (event->capture && event->capture->open) {
      if (stream->capture && stream->capture != event->capture) {
        invalidate(*stream->capture);
        invalidate(*event->capture);
        return kCaptureMerge;
      }
      join_capture(stream, event->capture, event->nodes);
      return kOk;
    }
    if (event->capture) {  // of a graph that is captured already
      if (stream->capture) invalidate(*stream->capture);
      return kCapturedEvent;
    }
    if (stream->capture) {
      if (!event->mark) return kOk;
      invalidate(*stream->capture);  // on work outside of the graph
      return kCaptureIsolation;
    }
    mark = event->mark;
    shared = event->shared;
  }
  if (shared) {
    std::uint64_t wanted = shared->recorded.load();
    return enqueue(stream, "event wait", [shared, wanted](Execution& execution) {
      return execution.until([&] { return shared->reached.load(std::memory_order_acquire) >= wanted; },
                             [] { return std::string("for another process's event"); });
    });
  }
  if (!mark) return kOk;
  return enqueue(stream, "event wait", [](Execution&) { return kOk; }, {mark});
}

Error elapsed(Event* start, Event* end, float* milliseconds) {
  std::lock_guard lock(state_mutex());
  if ((start->flags | end->flags) & kEventNoTiming) return kInvalidHandle;
  if (!start->mark || !end->mark) return kInvalidHandle;
  if (!start->mark->done() || !end->mark->done()) return kNotReady;
  *milliseconds = static_cast<float>(1e3 * (end->mark->time() - start->mark->time()));
  return kOk;
}

Error export_event(Event* event, char out[64]) {
  std::lock_guard lock(state_mutex());
  if (!event->shared || event->shared_fd < 0) return kInvalidHandle;
  EventHandle handle{};
  std::strncpy(handle.vendor, kVendor.name, sizeof handle.vendor - 1);
  handle.process = getpid();
  handle.fd = event->shared_fd;
  handle.id = event->shared_id;
  std::memcpy(out, &handle, sizeof handle);
  return kOk;
}

Error import_event(Device& device, const char in[64], Event** out) {
  EventHandle handle;
  std::memcpy(&handle, in, sizeof handle);
  if (std::strncmp(handle.vendor, kVendor.name, sizeof handle.vendor) != 0) return kInvalidValue;
  if (handle.process == getpid()) return kInvalidContext;
  std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.fd);
  std::string wanted = "/memfd:" + file_name("event", handle.process, handle.id) + " ";
  char name[128] = {};
  if (readlink(path.c_str(), name, sizeof name - 1) < 0 || std::strncmp(name, wanted.c_str(), wanted.size()) != 0) {
    return kInvalidValue;
  }
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidValue;
  auto event = std::make_unique<Event>();
  event->device = &device;
  event->flags = kEventInterprocess | kEventNoTiming;
  event->shared = map_mark(fd);
  close(fd);
  if (!event->shared) return kOutOfMemory;
  std::lock_guard lock(state_mutex());
  *out = *events().insert(event.release()).first;
  return kOk;
}

}  // namespace fake
