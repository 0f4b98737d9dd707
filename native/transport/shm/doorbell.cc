#include "transport/shm/doorbell.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "transport/transport.h"

namespace hetcoll {
namespace {

socklen_t Address(const std::string& prefix, int index, sockaddr_un& address) {
  const std::string name = prefix + "-" + std::to_string(index);
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

Doorbell::Doorbell(const std::string& prefix, int index) : prefix_(prefix) {
  sockaddr_un address;
  if (prefix.size() > sizeof address.sun_path - 16) throw Fault(FaultKind::kSystem, -1, "doorbell: name too long");
  const socklen_t length = Address(prefix, index, address);
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

void Doorbell::Ring(int index) const {
  sockaddr_un address;
  const socklen_t length = Address(prefix_, index, address);
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
