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

ProxyWorker::ProxyWorker(bool oversubscribed, Failed failed, Told told)
    : oversubscribed_(oversubscribed),
      failed_(std::move(failed)),
      told_(std::move(told)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (wake_ < 0) throw Fault(FaultKind::kSystem, -1, std::string("eventfd: ") + std::strerror(errno));
  thread_ = std::thread([this] { Run(); });
}

ProxyWorker::~ProxyWorker() {
  if (thread_.joinable()) thread_.join();
  close(wake_);
}

void ProxyWorker::Own(ProxyLane* lane) {
  std::lock_guard lock(mutex_);
  lanes_.push_back(lane);
  if (over_ && let_go_) lane->Release();
}

template <class Change>
void ProxyWorker::Tell(Change&& change) {
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

void ProxyWorker::Post(ProxyLane* lane, const ProxyPart& m) {
  Tell([&] {
    if (stop_) return;
    lane->Expect();
    inbox_.emplace_back(lane, m);
  });
}

void ProxyWorker::Do(const std::function<void()>& what) {
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

void ProxyWorker::Leave(int peer) {
  Do([&] { LeaveLanes(peer); });
}

void ProxyWorker::LeaveLanes(int peer) {
  std::vector<ProxyLane*> lanes;
  {
    std::lock_guard lock(mutex_);
    lanes = lanes_;
  }
  for (ProxyLane* lane : lanes) {
    if (lane->peer() == peer) lane->Leave();
  }
  if (verbs_ != nullptr) verbs_->Forget();
}

void ProxyWorker::Stop() {
  Tell([&] { stop_ = true; });
}

void ProxyWorker::LetGo() {
  Tell([&] {
    stop_ = let_go_ = true;
    if (!over_) return;  // it does so at its end
    for (ProxyLane* lane : lanes_) lane->Release();
  });
}

void ProxyWorker::Join() {
  if (thread_.joinable()) thread_.join();
}

void ProxyWorker::Abandon() {
  if (thread_.joinable()) thread_.detach();
  static_cast<void>(verbs_.release());
}

void ProxyWorker::Run() {
  pthread_setname_np(pthread_self(), "hetcoll-proxy");
  std::vector<ProxyLane*> active;
  std::int64_t idle_since = 0;
  while (Listen(active)) {
    if (MoveAny(active)) {
      std::erase_if(active, [](const ProxyLane* lane) { return lane->empty(); });
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
    if (let_go_) {
      for (ProxyLane* lane : lanes_) lane->Release();
    }
  }
  std::lock_guard lock(late_);
  for (auto& task : tasks) task();
}

bool ProxyWorker::MoveAny(const std::vector<ProxyLane*>& active) {
  bool moved = false;
  for (ProxyLane* lane : active) {
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
bool ProxyWorker::Listen(std::vector<ProxyLane*>& active) {
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
void ProxyWorker::ServeLinks(bool at_once) {
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
void ProxyWorker::Sleep(const std::vector<ProxyLane*>& active, std::int64_t nap) {
  fds_.assign(1, {wake_, POLLIN, 0});
  bool short_nap = false;
  for (const ProxyLane* lane : active) short_nap |= lane->AddPoll(fds_);
  if (verbs_ != nullptr) verbs_->AddWatch(fds_);
  Mending::Flush(resumed_, fds_);
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
