#include "transport/verbs/verbs.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include "base/clock.h"

namespace hetcoll {
namespace {

class VerbsSend final : public SendEnd {
 public:
  explicit VerbsSend(std::shared_ptr<VerbsLink> link) : link_(std::move(link)) {}

  std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) override {
    if (at == 0 && m.total >= kInviteBytes) link_->Drive();  // there may be a clear-to-send
    if (Open()) {
      std::ptrdiff_t taken = link_->Push(m, at, data, n);
      if (taken != kWouldBlock) return taken;
      link_->Drive();
      if (link_->open()) return link_->Push(m, at, data, n);
    }
    SendEnd* tcp = link_->tcp_send();
    if (tcp != nullptr && m.device) return kOutOfReach;
    return tcp != nullptr ? tcp->Push(m, at, data, n) : kWouldBlock;
  }

  std::byte* Reserve(const std::byte* data, std::size_t n, const std::byte* from) override {
    static_cast<void>(from);  // the peer's memory is its own
    return Open() ? link_->outbox().Reserve(data, n) : nullptr;
  }
  void Commit(const Message& m, std::size_t at, std::size_t n) override { link_->outbox().Commit(m, at, n); }

  std::size_t Lent() override {
    if (SendEnd* tcp = link_->tcp_send()) return tcp->Lent();
    if (link_->outbox().Lent() > 0) link_->Drive();
    return link_->outbox().Lent();
  }

  void AddPoll(std::vector<pollfd>& fds) const override {
    link_->AddPoll(fds);
    if (SendEnd* tcp = link_->tcp_send()) tcp->AddPoll(fds);
  }

  bool Keep() override {
    SendEnd* tcp = link_->tcp_send();
    return tcp != nullptr && tcp->Keep();
  }

  void Answered(std::uint64_t messages) override { link_->outbox().Answered(messages); }
  void Recall() override { link_->Recall(); }

  bool FinalWithoutPeer() const override {
    const SendEnd* tcp = link_->tcp_send();
    return tcp == nullptr || tcp->FinalWithoutPeer();
  }
  void Count(Holdings& held) const override { link_->Count(held); }
  void Finish() override { link_->Shutdown(); }
  void Abandon() override { link_->Abandon(); }

 private:
  bool Open() {
    if (link_->open()) return true;
    link_->Drive();
    if (link_->ended()) link_->PeerGone();
    return link_->open();
  }

  std::shared_ptr<VerbsLink> link_;
};

class VerbsRecv final : public RecvEnd {
 public:
  explicit VerbsRecv(std::shared_ptr<VerbsLink> link) : link_(std::move(link)) {}

  std::ptrdiff_t Pull(const Message& m, std::size_t at, std::byte* dst, std::size_t n, bool stream) override {
    std::ptrdiff_t taken = kWouldBlock;
    if (RecvEnd* tcp = link_->tcp_recv()) {
      taken = tcp->Pull(m, at, dst, n, stream);
    } else {
      link_->Expect(m, at, dst, n);
      if (!Here(m)) return kWouldBlock;
      const View v = link_->inbox().Peek(m, at, n);
      taken = link_->Place(dst, v, stream);
      if (taken == kWouldBlock) return kWouldBlock;
      link_->inbox().Consume(static_cast<std::size_t>(taken));
      link_->Confirm();
    }
    if (taken != kWouldBlock) link_->Taken(m, at + static_cast<std::size_t>(taken));
    return taken;
  }

  void Announce(const Message& m, std::byte* dst) override { link_->Announce(m, dst); }
  Placement Expose(std::byte* base, std::size_t n) override { return link_->Expose(base, n); }
  void Hide(bool at_once) override { link_->Hide(at_once); }

  View Peek(const Message& m, std::size_t at, std::size_t n) override {
    if (RecvEnd* tcp = link_->tcp_recv()) return tcp->Peek(m, at, n);
    return Here(m) ? link_->inbox().Peek(m, at, n) : View{nullptr, kWouldBlock};
  }

  void Consume(std::size_t n) override {
    if (RecvEnd* tcp = link_->tcp_recv()) return tcp->Consume(n);
    link_->inbox().Consume(n);
    link_->Confirm();
  }

