// One-sided messages of a device's memory: what is copied on the way from links and to them, and when that is over.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "host/windows.h"
#include "transport/shm/pages.h"
#include "transport/shm/slots.h"

namespace hetcoll {
namespace {

constexpr std::size_t kMostMoves = 4096;          // begun under the engine's lock at a time
constexpr std::int64_t kDrainNs = 5'000'000'000;  // a device that takes longer does not come back

// One copy for what follows on both sides.
void AddMove(std::vector<Move>& moves, std::byte* to, const std::byte* from, std::size_t n) {
  if (n == 0) return;
  const bool follows = !moves.empty() && static_cast<std::byte*>(moves.back().dst) + moves.back().n == to &&
                       static_cast<const std::byte*>(moves.back().src) + moves.back().n == from;
  if (!follows) moves.push_back({to, from, 0});
  moves.back().n += n;
}

}  // namespace

Windows::Device::Device(std::shared_ptr<Copier> of, std::span<std::byte> pinned, std::size_t fifos)
    : copier(std::move(of)), inlet(*copier, pinned.first(pinned.size() / 2)) {
  const std::span<std::byte> rest = pinned.subspan(pinned.size() / 2);
  const std::size_t each = rest.size() / fifos / kPage * kPage;
  if (each == 0) throw Fault(FaultKind::kSystem, -1, "too little pinned memory for one-sided messages");
  for (std::size_t i = 0; i < fifos; ++i) outlets.emplace_back(*copier, rest.subspan(i * each, each));
}

bool Windows::Device::Busy() const {
  return inlet.Busy() || gated > 0 || landing > 0 || !own.empty() || !landed.empty() ||
         std::any_of(outlets.begin(), outlets.end(), [](const Outlet& outlet) { return outlet.Busy(); });
}

bool Windows::Copying() const {
  const auto is_read = [](const auto& transfer) { return transfer->window >= 0; };
  return Silent() || std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
           return std::any_of(peer.awaiting.begin(), peer.awaiting.end(), is_read);
         });
}

void Windows::UseCopier(std::shared_ptr<Copier> copier, std::span<std::byte> pinned) {
  device_ = std::make_unique<Device>(std::move(copier), pinned, 2 * peers_.size());
}

void Windows::Show(std::uint32_t id, std::uint64_t* words) {
  const auto found = windows_.find(id);
  if (found == windows_.end()) return;
  Window& window = found->second;
  window.shown = words;
  for (std::size_t i = 0; i < window.signals.size(); ++i) {
    std::atomic_ref(words[i]).store(window.open ? window.signals[i] : kReleased, std::memory_order_release);
  }
}

// Whatever stream waits for its signals goes on. The words may be gone afterwards.
void Windows::Release(Window& window) {
  for (std::size_t i = 0; window.shown != nullptr && i < window.signals.size(); ++i) {
    std::atomic_ref(window.shown[i]).store(kReleased, std::memory_order_release);
  }
  window.shown = nullptr;
}

bool Windows::Ready(Outbound& out, std::size_t index) {
  Item& item = out.items[index];
  if (item.after) {
    if (!item.after()) return false;
    item.after = nullptr;
    --device_->gated;
  }
  if (item.late.word != nullptr) Shorten(out, index);
  return true;
}

// Begins to copy what is to be sent from the device's memory, as far ahead as there is room.
void Windows::Stage(int peer, int channel) {
  Outbound& out = peers_[static_cast<std::size_t>(peer)].out[static_cast<std::size_t>(channel)];
  Outlet& outlet = OutletOf(peer, channel);
  while (out.staged_item < out.items.size()) {
    if (!Ready(out, out.staged_item)) break;
    Item& item = out.items[out.staged_item];  // not before: an item behind it may be gone now
    if (item.straight) break;
    for (; item.device && out.staged_part < item.parts.size(); ++out.staged_part, out.staged_at = 0) {
      const Part& part = item.parts[out.staged_part];
      while (part.device && out.staged_at < part.nbytes) {
        const std::size_t n = outlet.Begin(part.data + out.staged_at, part.nbytes - out.staged_at);
        if (n == 0) return outlet.Mark();
        out.staged_at += n;
      }
    }
    ++out.staged_item;
    out.staged_part = 0;
  }
  outlet.Mark();
}

