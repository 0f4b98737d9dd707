#include "transport/tcp.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace hetcoll {
namespace {

constexpr std::size_t kStripeBlock = std::size_t{256} << 10;  // what one stripe carries before another one's turn
constexpr std::size_t kWholeBlock = std::size_t{1} << 30;     // with one stripe there is no turn to take
// What a call moves, and what is staged, before other directions and channels have their turn. With less the two ends
// of a socket fight over its lock more often; with more, data leaves the caches before it is read. Between 128 KiB and
// 1 MiB, this was the fastest for all-reduces of 1 to 64 MiB of 2, 4 and 8 ranks on two cores, by up to a tenth.
constexpr std::size_t kMove = std::size_t{256} << 10;
constexpr std::size_t kWeighed = std::size_t{64} << 10;  // blocks from here on go where the queue is shortest
constexpr std::size_t kMaxItem = 16;
// Up to here it costs less to copy a message to and from its header than to have the kernel deal with two places.
constexpr std::size_t kJoined = std::size_t{4} << 10;

struct BlockHeader {
  std::uint64_t signature;
  std::uint64_t total;   // of the message
  std::uint64_t offset;  // of this block in it
  std::uint32_t stamp;   // index of the block on this link
  std::uint32_t next;    // the stripe that will carry the block after this one
};
static_assert(sizeof(BlockHeader) == 32);

class Sockets {
 public:
  Sockets(std::span<const int> fds, int peer) : fds_(fds.begin(), fds.end()), peer_(peer) {
    for (int fd : fds_) {
      const int flags = fcntl(fd, F_GETFL);
      const int on = 1;
      if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) Fail("fcntl");
      // Unix sockets serve as links in tests: they have no Nagle delay to turn off.
      if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0 && errno != EOPNOTSUPP) Fail("TCP_NODELAY");
    }
  }
  ~Sockets() { Close(); }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  std::uint32_t count() const { return static_cast<std::uint32_t>(fds_.size()); }
  std::size_t block() const { return fds_.size() == 1 ? kWholeBlock : kStripeBlock; }
  int fd(std::uint32_t stripe) const { return fds_[stripe]; }
  int peer() const { return peer_; }

  // A header and a body, of each perhaps nothing, as one call sends or receives them.
  ssize_t Send(std::uint32_t stripe, const std::byte* header, std::size_t head, const std::byte* data,
               std::size_t n) const {
    constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
    if (head == 0) return send(fd(stripe), data, n, kFlags);
    if (n <= kJoined) {
      std::byte joined[sizeof(BlockHeader) + kJoined];
      std::memcpy(joined, header, head);
      if (n > 0) std::memcpy(joined + head, data, n);
      return send(fd(stripe), joined, head + n, kFlags);
    }
    iovec iov[2] = {{const_cast<std::byte*>(header), head}, {const_cast<std::byte*>(data), n}};
    msghdr msg{};
    msg.msg_iov = iov;
    msg.msg_iovlen = 2;
    return sendmsg(fd(stripe), &msg, kFlags);
  }
  ssize_t Receive(std::uint32_t stripe, std::byte* header, std::size_t head, std::byte* data, std::size_t n) const {
    if (head == 0) return recv(fd(stripe), data, n, MSG_DONTWAIT);
    if (n <= kJoined) {
      std::byte joined[sizeof(BlockHeader) + kJoined];
      const ssize_t got = recv(fd(stripe), joined, head + n, MSG_DONTWAIT);
      if (got <= 0) return got;
      const auto size = static_cast<std::size_t>(got);
      std::memcpy(header, joined, std::min(head, size));
      if (size > head) std::memcpy(data, joined + head, size - head);
      return got;
    }
    iovec iov[2] = {{header, head}, {data, n}};
    msghdr msg{};
    msg.msg_iov = iov;
    msg.msg_iovlen = 2;
    return recvmsg(fd(stripe), &msg, MSG_DONTWAIT);
  }

  void Close() const {
    for (int fd : fds_) close(fd);
  }
  void Shutdown() const {
    for (int fd : fds_) shutdown(fd, SHUT_WR);
  }

  // Which stripe to use after `stripe`, which is about to carry `nbytes`: each in turn, and for large blocks the one
  // with the least to do, so that a slow network gets less.
  std::uint32_t After(std::uint32_t stripe, std::size_t nbytes) const {
    std::uint32_t best = (stripe + 1) % count();
    if (count() == 1 || nbytes < kWeighed) return best;
    std::size_t least = SIZE_MAX;
    for (std::uint32_t i = 1; i <= count(); ++i) {
      const std::uint32_t candidate = (stripe + i) % count();
      const std::size_t queued = Queued(candidate) + (candidate == stripe ? nbytes : 0);
      if (queued < least) {
        least = queued;
        best = candidate;
      }
    }
    return best;
  }

  [[noreturn]] void Fail(const char* what) const {
    const int err = errno;
    const bool gone = err == EPIPE || err == ECONNRESET || err == ECONNABORTED || err == ETIMEDOUT ||
                      err == EHOSTUNREACH || err == EHOSTDOWN || err == ENETUNREACH || err == ENETDOWN;
    throw Fault(gone ? FaultKind::kPeerGone : FaultKind::kSystem, peer_,
                std::string("TCP ") + what + ": " + std::strerror(err));
  }

 private:
  // Bytes that the peer has not acknowledged.
  std::size_t Queued(std::uint32_t stripe) const {
    int nbytes = 0;
    return ioctl(fds_[stripe], SIOCOUTQ, &nbytes) < 0 ? 0 : static_cast<std::size_t>(nbytes);
  }

  std::vector<int> fds_;
  int peer_;
};

