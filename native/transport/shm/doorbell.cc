#include "transport/shm/doorbell.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

#include "transport/transport.h"

namespace hetcoll {
namespace {

socklen_t Address(std::uint64_t name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const int n = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "hetcoll-bell-%016llx",
                              static_cast<unsigned long long>(name));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(n));
}

}  // namespace

Doorbell::Doorbell() {
  if (getrandom(&name_, sizeof name_, 0) != sizeof name_) {
    throw Fault(FaultKind::kSystem, -1, std::string("doorbell: getrandom: ") + std::strerror(errno));
  }
  sockaddr_un address;
  const socklen_t length = Address(name_, address);
  fd_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd_ < 0) throw Fault(FaultKind::kSystem, -1, std::string("doorbell: socket: ") + std::strerror(errno));
  if (bind(fd_, reinterpret_cast<sockaddr*>(&address), length) < 0) {
    const int err = errno;
    close(fd_);
    throw Fault(FaultKind::kSystem, -1, std::string("doorbell: bind: ") + std::strerror(err));
  }
}

void Doorbell::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void Doorbell::Ring(std::uint64_t name) const {
  sockaddr_un address;
  const socklen_t length = Address(name, address);
  const char byte = 0;
  // Failure is no news: the queue is full (it wakes anyway) or the peer is gone (the control channel says so).
  static_cast<void>(sendto(fd_, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL, reinterpret_cast<sockaddr*>(&address), length));
}

bool Doorbell::Drain() const {
  char bytes[64];
  bool rung = false;
  while (recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT) > 0) rung = true;
  return rung;
}

}  // namespace hetcoll
