#include "host/engine.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "base/clock.h"
#include "transport/shm/private.h"

namespace hetcoll {
namespace {

constexpr int kPreparedRanks = 64;        // of a host; among more, links are many and mostly idle
constexpr double kPromptSeconds = 20e-6;  // how long a call may keep the interpreter's lock while it waits
constexpr double kDrainSeconds = 2;       // how long closing waits for peers' NICs to have what was sent

std::uint64_t Mix(std::uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      injector_(FaultSpec::Parse(options.fault), options.rank),
      tcp_(std::make_shared<TcpShared>(options.integrity, injector_.tcp())),
      links_(options.size),
      called_(options.identity),
      scratch_(nullptr, [](std::byte* p) { std::free(p); }),
      departed_(static_cast<std::size_t>(options.size)) {
  // With more ranks than cores, whoever spins keeps a peer from running.
  spin_ns_ = options.oversubscribed ? 0 : static_cast<std::int64_t>(options.spin_seconds * 1e9);
  // A pass with a pause takes about 40 ns.
  prompt_spins_ = options.oversubscribed ? 4 : static_cast<int>(std::min(kPromptSeconds, options.spin_seconds) / 40e-9);
}

Engine::~Engine() { Close(); }

void Engine::Abandon() {
  for (Port<SendEnd>& port : links_.send) {
    if (port.end != nullptr) port.end->Abandon();
  }
  doorbell_.Close();
}

int Engine::AddPlan(std::span<const std::byte> encoded) {
  auto plan = std::make_unique<Plan>(encoded, options_.size);
  const std::unique_lock lock = LockSoon();
  for (const StepRecord& s : plan->steps) {
    if (s.op == std::uint8_t(Op::kLocal)) throw PlanError("plan: a local step needs an island of devices");
    if (s.op <= std::uint8_t(Op::kRecvReduce) && !HasLink(s.peer, s.channel)) {
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

// It stays where it is as long as the engine.
const Plan& Engine::PlanOf(int number) {
  const std::unique_lock lock = LockSoon();
  return *plans_.at(static_cast<std::size_t>(number));
}

std::shared_ptr<Shape> Engine::Bind(int plan, DType dtype, ReduceOp op, std::size_t send_count, std::size_t recv_count,
                                    std::span<const std::size_t> send_table, std::span<const std::size_t> recv_table,
                                    std::uint64_t descriptor, bool p2p, bool skip_empty, Format format) {
  const Plan& p = PlanOf(plan);
  // Ranks that reduce the same elements may take their operands in another order, or be of another kind.
  const Kernels* kernels = FindKernels(dtype, op, (p.head.flags & kRedundant) != 0);
  for (const StepRecord& s : p.steps) {
    const auto o = static_cast<Op>(s.op);
    const bool reduces = o == Op::kRecvReduce || o == Op::kReduce || o == Op::kScale;
    if (reduces && kernels == nullptr) throw PlanError("plan: this reduction is not defined on this type");
  }
  const Codec* codec = FindCodec(dtype, format);
  BoundPlan bound(p, dtype, send_count, recv_count, send_table, recv_table, skip_empty, codec);
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

// Scratch that the other ranks of this host can read, where there is room for it. What is never touched costs nothing.
std::byte* Engine::Stage(std::size_t bytes) {
  if (heap_ == nullptr) return Scratch(bytes);
  if (bytes <= stage_size_) return stage_;
  if (stage_ != nullptr) heap_->Free(stage_, stage_size_);  // whoever read there is through: its task is over
  stage_ = heap_->Allocate(bytes);
  stage_size_ = stage_ == nullptr ? 0 : bytes;
  return stage_ == nullptr ? Scratch(bytes) : stage_;
}

std::shared_ptr<Task> Engine::TakeTask(Shape& shape) {
  if (shape.spare == nullptr) shape.spare = std::make_shared<Task>(shape);
  return shape.spare.use_count() == 1 ? shape.spare : std::make_shared<Task>(shape);
}

std::uint64_t Engine::Sign(int shape, std::uint64_t hash, bool p2p, FlightRecorder::Mark& mark) {
  // Point-to-point messages carry nothing of what was before: the channel's order is theirs.
  if (p2p) {
    messages_.Begin(shape, mark);
    return Mix(options_.identity ^ hash);
  }
  history_.Begin(shape, mark);
  // A linear congruential generator, which as all constants are odd comes back after 2^64 calls at the earliest.
  called_ = called_ * kNumberStep + (hash | 1);
  return Mix(called_);
}

std::uint64_t Engine::Enter(int shape, std::uint64_t descriptor, bool p2p) {
  contenders_.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1, std::memory_order_relaxed);
  FlightRecorder::Mark unused;  // a GPU does not say here when a call ends
  return Sign(shape, Mix(descriptor), p2p, unused);
}

std::shared_ptr<Task> Engine::Submit(const std::shared_ptr<Shape>& shape, const void* send, void* recv, float* residual,
                                     std::byte* snapshot) {
  contenders_.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1, std::memory_order_relaxed);
  std::shared_ptr<Task> task = TakeTask(*shape);
  task->Prepare(links_, send, recv, NextSignature(*shape, *task), residual);
  if (failed()) {
    task->state.store(Task::State::kFailed, std::memory_order_release);
    return task;
  }
  task->keepalive = shape;
  task->snapshot = snapshot;
  if (shape->p2p) {
    p2p_.push_back(task);
  } else {
    collectives_.push_back(task);
  }
  return task;
}

// Called before whoever waits is told of a failure: then the memory is the users' again, who may write what peers still
// read. Those of this host look at the flag once they have read; nobody writes.
void Engine::FenceLinks() {
  if (verbs_ != nullptr && !draining_) verbs_->Fence();
  if (segment_ == nullptr) return;
  segment_->owner(options_.local_rank).withdrawn.store(1, std::memory_order_seq_cst);
}

void Engine::DropTasks() {
  FenceLinks();
  const auto drop = [](const std::shared_ptr<Task>& task) { task->End(Task::State::kFailed); };
  std::for_each(collectives_.begin(), collectives_.end(), drop);
  std::for_each(p2p_.begin(), p2p_.end(), drop);
  collectives_.clear();
  p2p_.clear();
  if (windows_ != nullptr) windows_->Drop();
}

void Engine::Fail(FaultKind kind, int peer, const std::string& text) {
  std::lock_guard lock(failure_mutex_);
  if (failure_.kind != FaultKind::kNone) return;
  failure_ = {kind, peer, text};
  failed_.store(true, std::memory_order_release);
  doorbell_.Ring();
}

void Engine::Halt(FaultKind kind, int peer, const std::string& text) {
  Fail(kind, peer, text);
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);  // whoever holds it may be copying
  contenders_.fetch_sub(1);
  DropTasks();
}

// To those that serve this rank's one-sided messages.
void Engine::SayGoodbye() {
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  if (windows_ == nullptr) return;
  windows_->Leave(links_, DeadlineNs(kDrainSeconds));
  RingDoorbells();
}

void Engine::Close() {
  const bool sound = !failed();
  if (sound) SayGoodbye();
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
  if (tcp_->mending != nullptr) tcp_->mending->Close();
  team_.reset();
  verbs_.reset();
  own_bell_ = nullptr;
  stage_ = nullptr;
  stage_size_ = 0;
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

void Engine::ServeWindows() {
  {
    std::lock_guard lock(mutex_);
    if (windows_ != nullptr) return;
    constexpr std::uint64_t kKind = 0x6f6e652d73696465;  // signatures are of no plan's messages
    windows_ = std::make_unique<Windows>(options_.rank, options_.size, Mix(options_.identity ^ kKind));
  }
  DriveInBackground();
}

// For a call of a user's while others drive, who give way at their next look: a sleeper would come back much later.
std::unique_lock<std::mutex> Engine::LockSoon() {
  contenders_.fetch_add(1);
  std::unique_lock lock(mutex_, std::try_to_lock);
  for (int i = 0; !lock.owns_lock() && i < prompt_spins_; ++i) {
    CpuRelax();
    static_cast<void>(lock.try_lock());
  }
  if (!lock.owns_lock()) lock.lock();
  contenders_.fetch_sub(1);
  return lock;
}

void Engine::BeginTransfers() {
  if (failed()) return DropTasks();
  if (!windows_->Unsent()) return;
  PassWindows(&Windows::Push);  // the engine's own thread receives
  RingDoorbells();
  // The engine's own thread may sleep until there is something to receive.
  if (windows_->Unsent() || windows_->Silent() || failed()) doorbell_.Ring();
}

void Engine::PeerLeft(int peer) {
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  if (failed()) return;
  departed_.at(static_cast<std::size_t>(peer)).store(true);
  any_departed_.store(true, std::memory_order_release);
  doorbell_.Ring();
}

std::string Engine::Describe() {
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  if (!collectives_.empty()) return collectives_.front()->Describe();
  if (!p2p_.empty()) return p2p_.front()->Describe();
  return windows_ == nullptr ? "" : windows_->Describe();
}

std::vector<Awaited> Engine::WaitsFor() {
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  std::vector<Awaited> found;
  const auto add = [&](const std::shared_ptr<Task>& task) {
    task->ForEachBlocked([&](const BoundStep& s) {
      if (s.peer < 0 || !task->Ready(s)) return;
      const bool sends = s.op == Op::kSend;
      const auto& tx = links_.tx(s.peer, s.channel);
      const auto& rx = links_.rx(s.peer, s.channel);
      const std::size_t handed = s.wire > 0 ? s.done : s.posted;
      found.push_back({s.peer, s.channel, sends, sends ? handed : s.done, s.len, sends ? tx.taken : rx.taken,
                       sends ? tx.through : rx.through});
    });
  };
  if (!collectives_.empty()) add(collectives_.front());
  std::for_each(p2p_.begin(), p2p_.end(), add);
  return found;
}

std::pair<std::uint64_t, std::uint64_t> Engine::Through(int peer, int channel, bool sends) {
  if (peer < 0 || peer >= options_.size || channel < 0 || channel >= kLinkChannels) return {};
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  const auto& tx = links_.tx(peer, channel);
  const auto& rx = links_.rx(peer, channel);
  return sends ? std::pair{tx.taken, tx.through} : std::pair{rx.taken, rx.through};
}

std::vector<std::uint64_t> Engine::Sent() {
  std::vector<std::uint64_t> sent(static_cast<std::size_t>(options_.size));
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  for (int peer = 0; peer < options_.size; ++peer) {
    for (int channel = 0; channel < kLinkChannels; ++channel) {
      sent[static_cast<std::size_t>(peer)] += links_.tx(peer, channel).taken;
    }
  }
  return sent;
}

Copies Engine::Copied() {
  Copies copies;
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  for (const auto& port : links_.send) {
    if (port.end != nullptr) port.end->CountCopies(copies);
  }
  for (const auto& port : links_.recv) {
    if (port.end != nullptr) port.end->CountCopies(copies);
  }
  return copies;
}

double Engine::still_seconds() const {
  const std::int64_t since = still_ns_.load(std::memory_order_relaxed);
  if (since == 0 || moves() != still_moves_.load(std::memory_order_relaxed)) return 0;
  return static_cast<double>(NowNs() - since) * 1e-9;
}

}  // namespace hetcoll
