// A descriptor that is always readable: nobody falls asleep over an end that has news or only rests.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "transport/transport.h"

namespace hetcoll {

class ReadyFd {
 public:
  ReadyFd() : fd_(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0) throw Fault(FaultKind::kSystem, -1, std::string("eventfd: ") + std::strerror(errno));
  }
  ~ReadyFd() { close(fd_); }
  ReadyFd(const ReadyFd&) = delete;
  ReadyFd& operator=(const ReadyFd&) = delete;
  pollfd Poll() const { return {fd_, POLLIN, 0}; }

 private:
  int fd_;
};

}  // namespace hetcoll
