#include "engine/engine.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>

#include "engine/clock.h"

namespace hetcoll {
namespace {

constexpr std::int64_t kSharedSleepSliceNs = 1'000'000;  // another thread may finish our task while we sleep
// Where a GPU must be awaited, which rings no bell: a quarter of the time that it has been awaited.
constexpr std::int64_t kShortestNapNs = 20'000;
constexpr std::int64_t kLongestNapNs = 1'000'000;
constexpr std::size_t kKeepScratch = std::size_t{64} << 20;  // between calls: fresh memory is a page fault every 4 KiB
constexpr int kPromptYields = 32;                            // in place of spinning, where a peer waits for our core
// Two ranks that take turns on one core may stay there beside an idle one: the kernel looks for a better place when it
// wakes a sleeper, so one of them sleeps now and then.
constexpr int kMoveAfter = 64;
constexpr int kPreparedRanks = 64;  // of a host; among more, links are many and mostly idle
constexpr int kSpinsPerClock = 64;
constexpr double kPromptSeconds = 20e-6;  // how long a call may keep the interpreter's lock while it waits
constexpr std::size_t kLargestItem = 16;
constexpr double kDrainSeconds = 2;         // how long closing waits for peers' NICs to have what was sent
constexpr std::int64_t kYieldNs = 200'000;  // between spinning and sleeping

std::atomic<int> g_forks{0};

int WatchForks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1); }); });
  return g_forks.load();
}

