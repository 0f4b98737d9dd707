#include "base/forks.h"

#include <pthread.h>

#include <mutex>

namespace hetcoll {

std::atomic<int> Birthplace::forks_{0};

Birthplace::Birthplace() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { forks_.fetch_add(1); }); });
  born_ = forks_.load();
}

}  // namespace hetcoll
