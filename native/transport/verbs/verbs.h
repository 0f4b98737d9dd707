// RDMA verbs: reliable connections over InfiniBand and RoCE, several NICs to a link, TCP behind them.
//
// Who does what, from the inside out: abi.h and api.h are libibverbs as we see it; a Nic is a port; a Rail is a queue
// pair with its two rings; an Outbox spreads a link's frames over its rails and keeps them until they are delivered, an
// Inbox puts them in order again; a VerbsLink makes the rails, notices their deaths, has TCP carry the frames while
// none is left, and takes them up again. This file is what the engine sees: all links of one engine.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"
#include "transport/verbs/link.h"
#include "transport/verbs/nic.h"

namespace hetcoll {

class VerbsHost {
 public:
  // `has_events` is set while there is something to take.
  VerbsHost(const VerbsApi& api, std::shared_ptr<TcpShared> tcp, std::atomic<bool>& has_events);

  int AddNic(NicInfo info);
  // Rails: a NIC's number here and the name of the peer's device. Both ends give as many, in the same order. Returns at
  // once: the link is made while it is driven. Takes over the descriptors.
  LinkEnds Attach(const VerbsLinkOptions& options, std::span<const std::pair<int, std::string>> rails,
                  std::span<const int> fds);

  Regions& regions() { return shared_.regions; }
  std::vector<std::string> TakeEvents();
  std::string Describe() const;  // JSON, for people and tests
  std::vector<std::pair<std::string, std::uint64_t>> Counters() const;

  // For the engine's keeper: what nobody may be waiting for. True if anything changed.
  bool Service();
  void AddWatch(std::vector<pollfd>& fds) const;
  // From here on no NIC touches the users' memory, and nothing works any more.
  void Fence() {
    for (const auto& link : links_) link->Fence();
  }
  // Ends the links whose ends are gone.
  void Forget() {
    std::erase_if(links_, [](const auto& link) { return link.use_count() == 1; });
  }
  // Whether every link waits for the ranks alone, not for the network.
  bool Settled() const;
  // Waits until all that was sent has left, or `until`.
  void Drain(std::int64_t until);

 private:
  const VerbsApi& api_;
  VerbsShared shared_;
  std::vector<std::unique_ptr<Nic>> nics_;
  std::vector<std::shared_ptr<VerbsLink>> links_;
};

}  // namespace hetcoll
