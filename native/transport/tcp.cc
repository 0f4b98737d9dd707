#include "transport/tcp.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/clock.h"
#include "transport/tcp_block.h"
#include "transport/tcp_sockets.h"

namespace hetcoll {
namespace {

// What a call moves, and what is staged, before other directions and channels have their turn. With less the two ends
// of a socket fight over its lock more often; with more, data leaves the caches before it is read. Between 128 KiB and
// 1 MiB, this was the fastest for all-reduces of 1 to 64 MiB of 2, 4 and 8 ranks on two cores, by up to a tenth.
constexpr std::size_t kTcpMove = std::size_t{256} << 10;
constexpr std::size_t kMaxItem = 16;

bool Again(int err) { return err == EAGAIN || err == EWOULDBLOCK || err == EINTR; }

class TcpSend final : public SendEnd {
 public:
  TcpSend(std::shared_ptr<Sockets> sockets, Integrity integrity)
      : sockets_(std::move(sockets)), course_(integrity, sockets_->count()) {}

  std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) override {
    std::size_t taken = 0;
    n = std::min(n, kTcpMove);
    do {
      const std::ptrdiff_t r = PushBlock(m, at + taken, data + taken, n - taken);
      full_ = r == kWouldBlock;
      if (full_) return taken > 0 ? static_cast<std::ptrdiff_t>(taken) : kWouldBlock;
      taken += static_cast<std::size_t>(r);
      if (sockets_->lends()) lent_ += static_cast<std::size_t>(r);
    } while (taken < n);
    return static_cast<std::ptrdiff_t>(taken);
  }

  std::size_t Lent() override { return lent_; }
  bool Keep() override {
    if (lent_ == 0) return false;
    sockets_->Keep();
    lent_ = 0;
    return true;
  }

  // That there is room again concerns only who found none. What is lent comes back by nothing but Keep.
  void AddPoll(std::vector<pollfd>& fds) const override {
    const bool any = full_ && !course_.begun;
    for (std::uint32_t i = 0; i < sockets_->count(); ++i) {
      if (any || i == course_.stripe) fds.push_back({sockets_->fd(i), full_ ? sockets_->RoomEvents() : short{0}, 0});
    }
  }
  // A peer that has left acknowledges what is lent, as long as the connection stands.
  bool FinalWithoutPeer() const override { return lent_ == 0; }
  void Count(Holdings& held) const override { sockets_->Count(held); }
  void Finish() override { sockets_->Shutdown(); }
  void Abandon() override { sockets_->Close(); }

 private:
  std::ptrdiff_t PushBlock(const Message& m, std::size_t at, const std::byte* data, std::size_t n) {
    Course& c = course_;
    if (!c.begun && !Begin(m, at)) return kWouldBlock;
    if (c.checked) return PushChecked(at, data, n);
    const std::size_t header = c.header_left;
    const ssize_t sent = sockets_->Send(c.stripe, {c.HeaderRest(), header, data, std::min(n, c.end - at)});
    if (sent < 0) {
      if (!Again(errno)) sockets_->Lost(c.stripe, "send");
      return kWouldBlock;
    }
    const std::size_t head = std::min<std::size_t>(header, static_cast<std::size_t>(sent));
    c.header_left -= head;
    if (c.header_left > 0) return kWouldBlock;
    const std::size_t body = static_cast<std::size_t>(sent) - head;
    if (at + body == c.end) c.Finish();
    return body == 0 && m.total > 0 ? kWouldBlock : static_cast<std::ptrdiff_t>(body);
  }

  // False where no stripe has room for what comes after the block.
  bool Begin(const Message& m, std::size_t at) {
    Course& c = course_;
    auto next = static_cast<std::uint16_t>((c.stripe + 1) % sockets_->count());
    std::uint16_t most = c.header.most;
    if (sockets_->spread() && m.total > Course::kLeast << 10) {
      const auto room = sockets_->FindRoom(c.stripe);
      if (!room) return false;
      next = room->stripe;
      most = Course::Longer(most, room->all);
    }
    c.Begin(m, at);
    c.header = {m.signature, m.total, at, c.stamp, next, most, 0, 0};
    if (c.size == BlockHeader::kPlain) return true;
    c.header.right = sockets_->right(c.stripe);
    c.header.check = c.header.Sum();
    if (!c.checked) return true;
    check_.sum = c.header.check;
    checked_to_ = sent_to_ = at;
    check_left_ = sizeof check_;
    return true;
  }

