#include "device.h"

#include <cstdio>
#include <cstring>

#include "capture.h"
#include "memory.h"
#include "settings.h"

namespace fake {
namespace {

std::atomic<int> next_stream{1};

std::unique_ptr<Stream> new_stream(Device& device, unsigned flags, int priority) {
  auto stream = std::make_unique<Stream>();
  stream->device = &device;
  stream->flags = flags;
  stream->priority = priority;
  stream->id = next_stream++;
  return stream;
}

std::unique_ptr<Device> new_device(int ordinal, int physical) {
  auto device = std::make_unique<Device>();
  device->ordinal = ordinal;
  device->physical = physical;
  const int most = kVendor.pools ? 1 : 0;
  for (int priority = -most; priority <= most; ++priority) {
    for (int i = 0; i < settings().queues; ++i) {
      device->queues[priority].push_back(std::make_unique<Queue>(*device, i));
    }
  }
  auto legacy = new_stream(*device, kStreamBlocking, 0);
  legacy->id = 0;
  legacy->legacy = true;
  device->legacy = legacy.get();
  device->streams.insert(legacy.release());
  return device;
}

// The queue that the fewest streams share, as the drivers choose: as long as there are no more streams than queues,
// none holds up another.
Queue* least_shared(Device& device, int priority) {
  std::map<Queue*, int> users;
  for (Stream* stream : device.streams) ++users[stream->queue];
  Queue* best = nullptr;
  for (auto& queue : device.queues[kVendor.pools ? priority : 0]) {
    if (!best || users[queue.get()] < users[best]) best = queue.get();
  }
  return best;
}

// What the default stream's peculiar order asks for: it follows all blocking streams, and they follow it.
void order_with_default(Stream* stream, std::vector<CompletionPtr>* after) {
  Device& device = *stream->device;
  if (stream->legacy) {
    for (Stream* other : device.streams) {
      if (!(other->flags & kStreamNonBlocking) && other->last && !other->last->done()) after->push_back(other->last);
    }
  } else if (!(stream->flags & kStreamNonBlocking) && device.legacy_last && !device.legacy_last->done()) {
    after->push_back(device.legacy_last);
  }
}

}  // namespace

std::string Device::bus_id() const {
  char text[16];
  std::snprintf(text, sizeof text, "0000:%02X:00.0", kVendor.bus + static_cast<unsigned>(physical));
  return text;
}

void Device::uuid(char bytes[16]) const {
  std::memset(bytes, 0, 16);
  std::snprintf(bytes, 16, "fake-%s-%02d", kVendor.name, physical);
}

std::mutex& state_mutex() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}

std::vector<std::unique_ptr<Device>>& devices() {
  static auto* const all = [] {
    auto* made = new std::vector<std::unique_ptr<Device>>;
    for (std::size_t i = 0; i < settings().devices.size(); ++i) {
      made->push_back(new_device(static_cast<int>(i), settings().devices[i]));
    }
    return made;
  }();
  return *all;
}

Device* device_at(int ordinal) {
  if (ordinal < 0 || static_cast<std::size_t>(ordinal) >= devices().size()) return nullptr;
  return devices()[static_cast<std::size_t>(ordinal)].get();
}

Device* device_of_physical(int physical) {
  for (auto& device : devices()) {
    if (device->physical == physical) return device.get();
  }
  return nullptr;
}

void fail(Device& device, Error error, const char* operation, int stream) {
  int none = 0;
  if (device.fault.compare_exchange_strong(none, error)) {
    complain("device %d: %s on stream %d failed with error %d", device.ordinal, operation, stream, error);
  }
}

Error create_stream(Device& device, unsigned flags, int priority, Stream** stream) {
  std::lock_guard lock(state_mutex());
  *stream = new_stream(device, flags, priority).release();
  (*stream)->queue = least_shared(device, priority);
  device.streams.insert(*stream);
  return kOk;
}

Error destroy_stream(Stream* stream) {
  std::lock_guard lock(state_mutex());
  if (stream->legacy) return kInvalidHandle;
  if (stream->capture) invalidate(*stream->capture);
  stream->device->streams.erase(stream);
  std::unique_ptr<Stream> owned(stream);
  return kOk;
}

Error query_stream(Stream* stream) {
  std::lock_guard lock(state_mutex());
  if (Error error = refuse_capture(stream)) return error;
  if (Error error = refuse_any_capture()) return error;
  bool busy = stream->last && !stream->last->done();
  if (int fault = stream->device->fault.load()) return static_cast<Error>(fault);
  return busy ? kNotReady : kOk;
}

Error synchronize_stream(Stream* stream) {
  CompletionPtr last;
  Device& device = *stream->device;
  {
    std::lock_guard lock(state_mutex());
    if (Error error = refuse_capture(stream)) return error;
    if (stream->legacy) {  // as seen on H200s: not in another stream's capture
      if (Error error = refuse_any_capture()) return error;
    }
    last = stream->last;
  }
  if (last) last->wait();
  return static_cast<Error>(device.fault.load());
}

Error synchronize_device(Device& device) {
  std::vector<CompletionPtr> ends;
  {
    std::lock_guard lock(state_mutex());
    if (Error error = refuse_any_capture()) return error;
    for (Stream* stream : device.streams) {
      if (stream->last) ends.push_back(stream->last);
    }
  }
  for (const CompletionPtr& end : ends) end->wait();
  return static_cast<Error>(device.fault.load());
}

Error may_synchronize(Device& device) { return settings().strict ? synchronize_device(device) : kOk; }

Stream* stream_of(Device& device, void* handle) {
  thread_local std::map<Device*, Stream*> own;
  auto value = reinterpret_cast<std::uintptr_t>(handle);
  if (value <= 1) return device.legacy;
  if (value == 2) {
    Stream*& stream = own[&device];
    if (!stream) create_stream(device, kStreamBlocking, 0, &stream);
    return stream;
  }
  std::lock_guard lock(state_mutex());
  for (auto& each : devices()) {
    auto found = each->streams.find(static_cast<Stream*>(handle));
    if (found != each->streams.end()) return *found;
  }
  return nullptr;
}

Error enqueue(Stream* stream, const char* name, Body body, std::vector<CompletionPtr> after, CompletionPtr* done) {
  Error late = take_late_error();
  if (late != kOk) body = [late](Execution&) { return late; };
  std::lock_guard lock(state_mutex());
  Device& device = *stream->device;
  if (int fault = device.fault.load()) return static_cast<Error>(fault);
  if (stream->capture) return add_node(stream, name, std::move(body));
  if (stream->legacy) {
    if (Error error = refuse_default_stream(device)) return error;
  }
  if (!stream->queue) stream->queue = least_shared(device, stream->priority);
  order_with_default(stream, &after);
  Operation operation{name, stream->id, std::move(body), std::move(after), std::make_shared<Completion>()};
  stream->last = operation.done;
  if (stream->legacy) device.legacy_last = operation.done;
  if (done) *done = operation.done;
  stream->queue->push(std::move(operation));
  return kOk;
}

}  // namespace fake
