#include "transport/verbs/lifeline.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace hetcoll {

Lifeline::Lifeline(std::span<const int> fds, int peer) : fds_(fds.begin(), fds.end()), peer_(peer) {
  for (int fd : fds_) {
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
      throw Fault(FaultKind::kSystem, peer_, std::string("verbs: fcntl: ") + std::strerror(errno));
    }
  }
}

Lifeline::~Lifeline() {
  for (int fd : fds_) close(fd);
}

void Lifeline::SendBytes(const void* data, std::size_t n) {
  const auto* bytes = static_cast<const std::byte*>(data);
  out_.insert(out_.end(), bytes, bytes + n);
  Flush();
}

bool Lifeline::Flush() {
  while (!out_.empty() && !ended_) {
    const ssize_t n = send(fds_[0], out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return false;
    if (n < 0) {
      ended_ = true;
      return false;
    }
    out_.erase(out_.begin(), out_.begin() + n);
  }
  return out_.empty();
}

// Never reads beyond the record: what follows may be for the TCP ends.
bool Lifeline::ReceiveBytes(void* data, std::size_t n) {
  while (in_.size() < n && !ended_) {
    const std::size_t have = in_.size();
    in_.resize(n);
    const ssize_t got = recv(fds_[0], in_.data() + have, n - have, MSG_DONTWAIT);
    in_.resize(have + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    if (got < 0 && errno == EAGAIN) return false;
    ended_ = true;
  }
  if (in_.size() < n) return false;
  std::memcpy(data, in_.data(), n);
  in_.clear();
  return true;
}

void Lifeline::AddPoll(std::vector<pollfd>& fds) const {
  if (ended_ || fds_.empty()) return;
  fds.push_back({fds_[0], static_cast<short>(out_.empty() ? POLLIN : POLLIN | POLLOUT), 0});
}

void Lifeline::Shutdown() const {
  for (int fd : fds_) shutdown(fd, SHUT_WR);
}

std::vector<int> Lifeline::Release() { return std::exchange(fds_, {}); }

}  // namespace hetcoll
