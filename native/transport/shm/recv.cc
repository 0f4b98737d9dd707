#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/clock.h"
#include "kernels/kernels.h"
#include "transport/shm/edge.h"
#include "transport/shm/private.h"
#include "transport/shm/protocol_choice.h"

namespace hetcoll {
namespace {

constexpr std::size_t kFarCopy = 128 << 10;      // shorter fragments are copied one page after the other
constexpr std::size_t kStagedBytes = 256 << 10;  // of private memory that a reduction reads

class ShmRecv final : public RecvEnd {
 public:
  ShmRecv(const ShmSegment& segment, int me, int other, int channel, int peer, std::shared_ptr<Neighbour> neighbour)
      : edge_(segment, other, me, channel),
        policy_(segment.policy()),
        neighbour_(std::move(neighbour)),
        open_(neighbour_->open[static_cast<std::size_t>(channel)]),
        recycled_(neighbour_->recycled[static_cast<std::size_t>(channel)]),
        recycled_bytes_(segment.layout().recycled_bytes),
        memory_(segment.owner(other), peer),
        segment_(segment),
        borrowed_(segment.borrowed()),
        least_private_(segment.weighs() ? ProtocolChoice::kLeast
                                        : PrivateLengths(segment.reads(), segment.policy()).Least()),
        peer_(peer),
        base_(segment.base()) {
    for (int back = 0; back < kChannels; ++back) {
      own_rings_[static_cast<std::size_t>(back)] = Edge(segment, me, other, back).data;
    }
  }

  void Prepare() override { edge_.Prepare(policy_); }

  View Peek(const Message& m, std::size_t at, std::size_t n) override {
    if (!opened_ && !Open(m, at)) return {nullptr, kWouldBlock};
    n = std::min(n, size_ - taken_);
    if (place_ != ShmPlace::kPrivate) return {data_ + taken_, static_cast<std::ptrdiff_t>(n)};
    n = std::min(n, kStagedBytes);
    staged_.resize(kStagedBytes);
    memory_.Read(staged_.data(), address_ + taken_, n);
    copied_ += n;
    return {staged_.data(), static_cast<std::ptrdiff_t>(n)};
  }

  void Consume(std::size_t n) override {
    if (place_ == ShmPlace::kLent || place_ == ShmPlace::kPrivate) CheckValid();
    taken_ += n;
    open_.slot = nullptr;
    if (taken_ < size_) return;
    const ShmLine& line = edge_.line(seen_);
    if (!claimed_ && Claimable()) Claim();
    if (place_ >= ShmPlace::kReturned) GiveBack(line.where.kept != 0);
    opened_ = false;
    edge_.credit->lines.store(++seen_, std::memory_order_release);
    recycled_.midway = more_;
  }

  void CountCopies(Copies& copies) const override { copies.taken += copied_; }

  bool Far() const override { return place_ != ShmPlace::kPrivate && !policy_.claims(); }

  std::ptrdiff_t Pull(const Message& m, std::size_t at, std::byte* dst, std::size_t n, bool stream) override {
    if (!opened_ && !Open(m, at)) return kWouldBlock;
    n = std::min(n, size_ - taken_);
    Copy(dst, n, stream);
    copied_ += n;
    if (m.total >= least_private_ && !more_ && taken_ + n == size_) Weigh();
    Consume(n);
    return static_cast<std::ptrdiff_t>(n);
  }

 private:
  bool Open(const Message& m, std::size_t at) {
    ShmLine& line = edge_.line(seen_);
    const std::uint64_t stamp = line.stamp.load(std::memory_order_acquire);
    if (stamp != seen_ + 1) {
      if (stamp > seen_ + 1) throw Corrupt("a fragment was skipped");
      return false;
    }
    if (line.signature != m.signature || line.total != static_cast<std::uint32_t>(m.total)) {
      throw WrongFrame(m, line.signature, line.total, peer_);
    }
    size_ = line.nbytes;
    if (size_ > m.total - at) throw Corrupt("a fragment is too long");
    more_ = size_ < m.total - at;
    Find(line);
    if (m.total >= least_private_) OpenLong(m, at, line);
    taken_ = 0;
    claimed_ = false;
    opened_ = true;
    return true;
  }

