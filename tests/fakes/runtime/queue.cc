#include "queue.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "device.h"
#include "settings.h"

namespace fake {

void Completion::finish() {
  std::lock_guard lock(mutex_);
  time_ = now();
  done_.store(true, std::memory_order_release);
  ended_.notify_all();
}

void Completion::wait() {
  if (done()) return;
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return done(); });
}

bool Completion::wait_for(double seconds) {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return done(); });
}

Execution::Pause::Pause(const Execution& execution) : execution_(execution), begin_(now()) {}

Error Execution::Pause::rest() {
  if (int fault = execution_.device_.fault.load(std::memory_order_acquire)) return static_cast<Error>(fault);
  // Who yields on a busy machine runs again last of all; who slept runs next. Who has waited long is late by a
  // sixteenth of that at most.
  double waited = now() - begin_;
  timespec nap{0, static_cast<long>(1e9 * std::clamp(waited / 16, 20e-6, 2e-3))};
  nanosleep(&nap, nullptr);
  return waited > settings().timeout ? kLaunchTimeout : kOk;
}

void Execution::report(const char* what) const {
  complain("device %d, stream %d waited %g s (FAKE_TIMEOUT) %s", device_.ordinal, stream_, settings().timeout, what);
}

void start_thread(std::function<void()> run) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  std::thread(std::move(run)).detach();
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

Queue::Queue(Device& device, int number)
    : device_(device),
      random_(settings().seed * 0x9E3779B97F4A7C15u + static_cast<unsigned>(64 * device.physical + number + 1)) {
  start_thread([this] { run(); });
}

void Queue::push(Operation operation) {
  {
    std::lock_guard lock(mutex_);
    operations_.push_back(std::move(operation));
  }
  pushed_.notify_one();
}

void Queue::run() {
  for (;;) {
    Operation operation;
    {
      std::unique_lock lock(mutex_);
      pushed_.wait(lock, [this] { return !operations_.empty(); });
      operation = std::move(operations_.front());
      operations_.pop_front();
    }
    run_one(operation);
    operation.body = nullptr;  // whatever it held is gone when the host learns that it ended
    operation.done->finish();
  }
}

void Queue::run_one(Operation& operation) {
  Execution execution(device_, operation.stream);
  Error error = await(execution, operation);
  if (error == kOk && settings().jitter) loiter();
  if (device_.fault.load(std::memory_order_acquire) != 0) return;  // a failed device runs nothing more
  if (error == kOk) error = operation.body(execution);
  if (error != kOk) fail(device_, error, operation.name, operation.stream);
}

Error Queue::await(Execution& execution, const Operation& operation) {
  for (const CompletionPtr& before : operation.after) {
    double deadline = now() + settings().timeout;
    while (!before->wait_for(0.05)) {
      if (device_.fault.load(std::memory_order_acquire) != 0) return kOk;
      if (now() > deadline) {
        return execution.until([] { return false; }, [] { return std::string("for an earlier stream"); });
      }
    }
  }
  return kOk;
}

// xorshift64*: every other operation, at random, begins late by up to jitter_us.
void Queue::loiter() {
  random_ ^= random_ >> 12;
  random_ ^= random_ << 25;
  random_ ^= random_ >> 27;
  std::uint64_t value = random_ * 0x2545F4914F6CDD1Du;
  if (value >> 63 == 0 || settings().jitter_us == 0) return;
  timespec nap{0, static_cast<long>((value >> 8) % settings().jitter_us) * 1000};
  nanosleep(&nap, nullptr);
}

}  // namespace fake
