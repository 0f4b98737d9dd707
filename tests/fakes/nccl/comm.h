// A communicator of the fake NCCL (or RCCL): what the ranks share, and the operations they have under way.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "access.h"
#include "queue.h"
#include "reduce.h"
#include "segment.h"

namespace fake::nccl {

enum Result : int {  // ncclResult_t
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum Kind : int { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kAllToAll, kGather, kScatter };

struct Collective {
  Kind kind;
  std::uintptr_t send, recv;
  std::size_t count;  // of the call: of one rank's share where there are shares
  int dtype, op, root;
  double factor;  // operands are multiplied by it first
  Error late;     // what the operation comes to when a test wants it to fail
};

struct Message {  // a send or a receive
  bool sends;
  std::uintptr_t buffer;
  std::size_t nbytes;
  int peer;
};

struct Work {  // of one group on one communicator
  std::vector<Collective> collectives;
  std::vector<Message> messages;
};

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  Comm(Device& device, int size, int rank, bool blocking);
  ~Comm();

  // Meets the others; returns when all have come, or an error. `abort` and FAKE_TIMEOUT end it.
  Result meet(const Id& id);
  // The communicator of those with this rank's color, in the order of key; null for color -1.
  Result split(int color, int key, std::shared_ptr<Comm>* out, bool blocking);

  // Holds up the caller until the ranks of its first messages in a direction have called as well, as NCCL does.
  Result connect(const std::vector<Message>& messages);
  // Enqueues the work on streams[0], behind what all of them hold, and makes the others wait for it.
  Result enqueue(std::shared_ptr<Work> work, const std::vector<Stream*>& streams);
  // Waits for what was begun, then, as NCCL does, until no graph has an operation of this communicator any more.
  void drain();

  Device& device() const { return device_; }
  int size() const { return size_; }
  int rank() const { return rank_; }
  bool blocking() const { return blocking_; }
  Result state() const { return static_cast<Result>(state_.load()); }
  void set_state(Result state) { state_ = state; }
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }
  // Runs on a thread of its own; kInProgress until it ends with a result.
  template <class Job>
  void in_background(Job job) {
    join_background();
    asked_ = false;
    state_ = kInProgress;
    std::lock_guard lock(mutex_);
    threads_.emplace_back([this, job] { state_ = job(); });
  }
  void join_background();
  void ask() { asked_ = true; }
  void wait_until_asked() const;

  int add_operator(double factor, int dtype);
  bool remove_operator(int op);
  // What to do for ncclRedOp_t `op` on `dtype`: a plain operation, and the factor before it.
  bool resolve(int op, int dtype, int* plain, double* factor);

  std::string last_error;

 private:
  friend class Run;
  Result exchange(const std::int64_t mine[4], std::vector<std::int64_t>* all);
  Result check_devices();

  Device& device_;
  const int size_, rank_;
  const bool blocking_;
  std::atomic<int> state_{kSuccess};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> asked_{false};  // whether what runs in the background is done, or waited for
  std::shared_ptr<Segment> segment_;
  std::uint64_t rounds_ = 0;  // of the exchange
  std::mutex mutex_;          // of what follows
  std::vector<std::thread> threads_;
  CompletionPtr last_;
  std::vector<std::weak_ptr<void>> captured_;  // operations in graphs
  std::vector<std::pair<double, int>> operators_;
  std::mutex running_;       // one operation at a time
  std::uint64_t steps_ = 0;  // that have run
};

const DriverAccess& driver();

// Runs the work here and now, on a stream's thread.
Error run_work(Comm& comm, const Work& work, Execution& execution);

}  // namespace fake::nccl
