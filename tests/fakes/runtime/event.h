// Events: a mark in a stream that others query, wait for, and time.
#pragma once

#include <cstddef>
#include <memory>

#include "device.h"
#include "errors.h"

namespace fake {

enum EventFlags : unsigned { kEventBlocking = 1, kEventNoTiming = 2, kEventInterprocess = 4 };

struct SharedMark {  // of an event that several processes know, in memory that they share
  std::atomic<std::uint64_t> recorded;
  std::atomic<std::uint64_t> reached;
};

struct Event {
  Device* device = nullptr;
  unsigned flags = 0;
  CompletionPtr mark;                // of the latest record
  std::shared_ptr<Capture> capture;  // when that was captured
  std::set<std::size_t> nodes;
  std::shared_ptr<SharedMark> shared;
  std::uint64_t shared_id = 0;
  int shared_fd = -1;
};

Error create_event(Device& device, unsigned flags, Event** event);
Error destroy_event(Event* event);
Error record_event(Event* event, Stream* stream);
Error query_event(Event* event);
Error synchronize_event(Event* event);
Error wait_event(Stream* stream, Event* event);
Error elapsed(Event* start, Event* end, float* milliseconds);
bool known_event(Event* event);

Error export_event(Event* event, char handle[64]);
Error import_event(Device& device, const char handle[64], Event** event);

}  // namespace fake
