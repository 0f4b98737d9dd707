// What one-sided messages send: requests, answers, and what goes with them.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "host/windows.h"

namespace hetcoll {

std::shared_ptr<Transfer> Windows::Put(std::uint32_t id, int peer, const std::byte* src, std::span<const Piece> pieces,
                                       int signal, const Where& where) {
  if (peer == rank_) return ToSelf(id, const_cast<std::byte*>(src), pieces, signal, false, where);  // it is only read
  if (auto seen = PutSeen(id, peer, src, pieces, signal, where)) return seen;
  auto transfer = std::make_shared<Transfer>();
  transfer->peer = peer;
  transfer->asks = Asks(id, peer, pieces);
  Request(transfer, {.id = id, .ask = transfer->asks ? Ask::kPlace : Ask::kPut, .signal = signal}, pieces, src, where);
  return transfer;
}

std::shared_ptr<Transfer> Windows::Get(std::uint32_t id, int peer, std::byte* dst, std::span<const Piece> pieces,
                                       const Where& where) {
  if (peer == rank_) return ToSelf(id, dst, pieces, -1, true, where);
  if (auto seen = GetSeen(id, peer, dst, pieces, where)) return seen;
  auto transfer = std::make_shared<Transfer>();
  transfer->peer = peer;
  transfer->base = dst;
  transfer->device = where.device;
  transfer->pieces.assign(pieces.begin(), pieces.end());
  transfer->exposes = Asks(id, peer, pieces);
  Request(transfer, {.id = id, .ask = transfer->exposes ? Ask::kFetch : Ask::kGet}, pieces, nullptr, where);
  return transfer;
}

void Windows::Request(const std::shared_ptr<Transfer>& transfer, const Head& form, std::span<const Piece> pieces,
                      const std::byte* src, const Where& where, std::uint64_t source) {
  const int peer = transfer->peer;
  peers_[static_cast<std::size_t>(peer)].awaiting.push_back(transfer);
  Head head = form;
  head.pieces = static_cast<std::uint32_t>(pieces.size());
  const bool pull = head.ask == Ask::kPull, fetch = head.ask == Ask::kFetch;
  const bool table = pieces.size() > 1 || pull || fetch;
  if (!table && pieces.size() == 1) {
    head.offset = pieces[0].there;
    head.nbytes = pieces[0].nbytes;
  }
  Item item;
  const std::size_t runs = table ? pieces.size() * sizeof(Run) : 0;
  item.own.resize(sizeof head + runs + (fetch ? sizeof(Placement) : 0));
  std::memcpy(item.own.data(), &head, sizeof head);
  item.parts.reserve(3 + (src == nullptr ? 0 : pieces.size()));
  item.parts.push_back({item.own.data(), sizeof head, false});
  if (table) {
    std::byte* to = item.own.data() + sizeof head;
    item.parts.push_back({to, runs, false});
    for (const Piece& p : pieces) {
      const Run run{p.there, p.nbytes, pull || fetch ? source + p.here : 0};
      std::memcpy(to, &run, sizeof run);
      to += sizeof run;
    }
  }
  if (fetch) item.parts.push_back({item.own.data() + sizeof head + runs, sizeof(Placement), false});
  item.exposes = fetch;
  item.holds = head.ask == Ask::kRead || transfer->asks;
  if (where.after) {
    item.after = where.after;
    ++device_->gated;
  }
  item.late = where.late;
  if (transfer->asks) {
    item.transfer = transfer;
    Queue(peer, kRequests, std::move(item));
    item = {};
    item.parts.reserve(pieces.size());
  }
  if (src != nullptr) {
    for (const Piece& p : pieces)
      item.parts.push_back({src + p.here, p.nbytes, !where.device, where.device && p.nbytes > 0, p.there});
    item.device = where.device;
    item.straight = where.device && transfer->asks;
  }
  item.transfer = transfer;
  Queue(peer, kRequests, std::move(item));
}

// Whoever is told that its call is over gives its memory back, so all of it must have been sent.
void Windows::CheckAsked(const Transfer& transfer) {
  if (transfer.through == 0) throw Fault(FaultKind::kCorrupt, transfer.peer, "an answer came before it was asked for");
}

void Windows::Queue(int peer, int channel, Item item) {
  Peer& p = peers_[static_cast<std::size_t>(peer)];
  p.out[static_cast<std::size_t>(channel)].items.push_back(std::move(item));
  p.quiet = false;
  ++unsent_;
}

bool Windows::QueueLeave(int peer) {
  Outbound& out = peers_[static_cast<std::size_t>(peer)].out[kRequests];
  const bool begun = out.at > 0 || (!out.items.empty() && out.items.front().next > 0);
  if (begun || out.held) return false;
  unsent_ -= out.items.size();
  out.items.clear();
  const Head head{.ask = Ask::kLeave};
  Item item;
  item.own.resize(sizeof head);
  std::memcpy(item.own.data(), &head, sizeof head);
  item.parts.push_back({item.own.data(), sizeof head, false});
  Queue(peer, kRequests, std::move(item));
  return true;
}

bool Windows::HasHeard(Links& links, int peer) {
  const Peer& p = peers_[static_cast<std::size_t>(peer)];
  try {
    Serve(links, peer);
    if (p.in[kRequests].ended) return true;  // it leaves, too, and reads nothing any more
    Send(links, peer, kRequests);
    return p.out[kRequests].items.empty();
  } catch (const Fault&) {
    return true;  // it is gone
  }
}

void Windows::Leave(Links& links, std::int64_t until) {
  std::vector<int> others;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer != rank_ && links.tx(peer, kRequests).end != nullptr && QueueLeave(peer)) others.push_back(peer);
  }
  for (;;) {
    std::erase_if(others, [&](int peer) { return HasHeard(links, peer); });
    if (others.empty() || NowNs() >= until) return;
    sched_yield();
  }
}