  void AddPoll(std::vector<pollfd>& fds) const override {
    link_->AddPoll(fds);
    if (RecvEnd* tcp = link_->tcp_recv()) tcp->AddPoll(fds);
  }

  bool FinalWithoutPeer() const override { return false; }  // the control socket ends behind the data

 private:
  // Whether more of it can be taken, where it was to be.
  bool Here(const Message& m) {
    if (!Ready() || !link_->Landed()) return false;
    if (m.into != nullptr) link_->inbox().Direct(m.signature, reinterpret_cast<const std::byte*>(m.into->address));
    return true;
  }

  bool Ready() {
    if (link_->inbox().ready()) return true;
    link_->Drive();
    if (link_->inbox().ready()) return true;
    if (link_->ended()) link_->PeerGone();
    if (link_->lacks_rails() || link_->inbox().owes()) static_cast<void>(link_->Landed());
    if (link_->lacks_rails()) link_->inbox().MakeRoom();
    return false;
  }

  std::shared_ptr<VerbsLink> link_;
};

const char* PathOf(const VerbsLink& link) {
  if (link.over_tcp()) return "tcp";
  switch (link.state()) {
    case VerbsLink::State::kUp:
      return "verbs";
    case VerbsLink::State::kSwitch:
      return "switching to tcp";
    default:
      return "connecting";
  }
}

std::string Quote(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= ' ') out += c;
  }
  return out + '"';
}

std::string DescribeRail(const Rail& rail, const Recovery& r, bool up) {
  const Rail::Counters& c = rail.counters();
  return "{\"nic\":" + std::to_string(rail.nic().index()) + ",\"device\":" + Quote(rail.nic().info().device) +
         ",\"peer_device\":" + Quote(rail.peer_device()) +
         ",\"state\":" + (rail.alive() ? (up ? "\"up\"" : "\"connecting\"") : "\"down\"") +
         ",\"why\":" + Quote(rail.error()) + ",\"recovered\":" + std::to_string(r.successes) +
         ",\"tries\":" + std::to_string(r.all_tries) + ",\"tried\":" + Quote(r.why) +
         ",\"bytes\":" + std::to_string(c.bytes) + ",\"frames\":" + std::to_string(c.frames) +
         ",\"megabytes_per_second\":" + (rail.measured() ? std::to_string(rail.bytes_per_ns() * 1e3) : "null") + "}";
}

}  // namespace

VerbsHost::VerbsHost(const VerbsApi& api, std::shared_ptr<TcpShared> tcp, std::atomic<bool>& has_events)
    : api_(api), shared_{{}, std::move(tcp), {}, {}, has_events} {}

std::vector<std::string> VerbsHost::TakeEvents() {
  shared_.has_events.store(false, std::memory_order_relaxed);
  return std::exchange(shared_.events, {});
}

int VerbsHost::AddNic(NicInfo info) {
  const int index = static_cast<int>(nics_.size());
  if (index == kMaxNics) {
    throw Fault(FaultKind::kSystem, -1, "verbs: more than " + std::to_string(kMaxNics) + " NICs");
  }
  nics_.push_back(std::make_unique<Nic>(api_, std::move(info), index));
  return index;
}

LinkEnds VerbsHost::Attach(const VerbsLinkOptions& options, std::span<const std::pair<int, std::string>> rails,
                           std::span<const int> fds) {
  std::string wrong;
  if (rails.empty() || rails.size() > kMaxRails) {
    wrong = "1 to " + std::to_string(kMaxRails) + " rails were wanted, got " + std::to_string(rails.size());
  } else if (!std::has_single_bit(options.ring_bytes) || options.ring_bytes < kLeastRing ||
             options.ring_bytes > kLargestRing) {
    wrong =
        "a ring of a power of two bytes from 8 KiB to 256 MiB was wanted, got " + std::to_string(options.ring_bytes);
  } else if (fds.empty()) {
    wrong = "a TCP socket was wanted, got none";
  }
  std::vector<std::pair<Nic*, std::string>> pairs;
  for (const auto& [nic, peer_device] : rails) {
    if (nic < 0 || nic >= static_cast<int>(nics_.size())) {
      wrong = "no NIC " + std::to_string(nic);
      break;
    }
    pairs.emplace_back(nics_[static_cast<std::size_t>(nic)].get(), peer_device);
  }
  if (!wrong.empty()) {
    for (const int fd : fds) close(fd);
    throw Fault(FaultKind::kSystem, options.peer, "verbs: " + wrong);
  }
  links_.push_back(std::make_shared<VerbsLink>(options, pairs, fds, shared_));
  return {std::make_unique<VerbsSend>(links_.back()), std::make_unique<VerbsRecv>(links_.back())};
}

