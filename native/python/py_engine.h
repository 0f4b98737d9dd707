// The engine as Python sees it: calls read buffers, run without the interpreter's lock and look at signals.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "host/engine.h"
#include "python/call_cache.h"
#include "python/call_words.h"
#include "python/copies.h"
#include "python/host_buffer.h"
#include "python/sampling.h"
#include "python/waiting.h"

namespace hetcoll {

namespace nb = nanobind;

inline constexpr std::size_t kHoldGilBytes = 16
                                             << 10;  // longer messages release the interpreter's lock before they start
// The two halves of Collective.P2P, as src/hetcoll/calls calls them.
inline constexpr int kCallSend = 13;
inline constexpr int kCallSendRecv = 15;
inline constexpr std::int64_t kSignalSliceNs = 50'000'000;

// What a call ended with. kTimedOut: it is still in flight.
enum class Status : int { kDone = 1, kFailed = 2, kTimedOut = 3 };

struct Ticket {
  std::shared_ptr<Pending> task;
};

// Where the two buffers of a collective, of `s_bytes` and `r_bytes`, may coincide: the rule of src/hetcoll/calls.
inline bool AliasingAllowed(int collective, const std::byte* s, std::size_t s_bytes, const std::byte* r,
                            std::size_t r_bytes, int rank) {
  if (s + s_bytes <= r || r + r_bytes <= s) return true;
  switch (collective) {
    case 1:  // allgather
    case 5:  // gather
      return s == r + static_cast<std::size_t>(rank) * s_bytes;
    case 2:  // reduce_scatter
    case 6:  // scatter
      return r == s + static_cast<std::size_t>(rank) * r_bytes;
    case kCallSendRecv:
      return false;
    default:
      return s == r && s_bytes == r_bytes;
  }
}

class PyEngine {
 public:
  PyEngine(const EngineOptions& options, double timeout) : rank_(options.rank), timeout_(timeout), engine_(options) {}
  // In a forked child the engine stays as it is: its threads are not there to be joined, its queue pairs are the
  // parent's, and so is what its memory is registered with.
  ~PyEngine() {
    if (!engine_.forked()) engine_.~Engine();
  }
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  Engine& engine() { return engine_; }

  // Runs a collective that was run before with the same counts, and gives what stands for one that is done. None: it
  // was not run before, and nothing was done.
  nb::object Call(nb::handle number, nb::handle send, nb::handle recv, nb::handle op, nb::handle where) {
    // Only what needs no conversion: the rest is for the slow path, and so are all errors.
    const std::int32_t collective = SmallNumber(number.ptr()), root = SmallNumber(where.ptr());
    if (engine_.forked() || !done_ || collective < 0 || root < 0) return nb::none();
    const bool in_place = recv.is_none();
    HostBuffer send_buffer;
    HostBuffer recv_buffer;
    if (!send_buffer.Read(send.ptr(), in_place && collective != kCallSend)) return nb::none();
    if (!in_place) {
      if (!recv_buffer.Read(recv.ptr(), true) || recv_buffer.dtype() != send_buffer.dtype() ||
          !AliasingAllowed(collective, send_buffer.data(), send_buffer.nbytes(), recv_buffer.data(),
                           recv_buffer.nbytes(), rank_)) {
        return nb::none();
      }
    }
    const int redop = OpNumber(op.ptr());
    if (redop < 0) return nb::none();
    const HostBuffer& out = in_place ? send_buffer : recv_buffer;
    const CallKey key{static_cast<std::uint8_t>(collective),
                      send_buffer.dtype(),
                      static_cast<std::uint8_t>(redop),
                      root,
                      send_buffer.count(),
                      out.count()};
    const std::shared_ptr<Shape>& shape = cache_.Find(key);
    if (!shape || sampling_.IsDue(key.collective, send_buffer.nbytes(), false)) return nb::none();
    // A message's shape has one buffer; which of the two it is, its plan knows.
    const std::size_t nbytes = std::max(send_buffer.nbytes(), out.nbytes());
    const Status status = Run(shape, send_buffer.data(), out.data(), nbytes, timeout_);
    if (status != Status::kDone) on_stuck_(status);  // raises, or has waited until it was done
    TellNews();
    return done_;
  }

