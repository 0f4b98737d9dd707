#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "kernels/kernels.h"
#include "transport/shm/edge.h"
#include "transport/shm/private.h"
#include "transport/shm/protocol_choice.h"

namespace hetcoll {
namespace {

// Shorter messages are copied: waiting until the peer has read them would cost more.
constexpr std::size_t kLendBytes = 16 << 10;
constexpr std::size_t kLentFragment = 256 << 10;
constexpr int kRecycledPatience = 100;  // calls, of some 40 ns each, until the ring is taken instead
constexpr std::size_t kReservedWindow = 256
                                        << 10;  // of a reduction whose sum is sent on; its length is not known there

// How a message is cut on its way. Both ends of an exchange are busy all the time, so large fragments cost no overlap
// and save bookkeeping, until what is in flight no longer fits the L2 cache beside the user's buffers. Of what goes one
// way only, the receiver reads one part while the sender copies the next, if it is not long.
std::size_t FragmentBytes(const Message& m) {
  constexpr std::size_t kKiB = 1024;
  if (m.use == Use::kStored && !m.mutual && m.total < 256 * kKiB) return 16 * kKiB;
  return m.total <= 4096 * kKiB ? 256 * kKiB : 128 * kKiB;
}

class ShmSend final : public SendEnd {
 public:
  ShmSend(const ShmSegment& segment, int me, int other, int channel, std::shared_ptr<Neighbour> neighbour)
      : edge_(segment, me, other, channel),
        policy_(segment.policy()),
        private_(segment.reads(), segment.policy()),
        weighs_(segment.weighs()),
        pages_(segment.pages()),
        borrowed_(segment.borrowed()),
        neighbour_(std::move(neighbour)),
        channel_(channel),
        recycled_(neighbour_->recycled[static_cast<std::size_t>(channel)]),
        recycled_bytes_(segment.layout().recycled_bytes),
        base_(segment.base()),
        heap_(segment.base() + segment.layout().HeapOffset(me)),
        heap_bytes_(segment.layout().heap_bytes) {}

  void Prepare() override { edge_.Prepare(policy_); }

  std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) override {
    if (m.total >= kLendBytes && Lends(m, at, data)) return Lend(m, data, n);  // to the last byte
    if (n > kInlineBytes) {
      if (!m.mutual || policy_.around_cache()) return Copy(m, at, data, n);
      const std::ptrdiff_t handed = HandOver(m, at, data, n);
      return handed != 0 ? handed : Copy(m, at, data, n);
    }
    if (!LineFree()) return kWouldBlock;
    CopyBytes(Line().payload, data, n);
    Publish(ShmPlace::kLine, m, n);
    return static_cast<std::ptrdiff_t>(n);
  }

  // Nothing while slots are written around the cache: what a kernel stores there goes through it.
  std::byte* Reserve(const std::byte* data, std::size_t n, const std::byte* from) override {
    lent_on_ = from != nullptr && borrowed_.data == from && borrowed_.n == n && LineFree();
    if (lent_on_) return const_cast<std::byte*>(from);
    if (n <= kInlineBytes || OnHeap(data)) return nullptr;
    returned_ = -1;
    if (from != nullptr && LineFree()) {
      for (int channel = 0; channel < kChannels; ++channel) {
        const Neighbour::Open& open = neighbour_->open[static_cast<std::size_t>(channel)];
        if (open.slot != from || open.n != n || open.line->where.channel != channel_) continue;
        returned_ = channel;
        return open.slot;
      }
    }
    if (n > edge_.capacity / 2 || policy_.around_cache()) return nullptr;
    return Slot(n, Window(std::max(n, kReservedWindow), true));
  }

  void Commit(const Message& m, std::size_t at, std::size_t n) override {
    static_cast<void>(at);
    committed_ += n;
    ShmPlace place = ShmPlace::kSlot;
    ShmLine::Where& where = Line().where;
    if (lent_on_) {
      ShmLine::Where& lent = borrowed_.line->where;
      const auto line = static_cast<std::uint64_t>(reinterpret_cast<std::byte*>(borrowed_.line) - base_);
      where = {.offset = lent.offset, .fragment = lent.fragment != 0 ? lent.fragment : line, .gives = 1};
      place = ShmPlace::kLent;
      lent.kept = 1;
      lent_on_ = false;
    } else if (returned_ >= 0) {
      const Neighbour::Open& open = neighbour_->open[static_cast<std::size_t>(returned_)];
      where = {open.line->where.offset, open.fragment, static_cast<std::int8_t>(returned_)};
      place = ShmPlace::kReturned;
      open.line->where.kept = 1;
      returned_ = -1;
    } else {
      TakeRing(m, n);
    }
    Publish(place, m, n);
  }

  bool Silent() const override { return waited_ > 0; }  // the ring is there meanwhile

  // What was lent on comes home whether the peer is there or not.
  bool FinalWithoutPeer() const override {
    return lent_ == 0 || reclaimed_ == edge_.credit->lines.load(std::memory_order_acquire);
  }

