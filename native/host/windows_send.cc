// What one-sided messages send: requests, answers, and what goes with them.
#include <cstring>
#include <utility>

#include "host/windows.h"

namespace hetcoll {
void Windows::Request(int peer, const Head& form, std::span<const Piece> pieces, const std::byte* src) {
  Head head = form;
  head.pieces = static_cast<std::uint32_t>(pieces.size());
  const bool table = pieces.size() > 1;
  if (pieces.size() == 1) {
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
      const Run run{p.there, p.nbytes};
      std::memcpy(to, &run, sizeof run);
      to += sizeof run;
    }
  }
  if (src != nullptr) {
    for (const Piece& p : pieces) item.parts.push_back({src + p.here, p.nbytes, true});
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
    const std::byte* base = Find(id)->base;
    for (const Run& run : runs) item.parts.push_back({base + run.offset, run.nbytes, false});
  }
  Queue(peer, kAnswers, std::move(item));
}

// What is lent is read before it is answered, and who waits for the answer keeps it until then.
bool Windows::Send(Links& links, int peer, int channel) {
  Outbound& out = peers_[static_cast<std::size_t>(peer)].out[static_cast<std::size_t>(channel)];
  Port<SendEnd>& port = links.tx(peer, channel);
  bool moved = false;
  for (int turn = 0; turn < kTurn && !out.items.empty();) {
    Item& item = out.items.front();
    const Part& part = item.parts[item.next];
    const Message m = MessageOf(out.number, part.nbytes, part.lends);
    const std::ptrdiff_t n = port.end->Push(m, out.at, part.data + out.at, part.nbytes - out.at);
    if (n == kWouldBlock) break;
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
    out.items.pop_front();
    --unsent_;
  }
  return moved;
}

}  // namespace hetcoll
