#include "transport/verbs/control_socket.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "transport/tcp_sockets.h"

namespace hetcoll {

ControlSocket::ControlSocket(std::span<const int> fds, int peer) : fds_(fds.begin(), fds.end()), peer_(peer) {
  for (int fd : fds_) {
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
      throw Fault(FaultKind::kSystem, peer_, std::string("verbs: fcntl: ") + std::strerror(errno));
    }
  }
}

ControlSocket::~ControlSocket() {
  for (int fd : fds_) close(fd);
}

// What the socket takes at once.
std::size_t ControlSocket::Write(const std::byte* data, std::size_t n, int flags) {
  std::size_t done = 0;
  while (done < n && !ended_) {
    const ssize_t sent = send(fds_[0], data + done, n - done, MSG_NOSIGNAL | MSG_DONTWAIT | flags);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    if (sent < 0) {
      ended_ = true;
      break;
    }
    done += static_cast<std::size_t>(sent);
  }
  return done;
}

void ControlSocket::SendBytes(const void* data, std::size_t n, int flags) {
  const auto* bytes = static_cast<const std::byte*>(data);
  const std::size_t done = Flush() ? Write(bytes, n, flags) : 0;
  out_.insert(out_.end(), bytes + done, bytes + n);
}

void ControlSocket::SendFrame(const Frame& frame, const std::byte* payload) {
  const struct {
    Word word;
    Frame frame;
  } head{{kFrameWord, 0, frame.seq}, frame};
  SendBytes(&head, sizeof head, frame.nbytes > 0 ? MSG_MORE : 0);
  SendBytes(payload, frame.nbytes);
}

bool ControlSocket::Flush() {
  out_at_ += Write(out_.data() + out_at_, out_.size() - out_at_, 0);
  if (out_at_ < out_.size()) return false;
  out_.clear();
  out_at_ = 0;
  return true;
}

bool ControlSocket::Delivered() {
  int waiting = 0;
  return ended_ || (Flush() && (ioctl(fds_[0], SIOCOUTQ, &waiting) != 0 || waiting == 0));
}

bool ControlSocket::ReceiveBytes(std::byte* to, std::size_t n, std::size_t& have) {
  while (have < n && !ended_) {
    const ssize_t got = recv(fds_[0], to + have, n - have, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) ended_ = true;
    have += static_cast<std::size_t>(std::max<ssize_t>(got, 0));
  }
  return have == n;
}

// Never reads beyond the record: what follows may be for the TCP ends.
bool ControlSocket::Fill(std::size_t n) {
  std::size_t have = in_.size();
  in_.resize(n);
  const bool whole = ReceiveBytes(in_.data(), n, have);
  in_.resize(have);
  return whole;
}

void ControlSocket::Count(Holdings& held) const {
  for (const int fd : fds_) CountSocket(fd, held);
}

void ControlSocket::AddPoll(std::vector<pollfd>& fds) const {
  if (ended_ || fds_.empty()) return;
  fds.push_back({fds_[0], static_cast<short>(out_.empty() ? POLLIN : POLLIN | POLLOUT), 0});
}

void ControlSocket::Shutdown() const {
  for (int fd : fds_) shutdown(fd, SHUT_WR);
}

std::vector<int> ControlSocket::Release() { return std::exchange(fds_, {}); }

}  // namespace hetcoll
