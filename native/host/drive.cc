// How the engine moves what is in flight.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "host/engine.h"

namespace hetcoll {
namespace {

constexpr std::size_t kKeepScratch = std::size_t{64} << 20;  // between calls: fresh memory is a page fault every 4 KiB
constexpr int kPromptYields = 32;                            // in place of spinning, where a peer waits for our core
// Waits for a rank on our own core, after which one of the two goes elsewhere or, where there is no other core, sleeps:
// the kernel looks for a better place when it wakes a sleeper.
constexpr int kMoveAfter = 64;
constexpr int kSpinsPerClock = 64;
constexpr std::int64_t kLookNs = 40;  // of a look into shared memory, about

}  // namespace

Outcome Engine::RunPrompt(const std::shared_ptr<Shape>& shape, const void* send, void* recv,
                          std::shared_ptr<Task>& pending, float* residual) {
  if (failed()) return Outcome::kFailed;
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !Idle()) {
    if (lock.owns_lock()) lock.unlock();
    pending = Submit(shape, send, recv, residual);
    return Outcome::kPending;
  }
  if (shape->spare == nullptr) shape->spare = std::make_shared<Task>(*shape);
  const bool spare_is_free = shape->spare.use_count() == 1;
  std::shared_ptr<Task> fresh = spare_is_free ? nullptr : std::make_shared<Task>(*shape);
  Task& task = spare_is_free ? *shape->spare : *fresh;
  task.Prepare(links_, send, recv, NextSignature(*shape, task), residual);
  int idle = 0;
  Wait wait;
  std::int64_t until = 0;  // the clock's, where each look costs more than a look at it
  NoteCore();
  while (!task.finished() && !failed()) {
    if (PassTask(task)) {
      idle = 0;
      continue;
    }
    if (idle == 0) {
      RingDoorbells();
      wait = WaitsFor(task);
      until = wait.far ? NowNs() + prompt_spins_ * kLookNs : 0;
      if (wait.own_core && ++crowded_waits_ % kMoveAfter == 0) {
        crowded_ = true;
        break;
      }
    }
    ++idle;
    if (until > 0 ? NowNs() >= until : idle > (wait.own_core ? kPromptYields : prompt_spins_)) break;
    if (contenders_.load(std::memory_order_relaxed) > 0) break;
    if (wait.own_core) {
      sched_yield();
    } else {
      CpuRelax();
    }
  }
  RingDoorbells();
  if (task.finished()) {
    task.mark.End();
    return Outcome::kDone;
  }
  if (failed()) {
    FenceLinks();
    return Outcome::kFailed;
  }
  pending = spare_is_free ? shape->spare : std::move(fresh);
  pending->keepalive = shape;
  if (shape->p2p) {
    p2p_.push_back(pending);
  } else {
    collectives_.push_back(pending);
  }
  return Outcome::kPending;
}

bool Engine::PassTask(Task& task) {
  try {
    if (!task.begun) {
      task.SetScratch(task.staged() ? Stage(task.scratch_bytes()) : Scratch(task.scratch_bytes()));
      task.begun = true;
    }
    return task.Pass(links_);
  } catch (const Fault& fault) {
    const std::string at = task.Describe();
    Fail(fault.kind, fault.peer, std::string(fault.what()) + " (" + at + ")");
  } catch (const std::bad_alloc&) {
    Fail(FaultKind::kSystem, -1, "no memory for " + std::to_string(task.scratch_bytes()) + " bytes of scratch");
  }
  return false;
}

bool Engine::PassWindows(bool (Windows::*pass)(Links&)) {
  try {
    return (*windows_.*pass)(links_);
  } catch (const Fault& fault) {
    const std::string at = windows_->Describe();
    Fail(fault.kind, fault.peer, fault.what() + (at.empty() ? at : " (" + at + ")"));
  } catch (const std::bad_alloc&) {
    Fail(FaultKind::kSystem, -1, "no memory for one-sided messages");
  }
  return false;
}

bool Engine::PassAll() {
  if (failed()) {
    DropTasks();
    return true;
  }
  bool moved = false;
  while (!collectives_.empty()) {
    Task& task = *collectives_.front();
    moved |= PassTask(task);
    if (!task.finished()) break;
    task.mark.End();
    task.End(Task::State::kDone);
    collectives_.pop_front();
    moved = true;
  }
  for (std::size_t i = 0; i < p2p_.size();) {
    Task& task = *p2p_[i];
    moved |= PassTask(task);
    if (!task.finished()) {
      ++i;
      continue;
    }
    task.mark.End();
    task.End(Task::State::kDone);
    p2p_.erase(p2p_.begin() + static_cast<std::ptrdiff_t>(i));
    moved = true;
  }
  if (windows_ != nullptr) moved |= PassWindows(&Windows::Pass);
  if (scratch_size_ > kKeepScratch && collectives_.empty()) {
    scratch_.reset();
    scratch_size_ = 0;
  }
  if (moved) moves_.store(moves_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  return moved;
}

void Engine::RingDoorbells() {
  if (links_.touched.empty()) return;
  // What was published must be visible before we look whether its receiver sleeps; it does the same the other way
  // round.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const Links::Touched& t : links_.touched) {
    *t.flag = false;
    Ring(*t.doorbell);
  }
  links_.touched.clear();
  if (borrowed_ != nullptr && !borrowed_->returned.empty()) RingLenders();
}

void Engine::Ring(const ShmDoorbell& bell) const {
  if (bell.sleeping.load(std::memory_order_relaxed) == 0) return;
  std::atomic_thread_fence(std::memory_order_acquire);
  doorbell_.Ring(bell.name.load(std::memory_order_relaxed));
}