std::uint64_t Mix(std::uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      forks_(WatchForks()),
      doorbell_(options.doorbell_name, options.local_rank),
      injector_(FaultSpec::Parse(options.fault), options.rank),
      links_(options.size),
      scratch_(nullptr, [](std::byte* p) { std::free(p); }),
      departed_(static_cast<std::size_t>(options.size)) {
  // With more ranks than cores, whoever spins keeps a peer from running.
  spin_ns_ = options.oversubscribed ? 0 : static_cast<std::int64_t>(options.spin_seconds * 1e9);
  // A pass with a pause takes about 40 ns.
  prompt_spins_ = options.oversubscribed ? 4 : static_cast<int>(std::min(kPromptSeconds, options.spin_seconds) / 40e-9);
}

Engine::~Engine() {
  if (forked()) {  // neither the thread nor whoever held a lock exists here
    if (background_.joinable()) background_.detach();
    if (keeper_ != nullptr) keeper_->Abandon();
    return;
  }
  Close();
}

void Engine::StopBackground() {
  {
    std::lock_guard lock(background_mutex_);
    background_stop_ = true;
  }
  background_wake_.notify_all();
  if (background_.joinable()) background_.join();
}

bool Engine::forked() const { return g_forks.load(std::memory_order_relaxed) != forks_; }

void Engine::AttachShm(int fd, std::size_t ring_bytes, std::span<const int> local_ranks, const ShmOptions& options) {
  const ShmLayout layout(static_cast<int>(local_ranks.size()), ring_bytes);
  AttachShm(std::make_shared<ShmSegment>(fd, layout, options), local_ranks);
}

void Engine::AttachShm(std::shared_ptr<ShmSegment> segment, std::span<const int> local_ranks) {
  const int local_size = static_cast<int>(local_ranks.size());
  segment_ = std::move(segment);
  heap_ = std::make_shared<Heap>(segment_, options_.local_rank);
  own_bell_ = &segment_->doorbell(options_.local_rank);
  segment_->Introduce(options_.local_rank);
  for (int i = 0; i < local_size; ++i) {
    const int peer = local_ranks[static_cast<std::size_t>(i)];
    if (peer == options_.rank) continue;
    auto made = MakeShm(*segment_, options_.local_rank, i, peer);
    for (int channel = 0; channel < kChannels; ++channel) {
      LinkEnds ends = injector_.Wrap(std::move(made[static_cast<std::size_t>(channel)]), kLargestItem, peer, channel);
      auto& tx = links_.tx(peer, channel);
      tx.end = std::move(ends.send);
      auto& rx = links_.rx(peer, channel);
      rx.end = std::move(ends.recv);
      tx.doorbell = rx.doorbell = &segment_->doorbell(i);
      tx.local_peer = rx.local_peer = i;
    }
  }
}

void Engine::AttachTcp(int peer, int channel, std::span<const int> fds) {
  LinkEnds ends = injector_.Wrap(MakeTcp(fds, peer, staging_), 1, peer, channel);
  std::lock_guard lock(mutex_);
  if (failed()) return;  // perhaps closed: then nobody would close them
  links_.tx(peer, channel).end = std::move(ends.send);
  links_.rx(peer, channel).end = std::move(ends.recv);
}

int Engine::AddNic(NicInfo info, const VerbsApi& api) {
  std::lock_guard lock(mutex_);
  if (verbs_ == nullptr) verbs_ = std::make_unique<VerbsHost>(api, staging_, link_events_);
  return verbs_->AddNic(std::move(info));
}

void Engine::AttachVerbs(int peer, int channel, std::span<const std::pair<int, std::string>> rails,
                         std::size_t ring_bytes, std::span<const int> fds) {
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  if (failed() || verbs_ == nullptr) {  // perhaps closed
    for (const int fd : fds) close(fd);
    return;
  }
  LinkEnds ends = injector_.Wrap(
      verbs_->Attach({options_.rank, peer, channel, ring_bytes, false, options_.recovery_ns}, rails, fds), kLargestItem,
      peer, channel);
  links_.tx(peer, channel).end = std::move(ends.send);
  links_.rx(peer, channel).end = std::move(ends.recv);
  if (keeper_ == nullptr) keeper_ = std::make_unique<Keeper>([this](auto& fds) { ServeLinks(fds); });
  keeper_->Wake();
}

// On the keeper's thread.
void Engine::ServeLinks(std::vector<pollfd>& fds) {
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  if (failed()) return;
  try {
    if (verbs_->Service()) doorbell_.Ring(options_.local_rank);
    verbs_->AddWatch(fds);
  } catch (const Fault& fault) {
    Fail(fault.kind, fault.peer, fault.what());
  }
}

int Engine::RegisterMemory(std::uintptr_t address, std::size_t nbytes, const std::vector<RegionKey>& keys,
                           std::optional<std::uintptr_t> seen_at) {
  return AskVerbs([&](VerbsHost& verbs) { return verbs.regions().Add(address, nbytes, keys, seen_at); }, 0);
}

bool Engine::UnregisterMemory(int handle) {
  return AskVerbs([&](VerbsHost& verbs) { return verbs.regions().Remove(handle); }, true);
}

void Engine::AttachSlots(int peer, int channel, const Slots& out, const Slots& in, unsigned helpers) {
  std::lock_guard lock(mutex_);
  if (team_ == nullptr && helpers > 0) team_ = std::make_shared<Team>(helpers);
  links_.tx(peer, channel).end = MakeSlotSend(out, team_);
  links_.rx(peer, channel).end = MakeSlotRecv(in, team_);
}

bool Engine::Linked(int peer, int channel) const { return const_cast<Links&>(links_).tx(peer, channel).end != nullptr; }

int Engine::AddPlan(std::span<const std::byte> encoded) {
  auto plan = std::make_unique<Plan>(encoded, options_.size);
  for (const StepRecord& s : plan->steps) {
    if (s.op == std::uint8_t(Op::kLocal)) throw PlanError("plan: a local step needs an island of devices");
    if (s.op <= std::uint8_t(Op::kRecvReduce) && !Linked(s.peer, s.channel)) {
      throw PlanError("plan: no link to rank " + std::to_string(s.peer) + " on channel " + std::to_string(s.channel));
    }
  }
  Prepare(*plan);
  plans_.push_back(std::move(plan));
  return static_cast<int>(plans_.size()) - 1;
}

void Engine::Prepare(const Plan& plan) {
  if (segment_ != nullptr && segment_->layout().local_size > kPreparedRanks) return;
  for (const StepRecord& s : plan.steps) {
    const auto op = static_cast<Op>(s.op);
    if (op == Op::kSend) links_.tx(s.peer, s.channel).end->Prepare();
    if (op == Op::kRecv || op == Op::kRecvReduce) links_.rx(s.peer, s.channel).end->Prepare();
  }
}

std::shared_ptr<Shape> Engine::Bind(int plan, DType dtype, ReduceOp op, std::size_t send_count, std::size_t recv_count,
                                    std::span<const std::size_t> send_table, std::span<const std::size_t> recv_table,
                                    std::uint64_t descriptor, bool p2p, bool skip_empty, Format format) {
  const Plan& p = *plans_.at(static_cast<std::size_t>(plan));
  const Kernels* kernels = FindKernels(dtype, op);
  for (const StepRecord& s : p.steps) {
    const auto o = static_cast<Op>(s.op);
    const bool reduces = o == Op::kRecvReduce || o == Op::kReduce || o == Op::kScale;
    if (reduces && kernels == nullptr) throw PlanError("plan: this reduction is not defined on this type");
  }
  const Codec* codec = FindCodec(dtype, format);
  BoundPlan bound(p, options_.rank, dtype, send_count, recv_count, send_table, recv_table, skip_empty, codec);
  return std::make_shared<Shape>(std::move(bound), dtype, kernels, codec, static_cast<unsigned>(options_.size),
                                 Mix(descriptor), p2p, shapes_++);
}

std::byte* Engine::Scratch(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  if (bytes > scratch_size_) {
    scratch_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)));
    if (scratch_ == nullptr) {
      scratch_size_ = 0;
      throw std::bad_alloc();
    }
    scratch_size_ = bytes;
  }
  return scratch_.get();
}

