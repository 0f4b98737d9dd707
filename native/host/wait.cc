// How the engine waits: for whom, for how long by yielding, and asleep.
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "host/engine.h"

namespace hetcoll {
namespace {

constexpr std::int64_t kSharedSleepSliceNs = 1'000'000;  // another thread may finish our task while we sleep
// Where a GPU must be awaited, which rings no bell: an eighth of the time that it has been awaited.
constexpr std::int64_t kShortestNapNs = 20'000;
constexpr std::int64_t kLongestNapNs = 1'000'000;
constexpr std::int64_t kYieldNs = 200'000;  // between spinning and sleeping
// The same where a GPU copies what is waited for: some 700 MB between two of them. A sleeper comes back 30 us late.
constexpr std::int64_t kCopyYieldNs = 2'000'000;
// Where ranks take turns on a core, each may copy and add that much before the next one runs, at 2 GB/s. To be waited
// for by yielding: sleepers come back late where nobody sleeps for long.
constexpr std::size_t kMostTurnBytes = std::size_t{1} << 20;
constexpr std::int64_t kMostYieldNs = 10'000'000;
// Who waited that long may find itself on another rank's core. Who waited for less is left where Linux puts it: beside
// strangers' work going elsewhere each time is worse than taking turns, since a slice there is 3 or 4 ms.
constexpr std::int64_t kLongWaitNs = 10'000'000;

}  // namespace

// Tells the ranks of this host on which core this one runs.
void Engine::NoteCore() {
  const int core = own_bell_ == nullptr ? -1 : sched_getcpu();
  if (core == core_) return;
  core_ = core;
  own_bell_->core.store(static_cast<std::uint32_t>(core) + 1, std::memory_order_relaxed);
}

// Whether a rank of this host that is awake was last seen on the core that we run on.
bool Engine::SharesCore() {
  if (own_bell_ == nullptr) return false;
  NoteCore();
  for (int i = 0; i < segment_->layout().local_size; ++i) {
    const ShmDoorbell& bell = segment_->doorbell(i);
    if (&bell == own_bell_ || bell.sleeping.load(std::memory_order_relaxed) != 0) continue;
    if (bell.core.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(core_) + 1) return true;
  }
  return false;
}

// Linux puts a thread that was woken where its waker runs. Two ranks may then take turns there for thousands of calls
// beside an idle core: neither sleeps, so neither is placed anew. So the woken one goes to a core where no rank of this
// host was seen, if it may run on one, and may then run again wherever it might before.
void Engine::LeaveCore() {
  cpu_set_t allowed, next;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;  // more cores than the set has room for
  cpu_set_t others = allowed;
  for (int i = 0; i < segment_->layout().local_size; ++i) {
    const std::uint32_t core = segment_->doorbell(i).core.load(std::memory_order_relaxed);
    if (core > 0 && core <= CPU_SETSIZE) CPU_CLR(core - 1, &others);
  }
  CPU_ZERO(&next);
  for (int i = 1; i < CPU_SETSIZE && CPU_COUNT(&next) == 0; ++i) {  // the next ones may share a cache
    const int core = (core_ + i) % CPU_SETSIZE;
    if (CPU_ISSET(core, &others)) CPU_SET(core, &next);
  }
  if (CPU_COUNT(&next) == 0 || sched_setaffinity(0, sizeof next, &next) != 0) return;
  sched_setaffinity(0, sizeof allowed, &allowed);
  NoteCore();
}

Engine::Wait Engine::WaitsFor(const Task& task) {
  NoteCore();
  const std::uint32_t own = static_cast<std::uint32_t>(core_) + 1;  // 0, which no rank has, where we have no bell
  Wait found;
  task.ForEachBlocked([&](const BoundStep& s) {
    if (s.peer < 0) return;
    const ShmDoorbell* bell = links_.rx(s.peer, s.channel).doorbell;
    found.far |= bell == nullptr;
    found.own_core |= bell != nullptr && own > 0 && bell->core.load(std::memory_order_relaxed) == own;
  });
  return found;
}

bool Engine::WaitsFar() {
  const auto far = [this](const std::shared_ptr<Task>& task) { return WaitsFor(*task).far; };
  return (!collectives_.empty() && far(collectives_.front())) || std::any_of(p2p_.begin(), p2p_.end(), far);
}

// How long to yield before sleeping.
std::int64_t Engine::YieldNs() const {
  if (windows_ != nullptr && spin_ns_ > 0 && windows_->Copying()) return kCopyYieldNs;
  if (!options_.oversubscribed || segment_ == nullptr || collectives_.empty()) return kYieldNs;
  const std::size_t turn = std::min(collectives_.front()->bytes(), kMostTurnBytes);
  return std::min(kYieldNs + static_cast<std::int64_t>(turn / 2) * segment_->layout().local_size, kMostYieldNs);
}

// Whoever waits does so in slices: only the first look since the last move counts.
void Engine::NoteStill(std::int64_t now) {
  const std::uint64_t moves = moves_.load(std::memory_order_relaxed);
  if (still_ns_.load(std::memory_order_relaxed) != 0 && moves == still_moves_.load(std::memory_order_relaxed)) {
    return;
  }
  still_moves_.store(moves, std::memory_order_relaxed);
  still_ns_.store(now, std::memory_order_relaxed);
}

void Engine::Sleep(std::unique_lock<std::mutex>& lock, std::int64_t until, std::int64_t idle) {
  if (own_bell_ != nullptr) {
    own_bell_->sleeping.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (PassAll()) {  // what came before the flag could be seen rings no bell
      if (sleepers_ == 0) own_bell_->sleeping.store(0, std::memory_order_relaxed);
      return;
    }
  }
  naps_.store(naps_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  std::vector<pollfd> fds{{doorbell_.fd(), POLLIN, 0}};
  bool silent = false;
  const auto add = [&](const std::shared_ptr<Task>& task) {
    task->ForEachBlocked([&](const BoundStep& s) {
      if (s.peer < 0 || !task->Ready(s)) return;
      if (s.op == Op::kSend) {
        links_.tx(s.peer, s.channel).end->AddPoll(fds);
        silent |= links_.tx(s.peer, s.channel).end->Silent();
      } else {
        links_.rx(s.peer, s.channel).end->AddPoll(fds);
        silent |= links_.rx(s.peer, s.channel).end->Silent();
      }
    });
  };
  if (!collectives_.empty()) add(collectives_.front());
  std::for_each(p2p_.begin(), p2p_.end(), add);
  const std::size_t others = fds.size();
  if (windows_ != nullptr) {
    windows_->AddPoll(links_, fds);
    silent |= windows_->Silent();
  }
  // Who begins a transfer rings, and so does who leaves while the engine's own thread sleeps.
  const bool serves = windows_ != nullptr && NoTasks() && drivers_.load() == 0;
  const bool shared = !serves && (drivers_.load() > 1 || background_driving_);
  std::int64_t slice = shared ? kSharedSleepSliceNs : options_.sleep_slice_ns;
  if (silent) slice = std::min(slice, std::clamp(idle / 8, kShortestNapNs, kLongestNapNs));
  const std::int64_t before = NowNs(), began = before - idle;
  const std::int64_t wait = std::clamp<std::int64_t>(until - before, 0, slice);
  const unsigned generation = generation_;
  ++sleepers_;
  lock.unlock();
  const timespec timeout{wait / 1'000'000'000, wait % 1'000'000'000};
  static_cast<void>(ppoll(fds.data(), fds.size(), &timeout, nullptr));
  lock.lock();
  if (windows_ != nullptr) windows_->Heard(std::span(fds).subspan(others));
  // The bell is for all who sleep, but silent once one has looked, and who sleeps then sleeps on: so it is rung for
  // them. While it is, it is nothing new for those who went to sleep since.
  const bool rung = doorbell_.Drain();
  if (generation != generation_) {
    --woken_;
  } else if (--sleepers_; rung && woken_ == 0) {
    woken_ = std::exchange(sleepers_, 0);
    ++generation_;
  }
  if (own_bell_ != nullptr && sleepers_ == 0) own_bell_->sleeping.store(0, std::memory_order_relaxed);
  if (woken_ > 0) doorbell_.Ring();
  const std::int64_t now = NowNs();
  if (now - began >= kLongWaitNs) last_long_wait_ns_ = now;
  if (rung && !options_.oversubscribed && now - last_long_wait_ns_ < kLongWaitNs && SharesCore()) LeaveCore();
}

}  // namespace hetcoll
