// Carries a GPU's messages to and from other hosts.
//
// The GPU's streams fill and empty slots of host memory as they do between GPUs of one host (gpu/queue.h); at
// the other end of such a slot is a thread of this proxy, and a link to the peer's proxy. Going out, a thread waits for
// a slot's `ready` word, sends what is in the slot, and writes `credit`; coming in, it waits until the slot is free,
// receives into it, and writes `ready`. Bytes go straight from the slot into the socket and from the socket into the
// slot.
//
// The queue tells the proxy of each message when it enqueues it, so a thread knows what is due: it sleeps when nothing
// is, and a frame that is not the one that was due is found when it comes. An edge may have several links ("stripes"):
// a long message goes through all of them, a part each, so that it is there as soon as it can be, and a short one
// through one. Its number and its length say which, at both ends alike, however many slots each has.
//
// A link is a TCP socket, or one over RDMA (transport/verbs/verbs.h), which stripes over NICs by itself. Slots that are
// registered are sent from and written to where they lie. They may be a GPU's own memory: then NICs alone touch it, or
// the GPU's copier where they fail. All RDMA links belong to one thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/copier.h"
#include "transport/fault.h"
#include "transport/integrity.h"
#include "transport/shm/slots.h"
#include "transport/tcp_mending.h"
#include "transport/transport.h"
#include "transport/verbs/nic.h"

namespace hetcoll {

struct ProxyMessage {
  std::uint64_t number;  // on its edge, from 0 on
  std::uint64_t signature;
  std::size_t nbytes;  // above 0
};

// What goes through one link of it.
struct ProxyPart {
  std::uint64_t number;
  std::uint64_t signature;
  std::size_t begin;
  std::size_t nbytes;
  unsigned parts;  // of that message
};

struct ProxyOptions {
  unsigned threads;
  bool oversubscribed;  // more ranks here than cores: threads that find nothing to do give theirs away at once
  int rank;
  std::string fault{};                // what goes wrong on purpose: FaultSpec::Parse
  std::size_t part_bytes = 64 << 10;  // the least that is worth a link of its own
  Integrity integrity = Integrity::kOff;
};

// A link over RDMA: as VerbsLinkOptions. Rails are a NIC's number and the name of the peer's device.
struct ProxyVerbs {
  std::size_t ring_bytes;
  std::vector<std::pair<int, std::string>> rails;
  std::int64_t recovery_ns = 1'000'000'000;
  // Where the slots lie in memory of GPUs, at both ends.
  std::shared_ptr<Copier> copier = nullptr;
  std::span<std::byte> pinned = {};
};

struct TcpShared;

class ProxyEdge;
class ProxyLane;
class ProxyWorker;

class Proxy : public std::enable_shared_from_this<Proxy> {
 public:
  explicit Proxy(const ProxyOptions& options);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Takes over the connected sockets to the same channel of a peer's proxy, which has as many.
  void Connect(int peer, int channel, std::span<const int> fds);

  // TCP sockets that broke, as Engine's.
  int MendTcp();
  std::vector<LostSocket> TakeLost();
  bool IsLost(const SocketId& id);
  std::optional<Came> HoldSocket(const SocketId& id, std::uint32_t number, bool first);
  bool ResumeSocket(const SocketId& id, std::uint32_t number, int socket, const Came& came);
  void GiveUpSocket(const SocketId& id, const std::string& why);
  std::map<int, std::uint64_t> Undelivered();
  std::uint64_t reconnects();

  // The same for one link over RDMA. A socket that goes with it is wanted, for the handshake, and for what comes after
  // the last rail. `api` stands for the system's libibverbs in tests.
  int AddNic(NicInfo info, const VerbsApi& api);
  void ConnectVerbs(int peer, int channel, const ProxyVerbs& link, std::span<const int> fds);
  // As Engine's.
  int RegisterMemory(std::uintptr_t address, std::size_t nbytes, const std::vector<RegionKey>& keys,
                     std::optional<std::uintptr_t> seen_at);
  bool UnregisterMemory(int handle);
  std::string DescribeLinks();  // JSON
  std::vector<std::pair<std::string, std::uint64_t>> Counters();
  IntegrityCounts integrity();            // of all TCP links
  std::vector<std::string> TakeEvents();  // what RDMA links lost

