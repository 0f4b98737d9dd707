#include "host/windows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

namespace hetcoll {
namespace {

constexpr std::size_t kSinkBytes = std::size_t{64} << 10;

bool Inside(std::uint64_t offset, std::uint64_t nbytes, std::size_t size) {
  return offset <= size && nbytes <= size - offset;
}

}  // namespace

void End(Transfer& transfer, Refusal refusal) {
  transfer.refused = static_cast<int>(refusal);
  transfer.state.store(refusal == Refusal::kNone ? Pending::State::kDone : Pending::State::kFailed,
                       std::memory_order_release);
}

Windows::Windows(int rank, int size, std::uint64_t identity)
    : rank_(rank), identity_(identity), peers_(static_cast<std::size_t>(size)) {}

void Windows::Add(std::uint32_t id, std::byte* base, std::size_t nbytes, std::size_t signals, bool device) {
  Window& window = windows_[id];
  window.base = base;
  window.device = device;
  window.nbytes = nbytes;
  window.signals.assign(signals, 0);
}

Windows::Window* Windows::Find(std::uint32_t id) {
  const auto found = windows_.find(id);
  return found == windows_.end() || !found->second.open ? nullptr : &found->second;
}

void Windows::Close(std::uint32_t id) {
  Window* window = Find(id);
  if (window == nullptr) return;
  window->open = false;
  window->base = nullptr;
  for (const Window::Expected& e : window->expected) End(*e.transfer, Refusal::kClosed);
  window->expected.clear();
  Release(*window);
  if (device_ != nullptr) return CloseDevice(id, *window);  // it copies for its own rank from and to the host's, too
  KeepAnswers(id);
}

void Windows::KeepAnswers(std::uint32_t id) {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    const std::deque<Item>& items = peers_[peer].out[kAnswers].items;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (items[i].window == static_cast<std::int64_t>(id)) KeepRest(static_cast<int>(peer), i);
    }
  }
}

std::uint64_t Windows::Signal(std::uint32_t id, std::size_t index) const {
  const auto found = windows_.find(id);
  return found == windows_.end() || index >= found->second.signals.size() ? 0 : found->second.signals[index];
}

std::shared_ptr<Transfer> Windows::Expect(std::uint32_t id, std::size_t index, std::uint64_t value) {
  auto transfer = std::make_shared<Transfer>();
  Window* window = Find(id);
  if (window == nullptr || index >= window->signals.size()) {
    End(*transfer, window == nullptr ? Refusal::kClosed : Refusal::kOutside);
  } else if (window->signals[index] >= value) {
    End(*transfer, Refusal::kNone);
  } else {
    // Whoever gave up waiting has let go of it.
    std::erase_if(window->expected, [](const Window::Expected& e) { return e.transfer.use_count() == 1; });
    window->expected.push_back({index, value, transfer});
  }
  return transfer;
}

void Windows::Raise(std::uint32_t id, int signal) {
  Window* window = Find(id);
  if (window == nullptr || signal < 0) return;
  const auto index = static_cast<std::size_t>(signal);
  const std::uint64_t now = ++window->signals[index];
  if (window->shown != nullptr) std::atomic_ref(window->shown[index]).store(now, std::memory_order_release);
  std::erase_if(window->expected, [&](const Window::Expected& e) {
    if (e.index != index || e.value > now) return false;
    End(*e.transfer, Refusal::kNone);
    return true;
  });
}

Refusal Windows::Check(std::uint32_t id, std::span<const Run> runs, int signal) {
  const Window* window = Find(id);
  if (window == nullptr) return Refusal::kClosed;
  const bool inside =
      std::all_of(runs.begin(), runs.end(), [&](const Run& r) { return Inside(r.offset, r.nbytes, window->nbytes); });
  return inside && (signal < 0 || static_cast<std::size_t>(signal) < window->signals.size()) ? Refusal::kNone
                                                                                             : Refusal::kOutside;
}

// Requests of this rank.

std::shared_ptr<Transfer> Windows::ToSelf(std::uint32_t id, std::byte* memory, std::span<const Piece> pieces,
                                          int signal, bool gets, const Where& where) {
  auto transfer = std::make_shared<Transfer>();
  const Window* window = Find(id);
  if (where.device || where.after || where.late.word != nullptr || Copies() || (window != nullptr && window->device)) {
    device_->own.push_back({transfer, id, signal, gets, memory, {pieces.begin(), pieces.end()}, where});
    return transfer;
  }
  std::vector<Run> runs;
  runs.reserve(pieces.size());
  for (const Piece& p : pieces) runs.push_back({p.there, p.nbytes});
  const Refusal refusal = Check(id, runs, signal);
  if (refusal == Refusal::kNone) {
    std::byte* base = Find(id)->base;
    for (const Piece& p : pieces) {
      std::byte *here = memory + p.here, *there = base + p.there;
      std::memmove(gets ? here : there, gets ? there : here, p.nbytes);
    }
    Raise(id, signal);
  }
  End(*transfer, refusal);
  return transfer;
}