std::shared_ptr<Task> Engine::TakeTask(Shape& shape) {
  if (shape.spare == nullptr) shape.spare = std::make_shared<Task>(shape);
  return shape.spare.use_count() == 1 ? shape.spare : std::make_shared<Task>(shape);
}

std::uint64_t Engine::Sign(int shape, std::uint64_t hash, bool p2p) {
  // Point-to-point messages carry no sequence number: the channel's order is theirs.
  std::uint64_t sequence = 0;
  if (p2p) {
    messages_.Add(shape);
  } else {
    sequence = history_.Add(shape);
  }
  return Mix(options_.identity ^ hash ^ (sequence * 0x9e3779b97f4a7c15u));
}

std::uint64_t Engine::Enter(int shape, std::uint64_t descriptor, bool p2p) {
  contenders_.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1, std::memory_order_relaxed);
  return Sign(shape, Mix(descriptor), p2p);
}

std::shared_ptr<Task> Engine::Submit(const std::shared_ptr<Shape>& shape, const void* send, void* recv,
                                     float* residual) {
  contenders_.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1, std::memory_order_relaxed);
  std::shared_ptr<Task> task = TakeTask(*shape);
  task->Prepare(links_, send, recv, NextSignature(*shape), residual);
  if (failed()) {
    task->state.store(Task::State::kFailed, std::memory_order_release);
    return task;
  }
  task->keepalive = shape;
  if (shape->p2p) {
    p2p_.push_back(task);
  } else {
    collectives_.push_back(task);
  }
  return task;
}

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
  task.Prepare(links_, send, recv, NextSignature(*shape), residual);
  int idle = 0;
  bool crowded = false;
  NoteCore();
  while (!task.finished() && !failed()) {
    if (PassTask(task)) {
      idle = 0;
      continue;
    }
    if (idle == 0) {
      RingDoorbells();
      crowded = WaitsForOwnCore(task);
      if (crowded && ++crowded_waits_ % kMoveAfter == 0) {
        sleep_at_once_ = true;
        break;
      }
    }
    if (++idle > (crowded ? kPromptYields : prompt_spins_)) break;
    if (contenders_.load(std::memory_order_relaxed) > 0) break;
    if (crowded) {
      sched_yield();
    } else {
      CpuRelax();
    }
  }
  RingDoorbells();
  if (task.finished()) return Outcome::kDone;
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