  // Where the bytes of a fragment are. What the header says is checked: it must not lead us astray.
  void Find(ShmLine& line) {
    const ShmLine::Where where = line.where;
    const auto inside = [&](std::size_t bytes) { return where.offset <= bytes && size_ <= bytes - where.offset; };
    place_ = static_cast<ShmPlace>(line.place);
    switch (place_) {
      case ShmPlace::kLine:
        if (size_ > kInlineBytes) break;
        data_ = line.payload;
        return;
      case ShmPlace::kSlot:
        if (!inside(edge_.capacity)) break;
        data_ = edge_.data + where.offset;
        open_ = {data_, size_, &line, seen_};
        return;
      case ShmPlace::kReturned:
        if (!inside(edge_.capacity) || where.channel < 0 || where.channel >= kChannels) break;
        data_ = own_rings_[static_cast<std::size_t>(where.channel)] + where.offset;
        where_ = where;
        return;
      case ShmPlace::kLent:
        if (!FindLent(line, where)) break;
        return;
      case ShmPlace::kPrivate:
        if (edge_.credit->reads.load(std::memory_order_relaxed) != 1) break;
        address_ = where.offset;
        return;
      case ShmPlace::kRecycledSlot:
        if (where.offset >= 2 * kRecycled || size_ > recycled_bytes_) break;
        data_ = recycled_.slot(where.offset);
        where_ = where;
        return;
    }
    throw Corrupt("a fragment lies nowhere");
  }

  void Copy(std::byte* dst, std::size_t n, bool stream) {
    if (place_ == ShmPlace::kPrivate) {
      memory_.Read(dst, address_ + taken_, n);
    } else if (n == size_ && Claimable()) {
      TakeBytes(dst, data_, n, stream);
      claimed_ = true;
    } else if (!stream && policy_.strings(n)) {
      CopyString(dst, data_ + taken_, n);
    } else if (!stream && n >= kFarCopy && Far()) {
      CopyBytes(dst, data_ + taken_, n, Sweep::kPages);
    } else {
      CopyBytes(dst, data_ + taken_, n, stream ? Sweep::kAround : Sweep::kPlain);
    }
  }

  // Not inlined, like others below: they are for long messages, and short ones should not pay for them.
  [[gnu::noinline]] bool FindLent(ShmLine& line, const ShmLine::Where& where) {
    const ShmLayout& layout = segment_.layout();
    lender_ = layout.HeapOwner(where.offset);
    const bool by_line = where.fragment < layout.HeapOffset(0) && where.fragment % sizeof(ShmLine) == 0;
    if (lender_ < 0 || size_ > layout.total_bytes - where.offset || !by_line) return false;
    data_ = base_ + where.offset;
    if (where.gives != 0) borrowed_.Show(data_, size_, line);
    where_ = where;
    return true;
  }

  // Whose memory it is may not have failed. Who only lent it on may: that one's call may be over, and it may have left.
  [[gnu::noinline]] void CheckValid() {
    borrowed_.data = nullptr;
    (place_ == ShmPlace::kLent ? PrivateMemory(segment_.owner(lender_), peer_) : memory_).CheckValid();
  }

  // What was read goes back to whose it is: by us, or by whoever it was sent or lent on to.
  [[gnu::noinline]] void GiveBack(bool kept) {
    const ShmLine::Where& where = where_;
    if (place_ == ShmPlace::kReturned) {
      neighbour_->home[static_cast<std::size_t>(where.channel)][where.fragment % kLines] = where.fragment + 1;
    } else if (place_ == ShmPlace::kLent && where.fragment != 0 && !kept) {
      auto* line = reinterpret_cast<ShmLine*>(base_ + where.fragment);
      std::atomic_ref(line->where.home).store(1, std::memory_order_release);
      borrowed_.returned.push_back(lender_);
    } else if (place_ == ShmPlace::kRecycledSlot && !recycled_.Give(where.offset)) {
      throw Corrupt("a slot came twice");
    }
  }

