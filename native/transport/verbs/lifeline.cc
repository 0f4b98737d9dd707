#include "transport/verbs/lifeline.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
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
  while (out_at_ < out_.size() && !ended_) {
    const ssize_t n = send(fds_[0], out_.data() + out_at_, out_.size() - out_at_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return false;
    if (n < 0) {
      ended_ = true;
      return false;
    }
    out_at_ += static_cast<std::size_t>(n);
  }
  if (out_at_ < out_.size()) return false;
  out_.clear();
  out_at_ = 0;
  return true;
}

// Never reads beyond the record: what follows may be for the TCP ends.
bool Lifeline::Fill(std::size_t n) {
  while (in_.size() < n && !ended_) {
    const std::size_t have = in_.size();
    in_.resize(n);
    const ssize_t got = recv(fds_[0], in_.data() + have, n - have, MSG_DONTWAIT);
    in_.resize(have + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    if (got < 0 && errno == EAGAIN) return false;
    ended_ = true;
  }
  return in_.size() >= n;
}

std::unique_ptr<std::byte[]> Lifeline::ReceiveBlock(std::size_t n) {
  if (!Fill(n)) return nullptr;
  auto block = std::make_unique<std::byte[]>(n);
  std::copy(in_.begin(), in_.end(), block.get());
  in_.clear();
  return block;
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