  // Begins a collective that was run before with the same counts; `pending` is what is left of it, if anything. False:
  // it was not run before, or the fast path refuses calls now, and nothing was done.
  bool Start(const CallKey& key, void* send, void* recv, std::shared_ptr<Task>& pending) {
    if (!starts_.load(std::memory_order_relaxed) || engine_.forked() || engine_.failed()) return false;
    const std::shared_ptr<Shape> shape = cache_.Find(key);  // its own: another thread may change the cache
    if (!shape || sampling_.IsDue(key.collective, shape->bound.send_bytes, false)) return false;
    Outcome outcome = Outcome::kPending;
    if (std::max(shape->bound.send_bytes, shape->bound.recv_bytes) <= kHoldGilBytes) {
      outcome = engine_.RunPrompt(shape, send, recv, pending, nullptr);
    } else {
      nb::gil_scoped_release release;
      pending = engine_.Submit(shape, send, recv, nullptr);
    }
    if (outcome == Outcome::kFailed) on_stuck_(Status::kFailed);  // raises
    if (outcome == Outcome::kPending) engine_.DriveInBackground();
    return true;
  }

  // Until what `Start` has begun is over.
  void Await(std::shared_ptr<Task> task) {
    Ticket ticket{std::move(task)};
    const Status status = DriveTo(*ticket.task, DeadlineNs(timeout_));
    if (status == Status::kTimedOut) t_pending = ticket;
    if (status != Status::kDone) on_stuck_(status);  // raises, or has waited until it was done
    TellNews();
  }

  // `memory` stays until what uses it is over, or with the engine.
  void KeepUntilDone(std::shared_ptr<Task> task, nb::object memory) {
    Keeping over;  // what dies may run Python, and does so once the lock is free
    const nb::ft_lock_guard lock(kept_mutex_);
    const auto running = [](const auto& each) { return each.first->state.load() == Task::State::kRunning; };
    const auto ended = std::partition(kept_.begin(), kept_.end(), running);
    std::move(ended, kept_.end(), std::back_inserter(over));
    kept_.erase(ended, kept_.end());
    kept_.emplace_back(std::move(task), std::move(memory));
  }

  // Nothing of ours touches the memory of calls from here on.
  void Close() {
    {
      nb::gil_scoped_release release;
      engine_.Close();
    }
    Keeping over;
    const nb::ft_lock_guard lock(kept_mutex_);
    over.swap(kept_);
  }

  // HETCOLL_CHECK=sampled.
  Sampling& sampling() { return sampling_; }

  // Whether `Start` may begin calls.
  void SetStarts(bool starts) { starts_.store(starts, std::memory_order_relaxed); }

  // Whether a message such as this went over the fast path before: then RunMessages will know it, too.
  bool Knows(int kind, nb::handle object, nb::handle peer) {
    HostBuffer buffer;
    const std::int32_t rank = SmallNumber(peer.ptr());
    return rank >= 0 && buffer.Read(object.ptr(), kind != kCallSend) && FindMessage(kind, buffer, rank);
  }

  // Runs messages, each (kind, object, peer), beside each other to their end. False: one of them is not known, and
  // nothing was done.
  bool RunMessages(const nb::list& messages) {
    std::deque<HostBuffer> buffers;  // never moved
    std::vector<std::pair<std::shared_ptr<Shape>, void*>> parts;
    for (nb::handle message : messages) {
      const int kind = nb::cast<int>(message[0]);
      HostBuffer& buffer = buffers.emplace_back();
      if (!buffer.Read(nb::object(message[1]).ptr(), kind != kCallSend)) return false;
      const std::shared_ptr<Shape>& shape = FindMessage(kind, buffer, nb::cast<int>(message[2]));
      if (!shape) return false;
      parts.emplace_back(shape, buffer.data());
    }
    std::vector<Ticket> tickets;
    {
      nb::gil_scoped_release release;
      for (const auto& [shape, data] : parts) tickets.push_back({engine_.Submit(shape, data, data)});
    }
    const std::int64_t deadline = DeadlineNs(timeout_);
    for (Ticket& ticket : tickets) {
      const Status status = DriveTo(*ticket.task, deadline);
      if (status == Status::kTimedOut) t_pending = ticket;
      if (status != Status::kDone) on_stuck_(status);  // raises, or has waited until it was done
    }
    return true;
  }