  // What might be read: finds out whether it can.
  [[gnu::noinline]] void OpenLong(const Message& m, std::size_t at, const ShmLine& line) {
    if (edge_.credit->reads.load(std::memory_order_relaxed) == 0) {
      edge_.credit->reads.store(memory_.Try() ? 1 : 2, std::memory_order_relaxed);
    }
    if (at == 0) timed_ = Times(m, line);
  }

  // Of the first fragment of a message: whether the message is timed. If so, that begins now.
  bool Times(const Message& m, const ShmLine& line) {
    read_ = place_ == ShmPlace::kPrivate;
    if (!read_ && place_ != ShmPlace::kSlot && place_ != ShmPlace::kRecycledSlot) return false;
    const ShmLine::Where& where = line.where;
    if (where.band < 0 || where.band >= ProtocolChoice::kBands) return false;
    band_ = where.band;
    ways_.Began(band_);
    if (edge_.credit->asked.load(std::memory_order_relaxed) != ways_.asked()) {
      edge_.credit->asked.store(ways_.asked(), std::memory_order_relaxed);
    }
    // The first fragment was copied in before, or all of them were.
    const float parts = ProtocolChoice::Streams(band_) ? 1 : static_cast<float>(m.total) / static_cast<float>(size_);
    copied_in_ns_ = static_cast<float>(where.copied_ns) * parts;
    total_ = m.total;
    began_ = NowNs();
    return true;
  }

  // All of a long message has come.
  [[gnu::noinline]] void Weigh() {
    if (!timed_) return;
    const float took = copied_in_ns_ + static_cast<float>(NowNs() - began_);
    ways_.Took(band_, read_, took / static_cast<float>(total_));
  }

  // See StorePolicy.
  bool Claimable() const { return policy_.claims() && place_ == ShmPlace::kSlot && edge_.line(seen_).where.kept == 0; }
  void Claim() {
    for (std::size_t i = 0; i < size_; i += kLineBytes) std::memset(data_ + i, 0, sizeof(std::uint64_t));
  }

  Fault Corrupt(const char* what) const { return {FaultKind::kCorrupt, peer_, std::string("shared memory: ") + what}; }

  Edge edge_;
  StorePolicy& policy_;
  std::shared_ptr<Neighbour> neighbour_;
  Neighbour::Open& open_;  // ours, for the sending ends
  RecycledSlots& recycled_;
  std::size_t recycled_bytes_;
  PrivateMemory memory_;
  const ShmSegment& segment_;
  BorrowedBuffers& borrowed_;
  int lender_ = 0;  // whose what lies on a heap is
  std::size_t least_private_;
  ProtocolChoice ways_;
  bool timed_ = false;  // this long message is; the next five are about it
  bool read_ = false;
  int band_ = 0;
  float copied_in_ns_ = 0;  // what its way into slots took, so far as that is not done while it comes out of them
  std::size_t total_ = 0;
  std::int64_t began_ = 0;
  int peer_;
  bool opened_ = false;  // a fragment was begun and not yet taken whole; the next seven are about it
  ShmPlace place_ = ShmPlace::kLine;
  std::byte* data_ = nullptr;
  std::uint64_t address_ = 0;
  ShmLine::Where where_{};  // of what goes back, as it was checked: the line may say otherwise since
  std::size_t size_ = 0;
  std::size_t taken_ = 0;
  bool claimed_ = false;
  bool more_ = false;       // of its message
  std::uint64_t seen_ = 0;  // fragments consumed
  std::uint64_t copied_ = 0;
  std::byte* base_;
  std::array<std::byte*, kChannels> own_rings_;  // of the way back
  std::vector<std::byte> staged_;
};

}  // namespace

std::unique_ptr<RecvEnd> MakeShmRecv(const ShmSegment& segment, int me, int other, int channel, int peer,
                                     std::shared_ptr<Neighbour> neighbour) {
  return std::make_unique<ShmRecv>(segment, me, other, channel, peer, std::move(neighbour));
}

}  // namespace hetcoll
