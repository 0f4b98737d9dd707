#include "transport/tcp_sockets.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>

#include "transport/tcp.h"
#include "transport/tcp_block.h"
#include "transport/transport.h"

namespace hetcoll {
namespace {

constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
// Of several cards the kernel takes no more of what it cannot send yet: what is left goes to whichever has room.
constexpr int kUnsent = 32 << 10;
// What a receiver's kernel may hold unread: Linux gives a socket 6 MiB, if nobody says otherwise.
constexpr std::uint64_t kMostUnread = std::uint64_t{8} << 20;
// Up to here it costs less to copy a message to and from its header than to have the kernel deal with two places.
constexpr std::size_t kJoined = std::size_t{4} << 10;

// Bytes that the peer's kernel has not acknowledged. A socket that was reset keeps to what it said last.
std::uint64_t Unacknowledged(int fd) {
  int nbytes = 0;
  return ioctl(fd, SIOCOUTQ, &nbytes) < 0 ? UINT64_MAX : static_cast<std::uint64_t>(nbytes);
}

// The connection is no more, though the peer has not ended it.
bool Broken(int err) {
  return err == ECONNRESET || err == ECONNABORTED || err == ETIMEDOUT || err == EHOSTUNREACH || err == EHOSTDOWN ||
         err == ENETUNREACH || err == ENETDOWN || err == EBADMSG;
}

// Of both ends of a connection, which are those of its network cards; "": of another kind than TCP.
std::string Addresses(int fd) {
  std::string both;
  for (const auto name : {getsockname, getpeername}) {
    sockaddr_in6 address{};
    socklen_t size = sizeof address;
    if (name(fd, reinterpret_cast<sockaddr*>(&address), &size) < 0) continue;
    address.sin6_port = 0;
    if (address.sin6_family == AF_INET || address.sin6_family == AF_INET6) {
      both.append(reinterpret_cast<const char*>(&address), sizeof address);
    }
  }
  return both;
}

std::string Spell(int err) {
  return err == EBADMSG ? "what came was changed on the way, so it cannot be decrypted (TLS)" : std::strerror(err);
}

}  // namespace

void CountSocket(int fd, Holdings& held) {
  held.descriptors += 1;
  for (const int option : {SO_SNDBUF, SO_RCVBUF}) {
    int nbytes = 0;
    socklen_t length = sizeof nbytes;
    if (getsockopt(fd, SOL_SOCKET, option, &nbytes, &length) == 0) {
      held.socket_bytes += static_cast<std::size_t>(nbytes);
    }
  }
}

void Parts::CopyTo(std::byte* to) const {
  if (head > 0) std::memcpy(to, header, head);
  if (n > 0) std::memcpy(to + head, data, n);
  if (tail_size > 0) std::memcpy(to + head + n, tail, tail_size);
}

Parts Parts::Cut(std::size_t most) const {
  Parts cut = *this;
  cut.head = std::min(head, most);
  cut.n = std::min(n, most - cut.head);
  cut.tail_size = std::min(tail_size, most - cut.head - cut.n);
  return cut;
}

Sockets::Sockets(std::span<const int> fds, const SocketId& first, std::shared_ptr<TcpShared> shared)
    : first_(first),
      shared_(std::move(shared)),
      mends_(shared_->mending != nullptr),
      spoil_(shared_->faults.spoil),
      until_end_(shared_->faults.truncate) {
  for (const int fd : fds) {
    spread_ |= Addresses(fd) != Addresses(fds.front());
    stripes_.emplace_back();
    stripes_.back().fd = fd;
    stripes_.back().tls = Tls::Claim(fd);
    ArmReset(stripes_.back());
  }
  for (const int fd : fds) Ready(fd);
  NoteOdd();
}

void Sockets::Ready(int fd) const {
  const int flags = fcntl(fd, F_GETFL);
  const int on = 1;
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) Fail("fcntl");
  // Unix sockets serve as links in tests: they have no Nagle delay to turn off.
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0 && errno != EOPNOTSUPP) Fail("TCP_NODELAY");
  if (!spread_) return;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsent, sizeof kUnsent) < 0) Fail("TCP_NOTSENT_LOWAT");
}

