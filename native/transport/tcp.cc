#include "transport/tcp.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace hetcoll {
namespace {

constexpr std::size_t kStripeBlock = std::size_t{256} << 10;  // what one stripe carries before the next one's turn
constexpr std::size_t kWholeBlock = std::size_t{1} << 30;     // with one stripe there is no turn to take
constexpr std::size_t kStaging = std::size_t{256} << 10;
constexpr std::size_t kMaxItem = 16;

struct BlockHeader {
  std::uint64_t signature;
  std::uint64_t total;   // of the message
  std::uint64_t offset;  // of this block in it
  std::uint64_t stamp;   // index of the block on its stripe
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
  ~Sockets() {
    for (int fd : fds_) close(fd);
  }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  std::size_t count() const { return fds_.size(); }
  std::size_t block() const { return fds_.size() == 1 ? kWholeBlock : kStripeBlock; }
  int fd(std::size_t stripe) const { return fds_[stripe]; }
  int peer() const { return peer_; }

  void Shutdown() const {
    for (int fd : fds_) shutdown(fd, SHUT_WR);
  }

  [[noreturn]] void Fail(const char* what) const {
    const int err = errno;
    const bool gone = err == EPIPE || err == ECONNRESET || err == ETIMEDOUT || err == EHOSTUNREACH || err == ENETDOWN;
    throw Fault(gone ? FaultKind::kPeerGone : FaultKind::kSystem, peer_,
                std::string("TCP ") + what + ": " + std::strerror(err));
  }

 private:
  std::vector<int> fds_;
  int peer_;
};

bool Again(int err) { return err == EAGAIN || err == EWOULDBLOCK || err == EINTR; }

// Which block of a message an offset falls in, and so which stripe.
struct Turn {
  Turn(const Sockets& sockets, std::size_t at, std::size_t total)
      : begin(at / sockets.block() * sockets.block()),
        end(std::min(total, begin + sockets.block())),
        stripe(begin / sockets.block() % sockets.count()) {}
  std::size_t begin;
  std::size_t end;
  std::size_t stripe;
};

class TcpSend final : public SendEnd {
 public:
  explicit TcpSend(std::shared_ptr<Sockets> sockets) : sockets_(std::move(sockets)), stamps_(sockets_->count(), 0) {}

  std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) override {
    std::size_t taken = 0;
    do {
      const std::ptrdiff_t r = PushBlock(m, at + taken, data + taken, n - taken);
      if (r == kWouldBlock) return taken > 0 ? static_cast<std::ptrdiff_t>(taken) : kWouldBlock;
      taken += static_cast<std::size_t>(r);
    } while (taken < n);
    return static_cast<std::ptrdiff_t>(taken);
  }

  void AddPoll(std::vector<pollfd>& fds) const override { fds.push_back({sockets_->fd(stripe_), POLLOUT, 0}); }
  void Finish() override { sockets_->Shutdown(); }

 private:
  std::ptrdiff_t PushBlock(const Message& m, std::size_t at, const std::byte* data, std::size_t n) {
    const Turn turn(*sockets_, at, m.total);
    stripe_ = turn.stripe;
    if (at == turn.begin && header_left_ == 0 && !begun_) {
      header_ = {m.signature, m.total, at, ++stamps_[turn.stripe]};
      header_left_ = sizeof header_;
      begun_ = true;
    }
    const std::size_t header = header_left_;
    const std::size_t payload = std::min(n, turn.end - at);
    iovec iov[2] = {{reinterpret_cast<std::byte*>(&header_) + (sizeof header_ - header), header},
                    {const_cast<std::byte*>(data), payload}};
    msghdr msg{};
    msg.msg_iov = header > 0 ? iov : iov + 1;
    msg.msg_iovlen = header > 0 ? 2 : 1;
    const ssize_t sent = sendmsg(sockets_->fd(turn.stripe), &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (Again(errno)) return kWouldBlock;
      sockets_->Fail("send");
    }
    const std::size_t head = std::min<std::size_t>(header, static_cast<std::size_t>(sent));
    header_left_ -= head;
    if (header_left_ > 0) return kWouldBlock;
    const std::size_t body = static_cast<std::size_t>(sent) - head;
    if (at + body == turn.end) begun_ = false;
    return body == 0 && m.total > 0 ? kWouldBlock : static_cast<std::ptrdiff_t>(body);
  }

  std::shared_ptr<Sockets> sockets_;
  std::vector<std::uint64_t> stamps_;
  BlockHeader header_{};
  std::size_t header_left_ = 0;
  bool begun_ = false;  // the current block's header was made
  std::size_t stripe_ = 0;
};

class TcpRecv final : public RecvEnd {
 public:
  explicit TcpRecv(std::shared_ptr<Sockets> sockets) : sockets_(std::move(sockets)), stamps_(sockets_->count(), 0) {}

