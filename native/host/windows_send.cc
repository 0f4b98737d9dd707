// What one-sided messages send: requests, answers, and what goes with them.
#include <algorithm>
#include <cstring>
#include <utility>

#include "host/windows.h"

namespace hetcoll {
void Windows::Request(int peer, const Head& form, std::span<const Piece> pieces, const std::byte* src,
                      const Where& where, std::uint64_t source) {
  Head head = form;
  head.pieces = static_cast<std::uint32_t>(pieces.size());
  const bool pull = head.ask == Ask::kPull, table = pieces.size() > 1 || pull;
  if (!table && pieces.size() == 1) {
    head.offset = pieces[0].there;
    head.nbytes = pieces[0].nbytes;
  }
  Item item;
  item.own.resize(sizeof head + (table ? pieces.size() * sizeof(Run) : 0));
  std::memcpy(item.own.data(), &head, sizeof head);
  item.parts.reserve(2 + (src == nullptr ? 0 : pieces.size()));
  item.parts.push_back({item.own.data(), sizeof head, false});
  if (table) {
    std::byte* to = item.own.data() + sizeof head;
    item.parts.push_back({to, pieces.size() * sizeof(Run), false});
    for (const Piece& p : pieces) {
      const Run run{p.there, p.nbytes, pull ? source + p.here : 0};
      std::memcpy(to, &run, sizeof run);
      to += sizeof run;
    }
  }
  if (src != nullptr) {
    for (const Piece& p : pieces)
      item.parts.push_back({src + p.here, p.nbytes, !where.device, where.device && p.nbytes > 0});
    item.device = where.device;
  }
  item.holds = head.ask == Ask::kRead;
  if (where.after) {
    item.after = where.after;
    ++device_->gated;
  }
  Queue(peer, kRequests, std::move(item));
}

void Windows::Queue(int peer, int channel, Item item) {
  peers_[static_cast<std::size_t>(peer)].out[static_cast<std::size_t>(channel)].items.push_back(std::move(item));
  ++unsent_;
}

// What is got is never lent: its window may be closed while it is under way.
void Windows::Answer(int peer, Refusal refusal, std::span<const Run> runs, std::uint32_t id) {
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
    for (const Run& run : runs) {
      item.parts.push_back({window.base + run.offset, run.nbytes, false, window.device && run.nbytes > 0});
    }
  }
  Queue(peer, kAnswers, std::move(item));
}

// What is lent is read before it is answered, and who waits for the answer keeps it until then.
bool Windows::Send(Links& links, int peer, int channel) {
  Outbound& out = peers_[static_cast<std::size_t>(peer)].out[static_cast<std::size_t>(channel)];
  Port<SendEnd>& port = links.tx(peer, channel);
  bool moved = false;
  if (device_ != nullptr) Stage(peer, channel);
  for (int turn = 0; turn < kTurn && !out.items.empty() && !out.held;) {
    Item& item = out.items.front();
    if (item.after) break;
    const Part& part = item.parts[item.next];
    const Message m = MessageOf(out.number, part.nbytes, part.lends);
    std::span<const std::byte> data(part.data + out.at, part.nbytes - out.at);
    if (part.device && (data = OutletOf(peer, channel).Front()).empty()) break;
    const std::ptrdiff_t n = port.end->Push(m, out.at, data.data(), data.size());
    if (n == kWouldBlock) break;
    if (part.device) OutletOf(peer, channel).Pop(static_cast<std::size_t>(n));
    moved = true;
    if (!part.lends) port.end->Keep();
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
  if (item.device) Stage(peer, kAnswers);
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
      std::memcpy(to, part.data, part.nbytes);
      part.data = to;
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
