#include "proxy/worker.h"

#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "proxy/lane.h"

namespace hetcoll {
namespace {

// How long a thread with messages under way spins, then yields, before it sleeps. A nap takes a host far longer than it
// was told to.
constexpr std::int64_t kSpinNs = 50'000;
constexpr std::int64_t kYieldNs = 1'000'000;
// A stream that writes a word wakes nobody, so while one is awaited sleeps are short, beside what was waited before.
constexpr std::int64_t kIdleOfNap = 8;
constexpr std::int64_t kLongestNapNs = 500'000;
// Not every device announces the failure of what it was asked to send.
constexpr std::int64_t kServeNs = 100'000'000;

timespec Time(std::int64_t ns) { return {ns / 1'000'000'000, ns % 1'000'000'000}; }

}  // namespace

RelayWorker::RelayWorker(bool oversubscribed, Failed failed, Told told)
    : oversubscribed_(oversubscribed),
      failed_(std::move(failed)),
      told_(std::move(told)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (wake_ < 0) throw Fault(FaultKind::kSystem, -1, std::string("eventfd: ") + std::strerror(errno));
  thread_ = std::thread([this] { Run(); });
}

RelayWorker::~RelayWorker() {
  if (thread_.joinable()) thread_.join();
  close(wake_);
}

void RelayWorker::Own(RelayLane* lane) {
  std::lock_guard lock(mutex_);
  lanes_.push_back(lane);
  if (over_) lane->Release();
}

template <class Change>
void RelayWorker::Tell(Change&& change) {
  bool asleep = false;
  {
    std::lock_guard lock(mutex_);
    change();
    news_.store(true, std::memory_order_release);
    std::swap(asleep, asleep_);
  }
  const std::uint64_t one = 1;
  if (asleep) static_cast<void>(write(wake_, &one, sizeof one));  // it fails only when the thread is awake
}

void RelayWorker::Post(RelayLane* lane, const RelayPart& m) {
  Tell([&] {
    if (stop_) return;
    lane->Expect();
    inbox_.emplace_back(lane, m);
  });
}

void RelayWorker::Do(const std::function<void()>& what) {
  std::packaged_task<void()> task(what);
  std::future<void> done = task.get_future();
  bool here = false;
  Tell([&] {
    here = over_;
    if (!here) tasks_.push_back(std::move(task));
  });
  if (here) {
    std::lock_guard lock(late_);
    task();
  }
  done.get();
}

void RelayWorker::Leave(int peer) {
  Do([&] { LeaveLanes(peer); });
}

void RelayWorker::LeaveLanes(int peer) {
  std::vector<RelayLane*> lanes;
  {
    std::lock_guard lock(mutex_);
    lanes = lanes_;
  }
  for (RelayLane* lane : lanes) {
    if (lane->peer() == peer) lane->Leave();
  }
  if (verbs_ != nullptr) verbs_->Forget();
}

void RelayWorker::Stop() {
  Tell([&] { stop_ = true; });
}

void RelayWorker::Join() {
  if (thread_.joinable()) thread_.join();
}

void RelayWorker::Abandon() {
  if (thread_.joinable()) thread_.detach();
  static_cast<void>(verbs_.release());
}

void RelayWorker::Run() {
  pthread_setname_np(pthread_self(), "hetcoll-relay");
  std::vector<RelayLane*> active;
  std::int64_t idle_since = 0;
  while (Listen(active)) {
    if (MoveAny(active)) {
      std::erase_if(active, [](const RelayLane* lane) { return lane->empty(); });
      ServeLinks(false);
      idle_since = 0;
      continue;
    }
    const std::int64_t now = NowNs();
    if (idle_since == 0) idle_since = now;
    const std::int64_t idle = now - idle_since;
    ServeLinks(false);
    if (!active.empty() && idle < kSpinNs && !oversubscribed_) {
      CpuRelax();
    } else if (!active.empty() && idle < kYieldNs) {
      sched_yield();
    } else {
      Sleep(active, std::min(idle / kIdleOfNap, kLongestNapNs));
    }
  }
  std::vector<std::packaged_task<void()>> tasks;
  {
    std::lock_guard lock(mutex_);
    over_ = true;
    tasks.swap(tasks_);
    for (RelayLane* lane : lanes_) lane->Release();
  }
  std::lock_guard lock(late_);
  for (auto& task : tasks) task();
}

bool RelayWorker::MoveAny(const std::vector<RelayLane*>& active) {
  bool moved = false;
  for (RelayLane* lane : active) {
    try {
      moved |= lane->Move();
    } catch (const Fault& fault) {
      if (failed_(fault, lane->peer(), lane->Describe())) LeaveLanes(lane->peer());
      return true;
    }
  }
  return moved;
}

// Takes what is new; false when it is time to end.
bool RelayWorker::Listen(std::vector<RelayLane*>& active) {
  if (!news_.load(std::memory_order_acquire)) return true;
  std::vector<std::packaged_task<void()>> tasks;
  bool stop = false;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [lane, message] : inbox_) {
      if (lane->empty()) active.push_back(lane);
      lane->Add(message);
    }
    inbox_.clear();
    news_.store(false, std::memory_order_relaxed);
    tasks.swap(tasks_);
    stop = stop_;
  }
  for (auto& task : tasks) task();
  return !stop;
}

// What nobody may be waiting for: handshakes, rails that die, peers that leave.
void RelayWorker::ServeLinks(bool at_once) {
  if (verbs_ == nullptr) return;
  const std::int64_t now = NowNs();
  if (!at_once && now < serve_at_ && !has_events_.load(std::memory_order_relaxed)) return;
  serve_at_ = now + kServeNs;
  try {
    static_cast<void>(verbs_->Service());
  } catch (const Fault& fault) {
    if (failed_(fault, fault.peer, "no message under way")) LeaveLanes(fault.peer);
  }
  if (has_events_.load(std::memory_order_relaxed)) told_(verbs_->TakeEvents());
}

// Until there is news, or a link is ready, or `nap` is over where only the GPU's words will tell.
void RelayWorker::Sleep(const std::vector<RelayLane*>& active, std::int64_t nap) {
  fds_.assign(1, {wake_, POLLIN, 0});
  bool short_nap = false;
  for (const RelayLane* lane : active) short_nap |= lane->AddPoll(fds_);
  if (verbs_ != nullptr) verbs_->AddWatch(fds_);
  {
    std::lock_guard lock(mutex_);
    if (news_.load(std::memory_order_relaxed)) return;
    asleep_ = true;
  }
  const timespec timeout = Time(short_nap ? nap : kServeNs);
  const int ready = ppoll(fds_.data(), fds_.size(), short_nap || verbs_ != nullptr ? &timeout : nullptr, nullptr);
  {
    std::lock_guard lock(mutex_);
    asleep_ = false;
  }
  std::uint64_t count = 0;
  static_cast<void>(read(wake_, &count, sizeof count));  // there may be none
  if (ready > 0) ServeLinks(true);
}

}  // namespace hetcoll
