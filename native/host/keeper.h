// A thread that looks after links while no call is in progress: a rail may die, or a peer ask for what it misses, at
// any time.
#pragma once

#include <poll.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace hetcoll {

class Keeper {
 public:
  // `serve` does what there is to do and adds the descriptors to wait on; it is called again when one of them is ready,
  // and ten times a second: not every device announces the failure of what it was asked to send. It must not throw.
  explicit Keeper(std::function<void(std::vector<pollfd>&)> serve);
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  void Wake() const;  // there are new links

 private:
  void Loop();

  std::function<void(std::vector<pollfd>&)> serve_;
  int wake_fd_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace hetcoll