  // The last byte is not taken before the checksum is on its way: nobody would send it later.
  std::ptrdiff_t PushChecked(std::size_t at, const std::byte* data, std::size_t n) {
    Course& c = course_;
    const std::size_t to = std::max(sent_to_, std::min(at + n, c.end));
    if (to > checked_to_) {
      check_.sum = Crc32c(static_cast<std::uint32_t>(check_.sum), data + (checked_to_ - at), to - checked_to_);
      checked_to_ = to;
    }
    Parts parts{c.HeaderRest(), c.header_left, data + (sent_to_ - at), to - sent_to_};
    parts.checked = true;
    if (to == c.end) {
      parts.tail = reinterpret_cast<const std::byte*>(&check_) + (sizeof check_ - check_left_);
      parts.tail_size = check_left_;
    }
    const ssize_t sent = sockets_->Send(c.stripe, parts);
    if (sent < 0) {
      if (!Again(errno)) sockets_->Lost(c.stripe, "send");
      return kWouldBlock;
    }
    auto left = static_cast<std::size_t>(sent);
    const auto take = [&left](std::size_t most) {
      const std::size_t part = std::min(left, most);
      left -= part;
      return part;
    };
    c.header_left -= take(c.header_left);
    sent_to_ += take(to - sent_to_);
    check_left_ -= left;
    const bool whole = check_left_ == 0;
    const std::size_t taken = (whole ? c.end : std::min(sent_to_, c.end - 1)) - at;
    if (whole) c.Finish();
    return taken == 0 ? kWouldBlock : static_cast<std::ptrdiff_t>(taken);
  }

  std::shared_ptr<Sockets> sockets_;
  Course course_;
  bool full_ = false;  // the last that was offered was not taken as a whole
  std::size_t lent_ = 0;
  // Of a checked block:
  BlockCheck check_;            // of what is before checked_to_
  std::size_t checked_to_ = 0;  // in the message
  std::size_t sent_to_ = 0;
  std::size_t check_left_ = 0;
};

class TcpRecv final : public RecvEnd {
 public:
  TcpRecv(std::shared_ptr<Sockets> sockets, std::shared_ptr<TcpShared> shared)
      : sockets_(std::move(sockets)), course_(shared->integrity, sockets_->count()), shared_(std::move(shared)) {}

  std::ptrdiff_t Pull(const Message& m, std::size_t at, std::byte* dst, std::size_t n, bool stream) override {
    static_cast<void>(stream);
    std::size_t taken = 0;
    n = std::min(n, kTcpMove);
    do {
      const std::ptrdiff_t r = Read(m, at + taken, dst + taken, n - taken);
      if (r == kWouldBlock) return taken > 0 ? static_cast<std::ptrdiff_t>(taken) : kWouldBlock;
      taken += static_cast<std::size_t>(r);
    } while (taken < n);
    return static_cast<std::ptrdiff_t>(taken);
  }

  View Peek(const Message& m, std::size_t at, std::size_t n) override {
    if (m.total == 0) return {nullptr, Read(m, 0, nullptr, 0)};
    std::vector<std::byte>& bytes = shared_->staging;
    if (bytes.size() < std::min(m.total, kTcpMove)) bytes.resize(std::min(m.total, kTcpMove));
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
    const std::byte* bytes = shared_->staging.data();
    left_.assign(bytes + n, bytes + staged_);
    staged_ = 0;
  }

  void AddPoll(std::vector<pollfd>& fds) const override { fds.push_back({sockets_->fd(course_.stripe), POLLIN, 0}); }
  bool Polled() const override { return !sockets_->down(course_.stripe); }
  bool FinalWithoutPeer() const override { return false; }  // the end of the stream comes behind the data

 private:
  // Reads within one block; its header first, in the same call.
  std::ptrdiff_t Read(const Message& m, std::size_t at, std::byte* dst, std::size_t n) {
    Course& c = course_;
    if (!c.begun) c.Begin(m, at);
    if (c.checked) return ReadChecked(m, at, dst, n);
    const std::ptrdiff_t body = Receive(m, dst, std::min(n, c.end - at));
    if (body == kWouldBlock) return kWouldBlock;
    if (at + static_cast<std::size_t>(body) == c.end) c.Finish();
    return body == 0 && m.total > 0 ? kWouldBlock : body;
  }

  // All of the block first, into memory of our own.
  std::ptrdiff_t ReadChecked(const Message& m, std::size_t at, std::byte* dst, std::size_t n) {
    Course& c = course_;
    const std::size_t length = c.end - c.begin, whole = length + sizeof(BlockCheck);
    if (piece_.size() < whole) piece_.resize(whole);
    while (came_ < whole) {
      const std::ptrdiff_t got = Receive(m, piece_.data() + came_, whole - came_);
      if (got == kWouldBlock) return kWouldBlock;
      came_ += static_cast<std::size_t>(got);
      if (came_ == whole && !Check(m, length)) return kWouldBlock;
    }
    const std::size_t taken = std::min(n, c.end - at);
    std::memcpy(dst, piece_.data() + (at - c.begin), taken);
    if (at + taken == c.end) {
      came_ = 0;
      c.Finish();
    }
    return static_cast<std::ptrdiff_t>(taken);
  }