  // What a reduction wrote into a slot, or was lent on, is neither.
  void CountCopies(Copies& copies) const override {
    copies.staged += taken_ - all_lent_ - committed_;
    copies.lent += all_lent_;
  }

  std::size_t Lent() override {
    if (lent_ == 0) return 0;
    Reclaim();
    if (lent_ == 0) return 0;
    std::uint64_t first = reclaimed_;
    while (record_[first % kLines].lent == 0) ++first;
    return taken_ - record_[first % kLines].begin;
  }

 private:
  struct Sent {
    std::uint64_t end = 0;    // of the ring as it was filled then
    std::uint64_t begin = 0;  // bytes of messages that were taken before
    std::size_t lent = 0;
  };

  bool OnHeap(const std::byte* data) const { return data >= heap_ && data < heap_ + heap_bytes_; }

  // Whether the receiver is to read where the bytes lie. All of a message or nothing: what was lent must be what was
  // taken last.
  bool Lends(const Message& m, std::size_t at, const std::byte* data) {
    if (at > 0 && decided_ == m.signature) return lends_;
    decided_ = m.signature;
    lends_ = false;
    if (at > 0 || !m.may_lend) return false;
    on_heap_ = OnHeap(data);
    lends_ = on_heap_ || (edge_.credit->reads.load(std::memory_order_relaxed) == 1 && IsRead(m, data) &&
                          pages_.Readable(data, m.total));
    return lends_;
  }

  bool IsRead(const Message& m, const std::byte* data) const {
    if (const int band = Band(m); band >= 0) return edge_.credit->asked.load(std::memory_order_relaxed) >> band & 1;
    return private_.Include(m, [&] { return pages_.MostlyHuge(data, m.total); });
  }

  int Band(const Message& m) const { return weighs_ ? ProtocolChoice::Band(m) : -1; }

  std::ptrdiff_t Lend(const Message& m, const std::byte* data, std::size_t n) {
    if (!LineFree()) return kWouldBlock;
    n = std::min(n, on_heap_ ? kLentFragment : kPrivateFragment);
    all_lent_ += n;
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    Line().where = {.offset = on_heap_ ? static_cast<std::uint64_t>(data - base_) : address,
                    .channel = -1,
                    .gives = static_cast<std::uint8_t>(m.gives),
                    .band = static_cast<std::int8_t>(Band(m))};
    Publish(on_heap_ ? ShmPlace::kLent : ShmPlace::kPrivate, m, n, n);
    return static_cast<std::ptrdiff_t>(n);
  }

  // As many fragments as we have slots to give away; 0 where there are none and others are better not waited for.
  std::ptrdiff_t HandOver(const Message& m, std::size_t at, const std::byte* data, std::size_t n) {
    std::size_t taken = 0;
    for (; taken < n && !recycled_.empty() && LineFree(); waited_ = 0) {
      const std::size_t part = std::min(recycled_bytes_, n - taken);
      const std::uint8_t slot = recycled_.Take();
      Line().where = {slot, 0, -1};
      Fill(m, at + taken, recycled_.slot(slot), data + taken, part);
      Publish(ShmPlace::kRecycledSlot, m, part);
      taken += part;
    }
    if (taken > 0) return static_cast<std::ptrdiff_t>(taken);
    const bool worth = m.may_lend && recycled_.empty() && recycled_.midway && waited_ < kRecycledPatience;
    waited_ = worth ? waited_ + 1 : 0;
    return worth ? kWouldBlock : 0;
  }

  // As many fragments as there is room for: who writes all and then reads all is faster than who does a little of both.
  std::ptrdiff_t Copy(const Message& m, std::size_t at, const std::byte* data, std::size_t n) {
    const std::size_t window = Window(m.total, m.back >= 0);
    const std::size_t most = std::min(FragmentBytes(m), window / 4);
    std::size_t taken = 0;
    while (taken < n) {
      const std::size_t part = std::min(most, n - taken);
      std::byte* slot = Slot(part, window);
      if (slot == nullptr) break;
      TakeRing(m, part);
      Fill(m, at + taken, slot, data + taken, part);
      Publish(ShmPlace::kSlot, m, part);
      taken += part;
    }
    return taken == 0 ? kWouldBlock : static_cast<std::ptrdiff_t>(taken);
  }

  // What the next line says lies in the slot that was looked up last.
  void TakeRing(const Message& m, std::size_t n) {
    Line().where = {place_ % edge_.capacity, 0, static_cast<std::int8_t>(m.back)};
    pos_ = place_ + AlignUp(n, kLineBytes);
  }

