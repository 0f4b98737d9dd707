// Carries a GPU's messages to and from other hosts.
//
// The GPU's streams fill and empty slots of host memory as they do between GPUs of one host (engine/device_queue.h); at
// the other end of such a slot is a thread of this relay, and a link to the peer's relay. Going out, a thread waits for
// a slot's `ready` word, sends what is in the slot, and writes `credit`; coming in, it waits until the slot is free,
// receives into it, and writes `ready`. Bytes go straight from the slot into the socket and from the socket into the
// slot.
//
// The queue tells the relay of each message when it enqueues it, so a thread knows what is due: it sleeps when nothing
// is, and a frame that is not the one that was due is found when it comes. An edge may have several links ("stripes"):
// what lies in slot s goes through link s % links, so both ends know where to look.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/fault.h"
#include "transport/slots.h"
#include "transport/transport.h"

namespace hetcoll {

struct RelayMessage {
  std::uint64_t number;  // on its edge, from 0 on
  std::uint64_t signature;
  std::size_t nbytes;  // above 0
};

struct RelayOptions {
  unsigned threads;
  bool oversubscribed;  // more ranks here than cores: threads that find nothing to do give theirs away at once
  int rank;
  std::string fault{};  // what goes wrong on purpose: FaultSpec::Parse
};

class RelayEdge;

class Relay : public std::enable_shared_from_this<Relay> {
 public:
  explicit Relay(const RelayOptions& options);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Takes over the connected sockets to the same channel of a peer's relay, which has as many.
  void Connect(int peer, int channel, std::span<const int> fds);

  // One direction of a connected pair, once for each: `out` of these slots, or into them, which a driver has pinned at
  // one address for the host and the device.
  std::shared_ptr<RelayEdge> AddEdge(int peer, int channel, bool out, const Slots& slots);

  // Whether every message that was posted is through, or nothing moves any more.
  bool Idle() const;

  // Ends everything: streams that wait for a word of this relay are let go, now and later, and what is in the slots is
  // of no value. The first failure is kept. Callable from any thread.
  void Fail(FaultKind kind, int peer, const std::string& text);
  // Waits for that, or for Close, or until `until` (NowNs); kNone where nothing failed.
  Failure AwaitFailure(std::int64_t until);

  // Lets the peers see the end of what was sent and gives threads and sockets back. More than once is fine.
  void Close();

  // For people: the messages under way. Callable from any thread.
  std::string Describe() const;
  // Grows while anything moves.
  std::uint64_t moves() const;

 private:
  friend class RelayEdge;
  class Lane;
  class Worker;

  void Stop();

  RelayOptions options_;
  FaultInjector injector_;
  int pid_;
  std::map<std::pair<int, int>, std::vector<LinkEnds>> links_;  // by peer and channel; an end leaves with its edge
  std::vector<std::unique_ptr<Worker>> workers_;
  std::size_t turn_ = 0;  // whose the next lane is

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::condition_variable news_;
  Failure failure_;
  bool stopped_ = false;
};

// One direction between two ranks.
class RelayEdge {
 public:
  RelayEdge(std::shared_ptr<Relay> relay, unsigned slots) : relay_(std::move(relay)), slots_(slots) {}

  // `m` is the next message: a stream will fill its slot, or wait for it. Callable from one thread at a time.
  void Post(const RelayMessage& m) const;

 private:
  friend class Relay;
  std::shared_ptr<Relay> relay_;
  unsigned slots_;
  std::vector<std::pair<Relay::Worker*, Relay::Lane*>> lanes_{};  // by link
};

}  // namespace hetcoll
