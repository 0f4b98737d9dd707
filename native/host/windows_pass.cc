// One-sided messages: at whom a pass looks, and what tells a sleeper that there is something to look at.
//
// A look at a peer over TCP is a call of the system for each of two FIFOs. Among many ranks most have nothing to say,
// so of those with which nothing is under way poll() tells, all at once, who has.
#include <algorithm>
#include <utility>

#include "host/windows.h"

namespace hetcoll {
namespace {

// With fewer, a call that tells of some is no less than one that looks.
constexpr std::size_t kFewPeers = 8;

}  // namespace

bool Windows::Pass(Links& links) {
  bool moved = device_ != nullptr && PassCopies();
  if (peers_.size() > kFewPeers) HearQuiet(links);
  const bool heard = std::exchange(heard_, false);
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer == rank_ || links.rx(peer, kRequests).end == nullptr) continue;
    Peer& p = peers_[static_cast<std::size_t>(peer)];
    if (p.quiet) continue;
    if (heard) LookAtAnswers(links, peer);
    const bool news = PassPeer(links, peer);
    p.quiet = !news && peers_.size() > kFewPeers && Idle(links, peer);
    moved |= news;
  }
  return moved;
}

bool Windows::PassPeer(Links& links, int peer) {
  Peer& p = peers_[static_cast<std::size_t>(peer)];
  bool moved = false;
  if (Unsent()) {
    moved |= Send(links, peer, kRequests);
    moved |= Send(links, peer, kAnswers);
  }
  if (p.lent >= 0 && links.tx(peer, kAnswers).end->Lent() == 0) {
    HasGivenBack(p);
    moved = true;
  }
  moved |= Serve(links, peer);
  moved |= Collect(links, peer);
  if (Unsent()) moved |= Send(links, peer, kAnswers);
  return moved;
}

void Windows::Heard(std::span<const pollfd> fds) {
  heard_ |= std::any_of(fds.begin(), fds.end(), [](const pollfd& f) { return f.revents != 0; });
}

// There are none, but there may be what a link says for itself.
void Windows::LookAtAnswers(Links& links, int peer) {
  const Peer& p = peers_[static_cast<std::size_t>(peer)];
  if (!p.awaiting.empty() || p.in[kRequests].ended) return;  // Collect looks, or nobody needs it
  try {
    const Message next = MessageOf(p.in[kAnswers].number, sizeof p.status, false);
    if (links.rx(peer, kAnswers).end->Peek(next, 0, 1).n == kWouldBlock) return;
  } catch (const Fault& fault) {
    if (fault.kind == FaultKind::kPeerGone) return;  // as the FIFO of requests will say
    throw;
  }
  throw Fault(FaultKind::kCorrupt, peer, "it answers what nobody asked");
}

// Whether nothing of its and nothing for it is under way, and poll() tells when it says something.
bool Windows::Idle(Links& links, int peer) {
  const Peer& p = peers_[static_cast<std::size_t>(peer)];
  const Inbound &asks = p.in[kRequests], &answers = p.in[kAnswers];
  return p.awaiting.empty() && p.lent < 0 && p.out[kRequests].items.empty() && p.out[kAnswers].items.empty() &&
         asks.phase == Phase::kHead && asks.at == 0 && asks.reading < 0 && asks.landing.empty() &&
         answers.phase == Phase::kHead && answers.at == 0 && links.rx(peer, kRequests).end->Polled() &&
         links.rx(peer, kAnswers).end->Polled();
}

// One call of the system for all that are quiet, in place of two for each.
void Windows::HearQuiet(Links& links) {
  polled_.clear();
  polled_peers_.clear();
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (!peers_[static_cast<std::size_t>(peer)].quiet) continue;
    AddPollOf(links, peer, polled_);
    polled_peers_.resize(polled_.size(), peer);
  }
  if (polled_.empty()) return;
  const int heard = poll(polled_.data(), polled_.size(), 0);
  if (heard > 0) Heard(polled_);
  for (std::size_t i = 0; heard != 0 && i < polled_.size(); ++i) {
    if (heard < 0 || polled_[i].revents != 0) peers_[static_cast<std::size_t>(polled_peers_[i])].quiet = false;
  }
}

bool Windows::Push(Links& links) {
  bool moved = device_ != nullptr && PassCopies();
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    for (const int channel : {kRequests, kAnswers}) {
      const Outbound& out = peers_[static_cast<std::size_t>(peer)].out[static_cast<std::size_t>(channel)];
      if (!out.items.empty()) moved |= Send(links, peer, channel);
    }
  }
  return moved;
}

bool Windows::Needs(int peer) const { return !peers_[static_cast<std::size_t>(peer)].awaiting.empty(); }

void Windows::AddPoll(Links& links, std::vector<pollfd>& fds) const {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer == rank_ || links.rx(peer, kRequests).end == nullptr) continue;
    const Peer& p = peers_[static_cast<std::size_t>(peer)];
    AddPollOf(links, peer, fds);
    for (const int channel : {kRequests, kAnswers}) {
      if (!p.out[static_cast<std::size_t>(channel)].items.empty()) links.tx(peer, channel).end->AddPoll(fds);
    }
  }
}

// Of what comes from it.
void Windows::AddPollOf(Links& links, int peer, std::vector<pollfd>& fds) const {
  const Peer& p = peers_[static_cast<std::size_t>(peer)];
  // Answers also while none is due: who sleeps is not woken by those who begin to wait.
  const bool serves = !p.in[kRequests].ended && p.out[kAnswers].items.empty();
  if (serves) links.rx(peer, kRequests).end->AddPoll(fds);
  if (!p.in[kRequests].ended || Needs(peer)) links.rx(peer, kAnswers).end->AddPoll(fds);
}

}  // namespace hetcoll
