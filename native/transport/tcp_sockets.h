// The sockets of one TCP link, and what a call sends or receives on one of them.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/tcp_mending.h"
#include "transport/tcp_sent.h"
#include "transport/tls.h"

namespace hetcoll {

struct Holdings;
struct TcpShared;

// Adds a connected socket, and the most that the kernel keeps in it: its buffers grow up to that by themselves.
void CountSocket(int fd, Holdings& held);

// What one call sends: a header, data, and the data's checksum, each of which may be nothing.
struct Parts {
  const std::byte* header;
  std::size_t head;
  const std::byte* data;
  std::size_t n;
  const std::byte* tail = nullptr;
  std::size_t tail_size = 0;
  bool checked = false;  // there is a checksum, here or in a later call

  std::size_t size() const { return head + n + tail_size; }
  void CopyTo(std::byte* to) const;
  Parts Cut(std::size_t most) const;  // the first bytes
};

class Sockets {
 public:
  Sockets(std::span<const int> fds, const SocketId& first, std::shared_ptr<TcpShared> shared);
  ~Sockets() { Close(); }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  std::uint32_t count() const { return static_cast<std::uint32_t>(stripes_.size()); }
  int fd(std::uint32_t stripe) const { return stripes_[stripe].fd; }  // -1: it is being made again
  int peer() const { return first_.peer; }

  // As send(2) and recv(2) do.
  ssize_t Send(std::uint32_t stripe, const Parts& parts);
  // What poll(2) is to wait for where `Send` found no room.
  short RoomEvents() const { return until_end_ == kEnded ? POLLRDHUP : POLLOUT; }
  // Takes all of it, and copies it: what the socket does not take now is left to `Flush`.
  void Queue(std::uint32_t stripe, const Parts& parts);
  bool queued(std::uint32_t stripe) const { return stripes_[stripe].owes + stripes_[stripe].behind > 0; }
  ssize_t Receive(std::uint32_t stripe, std::byte* header, std::size_t head, std::byte* data, std::size_t n);
  // After such a call that failed: throws, unless the socket will be made again.
  void Lost(std::uint32_t stripe, const char* what);

  // Where the link checks what it carries. The n bytes that came before `behind`, the last ones received, were spoiled:
  // they come once more, and `behind` after them. Only where sockets are mended.
  void AskAgain(std::uint32_t stripe, std::size_t n, std::span<const std::byte> behind, const std::string& why);
  bool mends() const { return mends_; }
  // All that was received but the last bytes, so many, is right; the peer says that `theirs` of what it got is. And
  // how much is right here.
  void NoteRight(std::uint32_t stripe, std::size_t but, std::uint64_t theirs) {
    Stripe& s = stripes_[stripe];
    s.right = s.received - but;
    std::uint64_t sent = s.sent.total();
    if (odd_) [[unlikely]] {
      s.right -= s.saved.size() - s.taken;
      if (!mends_) return;  // nothing is kept, nor counted
      sent -= s.behind;
      if (s.owes > 0) sent = std::min(sent, s.owes_at);
    }
    if (theirs <= s.theirs) return;
    if (theirs > sent) FailUnsent();
    s.theirs = theirs;
  }
  std::uint64_t right(std::uint32_t stripe) const { return stripes_[stripe].right; }

  void Count(Holdings& held) const;
  void Close() const;
  void Shutdown() const;

  // Whether the stripes are of several network cards, of which one may be slow.
  bool spread() const { return spread_; }
  // The next stripe after `stripe` that would take something now, which may be the same one; if any. Throws where
  // `stripe` never will.
  struct Room {
    std::uint16_t stripe;
    bool all;  // of them would
  };
  std::optional<Room> FindRoom(std::uint32_t stripe) const;

  // Whether data that was sent must stay where it lies; until `Keep`.
  bool lends() const { return lends_; }
  void Keep();

  // What `Mending` asks for one of them.
  bool down(std::uint32_t stripe) const { return stripes_[stripe].fd < 0; }
  void GiveUp(std::uint32_t stripe, std::string why) { stripes_[stripe].given_up = std::move(why); }
  std::optional<Came> Hold(std::uint32_t stripe, std::uint32_t number, bool first);
  bool Resume(std::uint32_t stripe, std::uint32_t number, int socket, const Came& came);
  std::uint64_t Undelivered(std::uint32_t stripe);
  int Flush(std::uint32_t stripe);  // the descriptor to wait for until it can go on, or -1