  // One direction of a connected pair, once for each: `out` of these slots, or into them, which a driver has pinned at
  // one address for the host and the device.
  std::shared_ptr<ProxyEdge> AddEdge(int peer, int channel, bool out, const Slots& slots);

  // Whether every message that was posted is through, or nothing moves any more.
  bool Idle() const;

  // From now on, or no more, a link that fails does not end everything: nothing goes to and comes from its peer any
  // more over the links that there are, streams that wait for it are let go, and `Problem` says what happened.
  void Try(bool on);
  std::string Problem(int peer) const;
  // The same for a link that nothing is wrong with. New links may be made to that peer on other channels.
  void Leave(int peer);

  // Ends everything: streams that wait for a word of this proxy are let go, now and later, and what is in the slots is
  // of no value. The first failure is kept. Callable from any thread. A link that fails ends everything, too, but keeps
  // the streams: they would pass on what they find to ranks that have not heard of it.
  void Fail(FaultKind kind, int peer, const std::string& text);
  // Waits for that, or for Close, or for events to take, or until `until` (NowNs); kNone where nothing failed.
  Failure AwaitFailure(std::int64_t until);

  // Lets the peers see the end of what was sent, for which NICs have until `until`, and gives threads, sockets and NICs
  // back. More than once is fine.
  void Close(std::int64_t until = 0);

  // For people: the messages under way. Callable from any thread.
  std::string Describe() const;
  // Grows while anything moves.
  std::uint64_t moves() const;

 private:
  friend class ProxyEdge;
  struct Links {
    bool verbs = false;
    std::vector<LinkEnds> ends{};         // an end leaves with its edge
    std::vector<ProxyWorker*> workers{};  // of each link: both directions have one thread
  };

  ProxyWorker& AddWorker();
  ProxyWorker& VerbsWorker();
  std::shared_ptr<TcpShared> Share();
  template <class Fn, class Result>
  Result AskMending(const SocketId& id, Fn&& ask, Result none);
  void Stop();
  void Break(FaultKind kind, int peer, const std::string& text);

  ProxyOptions options_;
  FaultInjector injector_;
  int pid_;
  std::map<std::pair<int, int>, Links> links_;  // by peer and channel
  std::vector<std::unique_ptr<ProxyWorker>> workers_;
  ProxyWorker* verbs_ = nullptr;  // the one with RDMA links
  std::size_t turn_ = 0;          // whose the next link is

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<TcpShared>> tcp_;  // of each link
  std::shared_ptr<Mending> mending_;             // of TCP links
  std::map<SocketId, ProxyWorker*> menders_;     // whose sockets they are
  std::vector<std::unique_ptr<ProxyLane>> lanes_;
  std::vector<std::string> events_;
  bool trying_ = false;
  std::map<int, std::string> problems_;  // by peer
  std::condition_variable news_;
  Failure failure_;
  bool stopped_ = false;
  bool let_go_ = false;
};

// One direction between two ranks.
class ProxyEdge {
 public:
  ProxyEdge(std::shared_ptr<Proxy> proxy, std::size_t part_bytes) : proxy_(std::move(proxy)), part_bytes_(part_bytes) {}

  // `m` is the next message: a stream will fill its slot, or wait for it. Callable from one thread at a time.
  void Post(const ProxyMessage& m) const;

 private:
  friend class Proxy;
  std::shared_ptr<Proxy> proxy_;
  std::size_t part_bytes_;
  std::vector<std::pair<ProxyWorker*, ProxyLane*>> lanes_{};  // by link
};

}  // namespace hetcoll