// What is got is lent to NICs alone: its window may be closed while it is under way.
void Windows::Answer(int peer, Refusal refusal, std::span<const Run> runs, std::uint32_t id, const Placement& into) {
  Item item;
  item.own.resize(sizeof(std::uint32_t));
  const auto status = static_cast<std::uint32_t>(refusal);
  std::memcpy(item.own.data(), &status, sizeof status);
  item.parts.reserve(1 + runs.size());
  item.parts.push_back({item.own.data(), sizeof status, false});
  if (!runs.empty()) {
    item.window = static_cast<std::int64_t>(id);
    const Window& window = *Find(id);
    item.device = window.device;
    item.into = into;
    item.straight = window.device && into.given != 0;
    const bool lends = into.given != 0 && !window.device;
    for (const Run& run : runs) {
      item.parts.push_back({window.base + run.offset, run.nbytes, lends, window.device && run.nbytes > 0, run.from});
    }
  }
  Queue(peer, kAnswers, std::move(item));
}

// In bytes. More than the caller's bound, with which all was checked, ends the communicator: who waits for the put
// would wait in vain.
std::uint64_t Windows::CountOf(const Late& late, std::uint64_t most, int peer) {
  const std::uint64_t count = std::atomic_ref(*const_cast<std::uint64_t*>(late.word)).load(std::memory_order_acquire);
  if (count <= most / late.item) return count * late.item;
  throw Fault(FaultKind::kSystem, peer,
              "a put to rank " + std::to_string(peer) + ": its late count is " +
                  std::to_string(static_cast<std::int64_t>(count)) + ", and " + std::to_string(most / late.item) +
                  " was the most");
}

// To as many bytes as there are of a put of one piece. Of one that asks, what it has is the next item; it asks no more
// where these are few.
void Windows::Shorten(Outbound& out, std::size_t index) {
  Item& item = out.items[index];
  Head head;
  Run run;
  std::memcpy(&head, item.own.data(), sizeof head);
  const bool pull = head.ask == Ask::kPull, asks = head.ask == Ask::kPlace;
  std::byte* table = item.own.data() + sizeof head;
  if (pull) std::memcpy(&run, table, sizeof run);
  std::uint64_t& nbytes = pull ? run.nbytes : head.nbytes;
  nbytes = CountOf(item.late, nbytes, item.transfer->peer);
  Item& data = asks ? out.items[index + 1] : item;
  if (asks && nbytes < kAskedBytes) {
    head.ask = Ask::kPut;
    item.transfer->asks = item.holds = data.straight = false;
  }
  if (pull) {
    std::memcpy(table, &run, sizeof run);
  } else if (nbytes == 0) {
    head.pieces = 0;
    data.parts.pop_back();
  } else {
    data.parts.back().nbytes = nbytes;
  }
  std::memcpy(item.own.data(), &head, sizeof head);
  item.late = {};
  if (!data.parts.empty()) return;
  out.items.erase(out.items.begin() + static_cast<std::ptrdiff_t>(index) + 1);
  --unsent_;
}

