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
// How long a rank stays after it went to another core: longer each time that somebody else ran there, for whom it had
// to wait, usually for a slice of 3 or 4 ms.
constexpr std::int64_t kLeaveAgainNs = 2'000'000;
constexpr std::int64_t kMostLeaveAgainNs = 1'000'000'000;
constexpr std::int64_t kBusyNs = 1'000'000;

}  // namespace

// Tells the ranks of this host on which core this one runs.
void Engine::NoteCore() {
  const int core = own_bell_ == nullptr ? -1 : sched_getcpu();
  if (core == core_) return;
  core_ = core;
  own_bell_->core.store(static_cast<std::uint32_t>(core) + 1, std::memory_order_relaxed);
}

// Linux may put a thread that is woken where its waker runs. Two ranks then take turns there for thousands of calls
// beside an idle core: who never sleeps for long is not placed anew. So this thread goes to a core where no rank of the
// host was seen, if it may run on one, and comes back if somebody else runs there. Afterwards it may run wherever it
// might before.
bool Engine::LeaveCore() {
  const std::int64_t start = NowNs();
  cpu_set_t allowed;  // larger machines than it has room for leave us where we are
  if (start < leave_at_ns_ || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  cpu_set_t free = allowed;
  for (int i = 0; i < segment_->layout().local_size; ++i) {
    const std::uint32_t core = segment_->doorbell(i).core.load(std::memory_order_relaxed);
    if (core > 0 && core <= CPU_SETSIZE) CPU_CLR(core - 1, &free);
  }
  const auto go = [](int core) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    return sched_setaffinity(0, sizeof only, &only) == 0;
  };
  const int here = core_;
  int next = 2;  // the core beside ours comes last: it may be a hyperthread of the same one
  while (next <= CPU_SETSIZE + 1 && !CPU_ISSET((here + next) % CPU_SETSIZE, &free)) ++next;
  if (next > CPU_SETSIZE + 1) return false;
  core_ = (here + next) % CPU_SETSIZE;  // told before, so that nobody else goes there
  own_bell_->core.store(static_cast<std::uint32_t>(core_) + 1, std::memory_order_relaxed);
  if (go(core_)) sched_yield();
  const std::int64_t end = NowNs();
  const bool busy = end - start > kBusyNs;
  if (busy) go(here);
  sched_setaffinity(0, sizeof allowed, &allowed);
  leave_again_ns_ = std::clamp(busy ? 4 * leave_again_ns_ : leave_again_ns_ / 2, kLeaveAgainNs, kMostLeaveAgainNs);
  leave_at_ns_ = end + leave_again_ns_;
  NoteCore();
  return core_ != here;
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

Engine::Wait Engine::WaitsForAny() {
  Wait found;
  const auto add = [&](const std::shared_ptr<Task>& task) {
    const Wait wait = WaitsFor(*task);
    found.far |= wait.far;
    found.own_core |= wait.own_core;
  };
  if (!collectives_.empty()) add(collectives_.front());
  std::for_each(p2p_.begin(), p2p_.end(), add);
  return found;
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
  const std::int64_t wait = std::clamp<std::int64_t>(until - NowNs(), 0, slice);
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
}

}  // namespace hetcoll
