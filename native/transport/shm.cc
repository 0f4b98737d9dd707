#include "transport/shm.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "device/kernels.h"
#include "engine/clock.h"
#include "engine/plan.h"

namespace hetcoll {
namespace {

// Shorter messages are copied: waiting until the peer has read them would cost more.
constexpr std::size_t kLendBytes = 16 << 10;
constexpr std::size_t kLentFragment = 256 << 10;
// Of all ranks of a host together. Address space only, but valgrind refuses to map more than 32 GiB at once.
constexpr std::size_t kHeapBytes = std::size_t{24} << 30;
constexpr std::size_t kLeastHeapBytes = std::size_t{1} << 30;

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, absent from older headers

constexpr std::size_t AlignUp(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

// How a message is cut on its way. Both ends of an exchange are busy all the time, so large fragments cost no overlap
// and save bookkeeping, until what is in flight no longer fits the L2 cache beside the user's buffers. Measured in
// docs/performance.md.
std::size_t FragmentBytes(std::size_t total) {
  return total <= std::size_t{4} << 20 ? std::size_t{512} << 10 : std::size_t{128} << 10;
}

struct Edge {
  Edge(std::byte* at, std::size_t ring_bytes)
      : credit(reinterpret_cast<ShmCredit*>(at)),
        lines(reinterpret_cast<ShmLine*>(at + sizeof(ShmCredit))),
        data(at + sizeof(ShmCredit) + kLines * sizeof(ShmLine)),
        capacity(ring_bytes) {}

  // Has the kernel map all pages now and at once, instead of one page fault for each 4 KiB of the first messages. Older
  // kernels than 5.14 refuse, and the faults stay.
  void Prepare() {
    if (prepared) return;
    prepared = true;
    static_cast<void>(madvise(credit, static_cast<std::size_t>(data + capacity - reinterpret_cast<std::byte*>(credit)),
                              kPopulateWrite));
  }

  ShmCredit* credit;
  ShmLine* lines;
  std::byte* data;
  std::size_t capacity;
  bool prepared = false;
};

// Where a fragment of n bytes lies when the ring has been filled up to `pos`. A fragment is contiguous: one that would
// cross the end starts over at the beginning. Both ends follow this rule, so offsets need not travel.
std::uint64_t Place(std::uint64_t pos, std::size_t n, std::size_t capacity) {
  const std::size_t offset = pos % capacity;
  return offset + AlignUp(n, 64) > capacity ? pos + (capacity - offset) : pos;
}

class ShmSend final : public SendEnd {
 public:
  ShmSend(const ShmSegment& segment, int src, int dst, int channel)
      : edge_(segment.edge(src, dst, channel), segment.layout().ring_bytes),
        policy_(segment.policy()),
        base_(segment.base()),
        heap_(segment.base() + segment.layout().HeapOffset(src)),
        heap_bytes_(segment.layout().heap_bytes) {}

  void Prepare() override { edge_.Prepare(); }

  std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) override {
    static_cast<void>(at);
    // All of a message or nothing: what was lent must be what was taken last.
    if (m.may_lend && m.total >= kLendBytes && OnHeap(data)) return Lend(m, data, std::min(n, kLentFragment));
    if (n <= kInlineBytes) {
      if (!LineFree()) return kWouldBlock;
      ShmLine& line = Line();
      CopyBytes(line.payload, data, n, false);
      Publish(line, m, n);
      return static_cast<std::ptrdiff_t>(n);
    }
    n = std::min({n, FragmentBytes(m.total), edge_.capacity / 4});
    std::byte* slot = Slot(n);
    if (slot == nullptr) return kWouldBlock;
    policy_.Copy(slot, data, n);
    Commit(m, at, n);
    return static_cast<std::ptrdiff_t>(n);
  }

  // Nothing while slots are written around the cache: what a kernel stores there goes through it.
  std::byte* Reserve(const std::byte* data, std::size_t n) override {
    if (n > edge_.capacity / 2 || n <= kInlineBytes || policy_.around_cache() || OnHeap(data)) return nullptr;
    return Slot(n);
  }

  void Commit(const Message& m, std::size_t at, std::size_t n) override {
    static_cast<void>(at);
    pos_ = place_ + AlignUp(n, 64);
    Publish(Line(), m, n);
  }

  std::size_t Lent() override {
    if (lent_ == 0) return 0;
    consumed_ = edge_.credit->lines.load(std::memory_order_acquire);
    for (; lent_line_ < std::min(consumed_, sent_); ++lent_line_) lent_ -= lent_bytes_[lent_line_ % kLines];
    return lent_;
  }

 private:
  bool OnHeap(const std::byte* data) const { return data >= heap_ && data < heap_ + heap_bytes_; }

  std::ptrdiff_t Lend(const Message& m, const std::byte* data, std::size_t n) {
    if (!LineFree()) return kWouldBlock;
    if (Lent() == 0) lent_line_ = sent_;
    lent_ += n;
    ShmLine& line = Line();
    const std::uint64_t offset = static_cast<std::uint64_t>(data - base_);
    std::memcpy(line.payload, &offset, sizeof offset);
    Publish(line, m, n | kLentBit);
    return static_cast<std::ptrdiff_t>(n);
  }

  std::byte* Slot(std::size_t n) {
    if (!LineFree()) return nullptr;
    place_ = Place(pos_, n, edge_.capacity);
    const std::uint64_t end = place_ + AlignUp(n, 64);
    if (end - freed_ > edge_.capacity) {
      freed_ = edge_.credit->bytes.load(std::memory_order_acquire);
      if (end - freed_ > edge_.capacity) return nullptr;
    }
    return edge_.data + place_ % edge_.capacity;
  }

  ShmLine& Line() const { return edge_.lines[sent_ % kLines]; }

  bool LineFree() {
    if (sent_ - consumed_ < kLines) return true;
    consumed_ = edge_.credit->lines.load(std::memory_order_acquire);
    return sent_ - consumed_ < kLines;
  }

  void Publish(ShmLine& line, const Message& m, std::size_t n) {
    line.signature = m.signature;
    line.nbytes = static_cast<std::uint32_t>(n);
    lent_bytes_[sent_ % kLines] = (n & kLentBit) != 0 ? n & ~std::size_t{kLentBit} : 0;
    line.total = static_cast<std::uint32_t>(m.total);
    line.stamp.store(++sent_, std::memory_order_release);
    __builtin_prefetch(&Line(), 1);  // take the next line from the receiver's cache ahead of time
  }

  Edge edge_;
  StorePolicy& policy_;
  std::uint64_t sent_ = 0;      // fragments published
  std::uint64_t consumed_ = 0;  // last seen of credit->lines
  std::uint64_t pos_ = 0;       // data ring filled up to here
  std::uint64_t freed_ = 0;     // last seen of credit->bytes
  std::uint64_t place_ = 0;     // of the reserved slot
  std::byte* base_;
  const std::byte* heap_;
  std::size_t heap_bytes_;
  std::size_t lent_ = 0;         // bytes that the receiver still reads where they lie
  std::uint64_t lent_line_ = 0;  // the first fragment among them
  std::array<std::size_t, kLines> lent_bytes_{};
};

class ShmRecv final : public RecvEnd {
 public:
  ShmRecv(const ShmSegment& segment, int src, int dst, int channel, int peer)
      : edge_(segment.edge(src, dst, channel), segment.layout().ring_bytes),
        peer_(peer),
        base_(segment.base()),
        total_(segment.layout().total_bytes) {}