// What is lent is read before it is answered, and who waits for the answer keeps it until then.
bool Windows::Send(Links& links, int peer, int channel) {
  Outbound& out = peers_[static_cast<std::size_t>(peer)].out[static_cast<std::size_t>(channel)];
  Port<SendEnd>& port = links.tx(peer, channel);
  bool moved = false;
  if (device_ != nullptr) Stage(peer, channel);
  for (int turn = 0; turn < kTurn && !out.items.empty() && !out.held;) {
    Item& item = out.items.front();
    if (item.after || item.late.word != nullptr) break;
    if (item.exposes) ExposeFor(links, item);
    const Part& part = item.parts[item.next];
    const bool straight = part.device && item.straight, lends = part.lends || straight;
    Message m = MessageOf(out.number, part.nbytes, lends, channel == kRequests);
    m.device = straight;
    Placement into = item.into;
    if (into.given != 0 && (part.lends || part.device)) {
      into.address += part.place;
      m.into = &into;
    }
    std::span<const std::byte> data(part.data + out.at, part.nbytes - out.at);
    const bool staged = part.device && !straight;
    if (staged && (data = OutletOf(peer, channel).Front()).empty()) break;
    const std::ptrdiff_t n = port.end->Push(m, out.at, data.data(), data.size());
    if (n == kOutOfReach) {
      StageRest(peer, channel);
      continue;
    }
    if (n == kWouldBlock) break;
    if (staged) OutletOf(peer, channel).Pop(static_cast<std::size_t>(n));
    moved = true;
    if (!lends) port.end->Keep();
    if (lends && channel == kAnswers) peers_[static_cast<std::size_t>(peer)].lent = item.window;
    out.at += static_cast<std::size_t>(n);
    port.taken += static_cast<std::uint64_t>(n);
    links.Touch(port);
    if (out.at < part.nbytes) continue;
    ++turn;
    out.at = 0;
    ++out.number;
    ++port.through;
    if (++item.next < item.parts.size()) continue;
    out.held = item.holds;
    if (item.transfer != nullptr) item.transfer->through = out.number;
    out.items.pop_front();
    --unsent_;
    if (out.staged_item > 0) --out.staged_item;
  }
  return moved;
}

// What is still to be sent of a window that is closed now.
void Windows::KeepRest(int peer, std::size_t index) {
  Outbound& out = peers_[static_cast<std::size_t>(peer)].out[kAnswers];
  Item& item = out.items[index];
  item.window = -1;
  if (item.device && index == 0) {
    StageRest(peer, kAnswers);
  } else if (item.device) {
    item.straight = false;
    Stage(peer, kAnswers);
  }
  // Nothing that waits for a stream or another window's memory is before it: gets are answered one by one.
  const std::size_t done = item.device && out.staged_item > index ? item.parts.size() : 0;
  const std::size_t first = std::max({item.next, done, item.device ? out.staged_part : 1});  // the head is its own
  std::size_t at = item.device && first == out.staged_part ? out.staged_at : 0;
  std::size_t bytes = 0;
  for (std::size_t i = first; i < item.parts.size(); ++i) bytes += item.parts[i].nbytes;
  item.kept.resize(bytes);
  std::byte* to = item.kept.data();
  for (std::size_t i = first; i < item.parts.size(); ++i) {
    Part& part = item.parts[i];
    if (part.device) {
      OutletOf(peer, kAnswers).BeginTo(to, part.data + at, part.nbytes - at);
    } else {
      std::copy_n(part.data, part.nbytes, to);  // of no bytes, too: then there may be no memory
      part.data = to;
      part.lends = false;
    }
    to += part.nbytes;
    at = 0;
  }
  if (!item.device) return;
  OutletOf(peer, kAnswers).Mark();
  out.staged_item = index + 1;
  out.staged_part = out.staged_at = 0;
}

}  // namespace hetcoll