// What is still to be sent of the first item does not go straight.
void Windows::StageRest(int peer, int channel) {
  Outbound& out = peers_[static_cast<std::size_t>(peer)].out[static_cast<std::size_t>(channel)];
  Item& item = out.items.front();
  if (std::exchange(item.straight, false)) {  // nothing was staged, here or behind it
    out.staged_part = item.next;
    out.staged_at = out.at;
  }
  Stage(peer, channel);
}

// Takes more of the message that is due to the device's memory, as `Take` does to the host's.
bool Windows::Land(Links& links, Port<RecvEnd>& port, Inbound& in, std::byte* dst, std::size_t total, bool& moved) {
  return TakeTo(
      links, port, in, dst, total, moved, [&](std::size_t left) { return device_->inlet.Room(left); },
      [&](std::size_t n) { device_->inlet.Land(dst + in.at, n); });
}

void Windows::See(std::uint32_t id, int peer, std::span<const std::byte> theirs) {
  if (theirs.empty()) {
    theirs_.erase({peer, id});
  } else {
    theirs_[{peer, id}] = theirs;
  }
}

void Windows::IsSeen(std::uint32_t id, int peer) { windows_.at(id).seen.insert(peer); }

std::span<const std::byte> Windows::Theirs(int peer, std::uint64_t id) const {
  if (id > UINT32_MAX) return {};
  const auto found = theirs_.find({peer, static_cast<std::uint32_t>(id)});
  return found == theirs_.end() ? std::span<const std::byte>{} : found->second;
}

// A put out of a window of this rank that the peer's device sees: the peer is told where, and copies. Nothing where
// there is none.
std::shared_ptr<Transfer> Windows::PutSeen(std::uint32_t id, int peer, const std::byte* src,
                                           std::span<const Piece> pieces, int signal, const Where& where) {
  if (!where.device || pieces.empty()) return nullptr;
  std::uint64_t first = pieces[0].here, end = 0;
  for (const Piece& p : pieces) {
    first = std::min(first, p.here);
    end = std::max(end, p.here + p.nbytes);
  }
  const std::uint32_t own = where.window.value_or(id);
  const auto found = windows_.find(own);
  if (found == windows_.end() || !found->second.seen.contains(peer)) return nullptr;
  const Window& window = found->second;
  if (!window.open || src + first < window.base || src + end > window.base + window.nbytes) return nullptr;
  auto transfer = std::make_shared<Transfer>();
  transfer->peer = peer;
  transfer->window = own;
  Request(transfer, {.id = id, .ask = Ask::kPull, .signal = signal, .offset = own}, pieces, nullptr, where,
          static_cast<std::uint64_t>(src - window.base));
  return transfer;
}

// A get of what this rank's device sees: it copies when the owner allows it. Nothing where there is none.
std::shared_ptr<Transfer> Windows::GetSeen(std::uint32_t id, int peer, std::byte* dst, std::span<const Piece> pieces,
                                           const Where& where) {
  if (!where.device || pieces.empty()) return nullptr;
  const std::size_t size = Theirs(peer, id).size();
  const bool inside = std::all_of(pieces.begin(), pieces.end(),
                                  [&](const Piece& p) { return p.there <= size && p.nbytes <= size - p.there; });
  if (size == 0 || !inside) return nullptr;
  auto transfer = std::make_shared<Transfer>();
  transfer->peer = peer;
  transfer->base = dst;
  transfer->device = true;
  transfer->window = id;
  transfer->pieces.assign(pieces.begin(), pieces.end());
  Request(transfer, {.id = id, .ask = Ask::kRead}, pieces, nullptr, where);
  return transfer;
}