  void Prepare() override { edge_.Prepare(); }

  View Peek(const Message& m, std::size_t at, std::size_t n) override {
    if (!open_ && !Open(m, at)) return {nullptr, kWouldBlock};
    return {data_ + taken_, static_cast<std::ptrdiff_t>(std::min(n, size_ - taken_))};
  }

  void Consume(std::size_t n) override {
    taken_ += n;
    if (taken_ < size_) return;
    open_ = false;
    ++seen_;
    edge_.credit->bytes.store(pos_, std::memory_order_release);  // both: a sender may look at either alone
    edge_.credit->lines.store(seen_, std::memory_order_release);
  }

  std::ptrdiff_t Pull(const Message& m, std::size_t at, std::byte* dst, std::size_t n, bool stream) override {
    const View v = Peek(m, at, n);
    if (v.n == kWouldBlock) return kWouldBlock;
    CopyBytes(dst, v.data, static_cast<std::size_t>(v.n), stream);
    Consume(static_cast<std::size_t>(v.n));
    return v.n;
  }

 private:
  bool Open(const Message& m, std::size_t at) {
    ShmLine& line = edge_.lines[seen_ % kLines];
    const std::uint64_t stamp = line.stamp.load(std::memory_order_acquire);
    if (stamp != seen_ + 1) {
      if (stamp > seen_ + 1) throw Fault(FaultKind::kCorrupt, peer_, "shared memory: a fragment was skipped");
      return false;
    }
    if (line.signature != m.signature || line.total != static_cast<std::uint32_t>(m.total)) {
      throw WrongFrame(m, line.signature, line.total, peer_);
    }
    const bool lent = (line.nbytes & kLentBit) != 0;
    size_ = line.nbytes & ~kLentBit;
    if (size_ > m.total - at) throw Fault(FaultKind::kCorrupt, peer_, "shared memory: a fragment is too long");
    if (lent) {
      std::uint64_t offset = 0;
      std::memcpy(&offset, line.payload, sizeof offset);
      if (offset > total_ || size_ > total_ - offset)
        throw Fault(FaultKind::kCorrupt, peer_, "shared memory: bad offset");
      data_ = base_ + offset;
    } else if (size_ <= kInlineBytes) {
      data_ = line.payload;
    } else {
      const std::uint64_t place = Place(pos_, size_, edge_.capacity);
      data_ = edge_.data + place % edge_.capacity;
      pos_ = place + AlignUp(size_, 64);
    }
    taken_ = 0;
    open_ = true;
    return true;
  }