bool VerbsHost::Service() {
  bool changed = false;
  for (const auto& link : links_) changed |= link->Service();
  return changed;
}

void VerbsHost::AddWatch(std::vector<pollfd>& fds) const {
  for (const auto& link : links_) link->AddWatch(fds);
}

void VerbsHost::Drain(std::int64_t until) {
  const auto drained = [](const std::shared_ptr<VerbsLink>& link) {
    try {
      static_cast<void>(link->Service());
      return link->Drained();
    } catch (const Fault&) {
      return true;  // nobody is left to be told
    }
  };
  while (!std::all_of(links_.begin(), links_.end(), drained) && NowNs() < until) sched_yield();
}

bool VerbsHost::Settled() const {
  return std::all_of(links_.begin(), links_.end(), [](const auto& link) { return link->Settled(); });
}

std::string VerbsHost::Describe() const {
  std::string out = "[";
  for (const auto& link : links_) {
    const VerbsLinkOptions& o = link->options();
    out += std::string(out.size() > 1 ? "," : "") + "{\"peer\":" + std::to_string(o.peer) +
           ",\"channel\":" + std::to_string(o.channel) + ",\"path\":" + Quote(PathOf(*link)) +
           ",\"lost_rails\":" + std::to_string(link->lost_rails()) +
           ",\"resent\":" + std::to_string(link->outbox().counters().resent) + ",\"rails\":[";
    for (const auto& rail : link->rails()) {
      const Recovery& r = link->recoveries()[static_cast<std::size_t>(rail->number())];
      if (rail != link->rails().front()) out += ",";
      out += DescribeRail(*rail, r, link->state() == VerbsLink::State::kUp);
    }
    out += "]}";
  }
  return out + "]";
}

std::vector<std::pair<std::string, std::uint64_t>> VerbsHost::Counters() const {
  Rail::Counters rails;
  Outbox::Counters out;
  std::uint64_t twice = 0;
  std::uint64_t copied = 0;
  std::uint64_t lost = 0;
  std::uint64_t tries = 0;
  std::uint64_t recovered = 0;
  std::uint64_t tcp = 0;
  for (const auto& link : links_) {
    for (const auto& rail : link->rails()) {
      rails += rail->counters();
    }
    for (const Recovery& r : link->recoveries()) {
      tries += r.all_tries;
      recovered += r.successes;
    }
    const Outbox::Counters& c = link->outbox().counters();
    out.lent_bytes += c.lent_bytes;
    out.copied_bytes += c.copied_bytes;
    out.tcp_bytes += c.tcp_bytes;
    out.resent += c.resent;
    out.full += c.full;
    out.clear_to_sends += c.clear_to_sends;
    twice += link->inbox().twice();
    copied += link->copied_bytes();
    lost += static_cast<std::uint64_t>(link->lost_rails());
    tcp += link->over_tcp();
  }
  return {{"links", links_.size()},
          {"frames", rails.frames},
          {"bytes", rails.bytes},
          {"received", rails.received},
          {"credits", rails.credits},
          {"signalled", rails.signalled},
          {"inline", rails.inlined},
          {"zero_copy_bytes", out.lent_bytes},
          {"direct_bytes", rails.direct_bytes},
          {"staged_bytes", out.copied_bytes},
          {"copied_bytes", copied},
          {"tcp_bytes", out.tcp_bytes},
          {"clear_to_sends", out.clear_to_sends},
          {"waits", out.full},
          {"resent", out.resent},
          {"duplicates", twice},
          {"lost_rails", lost},
          {"rail_tries", tries},
          {"recovered_rails", recovered},
          {"links_over_tcp", tcp}};
}

}  // namespace hetcoll