// Whose memory is home: it came by another rank.
void Engine::RingLenders() {
  for (const int lender : borrowed_->returned) {
    Ring(segment_->doorbell(lender));
  }
  borrowed_->returned.clear();
}

void Engine::CheckDeparted() {
  const auto check = [&](const std::shared_ptr<Task>& task) {
    task->ForEachBlocked([&](const BoundStep& s) {
      if (s.peer < 0 || !departed_[static_cast<std::size_t>(s.peer)].load() || !task->Ready(s)) return;
      const bool final = s.op == Op::kSend ? links_.tx(s.peer, s.channel).end->FinalWithoutPeer()
                                           : links_.rx(s.peer, s.channel).end->FinalWithoutPeer();
      if (!final) return;
      Fail(FaultKind::kPeerGone, s.peer,
           "rank " + std::to_string(s.peer) + " left while it was needed (" + task->Describe() + ")");
    });
  };
  if (!collectives_.empty()) check(collectives_.front());
  std::for_each(p2p_.begin(), p2p_.end(), check);
  for (int peer = 0; windows_ != nullptr && peer < options_.size; ++peer) {
    if (!departed_[static_cast<std::size_t>(peer)].load()) continue;
    windows_->Left(links_, peer);
    if (!windows_->Needs(peer)) continue;
    if (!links_.rx(peer, kAnswers).end->FinalWithoutPeer()) continue;
    Fail(FaultKind::kPeerGone, peer,
         "rank " + std::to_string(peer) + " left while it was needed (" + windows_->Describe() + ")");
  }
}

template <class Done>
void Engine::DriveUntil(Done&& done, std::int64_t until) {
  std::unique_lock lock(mutex_);
  std::int64_t idle_since = 0;
  int spins = 0;
  bool far = false;
  while (!done()) {
    const bool departed = any_departed_.load(std::memory_order_acquire);
    if (PassAll()) {
      idle_since = 0;
      spins = 0;
      continue;
    }
    if (departed) CheckDeparted();
    RingDoorbells();
    if (crowded_) {
      crowded_ = false;
      if (!LeaveCore()) Sleep(lock, until, 0);
      continue;
    }
    if (contenders_.load(std::memory_order_relaxed) > 0) {
      lock.unlock();
      sched_yield();
      lock.lock();
    }
    if (spins == 0) {
      const Wait wait = WaitsForAny();
      far = wait.far;
      crowded_ = wait.own_core && ++crowded_waits_ % kMoveAfter == 0;
    }
    if (++spins % kSpinsPerClock != 0 && !options_.oversubscribed && !far) {
      CpuRelax();
      continue;
    }
    const std::int64_t now = NowNs();
    if (idle_since == 0) NoteStill(idle_since = now);
    if (now >= until) break;
    if (now - idle_since < spin_ns_) {
      CpuRelax();
    } else if (now - idle_since < spin_ns_ + YieldNs()) {
      lock.unlock();
      sched_yield();
      lock.lock();
    } else {
      Sleep(lock, until, now - idle_since);
    }
  }
  RingDoorbells();
  if (windows_ != nullptr && failed()) DropTasks();  // streams wait for them, and need not ask again
}

Outcome Engine::Drive(const Pending& task, std::int64_t until) {
  const auto settled = [&] { return task.state.load(std::memory_order_acquire) != Pending::State::kRunning; };
  drivers_.fetch_add(1);
  LockSoon().unlock();  // whoever drives now lets us in
  DriveUntil(settled, until);
  drivers_.fetch_sub(1);
  if (windows_ != nullptr) doorbell_.Ring();  // for the engine's own thread to take over
  switch (task.state.load(std::memory_order_acquire)) {
    case Task::State::kDone:
      return Outcome::kDone;
    case Task::State::kFailed:
      return Outcome::kFailed;
    default:
      return failed() ? Outcome::kFailed : Outcome::kPending;
  }
}

void Engine::DriveInBackground() {
  std::lock_guard lock(background_mutex_);
  if (background_stop_) return;
  background_work_ = true;
  if (!background_.joinable()) {
    try {
      background_ = std::thread([this] { BackgroundLoop(); });
    } catch (const std::system_error& error) {  // what was begun would not move: it fails here, and so everywhere
      // What it says of itself differs between standard libraries.
      return Fail(FaultKind::kSystem, options_.rank, "no thread for calls in flight: " + error.code().message());
    }
  }
  background_wake_.notify_one();
}

void Engine::BackgroundLoop() {
  pthread_setname_np(pthread_self(), "hetcoll");
  for (;;) {
    {
      std::unique_lock lock(background_mutex_);
      background_wake_.wait(lock, [&] { return background_stop_ || background_work_; });
      if (background_stop_) return;
    }
    // Step aside while a user's thread drives: it does this work as well, with less delay.
    const auto enough = [&] { return Idle() || drivers_.load(std::memory_order_relaxed) > 0; };
    background_driving_ = true;
    DriveUntil(enough, kForever);
    background_driving_ = false;
    std::unique_lock lock(background_mutex_);
    if (drivers_.load() > 0) {
      background_wake_.wait_for(lock, std::chrono::milliseconds(1), [&] { return background_stop_; });
      continue;
    }
    std::lock_guard tasks(mutex_);
    background_work_ = !Idle();
  }
}

void Engine::StopBackground() {
  {
    std::lock_guard lock(background_mutex_);
    background_stop_ = true;
  }
  background_wake_.notify_all();
  if (background_.joinable()) background_.join();
}

}  // namespace hetcoll
