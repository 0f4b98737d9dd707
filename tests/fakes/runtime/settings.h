// What the environment says about a fake driver, its log, and the errors that a test injects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "errors.h"

namespace fake {

// What differs between the vendors; each front end (cuda/, hip/) defines its own.
struct Vendor {
  const char* name;              // "CUDA", "HIP"
  const char* prefix;            // "cu", "hip": of the names of its functions
  const char* arch;              // of a device, unless FAKE_ARCH says otherwise
  const char* device_name;       // marketing name
  const char* queues_variable;   // how many hardware queues the streams share
  int queues;                    // and how many without it
  const char* visible_variable;  // which devices a process sees
  unsigned warp;                 // threads that run in lock step
  unsigned bus;                  // PCI bus of device 0
  bool cyclic;                   // wait-values compare as counters that wrap around
  bool pools;                    // streams of different priorities share no queue
};
extern const Vendor kVendor;

struct Settings {
  std::vector<int> devices;  // physical numbers of those that this process sees
  std::size_t memory;        // bytes of each
  std::string arch;
  int queues;
  bool peer;             // devices reach each other's memory
  bool stream_waits;     // wait-value and write-value are supported
  bool signal_only;      // a wait-value takes signal memory alone (HIP's GPU_STREAMOPS_CP_WAIT)
  bool dmabuf;           // memory can be exported as a file descriptor
  bool large_bar;        // the host reaches the devices' memory (HIP says so)
  bool strict;           // what may wait for the device to be idle does
  double timeout;        // seconds that a stream may wait for one thing
  bool jitter;           // run operations late, each queue at its own random pace
  std::uint64_t seed;    // of that randomness
  unsigned jitter_us;    // at most so late
  std::string log_path;  // one line a call: "pid tid name"
};

// FAKE_<VENDOR>_<NAME>, else FAKE_<NAME>, else null. Read once, at the first call.
const char* setting(const char* name);
const Settings& settings();

// Every exported function begins with this: it counts and logs the call, and returns the error that a test injected
// (FAKE_FAIL), or that the call may not be made here (after fork, inside a host function).
Error enter(const char* function);

// The error that FAKE_FAIL wants the operation just entered to end with on its stream, once.
Error take_late_error();

// Marks this thread as one that runs a host function, where no call is permitted.
void permit_calls(bool permitted);

// One line to standard error: what went wrong on the "device", which a real driver keeps to itself.
__attribute__((format(printf, 1, 2))) void complain(const char* format, ...);

double now();  // seconds, monotonic

}  // namespace fake
