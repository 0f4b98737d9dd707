// A device that is not there: its memory is the host's at addresses that no processor may touch, and a thread copies.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "base/copier.h"
#include "transport/transport.h"

namespace hetcoll::testing {

class FakeCopier final : public Copier {
 public:
  static constexpr std::uintptr_t kFar = std::uintptr_t{1} << 62;

  // `fails`: the copy of this number does; 0: none. Each takes `slow` longer.
  explicit FakeCopier(std::uint64_t fails = 0, std::chrono::milliseconds slow = {})
      : fails_(fails), slow_(slow), thread_([this] { Run(); }) {}
  ~FakeCopier() override {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  // The device's address of this memory.
  static std::byte* Far(const std::byte* at) {
    return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(at) + kFar);
  }

  void Copy(Way way, void* dst, const void* src, std::size_t n) override {
    if (++copies_ == fails_) throw Fault(FaultKind::kSystem, -1, "the copy failed");
    {
      std::lock_guard lock(mutex_);
      queue_.push_back({way, static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), n, 0});
    }
    begun_[static_cast<std::size_t>(way)] = true;
    wake_.notify_all();
  }

  std::uint64_t Mark(Way way) override {
    std::uint64_t& mark = marks_[static_cast<std::size_t>(way)];
    if (!std::exchange(begun_[static_cast<std::size_t>(way)], false)) return mark;
    std::lock_guard lock(mutex_);
    queue_.push_back({way, nullptr, nullptr, 0, ++mark});
    wake_.notify_all();
    return mark;
  }

  bool Passed(Way way, std::uint64_t mark) override {
    std::lock_guard lock(mutex_);
    return mark <= passed_[static_cast<std::size_t>(way)];
  }

 private:
  struct Job {
    Way way;
    std::byte* dst;
    const std::byte* src;
    std::size_t n;
    std::uint64_t mark;
  };

  template <class Pointer>
  static Pointer Near(Pointer at) {
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    return reinterpret_cast<Pointer>(address >= kFar ? address - kFar : address);
  }

  // What nobody wants any more, since a rail has carried it, may be read while the device writes there again: those
  // bytes go nowhere. Whoever wants bytes compares them. TSan would say so of memcpy, too.
  __attribute__((no_sanitize("thread"))) static void CopyOut(std::byte* to, const std::byte* from, std::size_t n) {
    const volatile std::byte* source = from;
    for (std::size_t i = 0; i < n; ++i) to[i] = source[i];
  }

  void Run() {
    std::mt19937 random(1);
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return ended_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const Job job = queue_.front();
      queue_.pop_front();
      if (job.mark > 0) {
        passed_[static_cast<std::size_t>(job.way)] = job.mark;
        continue;
      }
      lock.unlock();
      if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
      std::this_thread::sleep_for(slow_);
      if (job.way == Way::kOut) {
        CopyOut(Near(job.dst), Near(job.src), job.n);
      } else {
        std::memcpy(Near(job.dst), Near(job.src), job.n);
      }
      lock.lock();
    }
  }

  std::uint64_t fails_;
  std::chrono::milliseconds slow_;
  std::uint64_t copies_ = 0;  // these three: under the engine's lock
  std::uint64_t marks_[2] = {};
  bool begun_[2] = {};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_;
  std::uint64_t passed_[2] = {};
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace hetcoll::testing