  std::ptrdiff_t Pull(const Message& m, std::size_t at, std::byte* dst, std::size_t n, bool stream) override {
    static_cast<void>(stream);
    std::size_t taken = 0;
    do {
      const std::ptrdiff_t r = Read(m, at + taken, dst + taken, n - taken);
      if (r == kWouldBlock) return taken > 0 ? static_cast<std::ptrdiff_t>(taken) : kWouldBlock;
      taken += static_cast<std::size_t>(r);
    } while (taken < n);
    return static_cast<std::ptrdiff_t>(taken);
  }

  View Peek(const Message& m, std::size_t at, std::size_t n) override {
    if (m.total == 0) return {nullptr, Read(m, 0, nullptr, 0)};
    if (staged_ < std::min(n, kMaxItem)) {
      if (staging_.empty()) staging_.resize(kStaging);
      if (begin_ > 0) {
        std::memmove(staging_.data(), staging_.data() + begin_, staged_);
        begin_ = 0;
      }
      const std::size_t want = std::min(n, staging_.size()) - staged_;
      const std::ptrdiff_t r = Read(m, at + staged_, staging_.data() + staged_, want);
      if (r > 0) staged_ += static_cast<std::size_t>(r);
    }
    if (staged_ == 0) return {nullptr, kWouldBlock};
    return {staging_.data() + begin_, static_cast<std::ptrdiff_t>(std::min(n, staged_))};
  }

  void Consume(std::size_t n) override {
    begin_ += n;
    staged_ -= n;
    if (staged_ == 0) begin_ = 0;
  }

  void AddPoll(std::vector<pollfd>& fds) const override { fds.push_back({sockets_->fd(stripe_), POLLIN, 0}); }
  bool FinalWithoutPeer() const override { return false; }  // the end of the stream comes behind the data

 private:
  // Reads within one block; its header first, in the same call.
  std::ptrdiff_t Read(const Message& m, std::size_t at, std::byte* dst, std::size_t n) {
    const Turn turn(*sockets_, at, m.total);
    stripe_ = turn.stripe;
    if (at == turn.begin && !begun_) {
      header_left_ = sizeof header_;
      begun_ = true;
    }
    const std::size_t header = header_left_;
    iovec iov[2] = {{reinterpret_cast<std::byte*>(&header_) + (sizeof header_ - header), header},
                    {dst, std::min(n, turn.end - at)}};
    msghdr msg{};
    msg.msg_iov = header > 0 ? iov : iov + 1;
    msg.msg_iovlen = header > 0 ? 2 : 1;
    const ssize_t got = recvmsg(sockets_->fd(turn.stripe), &msg, MSG_DONTWAIT);
    if (got < 0) {
      if (Again(errno)) return kWouldBlock;
      sockets_->Fail("receive");
    }
    if (got == 0) throw Fault(FaultKind::kPeerGone, sockets_->peer(), "TCP: the peer closed the connection");
    const std::size_t head = std::min<std::size_t>(header, static_cast<std::size_t>(got));
    header_left_ -= head;
    if (header_left_ > 0) return kWouldBlock;
    if (header > 0) Verify(m, turn);
    const std::size_t body = static_cast<std::size_t>(got) - head;
    if (at + body == turn.end) begun_ = false;
    return body == 0 && m.total > 0 ? kWouldBlock : static_cast<std::ptrdiff_t>(body);
  }

  void Verify(const Message& m, const Turn& turn) {
    const std::uint64_t stamp = ++stamps_[turn.stripe];
    if (header_.stamp != stamp) {
      throw Fault(FaultKind::kCorrupt, sockets_->peer(),
                  "TCP: block " + std::to_string(header_.stamp) + " came, " + std::to_string(stamp) + " was due");
    }
    if (header_.signature != m.signature || header_.total != m.total) {
      throw WrongFrame(m, header_.signature, header_.total, sockets_->peer());
    }
    if (header_.offset != turn.begin) {
      throw Fault(FaultKind::kCorrupt, sockets_->peer(), "TCP: a block is out of place");
    }
  }

  std::shared_ptr<Sockets> sockets_;
  std::vector<std::uint64_t> stamps_;
  BlockHeader header_{};
  std::size_t header_left_ = 0;
  bool begun_ = false;
  std::size_t stripe_ = 0;
  std::vector<std::byte> staging_;
  std::size_t begin_ = 0;   // of what is staged
  std::size_t staged_ = 0;  // bytes received and not yet consumed
};

}  // namespace

LinkEnds MakeTcp(std::span<const int> fds, int peer) {
  auto sockets = std::make_shared<Sockets>(fds, peer);
  return {std::make_unique<TcpSend>(sockets), std::make_unique<TcpRecv>(sockets)};
}

}  // namespace hetcoll
