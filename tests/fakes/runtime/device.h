// Devices and their streams. A stream is an order; what it enqueues runs on the hardware queue it shares with others.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "errors.h"
#include "queue.h"

namespace fake {

struct Capture;  // capture.h

enum StreamFlags : unsigned { kStreamBlocking = 0, kStreamNonBlocking = 1 };

struct Stream {
  Device* device = nullptr;
  unsigned flags = 0;
  int priority = 0;
  int id = 0;
  Queue* queue = nullptr;  // the default stream's is chosen when it first has something to do
  CompletionPtr last;      // of what was enqueued last
  std::shared_ptr<Capture> capture;
  bool legacy = false;
};

struct Device {
  int ordinal = 0;                                            // as this process counts
  int physical = 0;                                           // as the machine does
  std::atomic<int> fault{0};                                  // sticky: a kernel's fault fails everything after it
  std::map<int, std::vector<std::unique_ptr<Queue>>> queues;  // by priority, where the vendor has a pool for each
  std::set<Stream*> streams;
  Stream* legacy = nullptr;  // the default stream, which orders itself with every blocking stream
  CompletionPtr legacy_last;
  std::atomic<std::uint64_t> peers{0};  // one bit a device (ordinal) whose memory it may touch
  int retains = 0;

  std::string bus_id() const;
  void uuid(char bytes[16]) const;
};

// Guards devices, streams, events, captures and modules: whatever the API's calls touch. Never held while waiting.
std::mutex& state_mutex();

std::vector<std::unique_ptr<Device>>& devices();
Device* device_at(int ordinal);  // null when there is none
Device* device_of_physical(int physical);

// Makes the device fail with an error that every later call on it returns.
void fail(Device& device, Error error, const char* operation, int stream);

Error create_stream(Device& device, unsigned flags, int priority, Stream** stream);
Error destroy_stream(Stream* stream);
Error query_stream(Stream* stream);
Error synchronize_stream(Stream* stream);
Error synchronize_device(Device& device);
// Of calls that a driver lets wait for the device when it likes (allocation, registration, loading of code): here they
// do with FAKE_STRICT=1, and never otherwise.
Error may_synchronize(Device& device);

// The stream that a handle means on this device: null and 1 the default stream, 2 this thread's own; null if none.
Stream* stream_of(Device& device, void* handle);

// Enqueues on the stream's queue, behind what its stream (and `after`) must follow, or adds to the graph it captures.
Error enqueue(Stream* stream, const char* name, Body body, std::vector<CompletionPtr> after = {},
              CompletionPtr* done = nullptr);

// A call that neither works on a capturing stream nor while another capture forbids it: the error to return, and the
// capture is invalid from then on.
Error refuse_capture(Stream* stream);
Error refuse_any_capture();

}  // namespace fake