  Edge edge_;
  int peer_;
  bool open_ = false;  // a fragment was opened and not yet taken whole
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t taken_ = 0;
  std::uint64_t seen_ = 0;  // fragments consumed
  std::uint64_t pos_ = 0;   // data ring consumed up to here once the open fragment is
  const std::byte* base_;
  std::size_t total_;
};

}  // namespace

void StorePolicy::Copy(std::byte* slot, const std::byte* data, std::size_t n) {
  constexpr int kSampleEvery = 4;
  constexpr int kStrikes = 4;  // a page fault or a lost time slice is slow as well, but not four times
  constexpr int kAroundFor = 1024;
  constexpr double kSlowNsPerByte = 0.2;  // 5 GB/s; a copy from memory into a shared cache does better
  constexpr double kClockNs = 100;
  constexpr std::size_t kSampleBytes = 2048;
  if (around_left_ > 0 && n >= 512) {
    if (stores_ == SlotStores::kAuto) --around_left_;
    CopyBytes(slot, data, n, true);
    return;
  }
  if (stores_ == SlotStores::kCached || n < kSampleBytes || ++copies_ % kSampleEvery != 0) {
    CopyBytes(slot, data, n, false);
    return;
  }
  const std::int64_t start = NowNs();
  CopyBytes(slot, data, n, false);
  const double allowed = kClockNs + kSlowNsPerByte * static_cast<double>(n);
  slow_ = static_cast<double>(NowNs() - start) > allowed ? slow_ + 1 : 0;
  if (slow_ < kStrikes) return;
  slow_ = kStrikes - 1;  // the next sample decides
  around_left_ = kAroundFor;
}

ShmLayout::ShmLayout(int local, std::size_t ring)
    : local_size(local),
      ring_bytes(ring),
      edge_bytes(sizeof(ShmCredit) + kLines * sizeof(ShmLine) + ring),
      heap_bytes(std::max(kLeastHeapBytes, kHeapBytes / static_cast<std::size_t>(local) / 4096 * 4096)),
      total_bytes(HeapOffset(local)) {}

std::size_t ShmLayout::HeapOffset(int local_rank) const {
  return EdgeOffset(local_size, 0, 0) + heap_bytes * static_cast<std::size_t>(local_rank);
}

std::size_t ShmLayout::EdgeOffset(int src, int dst, int channel) const {
  const std::size_t head = AlignUp(sizeof(ShmDoorbell) * static_cast<std::size_t>(local_size), 4096);
  const auto index =
      (static_cast<std::size_t>(src) * static_cast<std::size_t>(local_size) + static_cast<std::size_t>(dst)) *
          kChannels +
      static_cast<std::size_t>(channel);
  return head + index * AlignUp(edge_bytes, 4096);
}

ShmSegment::ShmSegment(int fd, const ShmLayout& layout, SlotStores stores) : stores_(stores), layout_(layout) {
  void* at = mmap(nullptr, layout.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED) {
    throw Fault(FaultKind::kSystem, -1,
                "mapping " + std::to_string(layout.total_bytes) + " bytes of shared memory: " + std::strerror(errno));
  }
  base_ = {static_cast<std::byte*>(at), [n = layout.total_bytes](std::byte* p) { munmap(p, n); }};
  static_cast<void>(madvise(at, layout.total_bytes, MADV_DONTDUMP));  // mostly holes; a core file need not have them
}

std::shared_ptr<ShmSegment> ShmSegment::Share() const {
  return std::shared_ptr<ShmSegment>(new ShmSegment(base_, layout_, stores_));
}

ShmDoorbell& ShmSegment::doorbell(int local_rank) const { return reinterpret_cast<ShmDoorbell*>(base())[local_rank]; }

std::unique_ptr<SendEnd> MakeShmSend(const ShmSegment& segment, int src, int dst, int channel) {
  return std::make_unique<ShmSend>(segment, src, dst, channel);
}

std::unique_ptr<RecvEnd> MakeShmRecv(const ShmSegment& segment, int src, int dst, int channel, int peer) {
  return std::make_unique<ShmRecv>(segment, src, dst, channel, peer);
}

}  // namespace hetcoll
