// Puts and gets whose pieces NICs read and write where they lie: see windows.h.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "host/windows.h"

namespace hetcoll {

void Windows::Place(std::uint32_t id, int peer) {
  Window& window = windows_.at(id);
  window.placed.resize(peers_.size());
  window.placed[static_cast<std::size_t>(peer)] = true;
}

bool Windows::Asks(std::uint32_t id, int peer, std::span<const Piece> pieces) const {
  const auto found = windows_.find(id);
  if (found == windows_.end() || found->second.placed.empty()) return false;
  if (!found->second.placed[static_cast<std::size_t>(peer)]) return false;
  std::uint64_t nbytes = 0;
  for (const Piece& p : pieces) nbytes += p.nbytes;
  return nbytes >= kAskedBytes;
}

// Where what is got may be written, when the request for it is sent.
void Windows::ExposeFor(Links& links, Item& item) {
  Transfer& transfer = *item.transfer;
  std::vector<Run> runs;
  std::uint64_t first = ~std::uint64_t{0}, end = 0;
  for (const Piece& p : transfer.pieces) {
    runs.push_back({p.here, p.nbytes});
    first = std::min(first, p.here);
    end = std::max(end, p.here + p.nbytes);
  }
  Placement where;
  if (Disjoint(runs)) {
    where = links.rx(transfer.peer, kAnswers).end->Expose(transfer.base + first, end - first);
  }
  transfer.exposes = where.given != 0;
  if (transfer.exposes) where.address -= first;
  std::memcpy(item.own.data() + item.own.size() - sizeof where, &where, sizeof where);
  item.exposes = false;
}

// Whether no byte is in two of them: several rails keep no order.
bool Windows::Disjoint(std::span<const Run> runs) {
  std::vector<std::size_t> order(runs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto before = [&](std::size_t a, std::size_t b) { return runs[a].offset < runs[b].offset; };
  if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
  std::uint64_t end = 0;
  for (const std::size_t i : order) {
    if (runs[i].nbytes == 0) continue;
    if (runs[i].offset < end) return false;
    end = runs[i].offset + runs[i].nbytes;
  }
  return true;
}

// The owner's answer to kPlace. Where the window may not be written, pieces come nevertheless, or are not sent at all.
void Windows::Allow(Links& links, int peer) {
  Inbound& in = peers_[static_cast<std::size_t>(peer)].in[kRequests];
  Allowed allowed{static_cast<std::uint32_t>(in.refusal), 0, {}};
  if (in.refusal == Refusal::kNone) {
    const Window& window = *Find(in.head.id);
    if (Disjoint(in.runs)) allowed.into = links.rx(peer, kRequests).end->Expose(window.base, window.nbytes);
    in.phase = Phase::kRuns;
  } else {
    counts_.refused += in.runs.size();
  }
  in.placed = in.exposed = allowed.into.given != 0;
  Item item;
  item.own.resize(sizeof allowed);
  std::memcpy(item.own.data(), &allowed, sizeof allowed);
  item.parts.push_back({item.own.data(), sizeof allowed, false});
  Queue(peer, kAnswers, std::move(item));
}

// Of a put that asks, the first answer.
bool Windows::IsAllowed(Links& links, int peer, bool& moved) {
  Peer& p = peers_[static_cast<std::size_t>(peer)];
  Port<RecvEnd>& port = links.rx(peer, kAnswers);
  if (!Take(links, port, p.in[kAnswers], reinterpret_cast<std::byte*>(&p.allowed), sizeof p.allowed, moved)) {
    return false;
  }
  if (p.allowed.status > static_cast<std::uint32_t>(Refusal::kOutside)) {
    throw Fault(FaultKind::kCorrupt, peer, "an answer is none");
  }
  CheckAsked(*p.awaiting.front());
  Outbound& out = p.out[kRequests];
  out.held = false;
  p.awaiting.front()->asks = false;
  p.awaiting.front()->through = 0;  // its pieces follow
  out.items.front().into = p.allowed.into;
  if (p.allowed.into.given == 0) out.items.front().straight = false;
  if (p.allowed.status == 0) return true;
  out.items.pop_front();  // its pieces
  --unsent_;
  if (out.staged_item > 0) --out.staged_item;
  End(*p.awaiting.front(), static_cast<Refusal>(p.allowed.status));
  p.awaiting.pop_front();
  return true;
}

void Windows::Revoke(Links& links, std::uint32_t id) {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    Peer& p = peers_[static_cast<std::size_t>(peer)];
    if (p.in[kRequests].exposed && p.in[kRequests].head.id == id) {
      links.rx(peer, kRequests).end->Hide(true);
      p.in[kRequests].exposed = false;
    }
    if (p.lent == static_cast<std::int64_t>(id)) {
      try {
        links.tx(peer, kAnswers).end->Recall();
        HasGivenBack(p);
      } catch (const Fault& fault) {
        if (device_ == nullptr) throw;
        device_->fault = fault;  // as where one is closed: the next Pass says so
        p.lent = -1;
      }
    }
  }
}

void Windows::Left(Links& links, int peer) {
  Inbound& in = peers_[static_cast<std::size_t>(peer)].in[kRequests];
  in.reading = -1;
  if (in.exposed) links.rx(peer, kRequests).end->Hide();
  in.exposed = false;
}

}  // namespace hetcoll
