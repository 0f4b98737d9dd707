// A hardware queue: one thread that runs operations in the order in which they came, whatever streams they are of.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "errors.h"

namespace fake {

struct Device;

// That an operation has ended; whoever needs to know holds one.
class Completion {
 public:
  void finish();
  bool done() const { return done_.load(std::memory_order_acquire); }
  void wait();
  bool wait_for(double seconds);
  double time() const { return time_; }  // when it ended; once done() is true

 private:
  std::atomic<bool> done_{false};
  double time_ = 0;
  std::mutex mutex_;
  std::condition_variable ended_;
};
using CompletionPtr = std::shared_ptr<Completion>;

// What a running operation can ask of the queue that runs it.
class Execution {
 public:
  Execution(Device& device, int stream) : device_(device), stream_(stream) {}

  Device& device() const { return device_; }
  int stream() const { return stream_; }

  // Polls until `ready` or the device has failed; kLaunchTimeout after FAKE_TIMEOUT, with `what` in the complaint.
  template <class Ready, class What>
  Error until(Ready ready, What what) {
    Pause pause(*this);
    while (!ready()) {
      Error error = pause.rest();
      if (error == kLaunchTimeout) report(what().c_str());
      if (error != kOk) return error;
    }
    return kOk;
  }

  class Pause {  // longer and longer rests, to leave the processor to whoever is waited for
   public:
    explicit Pause(const Execution& execution);
    Error rest();

   private:
    const Execution& execution_;
    double begin_;
  };

 private:
  void report(const char* what) const;

  Device& device_;
  int stream_;
};

// Runs again at each replay of a graph. An error other than kOk fails the device, as a fault in a kernel does.
using Body = std::function<Error(Execution&)>;

struct Operation {
  const char* name = "";
  int stream = 0;
  Body body;
  std::vector<CompletionPtr> after;  // ends of operations on other queues
  CompletionPtr done;
};

// A thread of the driver's own, for as long as the process lives: no signal is delivered to it.
void start_thread(std::function<void()> run);

class Queue {
 public:
  Queue(Device& device, int number);
  void push(Operation operation);

 private:
  [[noreturn]] void run();
  void run_one(Operation& operation);
  Error await(Execution& execution, const Operation& operation);
  void loiter();

  Device& device_;
  std::uint64_t random_;
  std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<Operation> operations_;
};

}  // namespace fake
