#include "host/keeper.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "transport/transport.h"

namespace hetcoll {

constexpr int kTickMs = 100;

Keeper::Keeper(std::function<void(std::vector<pollfd>&)> serve)
    : serve_(std::move(serve)), wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_fd_ < 0) throw Fault(FaultKind::kSystem, -1, std::string("eventfd: ") + std::strerror(errno));
  thread_ = std::thread([this] { Loop(); });
}

Keeper::~Keeper() {
  stop_ = true;
  Wake();
  if (thread_.joinable()) thread_.join();
  close(wake_fd_);
}

void Keeper::Wake() const { static_cast<void>(eventfd_write(wake_fd_, 1)); }

void Keeper::Loop() {
  pthread_setname_np(pthread_self(), "hetcoll-links");
  std::vector<pollfd> fds;
  while (!stop_) {
    fds.assign(1, {wake_fd_, POLLIN, 0});
    serve_(fds);
    static_cast<void>(poll(fds.data(), fds.size(), kTickMs));
    eventfd_t count;
    static_cast<void>(eventfd_read(wake_fd_, &count));
  }
}

}  // namespace hetcoll