bool Again(int err) { return err == EAGAIN || err == EWOULDBLOCK || err == EINTR; }

// How far one end is in the sequence of blocks. Both ends of a link go through the same states.
struct Course {
  void Begin(const Sockets& sockets, const Message& m, std::size_t at) {
    begin = at;
    end = std::min(m.total, at + sockets.block());
    header_left = sizeof header;
    begun = true;
    ++stamp;
  }
  // The end of the block is reached.
  void Finish() {
    begun = false;
    stripe = header.next;
  }
  std::byte* HeaderRest() { return reinterpret_cast<std::byte*>(&header) + (sizeof header - header_left); }

  BlockHeader header{};
  std::size_t header_left = 0;
  std::size_t begin = 0;
  std::size_t end = 0;
  std::uint32_t stamp = 0;
  std::uint32_t stripe = 0;
  bool begun = false;
};

class TcpSend final : public SendEnd {
 public:
  explicit TcpSend(std::shared_ptr<Sockets> sockets) : sockets_(std::move(sockets)) {}

  std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) override {
    std::size_t taken = 0;
    n = std::min(n, kMove);
    do {
      const std::ptrdiff_t r = PushBlock(m, at + taken, data + taken, n - taken);
      if (r == kWouldBlock) return taken > 0 ? static_cast<std::ptrdiff_t>(taken) : kWouldBlock;
      taken += static_cast<std::size_t>(r);
    } while (taken < n);
    return static_cast<std::ptrdiff_t>(taken);
  }

  void AddPoll(std::vector<pollfd>& fds) const override { fds.push_back({sockets_->fd(course_.stripe), POLLOUT, 0}); }
  void Finish() override { sockets_->Shutdown(); }
  void Abandon() override { sockets_->Close(); }

 private:
  std::ptrdiff_t PushBlock(const Message& m, std::size_t at, const std::byte* data, std::size_t n) {
    Course& c = course_;
    if (!c.begun) {
      c.Begin(*sockets_, m, at);
      c.header = {m.signature, m.total, at, c.stamp, sockets_->After(c.stripe, c.end - c.begin)};
    }
    const std::size_t header = c.header_left;
    const ssize_t sent = sockets_->Send(c.stripe, c.HeaderRest(), header, data, std::min(n, c.end - at));
    if (sent < 0) {
      if (Again(errno)) return kWouldBlock;
      sockets_->Fail("send");
    }
    const std::size_t head = std::min<std::size_t>(header, static_cast<std::size_t>(sent));
    c.header_left -= head;
    if (c.header_left > 0) return kWouldBlock;
    const std::size_t body = static_cast<std::size_t>(sent) - head;
    if (at + body == c.end) c.Finish();
    return body == 0 && m.total > 0 ? kWouldBlock : static_cast<std::ptrdiff_t>(body);
  }

  std::shared_ptr<Sockets> sockets_;
  Course course_;
};

class TcpRecv final : public RecvEnd {
 public:
  TcpRecv(std::shared_ptr<Sockets> sockets, std::shared_ptr<TcpStaging> staging)
      : sockets_(std::move(sockets)), staging_(std::move(staging)) {}

