#include "base/team.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "base/clock.h"

namespace hetcoll {
namespace {

constexpr std::size_t kGrain = 4096;
constexpr std::int64_t kSpinNs = 50'000;  // after a job there is often another one

}  // namespace

Team::~Team() {
  if (threads_.empty()) return;
  if (pid_ != getpid()) {  // a fork's child has none of them
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  over_.store(true, std::memory_order_relaxed);
  turn_.fetch_add(1, std::memory_order_release);
  turn_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::Run(const Job& job) {
  if (threads_.empty()) {
    pid_ = getpid();
    try {
      for (unsigned i = 1; i <= helpers_; ++i) threads_.emplace_back([this, i] { Help(i); });
    } catch (const std::system_error&) {  // those that could be had do the work
      helpers_ = static_cast<unsigned>(threads_.size());
    }
  }
  job_ = job;
  busy_.store(helpers_, std::memory_order_relaxed);
  turn_.fetch_add(1, std::memory_order_release);
  turn_.notify_all();
  Part(0);
  for (unsigned spins = 1; busy_.load(std::memory_order_acquire) > 0; ++spins) {
    CpuRelax();
    if (spins % 1024 == 0) sched_yield();  // a helper may be waiting for this core
  }
}

void Team::Part(unsigned number) const {
  const std::size_t grains = (job_.nbytes + kGrain - 1) / kGrain, parts = helpers_ + 1;
  const std::size_t begin = grains * number / parts * kGrain;
  const std::size_t end = std::min(job_.nbytes, grains * (number + 1) / parts * kGrain);
  if (begin < end) job_.call(job_.work, begin, end);
}

void Team::Help(unsigned number) {
  pthread_setname_np(pthread_self(), "hetcoll-helper");
  for (std::uint32_t seen = 0;; ++seen) {
    const std::int64_t start = NowNs();
    while (turn_.load(std::memory_order_acquire) == seen && NowNs() - start < kSpinNs) CpuRelax();
    turn_.wait(seen, std::memory_order_acquire);
    if (over_.load(std::memory_order_relaxed)) return;
    Part(number);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace hetcoll