  Status RunShape(const std::shared_ptr<Shape>& shape, std::uintptr_t send, std::uintptr_t recv, double timeout,
                  std::uintptr_t residual) {
    const std::size_t nbytes = std::max(shape->bound.send_bytes, shape->bound.recv_bytes);
    const Status status = Run(shape, reinterpret_cast<void*>(send), reinterpret_cast<void*>(recv), nbytes, timeout,
                              reinterpret_cast<float*>(residual));
    TellNews();
    return status;
  }

  Ticket Submit(const std::shared_ptr<Shape>& shape, std::uintptr_t send, std::uintptr_t recv, bool background,
                std::uintptr_t residual, std::uintptr_t snapshot) {
    nb::gil_scoped_release release;
    Ticket ticket{engine_.Submit(shape, reinterpret_cast<void*>(send), reinterpret_cast<void*>(recv),
                                 reinterpret_cast<float*>(residual), reinterpret_cast<std::byte*>(snapshot))};
    if (background) engine_.DriveInBackground();
    return ticket;
  }

  Status Wait(const Ticket& ticket, double timeout) {
    const Status status = DriveTo(*ticket.task, DeadlineNs(timeout));
    TellNews();
    return status;
  }

  // Pieces of memory from `address` on to (or, `gets`, from) a peer's window; `pieces` is rows of Piece. `device`: it
  // is not the host's, and not touched before `after`. `own`, `late` (and bytes of an element): see Where.
  Ticket Transfer(bool gets, std::uint32_t window, int peer, std::uintptr_t address, nb::handle pieces, int signal,
                  bool device, const std::optional<PyGate>& after, std::optional<std::uint32_t> own,
                  std::uintptr_t late, std::uint64_t item) {
    HostBuffer rows;
    if (!rows.Read(pieces.ptr(), false) || ItemSize(rows.dtype()) != 8 || rows.count() % 3 != 0) {
      throw nb::value_error("rows of three 64-bit integers were wanted");
    }
    const std::span<const Piece> span(reinterpret_cast<const Piece*>(rows.data()), rows.count() / 3);
    auto* memory = reinterpret_cast<std::byte*>(address);
    if (late != 0 && (gets || span.size() != 1 || item == 0)) {
      throw nb::value_error("a late count is of a put of one piece");
    }
    nb::gil_scoped_release release;
    const Where where{device,
                      after ? after->gate : nullptr,
                      own,
                      {reinterpret_cast<const std::uint64_t*>(late), late == 0 ? 1 : item}};
    return {engine_.AskWindows([&](Windows& windows) -> std::shared_ptr<Pending> {
      return gets ? windows.Get(window, peer, memory, span, where)
                  : windows.Put(window, peer, memory, span, signal, where);
    })};
  }

  void Remember(int collective, int dtype, int op, int root, std::size_t send_count, std::size_t recv_count,
                std::shared_ptr<Shape> shape) {
    cache_.Insert({static_cast<std::uint8_t>(collective), static_cast<DType>(dtype), static_cast<std::uint8_t>(op),
                   root, send_count, recv_count},
                  std::move(shape));
  }

  // `nbytes` of memory that this host's ranks share, or nothing where there is none (a single rank, or TCP only).
  nb::object Empty(std::size_t nbytes) {
    std::shared_ptr<Heap> heap = engine_.heap();
    if (heap == nullptr) return nb::none();
    std::byte* at = heap->Allocate(nbytes);
    if (at == nullptr) {
      throw nb::value_error(("shared memory: wanted " + std::to_string(nbytes) + " bytes in one piece of this rank's " +
                             std::to_string(heap->capacity()))
                                .c_str());
    }
    struct Loan {
      std::shared_ptr<Heap> heap;
      std::byte* at;
      std::size_t nbytes;
    };
    auto loan = std::make_unique<Loan>(Loan{std::move(heap), at, nbytes});
    nb::capsule owner(loan.get(), [](void* p) noexcept {
      const std::unique_ptr<Loan> ended(static_cast<Loan*>(p));
      ended->heap->Free(ended->at, ended->nbytes);
    });
    static_cast<void>(loan.release());  // the capsule's now
    return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(at, {nbytes}, owner));
  }

  // What the last call of this thread that timed out has in flight.
  static Ticket pending() { return std::move(t_pending); }