bool Windows::Take(Links& links, Port<RecvEnd>& port, Inbound& in, std::byte* dst, std::size_t total, bool& moved) {
  return TakeTo(
      links, port, in, dst, total, moved, [&](std::size_t left) { return std::span(dst + in.at, left); },
      [](std::size_t) {});
}

bool Windows::Sink(Links& links, Port<RecvEnd>& port, Inbound& in, std::size_t total, bool& moved) {
  sink_.resize(kSinkBytes);
  return TakeTo(
      links, port, in, sink_.data(), total, moved,
      [&](std::size_t left) { return std::span(sink_).first(std::min(left, kSinkBytes)); }, [](std::size_t) {});
}

// Requests of others.

bool Windows::Serve(Links& links, int peer) {
  const Inbound& in = peers_[static_cast<std::size_t>(peer)].in[kRequests];
  bool moved = false;
  for (int turn = 0; turn < kTurn && !in.ended && ServeStep(links, peer, moved); ++turn) {
  }
  return moved;
}

// One message, or what there is of it; whether all of it came.
bool Windows::ServeStep(Links& links, int peer, bool& moved) {
  Inbound& in = peers_[static_cast<std::size_t>(peer)].in[kRequests];
  Port<RecvEnd>& port = links.rx(peer, kRequests);
  switch (in.phase) {
    case Phase::kHead:
      // What the one before gets is read first: a put that follows would write over it.
      if (!peers_[static_cast<std::size_t>(peer)].out[kAnswers].items.empty()) return false;
      if (!Take(links, port, in, reinterpret_cast<std::byte*>(&in.head), sizeof in.head, moved)) return false;
      if (in.head.ask == Ask::kDone) {
        if (in.reading != in.head.id) throw Fault(FaultKind::kCorrupt, peer, "it has read what nobody allowed");
        in.reading = -1;
        return true;
      }
      if (in.head.ask == Ask::kLeave) return in.ended = true;
      if (in.head.pieces > kMostPieces) throw Fault(FaultKind::kCorrupt, peer, "a request has too many pieces");
      if (in.head.ask == Ask::kPull && device_ == nullptr) {
        throw Fault(FaultKind::kCorrupt, peer, "it asks a device to read, and this rank has no device");
      }
      in.runs.assign(in.head.pieces, {in.head.offset, in.head.nbytes});
      if (in.head.pieces > 1 || in.head.ask == Ask::kPull || in.head.ask == Ask::kFetch) {
        in.phase = Phase::kTable;
      } else {
        Admit(links, peer);
      }
      return true;
    case Phase::kLanding:
      if (!in.landing.empty() || peers_[static_cast<std::size_t>(peer)].lent >= 0) return false;
      Admit(links, peer);
      return true;
    case Phase::kTable:
      if (!Take(links, port, in, reinterpret_cast<std::byte*>(in.runs.data()), in.runs.size() * sizeof(Run), moved)) {
        return false;
      }
      in.phase = Phase::kWhere;
      if (in.head.ask != Ask::kFetch) Admit(links, peer);
      return true;
    case Phase::kWhere:
      if (!Take(links, port, in, reinterpret_cast<std::byte*>(&in.where), sizeof in.where, moved)) return false;
      Admit(links, peer);
      return true;
    case Phase::kRuns:
      break;
  }
  const Run& run = in.runs[in.run];
  const Window* window = Find(in.head.id);
  if (window == nullptr && in.refusal == Refusal::kNone) in.refusal = Refusal::kClosed;  // meanwhile
  if (in.head.ask == Ask::kPull) {
    Pull(peer, in);
    return moved = true;
  }
  const bool sinks = in.refusal != Refusal::kNone;
  if (sinks) {
    if (!Sink(links, port, in, run.nbytes, moved)) return false;
  } else if (window->device) {
    if (!Land(links, port, in, window->base + run.offset, run.nbytes, moved)) return false;
  } else {
    if (!Take(links, port, in, window->base + run.offset, run.nbytes, moved)) return false;
  }
  counts_.refused += sinks;
  counts_.pieces += !sinks;
  counts_.bytes += sinks ? 0 : run.nbytes;
  if (++in.run == in.runs.size()) {
    in.phase = Phase::kHead;
    if (in.placed) port.end->Hide();
    in.placed = in.exposed = false;
    if (device_ != nullptr) {
      PutIsThere(peer, in);
    } else {
      if (!sinks) Raise(in.head.id, in.head.signal);
      Answer(peer, in.refusal, {}, in.head.id);
    }
  }
  return true;
}