 private:
  struct Stripe {
    int fd = -1;
    std::shared_ptr<Tls> tls;  // null: nothing is encrypted
    SentBytes sent;
    std::uint64_t behind = 0;   // of them, those at the end that have yet to be sent, or sent again
    std::uint64_t theirs = 0;   // of them, those that came right, as the peer said last
    std::uint64_t owes_at = 0;  // of them, those that were spoiled and have yet to be sent again
    std::uint32_t owes = 0;
    std::uint64_t received = 0;    // bytes that ever came
    std::uint64_t right = 0;       // of them, those that need not come again
    std::vector<std::byte> saved;  // of them, what nobody has taken: it came before the socket broke
    std::size_t taken = 0;         // of `saved`
    // Those that were spoiled: nothing is taken before they have come again, and into `saved`.
    std::uint64_t asks_at = 0;
    std::uint32_t asks = 0;
    std::vector<std::byte> again;  // what has come of them
    Came told{};                   // for the last try
    std::uint32_t tries = 0;       // at making it again
    // Its first byte has yet to come, with which the peer says that it has taken a new socket over. What the peer's
    // kernel acknowledges before is lost where the peer drops the socket instead.
    bool unproved = false;
    std::string given_up;  // why it will not be made again
    std::uint64_t until_reset = 0;

    // As send(2), recv(2) and recvmsg(2).
    ssize_t Put(const std::byte* bytes, std::size_t n) const;
    ssize_t Get(std::byte* to, std::size_t n) const;
    ssize_t ReceiveInto(std::byte* header, std::size_t head, std::byte* data, std::size_t n) const;
    std::uint64_t Unread() const;
  };

  ssize_t SendKept(Stripe& s, const Parts& parts);
  ssize_t SendOddly(std::uint32_t stripe, const Parts& parts);
  static ssize_t SendBehindTheEnd(const Stripe& s);
  ssize_t SendSpoiled(Stripe& s, const Parts& parts);
  ssize_t SendBytes(Stripe& s, const std::byte* bytes, std::size_t n);
  static ssize_t SendApart(const Stripe& s, const Parts& parts);
  static ssize_t SendPlain(const Stripe& s, const Parts& parts);
  void Went(Stripe& s, const Parts& parts);
  ssize_t ReceiveAgain(Stripe& s);
  void CheckSent(const Stripe& s, int socket, const Came& came) const;
  static void Unread(Stripe& s, std::span<const std::byte> front);
  bool checks() const;
  void Forget(Stripe& s);
  SocketId Id(std::uint32_t stripe) const { return {first_.peer, first_.channel, first_.stripe + stripe}; }
  ssize_t ReceiveOddly(Stripe& s, std::byte* header, std::size_t head, std::byte* data, std::size_t n);
  std::byte* MakeRoom(Stripe& s, std::size_t n);
  static bool TakeProof(Stripe& s);
  void Prove(std::uint32_t stripe);
  static std::uint64_t Acknowledged(const Stripe& s);
  void Ready(int fd) const;
  void Break(std::uint32_t stripe, bool held, const std::string& why);
  void Drop(Stripe& s);
  bool Blocks(const Stripe& s) const;
  void NoteOdd();
  void ArmReset(Stripe& s);
  std::size_t Undisturbed(const Stripe& s, std::size_t n) const;
  void Spend(Stripe& s, std::uint64_t nbytes);
  [[noreturn]] void Fail(const char* what) const;
  [[noreturn]] void FailUnsent() const;

  static constexpr std::uint64_t kEnded = UINT64_MAX;  // `until_end_` once the stream has ended

  std::vector<Stripe> stripes_;
  SocketId first_;
  std::shared_ptr<TcpShared> shared_;
  bool mends_;
  bool odd_ = true;  // a call takes a longer way: something is to be sent again, nothing is kept, or faults are made
  bool lends_ = false;
  bool spread_ = false;
  std::uint64_t spoil_;      // the byte of what is sent next, from 1 on, of which a bit is turned; 0: none
  std::uint64_t until_end_;  // so many more bytes are sent until HETCOLL_FAULT ends the stream for good; 0: it does not
};

}  // namespace hetcoll
