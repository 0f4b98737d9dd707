#include "transport/verbs/nic.h"

#include <arpa/inet.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/verbs/read_back.h"

namespace hetcoll {

std::string NicInfo::Name() const {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(AF_INET6, gid.data(), text, sizeof text);
  return device + " port " + std::to_string(port) + " GID " + text;
}

Nic::Nic(const VerbsApi& api, NicInfo info, int index)
    : api_(api),
      info_(std::move(info)),
      index_(index),
      channel_(api.create_comp_channel(info_.pd->context), {api.destroy_comp_channel}) {
  if (channel_ == nullptr) Fail("no completion channel", errno);
  const int flags = fcntl(channel_->fd, F_GETFL);
  if (flags < 0 || fcntl(channel_->fd, F_SETFL, flags | O_NONBLOCK) < 0) Fail("fcntl", errno);
}

Nic::~Nic() = default;

ReadBack& Nic::read_back() {
  if (read_back_ == nullptr) read_back_ = std::make_unique<ReadBack>(*this);
  return *read_back_;
}

void Nic::Renew(std::unique_ptr<ReadBack> read_back) {
  if (read_back_ != nullptr) read_back->Follow(*read_back_);
  read_back_ = std::move(read_back);
}

bool Nic::Drain() {
  ibv::Cq* cq = nullptr;
  void* armed = nullptr;
  bool any = false;
  while (api_.get_cq_event(channel_.get(), &cq, &armed) == 0) {
    *static_cast<bool*>(armed) = false;
    api_.ack_cq_events(cq, 1);
    any = true;
  }
  return any;
}

void Nic::Fail(const std::string& what, int error) const {
  std::string text = "verbs: " + info_.Name() + ": " + what + ": " + std::strerror(error);
  if (error == ENOMEM)
    text += " (is the limit of locked memory, ulimit -l, too low, or are the device's queues used up?)";
  throw Fault(FaultKind::kSystem, -1, text);
}

int Regions::Add(std::uintptr_t address, std::size_t nbytes, const std::vector<RegionKey>& keys,
                 std::optional<std::uintptr_t> seen_at) {
  auto region = std::make_unique<Region>(Region{address, nbytes, seen_at.value_or(address), !seen_at, {}, {}});
  for (const RegionKey& key : keys) {
    if (key.nic < 0 || key.nic >= kMaxNics) continue;
    region->lkey[static_cast<std::size_t>(key.nic)] = key.lkey;
    region->rkey[static_cast<std::size_t>(key.nic)] = key.rkey;
    region->nics |= 1u << key.nic;
  }
  longest_ = std::max(longest_, nbytes);
  by_address_.emplace(address, region.get());
  regions_.emplace(next_, std::move(region));
  return next_++;
}

bool Regions::Remove(int handle) {
  const auto found = regions_.find(handle);
  if (found == regions_.end()) return true;
  Region* region = found->second.get();
  if (region->uses > 0) return false;
  std::erase_if(by_address_, [&](const auto& entry) { return entry.second == region; });
  regions_.erase(found);
  return true;
}

Region* Regions::Find(const std::byte* data, std::size_t n, std::uint32_t nics) {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  for (auto i = by_address_.upper_bound(at); i != by_address_.begin();) {
    --i;
    Region& region = *i->second;
    if (at - region.address >= longest_) break;
    if (at + n <= region.address + region.nbytes && (region.nics & nics) == nics) return &region;
  }
  return nullptr;
}

}  // namespace hetcoll