  std::ptrdiff_t Pull(const Message& m, std::size_t at, std::byte* dst, std::size_t n, bool stream) override {
    static_cast<void>(stream);
    std::size_t taken = 0;
    n = std::min(n, kMove);
    do {
      const std::ptrdiff_t r = Read(m, at + taken, dst + taken, n - taken);
      if (r == kWouldBlock) return taken > 0 ? static_cast<std::ptrdiff_t>(taken) : kWouldBlock;
      taken += static_cast<std::size_t>(r);
    } while (taken < n);
    return static_cast<std::ptrdiff_t>(taken);
  }

  View Peek(const Message& m, std::size_t at, std::size_t n) override {
    if (m.total == 0) return {nullptr, Read(m, 0, nullptr, 0)};
    std::vector<std::byte>& bytes = staging_->bytes;
    if (bytes.size() < std::min(m.total, kMove)) bytes.resize(std::min(m.total, kMove));
    staged_ = left_.size();
    std::copy(left_.begin(), left_.end(), bytes.begin());
    const std::size_t most = std::min(n, bytes.size());
    if (staged_ < most) {
      const std::ptrdiff_t r = Read(m, at + staged_, bytes.data() + staged_, most - staged_);
      if (r > 0) staged_ += static_cast<std::size_t>(r);
    }
    if (staged_ < kMaxItem) left_.assign(bytes.data(), bytes.data() + staged_);  // it may be too little to be consumed
    if (staged_ == 0) return {nullptr, kWouldBlock};
    return {bytes.data(), static_cast<std::ptrdiff_t>(std::min(n, staged_))};
  }

  void Consume(std::size_t n) override {
    const std::byte* bytes = staging_->bytes.data();
    left_.assign(bytes + n, bytes + staged_);
    staged_ = 0;
  }

  void AddPoll(std::vector<pollfd>& fds) const override { fds.push_back({sockets_->fd(course_.stripe), POLLIN, 0}); }
  bool FinalWithoutPeer() const override { return false; }  // the end of the stream comes behind the data

 private:
  // Reads within one block; its header first, in the same call.
  std::ptrdiff_t Read(const Message& m, std::size_t at, std::byte* dst, std::size_t n) {
    Course& c = course_;
    if (!c.begun) c.Begin(*sockets_, m, at);
    const std::size_t header = c.header_left;
    const ssize_t got = sockets_->Receive(c.stripe, c.HeaderRest(), header, dst, std::min(n, c.end - at));
    if (got < 0) {
      if (Again(errno)) return kWouldBlock;
      sockets_->Fail("receive");
    }
    if (got == 0) throw Fault(FaultKind::kPeerGone, sockets_->peer(), "TCP: the peer closed the connection");
    const std::size_t head = std::min<std::size_t>(header, static_cast<std::size_t>(got));
    c.header_left -= head;
    if (c.header_left > 0) return kWouldBlock;
    if (header > 0) Verify(m);
    const std::size_t body = static_cast<std::size_t>(got) - head;
    if (at + body == c.end) c.Finish();
    return body == 0 && m.total > 0 ? kWouldBlock : static_cast<std::ptrdiff_t>(body);
  }

  void Verify(const Message& m) const {
    const BlockHeader& h = course_.header;
    if (h.stamp != course_.stamp) {
      throw Fault(FaultKind::kCorrupt, sockets_->peer(),
                  "TCP: block " + std::to_string(h.stamp) + " came, " + std::to_string(course_.stamp) + " was due");
    }
    if (h.signature != m.signature || h.total != m.total) {
      throw WrongFrame(m, h.signature, h.total, sockets_->peer());
    }
    if (h.offset != course_.begin || h.next >= sockets_->count()) {
      throw Fault(FaultKind::kCorrupt, sockets_->peer(), "TCP: a block is out of place");
    }
  }

  std::shared_ptr<Sockets> sockets_;
  Course course_;
  std::shared_ptr<TcpStaging> staging_;
  std::size_t staged_ = 0;       // bytes in it that are ours, between Peek and Consume
  std::vector<std::byte> left_;  // what was not consumed: most often nothing, else a part of an element
};

}  // namespace

LinkEnds MakeTcp(std::span<const int> fds, int peer, std::shared_ptr<TcpStaging> staging) {
  auto sockets = std::make_shared<Sockets>(fds, peer);
  return {std::make_unique<TcpSend>(sockets), std::make_unique<TcpRecv>(sockets, std::move(staging))};
}

}  // namespace hetcoll