  // `labels` are the interned strings that name the reductions, by number; `done` is what calls return.
  // `on_wait` hears of a thread that waits for longer than a moment, and when it does not any more; or None.
  void SetOps(nb::tuple labels, nb::object done, nb::callable on_stuck, nb::callable on_interrupt, nb::callable on_news,
              nb::object on_wait) {
    if (labels.size() != op_labels_.size()) throw nb::value_error("set_ops: one name for each reduction");
    for (std::size_t i = 0; i < op_labels_.size(); ++i) op_labels_[i] = labels[i];
    done_ = std::move(done);
    on_stuck_ = std::move(on_stuck);
    on_interrupt_ = std::move(on_interrupt);
    on_news_ = std::move(on_news);
    on_wait_ = std::move(on_wait);
  }

  int rank() const { return rank_; }

  // The number of a reduction by its name, -1 for all that SetOps was not told.
  int OpNumber(PyObject* op) const {
    for (int i = 0; i < kReduceOps; ++i) {
      if (op_labels_[i].is(op)) return i;
    }
    return -1;
  }

 private:
  using Keeping = std::vector<std::pair<std::shared_ptr<Task>, nb::object>>;

  CallCache<Shape>::Found FindMessage(int kind, const HostBuffer& buffer, int peer) {
    return cache_.Find({static_cast<std::uint8_t>(kind), buffer.dtype(), static_cast<std::uint8_t>(ReduceOp::kSum),
                        peer, buffer.count(), buffer.count()});
  }

  // A link that has lost something says so once, at the end of the call that went on without it.
  void TellNews() {
    if (engine_.has_news() && on_news_) on_news_();
  }

  Status Run(const std::shared_ptr<Shape>& shape, void* send, void* recv, std::size_t nbytes, double timeout,
             float* residual = nullptr) {
    std::shared_ptr<Task> pending;
    Outcome outcome;
    if (nbytes <= kHoldGilBytes) {
      outcome = engine_.RunPrompt(shape, send, recv, pending, residual);
    } else {
      const std::shared_ptr<Shape> held = shape;  // another thread may change the cache that it lies in
      nb::gil_scoped_release release;
      outcome = engine_.RunPrompt(held, send, recv, pending, residual);
    }
    if (outcome == Outcome::kDone) return Status::kDone;
    if (outcome == Outcome::kFailed) return Status::kFailed;
    const Status status = DriveTo(*pending, DeadlineNs(timeout));
    if (status == Status::kTimedOut) t_pending = {pending};
    return status;
  }

  // Waits without the interpreter's lock, looking at signals now and then.
  Status DriveTo(const Pending& task, std::int64_t deadline) {
    Waiting waiting(on_wait_);
    for (;;) {
      if (engine_.forked()) return Status::kFailed;  // a signal handler may have forked
      const std::int64_t until = std::min(deadline, NowNs() + kSignalSliceNs);
      Outcome outcome;
      {
        nb::gil_scoped_release release;
        outcome = engine_.Drive(task, until);
      }
      if (outcome == Outcome::kDone) return Status::kDone;
      if (outcome == Outcome::kFailed) return Status::kFailed;
      if (PyErr_CheckSignals() != 0) Interrupt();
      waiting.Tell();
      if (NowNs() >= deadline) return Status::kTimedOut;
    }
  }

  // A signal handler raised: nothing of ours may touch the caller's memory any more once the exception leaves here.
  [[noreturn]] void Interrupt() {
    nb::python_error error;
    engine_.Halt(FaultKind::kAborted, rank_, "rank " + std::to_string(rank_) + " was interrupted");
    if (on_interrupt_) on_interrupt_();
    throw error;
  }

  int rank_;
  double timeout_;
  union {
    Engine engine_;
  };
  CallCache<Shape> cache_;
  std::atomic<bool> starts_{false};
  Sampling sampling_;
  nb::ft_mutex kept_mutex_;
  Keeping kept_;
  inline static thread_local Ticket t_pending;
  std::array<nb::object, kReduceOps> op_labels_;
  nb::object done_;
  nb::object on_interrupt_;
  nb::object on_news_;
  nb::object on_stuck_;
  nb::object on_wait_ = nb::none();
};

}  // namespace hetcoll