// All that a request says is there.
void Windows::Admit(Links& links, int peer) {
  Inbound& in = peers_[static_cast<std::size_t>(peer)].in[kRequests];
  const bool reads = in.head.ask == Ask::kRead, fetches = in.head.ask == Ask::kFetch;
  const bool gets = in.head.ask == Ask::kGet || reads || fetches;
  const bool asks = in.head.ask == Ask::kPlace && !in.runs.empty();
  const std::int64_t lent = peers_[static_cast<std::size_t>(peer)].lent;
  // What was put before comes first, and what was got before has been read.
  if (((gets || asks || in.runs.empty()) && !in.landing.empty()) || (lent >= 0 && (!gets || lent != in.head.id))) {
    in.phase = Phase::kLanding;
    return;
  }
  in.refusal = Check(in.head.id, in.runs, in.head.signal);
  if (in.refusal == Refusal::kNone && in.head.ask == Ask::kPull && !Readable(peer, in)) in.refusal = Refusal::kOutside;
  in.run = 0;
  in.phase = Phase::kHead;
  const bool fine = in.refusal == Refusal::kNone;
  (gets ? counts_.gets : counts_.puts) += fine;
  if (asks) return Allow(links, peer);
  if (!gets && !in.runs.empty()) {
    in.phase = Phase::kRuns;
    return;
  }
  if (gets) {
    (fine ? counts_.pieces : counts_.refused) += in.runs.size();
    for (const Run& run : in.runs) {
      counts_.bytes += fine ? run.nbytes : 0;
      counts_.direct += fine && reads ? run.nbytes : 0;
    }
    if (fine && reads) in.reading = in.head.id;
  }
  if (fine) Raise(in.head.id, in.head.signal);
  Answer(peer, in.refusal, fine && gets && !reads ? std::span<const Run>(in.runs) : std::span<const Run>{}, in.head.id,
         fetches ? in.where : Placement{});
}

// Answers to this rank.

bool Windows::Collect(Links& links, int peer) {
  bool moved = false;
  for (int turn = 0; turn < kTurn && CollectStep(links, peer, moved); ++turn) {
  }
  return moved;
}

bool Windows::CollectStep(Links& links, int peer, bool& moved) {
  Peer& p = peers_[static_cast<std::size_t>(peer)];
  if (p.awaiting.empty()) return false;
  if (p.awaiting.front()->asks) return IsAllowed(links, peer, moved);
  Inbound& in = p.in[kAnswers];
  Port<RecvEnd>& port = links.rx(peer, kAnswers);
  Transfer& transfer = *p.awaiting.front();
  if (in.phase == Phase::kHead) {
    if (!Take(links, port, in, reinterpret_cast<std::byte*>(&p.status), sizeof p.status, moved)) return false;
    if (p.status > static_cast<std::uint32_t>(Refusal::kOutside)) {
      throw Fault(FaultKind::kCorrupt, peer, "an answer is none");
    }
    CheckAsked(transfer);
    in.run = 0;
    if (p.status == 0 && transfer.window < 0 && !transfer.pieces.empty()) {
      in.phase = Phase::kRuns;
      in.placed = transfer.exposes;
      return true;
    }
  } else {
    const Piece& piece = transfer.pieces[in.run];
    const bool whole = transfer.device ? Land(links, port, in, transfer.base + piece.here, piece.nbytes, moved)
                                       : Take(links, port, in, transfer.base + piece.here, piece.nbytes, moved);
    if (!whole) return false;
    if (++in.run < transfer.pieces.size()) return true;
  }
  in.phase = Phase::kHead;
  in.placed = false;
  if (transfer.exposes) port.end->Hide();
  links.tx(peer, kRequests).end->Keep();  // what was put is its owner's again
  links.tx(peer, kRequests).end->Answered(transfer.through);
  const bool reads = transfer.window >= 0 && transfer.device;
  if (reads && p.status == 0) {
    Read(p.awaiting.front());
  } else if (transfer.device && p.status == 0) {
    device_->landed.emplace_back(device_->inlet.Mark(), p.awaiting.front());
  } else {
    if (reads) p.out[kRequests].held = false;
    End(transfer, static_cast<Refusal>(p.status));
  }
  p.awaiting.pop_front();
  return true;
}

void Windows::Drop() {
  for (auto& [id, window] : windows_) Release(window);
  if (device_ != nullptr) Drain();
  for (auto& [id, window] : windows_) {
    for (const Window::Expected& e : window.expected) e.transfer->state.store(Pending::State::kFailed);
    window.expected.clear();
  }
  for (Peer& peer : peers_) {
    for (const auto& transfer : peer.awaiting) transfer->state.store(Pending::State::kFailed);
    peer.awaiting.clear();
    peer.lent = -1;
    for (Outbound& out : peer.out) {
      out.items.clear();
      out.held = false;
    }
    for (Inbound& in : peer.in) {
      in.landing.clear();
      in.reading = -1;
      in.exposed = false;
    }
  }
  unsent_ = 0;
}

std::string Windows::Describe() const {
  std::string out;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const Peer& p = peers_[i];
    if (p.awaiting.empty()) continue;
    const Outbound& requests = p.out[kRequests];
    out += (out.empty() ? "" : "; ") + std::to_string(p.awaiting.size()) + " puts and gets wait for rank " +
           std::to_string(i);
    if (!requests.items.empty()) out += ", " + std::to_string(requests.items.size()) + " of them not sent yet";
    if (!requests.items.empty() && requests.items.front().after) out += ", since the stream is not there yet";
  }
  return out;
}

}  // namespace hetcoll