  // A slot, of which the next line says the rest. The first one of a message is timed where that is asked for.
  void Fill(const Message& m, std::size_t at, std::byte* slot, const std::byte* data, std::size_t n) {
    const int band = at == 0 && m.total >= ProtocolChoice::kLeast ? Band(m) : -1;
    if (band < 0) return policy_.Copy(slot, data, n);
    const std::int64_t start = NowNs();
    policy_.Copy(slot, data, n);
    Line().where.band = static_cast<std::int8_t>(band);
    Line().where.copied_ns = static_cast<std::uint32_t>(NowNs() - start);
  }

  std::size_t Window(std::size_t total, bool back) const { return policy_.Window(total, edge_.capacity, back); }

  // For n bytes. A fragment is contiguous, and the ring begins anew where the window ends.
  std::byte* Slot(std::size_t n, std::size_t window) {
    if (!LineFree()) return nullptr;
    const std::size_t size = AlignUp(n, kLineBytes);
    const std::size_t offset = pos_ % edge_.capacity;
    place_ = offset + size > window && offset > 0 ? pos_ + (edge_.capacity - offset) : pos_;
    if (place_ + size - freed_ > edge_.capacity) {
      Reclaim();
      if (place_ + size - freed_ > edge_.capacity) return nullptr;
    }
    return edge_.data + place_ % edge_.capacity;
  }

  ShmLine& Line() const { return edge_.line(sent_); }

  bool LineFree() {
    if (sent_ - reclaimed_ < kLines) return true;
    Reclaim();
    return sent_ - reclaimed_ < kLines;
  }

  // What the receiver has consumed is free, up to the first slot that it sent back and that was not read here yet, or
  // to memory of ours that it lent on and that not all have read.
  void Reclaim() {
    const std::uint64_t consumed = edge_.credit->lines.load(std::memory_order_acquire);
    for (; reclaimed_ < std::min(consumed, sent_); ++reclaimed_) {
      const ShmLine& line = edge_.line(reclaimed_);
      const bool back = static_cast<ShmPlace>(line.place) == ShmPlace::kSlot && line.where.kept != 0;
      if (back && neighbour_->home[static_cast<std::size_t>(channel_)][reclaimed_ % kLines] != reclaimed_ + 1) break;
      const Sent& sent = record_[reclaimed_ % kLines];
      if (sent.lent > 0 && Away(reclaimed_)) break;
      freed_ = sent.end;
      lent_ -= sent.lent;
    }
  }

  // Whether memory of ours was lent on and is not home.
  bool Away(std::uint64_t fragment) const {
    ShmLine& line = edge_.line(fragment);
    return static_cast<ShmPlace>(line.place) == ShmPlace::kLent && line.where.kept != 0 &&
           std::atomic_ref(line.where.home).load(std::memory_order_acquire) == 0;
  }

  void Publish(ShmPlace place, const Message& m, std::size_t n, std::size_t lent = 0) {
    ShmLine& line = Line();
    line.signature = m.signature;
    line.nbytes = static_cast<std::uint32_t>(n);
    line.place = static_cast<std::uint32_t>(place);
    line.total = static_cast<std::uint32_t>(m.total);
    record_[sent_ % kLines] = {pos_, taken_, lent};
    lent_ += lent;
    taken_ += n;
    line.stamp.store(++sent_, std::memory_order_release);
    __builtin_prefetch(&Line(), 1);  // take the next line from the receiver's cache ahead of time
  }

  Edge edge_;
  StorePolicy& policy_;
  PrivateLengths private_;
  bool weighs_;
  OwnPages& pages_;
  BorrowedBuffers& borrowed_;
  std::shared_ptr<Neighbour> neighbour_;
  int channel_;
  RecycledSlots& recycled_;
  std::size_t recycled_bytes_;
  int waited_ = 0;               // calls since one had a slot to give away
  std::uint64_t sent_ = 0;       // fragments published
  std::uint64_t reclaimed_ = 0;  // fragments whose line and slot are free again
  std::uint64_t taken_ = 0;      // bytes of messages
  std::uint64_t all_lent_ = 0;   // of these, what the receiver was to read where it lay
  std::uint64_t committed_ = 0;  // and what came by Commit
  std::uint64_t pos_ = 0;        // data ring filled up to here
  std::uint64_t freed_ = 0;      // and free again up to here
  std::uint64_t place_ = 0;      // of the reserved slot
  int returned_ = -1;            // the channel of the open slot that is reserved to be sent back
  bool lent_on_ = false;         // what is reserved is what was lent to this rank
  std::byte* base_;
  const std::byte* heap_;
  std::size_t heap_bytes_;
  std::uint64_t decided_ = 0;  // the message that the next two are about
  bool lends_ = false;
  bool on_heap_ = false;
  std::size_t lent_ = 0;  // bytes that the receiver still reads where they lie
  std::array<Sent, kLines> record_;
};

}  // namespace

std::unique_ptr<SendEnd> MakeShmSend(const ShmSegment& segment, int me, int other, int channel,
                                     std::shared_ptr<Neighbour> neighbour) {
  return std::make_unique<ShmSend>(segment, me, other, channel, std::move(neighbour));
}

}  // namespace hetcoll