void Sockets::NoteOdd() {
  odd_ = !mends_ || spoil_ > 0 || until_end_ > 0 || shared_->faults.reset > 0;
  for (const Stripe& s : stripes_) {
    odd_ |= s.fd < 0 || s.behind > 0 || s.owes > 0 || s.asks > 0 || s.unproved || !s.saved.empty();
  }
}

void Sockets::Count(Holdings& held) const {
  for (const Stripe& s : stripes_) {
    if (s.fd >= 0) CountSocket(s.fd, held);
    held.socket_bytes += s.sent.kept();
  }
}

ssize_t Sockets::Send(std::uint32_t stripe, const Parts& parts) {
  if (odd_) [[unlikely]]
    return SendOddly(stripe, parts);
  return SendKept(stripes_[stripe], parts);
}

ssize_t Sockets::SendOddly(std::uint32_t stripe, const Parts& parts) {
  Stripe& s = stripes_[stripe];
  if (s.unproved) Prove(stripe);
  if (s.owes + s.behind > 0) Flush(stripe);
  if (Blocks(s)) return -1;
  if (until_end_ == kEnded) return SendBehindTheEnd(s);
  if (spoil_ > 0) return SendSpoiled(s, parts);
  const Parts now = parts.Cut(Undisturbed(s, parts.size()));
  const ssize_t sent = mends_ ? SendKept(s, now) : SendPlain(s, now);
  if (sent > 0) Spend(s, static_cast<std::uint64_t>(sent));
  return sent;
}

// As send(2) where HETCOLL_FAULT has ended the stream: nothing goes, and once the peer has closed it that is an error.
ssize_t Sockets::SendBehindTheEnd(const Stripe& s) {
  pollfd peer{s.fd, POLLRDHUP, 0};
  errno = poll(&peer, 1, 0) > 0 ? EPIPE : EAGAIN;
  return -1;
}

ssize_t Sockets::SendSpoiled(Stripe& s, const Parts& parts) {
  std::vector<std::byte> bytes(parts.size());
  parts.CopyTo(bytes.data());
  const ssize_t sent = SendBytes(s, bytes.data(), bytes.size());
  if (sent > 0 && mends_) Went(s, parts.Cut(static_cast<std::size_t>(sent)));
  return sent;
}

void Sockets::Queue(std::uint32_t stripe, const Parts& parts) {
  Stripe& s = stripes_[stripe];
  std::byte* place = s.sent.Place(parts.size());
  parts.CopyTo(place != nullptr ? place : MakeRoom(s, parts.size()));
  for (std::size_t left = parts.size(), now = 0; left > 0; left -= now) {
    now = Undisturbed(s, left);
    s.sent.Took(now);
    s.behind += now;
    NoteOdd();
    Flush(stripe);
    Spend(s, now);
  }
}

// As send(2), but for HETCOLL_FAULT's corrupt=B and corrupt_every=B.
ssize_t Sockets::SendBytes(Stripe& s, const std::byte* bytes, std::size_t n) {
  if (s.tls != nullptr && spoil_ > 1) n = std::min(n, std::size_t{spoil_} - 1);  // the byte has a record of its own
  if (spoil_ == 0 || spoil_ > n) {
    const ssize_t sent = s.Put(bytes, n);
    if (spoil_ > 0 && sent > 0) spoil_ -= static_cast<std::uint64_t>(sent);
    return sent;
  }
  std::vector<std::byte> spoiled(bytes, bytes + spoil_);
  if (s.tls != nullptr) {
    s.tls->SpoilNext();  // as the network would: behind the encryption
  } else {
    spoiled.back() ^= std::byte{0x10};
  }
  const ssize_t sent = s.Put(spoiled.data(), spoiled.size());
  if (sent <= 0) return sent;
  spoil_ -= static_cast<std::uint64_t>(sent);
  if (spoil_ == 0) spoil_ = shared_->faults.spoil_every;
  NoteOdd();
  return sent;
}

ssize_t Sockets::Stripe::Put(const std::byte* bytes, std::size_t n) const {
  if (tls == nullptr) [[likely]]
    return send(fd, bytes, n, kFlags);
  const iovec piece{const_cast<std::byte*>(bytes), n};
  return tls->Send({&piece, 1});
}

ssize_t Sockets::Stripe::Get(std::byte* to, std::size_t n) const {
  return tls == nullptr ? recv(fd, to, n, MSG_DONTWAIT) : tls->Receive(to, n);
}

