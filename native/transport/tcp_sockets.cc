#include "transport/tcp_sockets.h"

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

#include "transport/tcp_block.h"
#include "transport/transport.h"

namespace hetcoll {
namespace {

constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
constexpr std::size_t kWeighed = std::size_t{64} << 10;  // blocks from here on go where the queue is shortest
// Up to here it costs less to copy a message to and from its header than to have the kernel deal with two places.
constexpr std::size_t kJoined = std::size_t{4} << 10;

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

Sockets::Sockets(std::span<const int> fds, int peer, std::uint64_t spoil)
    : fds_(fds.begin(), fds.end()), peer_(peer), spoil_(spoil) {
  for (int fd : fds_) {
    const int flags = fcntl(fd, F_GETFL);
    const int on = 1;
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) Fail("fcntl");
    // Unix sockets serve as links in tests: they have no Nagle delay to turn off.
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0 && errno != EOPNOTSUPP) Fail("TCP_NODELAY");
  }
}

void Sockets::Count(Holdings& held) const {
  for (const int fd : fds_) CountSocket(fd, held);
}

ssize_t Sockets::Send(std::uint32_t stripe, const Parts& parts) {
  if (spoil_ > 0) return SendSpoiled(stripe, parts);
  if (parts.head == 0 && parts.tail_size == 0) return send(fd(stripe), parts.data, parts.n, kFlags);
  if (parts.n <= kJoined) {
    std::byte joined[BlockHeader::kChecked + kJoined + sizeof(BlockCheck)];
    parts.CopyTo(joined);
    return send(fd(stripe), joined, parts.size(), kFlags);
  }
  iovec iov[3] = {{const_cast<std::byte*>(parts.header), parts.head},
                  {const_cast<std::byte*>(parts.data), parts.n},
                  {const_cast<std::byte*>(parts.tail), parts.tail_size}};
  msghdr msg{};
  msg.msg_iov = iov;
  msg.msg_iovlen = parts.tail_size > 0 ? 3 : 2;
  return sendmsg(fd(stripe), &msg, kFlags);
}

ssize_t Sockets::SendSpoiled(std::uint32_t stripe, const Parts& parts) {
  std::vector<std::byte> bytes(parts.size());
  parts.CopyTo(bytes.data());
  if (spoil_ <= bytes.size()) bytes[spoil_ - 1] ^= std::byte{0x10};
  const ssize_t sent = send(fd(stripe), bytes.data(), bytes.size(), kFlags);
  if (sent > 0) spoil_ -= std::min(spoil_, static_cast<std::uint64_t>(sent));
  return sent;
}

ssize_t Sockets::Receive(std::uint32_t stripe, std::byte* header, std::size_t head, std::byte* data,
                         std::size_t n) const {
  if (head == 0) return recv(fd(stripe), data, n, MSG_DONTWAIT);
  if (n <= kJoined) {
    std::byte joined[BlockHeader::kChecked + kJoined];
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

void Sockets::Close() const {
  for (int fd : fds_) close(fd);
}

void Sockets::Shutdown() const {
  for (int fd : fds_) shutdown(fd, SHUT_WR);
}

std::uint32_t Sockets::After(std::uint32_t stripe, std::size_t nbytes) const {
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

// Bytes that the peer has not acknowledged.
std::size_t Sockets::Queued(std::uint32_t stripe) const {
  int nbytes = 0;
  return ioctl(fds_[stripe], SIOCOUTQ, &nbytes) < 0 ? 0 : static_cast<std::size_t>(nbytes);
}

void Sockets::Fail(const char* what) const {
  const int err = errno;
  const bool gone = err == EPIPE || err == ECONNRESET || err == ECONNABORTED || err == ETIMEDOUT ||
                    err == EHOSTUNREACH || err == EHOSTDOWN || err == ENETUNREACH || err == ENETDOWN;
  throw Fault(gone ? FaultKind::kPeerGone : FaultKind::kSystem, peer_,
              std::string("TCP ") + what + ": " + std::strerror(err));
}

}  // namespace hetcoll