// Tells the ranks of this host on which core this one runs.
void Engine::NoteCore() {
  const int core = own_bell_ == nullptr ? -1 : sched_getcpu();
  if (core == core_) return;
  core_ = core;
  own_bell_->core.store(static_cast<std::uint32_t>(core) + 1, std::memory_order_relaxed);
}

// Whether a rank that this task waits for was last seen on the very core that we run on: then it cannot move before we
// let it, and spinning would only keep it out.
bool Engine::WaitsForOwnCore(const Task& task) {
  NoteCore();
  if (core_ < 0) return false;
  bool found = false;
  task.ForEachBlocked([&](const BoundStep& s) {
    if (s.peer < 0) return;
    const ShmDoorbell* bell = links_.rx(s.peer, s.channel).doorbell;
    found |= bell != nullptr && bell->core.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(core_) + 1;
  });
  return found;
}

bool Engine::PassTask(Task& task) {
  try {
    if (!task.begun) {
      task.SetScratch(Scratch(task.scratch_bytes()));
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
    task.keepalive.reset();
    task.state.store(Task::State::kDone, std::memory_order_release);
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
    task.keepalive.reset();
    task.state.store(Task::State::kDone, std::memory_order_release);
    p2p_.erase(p2p_.begin() + static_cast<std::ptrdiff_t>(i));
    moved = true;
  }
  if (scratch_size_ > kKeepScratch && collectives_.empty()) {
    scratch_.reset();
    scratch_size_ = 0;
  }
  if (moved) moves_.store(moves_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  return moved;
}

// Called before whoever waits is told of a failure: then the memory is the users' again, who may write what peers still
// read. Those of this host look at the flag once they have read.
void Engine::FenceLinks() {
  if (verbs_ != nullptr && !draining_) verbs_->Fence();
  if (segment_ != nullptr) segment_->owner(options_.local_rank).withdrawn.store(1, std::memory_order_seq_cst);
}

void Engine::DropTasks() {
  FenceLinks();
  const auto drop = [](const std::shared_ptr<Task>& task) {
    task->keepalive.reset();
    task->state.store(Task::State::kFailed, std::memory_order_release);
  };
  std::for_each(collectives_.begin(), collectives_.end(), drop);
  std::for_each(p2p_.begin(), p2p_.end(), drop);
  collectives_.clear();
  p2p_.clear();
}

void Engine::RingDoorbells() {
  if (links_.touched.empty()) return;
  // What was published must be visible before we look whether its receiver sleeps; it does the same the other way
  // round.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const Links::Touched& t : links_.touched) {
    *t.flag = false;
    if (t.doorbell->sleeping.load(std::memory_order_relaxed) != 0) doorbell_.Ring(t.local_peer);
  }
  links_.touched.clear();
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
}

template <class Done>
void Engine::DriveUntil(Done&& done, std::int64_t until) {
  std::unique_lock lock(mutex_);
  std::int64_t idle_since = 0;
  int spins = 0;
  while (!done()) {
    const bool departed = any_departed_.load(std::memory_order_acquire);
    if (PassAll()) {
      idle_since = 0;
      spins = 0;
      continue;
    }
    if (departed) CheckDeparted();
    RingDoorbells();
    if (sleep_at_once_) {
      sleep_at_once_ = false;
      Sleep(lock, until, 0);
      continue;
    }
    if (contenders_.load(std::memory_order_relaxed) > 0) {
      lock.unlock();
      sched_yield();
      lock.lock();
    }
    if (++spins % kSpinsPerClock != 0 && !options_.oversubscribed) {
      CpuRelax();
      continue;
    }
    const std::int64_t now = NowNs();
    if (idle_since == 0) idle_since = now;
    if (now >= until) break;
    if (now - idle_since < spin_ns_) {
      CpuRelax();
    } else if (now - idle_since < spin_ns_ + kYieldNs) {
      lock.unlock();
      sched_yield();
      lock.lock();
    } else {
      Sleep(lock, until, now - idle_since);
    }
  }
  RingDoorbells();
}

void Engine::Sleep(std::unique_lock<std::mutex>& lock, std::int64_t until, std::int64_t idle) {
  if (own_bell_ != nullptr) {
    own_bell_->sleeping.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (PassAll()) {  // what came before the flag could be seen rings no bell
      own_bell_->sleeping.store(0, std::memory_order_relaxed);
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
  std::int64_t slice = drivers_.load() > 1 || background_driving_ ? kSharedSleepSliceNs : options_.sleep_slice_ns;
  if (silent) slice = std::min(slice, std::clamp(idle / 4, kShortestNapNs, kLongestNapNs));
  const std::int64_t wait = std::clamp<std::int64_t>(until - NowNs(), 0, slice);
  lock.unlock();
  const timespec timeout{wait / 1'000'000'000, wait % 1'000'000'000};
  static_cast<void>(ppoll(fds.data(), fds.size(), &timeout, nullptr));
  lock.lock();
  if (own_bell_ != nullptr) own_bell_->sleeping.store(0, std::memory_order_relaxed);
  doorbell_.Drain();
}

Outcome Engine::Drive(const Task& task, std::int64_t until) {
  const auto settled = [&] { return task.state.load(std::memory_order_acquire) != Task::State::kRunning; };
  drivers_.fetch_add(1);
  contenders_.fetch_add(1);  // ask whoever drives now to let us in
  mutex_.lock();
  contenders_.fetch_sub(1);
  mutex_.unlock();
  DriveUntil(settled, until);
  drivers_.fetch_sub(1);
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
  if (!background_.joinable()) background_ = std::thread([this] { BackgroundLoop(); });
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

void Engine::Fail(FaultKind kind, int peer, const std::string& text) {
  std::lock_guard lock(failure_mutex_);
  if (failure_.kind != FaultKind::kNone) return;
  failure_ = {kind, peer, text};
  failed_.store(true, std::memory_order_release);
  doorbell_.Ring(options_.local_rank);
}

void Engine::Halt(FaultKind kind, int peer, const std::string& text) {
  Fail(kind, peer, text);
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);  // whoever holds it may be copying
  contenders_.fetch_sub(1);
  DropTasks();
}

void Engine::Close() {
  const bool sound = !failed();
  const std::string why = "the communicator was closed";
  Fail(FaultKind::kAborted, options_.rank, why);
  {
    contenders_.fetch_add(1);
    std::lock_guard lock(mutex_);
    contenders_.fetch_sub(1);
    draining_ = sound && Idle() && verbs_ != nullptr;
  }
  Halt(FaultKind::kAborted, options_.rank, why);
  StopBackground();
  while (drivers_.load() > 0) sched_yield();  // they are on their way out, and use links and doorbell until then
  std::unique_ptr<Keeper> keeper;
  {
    std::lock_guard lock(mutex_);
    keeper = std::move(keeper_);
  }
  keeper.reset();
  std::lock_guard lock(mutex_);
  if (draining_) verbs_->Drain(DeadlineNs(kDrainSeconds));
  links_.touched.clear();
  for (Port<SendEnd>& port : links_.send) {
    if (port.end != nullptr) port.end->Finish();
    port.end.reset();
  }
  for (Port<RecvEnd>& port : links_.recv) port.end.reset();
  team_.reset();
  verbs_.reset();
  own_bell_ = nullptr;
  heap_.reset();
  segment_.reset();
  scratch_.reset();
  scratch_size_ = 0;
  std::lock_guard failure_lock(failure_mutex_);
  doorbell_.Close();
}

Failure Engine::failure() const {
  std::lock_guard lock(failure_mutex_);
  return failure_;
}

void Engine::PeerLeft(int peer) {
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  if (failed()) return;
  departed_.at(static_cast<std::size_t>(peer)).store(true);
  any_departed_.store(true, std::memory_order_release);
  doorbell_.Ring(options_.local_rank);
}

std::string Engine::Describe() {
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  if (!collectives_.empty()) return collectives_.front()->Describe();
  if (!p2p_.empty()) return p2p_.front()->Describe();
  return "";
}

}  // namespace hetcoll
