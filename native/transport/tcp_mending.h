// TCP sockets that broke and are made again: what the transport tells of them, and what it is told.
//
// A socket that was reset (by a firewall, a NAT that forgot it, a path that was down for too long) between two ranks
// that live is mended; one that was closed in order is the peer's end, as ever. What was reset loses what its sender's
// kernel still held, and nothing else: what the receiver's kernel has acknowledged can be read after a reset, too
// (Linux keeps it; native/tests/tcp_mending_test.cc). So each end reads all of that, counts the bytes that ever came,
// and closes its end for good before it tells that count; the other end sends the rest again. Making the connection,
// with the job's proofs, is src/hetcoll/links/mending.py's affair; both ends number the tries.
//
// A receiver that finds a piece spoiled (HETCOLL_INTEGRITY) breaks the socket itself, and names that piece beside the
// count: it comes first over the new one.
#pragma once

#include <poll.h>

#include <atomic>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace hetcoll {

class Sockets;

// One socket between two ranks.
struct SocketId {
  int peer;
  int channel;
  std::uint32_t stripe;
  auto operator<=>(const SocketId&) const = default;
};

struct LostSocket {
  SocketId id;
  std::uint32_t tries;  // at making it again, so far
  bool held;            // the peer makes it again, and does so perhaps in vain
  bool spoiled;         // this end broke it, for what came over it
  std::string why;
};

// What an end says of the stream that comes to it, when a socket is made again.
struct Came {
  std::uint64_t total;       // bytes that ever came
  std::uint64_t spoiled_at;  // of them, the first of those that were spoiled
  std::uint32_t spoiled;     // how many these are; 0: none
  bool operator==(const Came&) const = default;
};
inline constexpr Came kLeft{~std::uint64_t{0}, 0, 0};  // this end has left: nobody will make the socket again

// The sockets of one owner that are mended. What concerns one of them is called under the lock, or on the thread, that
// is over its link; the rest from any.
class Mending {
 public:
  struct Place {
    std::weak_ptr<Sockets> sockets;
    std::uint32_t stripe = 0;  // of them
  };
  // Sockets that were made again, and have perhaps something to send again: a list of one lock, or thread.
  using Resumed = std::vector<Place>;

  Mending();
  ~Mending();
  Mending(const Mending&) = delete;
  Mending& operator=(const Mending&) = delete;

  int fd() const { return fd_; }  // readable while there are lost ones to take
  void Close();                   // it is no more
  void Add(const SocketId& first, const std::shared_ptr<Sockets>& sockets);
  void Lose(LostSocket lost);
  std::vector<LostSocket> TakeLost();
  bool IsLost(const SocketId& id) const;
  // A try at making it again begins, the `number`th: what came, or nothing if that try is to be refused, since there
  // was a later one. `first` of two tries with the same number counts: the lower rank's. Whatever there was of the
  // socket is closed. kLeft: nobody here uses it any more.
  std::optional<Came> Hold(const SocketId& id, std::uint32_t number, bool first) const;
  // That try came through; this came to the peer. Takes the socket over, unless it is false: there was a later try, or
  // more was found spoiled meanwhile. Throws Fault where the peer lacks what cannot be sent again.
  bool Resume(const SocketId& id, std::uint32_t number, int socket, const Came& came, Resumed& resumed);

  // How many bytes that were sent over it the peer's kernel may lack: what is lost when this end is no more and the
  // connection breaks.
  std::uint64_t Undelivered(const SocketId& id) const;
  // What `count` says of each socket, summed by peer.
  template <class Count>
  std::map<int, std::uint64_t> ByPeer(Count&& count) const {
    std::map<int, std::uint64_t> sums;
    for (const SocketId& id : Ids()) {
      const std::uint64_t n = count(id);
      if (n > 0) sums[id.peer] += n;
    }
    return sums;
  }

  // It will not be made again: calls that need it fail with that.
  void GiveUp(const SocketId& id, const std::string& why) const;

  // Sends again what it can, and adds what to wait for.
  static void Flush(Resumed& resumed, std::vector<pollfd>& fds);

  std::atomic<std::uint64_t> made{0};  // again, so far

 private:
  Place Find(const SocketId& id) const;
  std::vector<SocketId> Ids() const;

  int fd_;
  mutable std::mutex mutex_;
  std::map<SocketId, Place> sockets_;
  std::vector<LostSocket> lost_;
};

// Has the kernel reset a connection, as a firewall would: both ends lose what was under way. For HETCOLL_FAULT and
// tests; it takes CAP_NET_ADMIN. Throws Fault.
void ResetConnection(int fd);

}  // namespace hetcoll