// The owner allows it, and leaves its memory as it is until it hears that it was done.
void Windows::Read(const std::shared_ptr<Transfer>& transfer) {
  const std::byte* theirs = Theirs(transfer->peer, static_cast<std::uint64_t>(transfer->window)).data();
  if (theirs == nullptr) {  // it was forgotten meanwhile
    HasRead(*transfer);
    return End(*transfer, Refusal::kClosed);
  }
  std::vector<Move> moves;
  for (const Piece& p : transfer->pieces) AddMove(moves, transfer->base + p.here, theirs + p.there, p.nbytes);
  device_->inlet.Mark();  // what came before is begun before
  device_->copier->CopyEach(Way::kIn, moves);
  device_->landed.emplace_back(device_->copier->Mark(Way::kIn), transfer);
}

// Before anything else that is asked of the peer.
void Windows::HasRead(const Transfer& transfer) {
  Outbound& out = peers_[static_cast<std::size_t>(transfer.peer)].out[kRequests];
  const Head head{.id = static_cast<std::uint32_t>(transfer.window), .ask = Ask::kDone};
  Item item;
  item.own.resize(sizeof head);
  std::memcpy(item.own.data(), &head, sizeof head);
  item.parts.push_back({item.own.data(), sizeof head, false});
  out.items.push_front(std::move(item));
  ++unsent_;
  ++out.staged_item;
  out.held = false;
}

// Whether this rank's device sees all that it is to read.
bool Windows::Readable(int peer, const Inbound& in) const {
  const std::size_t size = Theirs(peer, in.head.offset).size();
  return std::all_of(in.runs.begin(), in.runs.end(),
                     [&](const Run& run) { return run.from <= size && run.nbytes <= size - run.from; });
}

// Begins more copies of a put that this rank reads.
void Windows::Pull(int peer, Inbound& in) {
  const bool reads = in.refusal == Refusal::kNone;
  const std::size_t end = reads ? std::min(in.runs.size(), in.run + kMostMoves) : in.runs.size();
  counts_.refused += reads ? 0 : end - in.run;
  if (reads) {
    const Window& window = *Find(in.head.id);
    const std::byte* theirs = Theirs(peer, in.head.offset).data();
    std::vector<Move> moves;
    for (const Run& run : std::span(in.runs).subspan(in.run, end - in.run)) {
      AddMove(moves, window.base + run.offset, theirs + run.from, run.nbytes);
      counts_.bytes += run.nbytes;
      counts_.direct += run.nbytes;
    }
    device_->inlet.Mark();  // what came before is begun before
    device_->copier->CopyEach(Way::kIn, moves);
    counts_.pieces += end - in.run;
  }
  in.run = end;
  if (in.run < in.runs.size()) return;
  in.phase = Phase::kHead;
  PutIsThere(peer, in);
}

// All pieces of a put have come; some may wait for the device.
void Windows::PutIsThere(int peer, Inbound& in) {
  const Window* window = in.refusal == Refusal::kNone ? Find(in.head.id) : nullptr;
  std::uint64_t mark = window != nullptr && window->device ? device_->inlet.Mark() : 0;
  if (mark > 0 || in.head.ask == Ask::kPull) mark = device_->copier->Mark(Way::kIn);
  if (mark > 0 || !in.landing.empty()) {
    in.landing.push_back({mark, in.head.id, in.head.signal, in.refusal});
    ++device_->landing;
    return;
  }
  if (in.refusal == Refusal::kNone) Raise(in.head.id, in.head.signal);
  Answer(peer, in.refusal, {}, in.head.id);
}

bool Windows::PassCopies() {
  if (device_->fault) throw Fault(*device_->fault);
  Inlet& inlet = device_->inlet;
  bool moved = inlet.Poll();
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    std::deque<Landing>& landing = peers_[peer].in[kRequests].landing;
    for (; !landing.empty() && inlet.Passed(landing.front().mark); landing.pop_front(), moved = true) {
      --device_->landing;
      const Landing& put = landing.front();
      if (put.refusal == Refusal::kNone) Raise(put.id, put.signal);
      Answer(static_cast<int>(peer), put.refusal, {}, put.id);
    }
  }
  auto& landed = device_->landed;
  for (; !landed.empty() && inlet.Passed(landed.front().first); landed.pop_front(), moved = true) {
    const Transfer& got = *landed.front().second;
    if (got.window >= 0) HasRead(got);
    End(*landed.front().second, Refusal::kNone);
  }
  return PassOwn() || moved;
}