// What the peer cannot read yet: of a record that lacks a byte, nothing.
std::uint64_t Sockets::Stripe::Unread() const {
  const std::uint64_t nbytes = Unacknowledged(fd);
  return tls == nullptr || nbytes == 0 || nbytes == UINT64_MAX ? nbytes : nbytes + Tls::kRecord;
}

ssize_t Sockets::SendApart(const Stripe& s, const Parts& parts) {
  if (parts.head == 0 && parts.tail_size == 0) return s.Put(parts.data, parts.n);
  iovec iov[3] = {{const_cast<std::byte*>(parts.header), parts.head},
                  {const_cast<std::byte*>(parts.data), parts.n},
                  {const_cast<std::byte*>(parts.tail), parts.tail_size}};
  const std::size_t count = parts.tail_size > 0 ? 3 : 2;
  if (s.tls != nullptr) return s.tls->Send({iov, count});
  msghdr msg{};
  msg.msg_iov = iov;
  msg.msg_iovlen = count;
  return sendmsg(s.fd, &msg, kFlags);
}

// Without keeping anything.
ssize_t Sockets::SendPlain(const Stripe& s, const Parts& parts) {
  if (parts.n > kJoined || (parts.head == 0 && parts.tail_size == 0)) return SendApart(s, parts);
  std::byte joined[BlockHeader::kChecked + kJoined + sizeof(BlockCheck)];
  parts.CopyTo(joined);
  return s.Put(joined, parts.size());
}

// Sends, so that it can be sent again.
ssize_t Sockets::SendKept(Stripe& s, const Parts& parts) {
  if (parts.n <= kJoined) {
    const std::size_t size = parts.size();
    std::byte* joined = s.sent.Place(size);
    if (joined == nullptr) [[unlikely]]
      joined = MakeRoom(s, size);
    parts.CopyTo(joined);
    const ssize_t sent = s.Put(joined, size);
    if (sent > 0) s.sent.Took(static_cast<std::size_t>(sent));
    return sent;
  }
  const ssize_t sent = SendApart(s, parts);
  if (sent <= 0) return sent;
  Went(s, parts.Cut(static_cast<std::size_t>(sent)));
  return sent;
}

void Sockets::Went(Stripe& s, const Parts& parts) {
  s.sent.Copy(parts.header, parts.head);
  s.sent.Lend(parts.data, parts.n, parts.checked);
  s.sent.Copy(parts.tail, parts.tail_size);
  lends_ |= parts.n > 0;
}

std::byte* Sockets::MakeRoom(Stripe& s, std::size_t n) {
  Forget(s);
  s.sent.MakeRoom(n);
  return s.sent.Place(n);
}

bool Sockets::checks() const { return shared_->integrity != Integrity::kOff; }

// What the peer will never ask for. Where it checks what comes, that is what it has found right, which headers that it
// sends say, or else what its kernel can no longer hold unread; and at once what no checksum covers.
void Sockets::Forget(Stripe& s) {
  const std::uint64_t acked = Acknowledged(s);
  if (!checks()) return s.sent.Forget(acked);
  s.sent.Drop(acked);
  const std::uint64_t unread = acked - std::min(acked, kMostUnread);
  s.sent.Forget(std::max(s.theirs, s.owes > 0 ? std::min(unread, s.owes_at) : unread));
}

// How much of what was sent the peer's kernel has, for all that is known.
std::uint64_t Sockets::Acknowledged(const Stripe& s) {
  const std::uint64_t left = s.owes + s.behind, over = left + s.Unread();
  return s.fd < 0 || s.unproved || over > s.sent.total() || over < left ? s.sent.base() : s.sent.total() - over;
}

std::uint64_t Sockets::Undelivered(std::uint32_t stripe) {
  Stripe& s = stripes_[stripe];
  if (!s.given_up.empty()) return 0;
  if (s.unproved) Prove(stripe);
  return s.sent.total() - Acknowledged(s);
}

void Sockets::Keep() {
  if (!lends_) return;
  lends_ = false;
  for (std::uint32_t stripe = 0; stripe < count(); ++stripe) {
    Stripe& s = stripes_[stripe];
    if (!s.sent.lends()) continue;
    if (s.unproved) Prove(stripe);
    Forget(s);
    s.sent.Keep();
  }
}