  // Up to n bytes behind what is missing of the header; how many of them came.
  std::ptrdiff_t Receive(const Message& m, std::byte* to, std::size_t n) {
    Course& c = course_;
    const std::size_t header = c.header_left;
    const ssize_t got = sockets_->Receive(c.stripe, c.HeaderRest(), header, to, n);
    if (got < 0) {
      if (!Again(errno)) sockets_->Lost(c.stripe, "receive");
      return kWouldBlock;
    }
    if (got == 0) throw Fault(FaultKind::kPeerGone, sockets_->peer(), "TCP: the peer closed the connection");
    const std::size_t head = std::min<std::size_t>(header, static_cast<std::size_t>(got));
    c.header_left -= head;
    if (c.header_left > 0) return kWouldBlock;
    const std::size_t body = static_cast<std::size_t>(got) - head;
    if (header > 0 && !Verify(m, {to, body})) return kWouldBlock;
    return static_cast<std::ptrdiff_t>(body);
  }

  // False where it comes again, and `behind` after it.
  bool Verify(const Message& m, std::span<const std::byte> behind) {
    Course& c = course_;
    const BlockHeader& h = c.header;
    if (c.size == BlockHeader::kChecked) {
      if (h.check != h.Sum()) {
        Spoiled(m, "the header of the bytes", c.size, behind);
        c.header_left = c.size;
        return false;
      }
      sockets_->NoteRight(c.stripe, behind.size(), h.right);
      if (again_) [[unlikely]]
        CameAgain();
    }
    if (h.stamp != c.stamp) {
      throw Fault(FaultKind::kCorrupt, sockets_->peer(),
                  "TCP: block " + std::to_string(h.stamp) + " came, " + std::to_string(c.stamp) + " was due");
    }
    if (h.signature != m.signature || h.total != m.total) {
      throw WrongFrame(m, h.signature, h.total, sockets_->peer());
    }
    if (h.offset != c.begin || h.next >= sockets_->count() || h.most == 0) {
      throw Fault(FaultKind::kCorrupt, sockets_->peer(), "TCP: a block is out of place");
    }
    return true;
  }

  // False where it comes again.
  bool Check(const Message& m, std::size_t length) {
    BlockCheck sent;
    std::memcpy(&sent, piece_.data() + length, sizeof sent);
    const auto start = static_cast<std::uint32_t>(course_.header.check);
    if (sent != BlockCheck{Crc32c(start, piece_.data(), length)}) {
      came_ = 0;
      Spoiled(m, "bytes", length + sizeof sent, {});
      return false;
    }
    shared_->counts.checked_bytes += length;
    sockets_->NoteRight(course_.stripe, 0, 0);
    if (again_) CameAgain();
    return true;
  }

  // What was spoiled came right.
  void CameAgain() {
    again_ = false;
    shared_->counts.resent += 1;
  }

  // Asks for the n bytes before `behind` once more. Throws where that is of no use.
  void Spoiled(const Message& m, const std::string& what, std::size_t n, std::span<const std::byte> behind) {
    shared_->counts.spoiled += 1;
    const std::string why = "what rank " + std::to_string(sockets_->peer()) + " sent was spoiled on the way: " + what +
                            " " + std::to_string(course_.begin) + " to " + std::to_string(course_.end) + " of " +
                            std::to_string(m.total) + " came with a wrong checksum (CRC32C)";
    const bool too_many = spoils_.Add(NowNs());
    if (too_many || !sockets_->mends()) {
      throw Fault(FaultKind::kCorrupt, sockets_->peer(), "TCP: " + why + (too_many ? spoils_.Times() : ""));
    }
    again_ = true;
    sockets_->AskAgain(course_.stripe, n, behind, why);
  }

  std::shared_ptr<Sockets> sockets_;
  Course course_;
  std::shared_ptr<TcpShared> shared_;
  std::size_t staged_ = 0;        // bytes of the staging that are ours, between Peek and Consume
  std::vector<std::byte> left_;   // what was not consumed: most often nothing, else a part of an element
  std::vector<std::byte> piece_;  // a checked block and its checksum
  std::size_t came_ = 0;          // of it
  bool again_ = false;            // what was spoiled last has yet to come right
  Spoils spoils_;
};

}  // namespace

std::shared_ptr<Sockets> MakeSockets(std::span<const int> fds, const SocketId& first,
                                     const std::shared_ptr<TcpShared>& shared) {
  auto sockets = std::make_shared<Sockets>(fds, first, shared);
  if (shared->mending != nullptr) shared->mending->Add(first, sockets);
  return sockets;
}

LinkEnds MakeTcp(std::shared_ptr<Sockets> sockets, const std::shared_ptr<TcpShared>& shared) {
  auto send = std::make_unique<TcpSend>(sockets, shared->integrity);
  return {std::move(send), std::make_unique<TcpRecv>(std::move(sockets), shared)};
}

}  // namespace hetcoll
