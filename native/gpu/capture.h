// Programs of copies in graphs. The number that a signal writes, or that a wait waits for, cannot stand in a graph: it
// would be stale at the second replay. So captured programs have edges of their own, whose words say all that is to be
// known: `ready` counts the messages that were put into a slot, `credit` those that were taken out of it. Message k of
// a call lies in slot k % count, the same at each replay. A sender waits until a slot's words are equal and then adds
// one to `ready`; a receiver waits until `ready` is larger and then adds one to `credit`. Kernels of one thread do
// both.
//
// A driver may run the nodes of a graph in any order that its edges allow, on however few hardware queues. So the order
// in which a program makes progress anyhow is drawn into the graph: what waits for a peer comes after all that this
// rank tells its peers at levels that are lower by a lag (order.py says why nothing gets stuck then).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "gpu/driver.h"
#include "gpu/queue.h"

namespace hetcoll {

// How many captured programs have begun, and how many have ended: on a cache line of this rank's own.
struct CaptureWords {
  std::uint64_t* begun;       // the device's address; `ended` follows it
  const std::uint64_t* seen;  // the host's address of the same
};

class DeviceCapture {
 public:
  using Work = std::function<void(const DeviceAction& action, std::byte* slot, DeviceLanes& lanes)>;

  // `kernels`: see SignalKernels. `staging` as a DeviceQueue's, but never used outside of a capture.
  DeviceCapture(std::shared_ptr<Driver> driver, const DriverFunctions& kernels, std::byte* staging,
                const CaptureWords& words);

  // What programs use in place of the queue's `edge`.
  void AddEdge(std::uint16_t edge, const Slots& slots) { edges_.insert_or_assign(edge, Edge{slots, 0}); }

  // Whether another graph than the one on `user` is being captured with the same streams.
  bool Taken(DeviceStream user);

  // Adds a program to the graph that is captured on `user`; `work` does what needs no peer. All edges must be there.
  void Enqueue(const DeviceProgram& program, std::uint32_t lag, DeviceStream user, const Work& work);

  // Whether a replay is under way.
  bool Busy() const;
  std::byte* staging() const { return staging_; }

 private:
  struct Edge {
    Slots slots;
    std::uint64_t next;  // message of the call
  };
  struct Told {
    std::uint32_t level;
    std::uint32_t event;
  };
  void Order(const DeviceAction& action, std::uint32_t lag);
  DeviceEvent EventAt(std::uint32_t index);
  void Run(const DeviceAction& action, const Work& work);

  std::shared_ptr<Driver> driver_;
  SignalKernels signals_;
  DeviceLanes lanes_;
  std::byte* staging_;
  CaptureWords words_;
  std::map<std::uint16_t, Edge> edges_;

  // Of the program that is being added: by lane, what tells peers anything at this level, and where such a lane was at
  // the end of lower levels; and how many of these places of another lane (second) a lane comes after.
  std::uint32_t level_ = 0;
  std::array<bool, kDeviceLanes> tells_{};
  std::array<std::vector<Told>, kDeviceLanes> told_;
  std::array<std::array<std::size_t, kDeviceLanes>, kDeviceLanes> after_{};
  std::vector<Event> events_;
  std::uint32_t used_events_ = 0;
};

}  // namespace hetcoll