ssize_t Sockets::Receive(std::uint32_t stripe, std::byte* header, std::size_t head, std::byte* data, std::size_t n) {
  Stripe& s = stripes_[stripe];
  if (odd_) [[unlikely]] {
    if (s.unproved) Prove(stripe);
    if (s.fd < 0 || s.unproved || s.asks > 0 || !s.saved.empty()) return ReceiveOddly(s, header, head, data, n);
  }
  const ssize_t got = s.ReceiveInto(header, head, data, n);
  if (got > 0) s.received += static_cast<std::uint64_t>(got);
  return got;
}

ssize_t Sockets::Stripe::ReceiveInto(std::byte* header, std::size_t head, std::byte* data, std::size_t n) const {
  if (head == 0) return Get(data, n);
  if (n <= kJoined) {
    std::byte joined[BlockHeader::kChecked + kJoined];
    const ssize_t got = Get(joined, head + n);
    if (got <= 0) return got;
    const auto size = static_cast<std::size_t>(got);
    std::memcpy(header, joined, std::min(head, size));
    if (size > head) std::memcpy(data, joined + head, size - head);
    return got;
  }
  if (tls != nullptr) {  // what OpenSSL has read already must not be left: the socket will not tell of it
    const ssize_t got = Get(header, head);
    const ssize_t more = got == static_cast<ssize_t>(head) ? Get(data, n) : 0;
    return got + std::max<ssize_t>(more, 0);
  }
  iovec iov[2] = {{header, head}, {data, n}};
  msghdr msg{};
  msg.msg_iov = iov;
  msg.msg_iovlen = 2;
  return recvmsg(fd, &msg, MSG_DONTWAIT);
}

// How many of n bytes may be sent until HETCOLL_FAULT breaks a socket.
std::size_t Sockets::Undisturbed(const Stripe& s, std::size_t n) const {
  if (shared_->faults.reset > 0) n = std::min<std::size_t>(n, s.until_reset);
  return until_end_ > 0 ? std::min<std::size_t>(n, until_end_) : n;
}

// So many were sent. A stream that ends does so in order, as if this rank had ended it: no socket comes in its place.
// This rank does not notice before the other end has seen it, and closed.
void Sockets::Spend(Stripe& s, std::uint64_t nbytes) {
  if (until_end_ > 0 && until_end_ != kEnded && (until_end_ -= nbytes) == 0) {
    until_end_ = kEnded;
    Shutdown();
  }
  if (shared_->faults.reset == 0 || (s.until_reset -= nbytes) > 0) return;
  ArmReset(s);
  if (s.fd >= 0) ResetConnection(s.fd);
}

void Sockets::Close() const {
  for (const Stripe& s : stripes_) {
    if (s.fd >= 0) close(s.fd);
  }
}

void Sockets::Shutdown() const {
  for (const Stripe& s : stripes_) shutdown(s.fd, SHUT_WR);
}

std::optional<Sockets::Room> Sockets::FindRoom(std::uint32_t stripe) const {
  std::vector<pollfd> fds;
  for (const Stripe& s : stripes_) fds.push_back({s.fd, POLLOUT, 0});
  const int ready = poll(fds.data(), fds.size(), 0);
  if (ready <= 0) {
    static_cast<void>(Blocks(stripes_[stripe]));
    return {};
  }
  do {
    stripe = (stripe + 1) % count();
  } while (fds[stripe].revents == 0);
  return Room{static_cast<std::uint16_t>(stripe), static_cast<std::uint32_t>(ready) == count()};
}

void Sockets::Lost(std::uint32_t stripe, const char* what) {
  // What is changed on the way the kernel has acknowledged: it is kept where all of it has a checksum.
  if (!mends_ || !Broken(errno) || (errno == EBADMSG && shared_->integrity != Integrity::kAll)) Fail(what);
  Break(stripe, false, Spell(errno));
}

void Sockets::Fail(const char* what) const {
  const int err = errno;
  const bool gone = Broken(err) || err == EPIPE;
  throw Fault(err == EBADMSG ? FaultKind::kCorrupt
              : gone         ? FaultKind::kPeerGone
                             : FaultKind::kSystem,
              peer(), std::string("TCP ") + what + ": " + Spell(err));
}

}  // namespace hetcoll
