// Who the engine talks to: links and the memory that they reach.
#include <unistd.h>

#include "host/engine.h"

namespace hetcoll {
namespace {

constexpr std::size_t kLargestItem = 16;

}  // namespace

void Engine::AttachShm(int fd, std::size_t ring_bytes, std::size_t most_heap, std::span<const int> local_ranks,
                       const ShmOptions& options) {
  const ShmLayout layout(static_cast<int>(local_ranks.size()), ring_bytes, most_heap);
  ShmOptions settled = options;
  settled.weighs = !options_.oversubscribed;  // who shares a core has the other one run while it waits, and times that
  AttachShm(std::make_shared<ShmSegment>(fd, layout, settled), local_ranks);
}

void Engine::AttachShm(std::shared_ptr<ShmSegment> segment, std::span<const int> local_ranks) {
  const int local_size = static_cast<int>(local_ranks.size());
  segment_ = std::move(segment);
  heap_ = std::make_shared<Heap>(segment_, options_.local_rank);
  own_bell_ = &segment_->doorbell(options_.local_rank);
  own_bell_->name.store(doorbell_.name(), std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // whoever sees that this rank sleeps sees the name: see Ring
  borrowed_ = &segment_->borrowed();
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
    }
  }
}

void Engine::AttachTcp(int peer, int channel, std::span<const int> fds) {
  LinkEnds ends = injector_.Wrap(MakeTcp(MakeSockets(fds, {peer, channel, 0}, tcp_), tcp_), 1, peer, channel);
  std::lock_guard lock(mutex_);
  if (failed()) return;  // perhaps closed: then nobody would close them
  links_.tx(peer, channel).keeps = tcp_->mending != nullptr;
  links_.tx(peer, channel).end = std::move(ends.send);
  links_.rx(peer, channel).end = std::move(ends.recv);
}

int Engine::AddNic(NicInfo info, const VerbsApi& api) {
  std::lock_guard lock(mutex_);
  if (verbs_ == nullptr) verbs_ = std::make_unique<VerbsHost>(api, tcp_, link_events_);
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
  LinkEnds ends =
      injector_.Wrap(verbs_->Attach({options_.rank, peer, channel, ring_bytes, options_.recovery_ns}, rails, fds),
                     kLargestItem, peer, channel);
  links_.tx(peer, channel).keeps = tcp_->mending != nullptr;  // where it has no rail from the start
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
    Mending::Flush(resumed_, fds);
    if (verbs_ == nullptr) return;
    if (verbs_->Service()) doorbell_.Ring();
    verbs_->AddWatch(fds);
  } catch (const Fault& fault) {
    Fail(fault.kind, fault.peer, fault.what());
  }
}

int Engine::MendTcp() {
  std::lock_guard lock(mutex_);
  if (tcp_->mending == nullptr) tcp_->mending = std::make_shared<Mending>();
  return tcp_->mending->fd();
}

std::vector<LostSocket> Engine::TakeLost() {
  return tcp_->mending == nullptr ? std::vector<LostSocket>{} : tcp_->mending->TakeLost();
}

bool Engine::IsLost(const SocketId& id) {
  return AskMending([&](Mending& mending) { return mending.IsLost(id); }, false);
}

std::optional<Came> Engine::HoldSocket(const SocketId& id, std::uint32_t number, bool first) {
  return AskMending([&](Mending& mending) { return mending.Hold(id, number, first); }, std::optional<Came>{});
}

bool Engine::ResumeSocket(const SocketId& id, std::uint32_t number, int socket, const Came& came) {
  const bool resumed = AskMending(
      [&](Mending& mending) {
        try {
          const bool taken = mending.Resume(id, number, socket, came, resumed_);
          if (taken && keeper_ == nullptr) keeper_ = std::make_unique<Keeper>([this](auto& fds) { ServeLinks(fds); });
          if (taken) keeper_->Wake();
          return taken;
        } catch (const Fault& fault) {
          Fail(fault.kind, fault.peer, fault.what());
          return true;
        }
      },
      false);
  doorbell_.Ring();
  return resumed;
}

void Engine::GiveUpSocket(const SocketId& id, const std::string& why) {
  AskMending([&](Mending& mending) { return mending.GiveUp(id, why), true; }, false);
  doorbell_.Ring();
}

std::map<int, std::uint64_t> Engine::Undelivered() {
  return AskMending(
      [](const Mending& mending) {
        return mending.ByPeer([&](const SocketId& id) { return mending.Undelivered(id); });
      },
      std::map<int, std::uint64_t>{});
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

EngineMemory Engine::Memory() {
  EngineMemory held;
  {
    std::lock_guard lock(background_mutex_);
    held.threads += background_.joinable() ? 1 : 0;
  }
  contenders_.fetch_add(1);
  std::lock_guard lock(mutex_);
  contenders_.fetch_sub(1);
  if (doorbell_.fd() >= 0) held.links.descriptors += 1;
  for (const auto& port : links_.send) {
    if (port.end != nullptr) port.end->Count(held.links);
  }
  if (tcp_->mending != nullptr && tcp_->mending->fd() >= 0) held.links.descriptors += 1;
  if (keeper_ != nullptr) {
    held.links.descriptors += 1;
    held.threads += 1;
  }
  if (team_ != nullptr) held.threads += team_->helpers();
  if (segment_ != nullptr) {
    const ShmLayout& layout = segment_->layout();
    held.slots = static_cast<std::size_t>(layout.local_size - 1) * kChannels * layout.edge_bytes;
  }
  if (heap_ != nullptr) held.arrays = heap_->used();
  for (const auto& plan : plans_) held.plans += plan->nbytes();
  held.scratch = scratch_size_ + tcp_->staging.capacity();
  return held;
}

bool Engine::Linked(int peer, int channel) {
  const std::unique_lock lock = LockSoon();
  return HasLink(peer, channel);
}

}  // namespace hetcoll