// One after the other.
bool Windows::PassOwn() {
  bool moved = false;
  for (std::deque<Own>& queue = device_->own; !queue.empty(); queue.pop_front(), moved = true) {
    Own& own = queue.front();
    if (own.mark == 0) {
      if (own.where.after && !own.where.after()) break;
      if (own.where.late.word != nullptr) {
        own.pieces[0].nbytes = CountOf(own.where.late, own.pieces[0].nbytes, rank_);
        own.where.late = {};
      }
      std::vector<Run> runs;
      for (const Piece& p : own.pieces) runs.push_back({p.there, p.nbytes});
      const Refusal refusal = Check(own.id, runs, own.signal);
      if (refusal != Refusal::kNone) {
        End(*own.transfer, refusal);
        continue;
      }
      const Window& window = *Find(own.id);
      for (const Piece& p : own.pieces) {
        std::byte *here = own.memory + p.here, *there = window.base + p.there;
        std::byte *to = own.gets ? here : there, *from = own.gets ? there : here;
        if (own.where.device || window.device) {
          device_->copier->Copy(Way::kIn, to, from, p.nbytes);
        } else {
          std::memmove(to, from, p.nbytes);
        }
      }
      own.mark = device_->copier->Mark(Way::kIn);
    }
    if (!device_->copier->Passed(Way::kIn, own.mark)) break;
    Raise(own.id, own.signal);
    End(*own.transfer, Refusal::kNone);
  }
  return moved;
}

// What touches its memory was begun before. A device that has failed does nothing more, and the next Pass says so.
void Windows::CloseDevice(std::uint32_t id, Window& window) {
  try {
    KeepAnswers(id);
    device_->inlet.Mark();
    window.last = {device_->copier->Mark(Way::kIn), device_->copier->Mark(Way::kOut)};
  } catch (const Fault& fault) {
    device_->fault = fault;
  }
}

// No NIC reads the window that was lent to answer this peer; a device may still copy out of it, for a link without
// rails.
void Windows::HasGivenBack(Peer& peer) {
  Window& window = windows_.at(static_cast<std::uint32_t>(peer.lent));
  if (window.device) window.last[static_cast<std::size_t>(Way::kOut)] = device_->copier->Mark(Way::kOut);
  peer.lent = -1;
}

bool Windows::Settled(std::uint32_t id) {
  const auto found = windows_.find(id);
  if (std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) { return IsUsed(peer, id); })) return false;
  if (found == windows_.end() || device_ == nullptr) return true;
  // Whoever was told to read it, or is allowed to; and what this rank reads of the others' parts.
  const auto of_it = [&](const auto& transfer) { return transfer->window == id; };
  if (std::any_of(device_->landed.begin(), device_->landed.end(), [&](const auto& got) { return of_it(got.second); }) ||
      std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
        return peer.in[kRequests].reading == id || std::any_of(peer.awaiting.begin(), peer.awaiting.end(), of_it);
      })) {
    return false;
  }
  try {
    const auto [in, out] = found->second.last;
    return device_->copier->Passed(Way::kIn, in) && device_->copier->Passed(Way::kOut, out);
  } catch (const Fault&) {
    return true;
  }
}

// The engine has failed: when it returns, no copy touches memory of callers.
void Windows::Drain() {
  Copier& copier = *device_->copier;
  try {
    const std::int64_t until = NowNs() + kDrainNs;
    const std::uint64_t in = copier.Mark(Way::kIn), out = copier.Mark(Way::kOut);
    while (!(copier.Passed(Way::kIn, in) && copier.Passed(Way::kOut, out)) && NowNs() < until) sched_yield();
  } catch (const Fault&) {
  }
  for (Own& own : device_->own) own.transfer->state.store(Pending::State::kFailed);
  for (auto& [mark, transfer] : device_->landed) transfer->state.store(Pending::State::kFailed);
  device_->own.clear();
  device_->landed.clear();
  device_->inlet.Clear();
  for (Outlet& outlet : device_->outlets) outlet.Clear();
  device_->gated = device_->landing = 0;
}

}  // namespace hetcoll
