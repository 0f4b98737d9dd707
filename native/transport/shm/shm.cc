#include "transport/shm/shm.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>

#include "base/clock.h"
#include "base/cpu.h"
#include "kernels/kernels.h"
#include "transport/shm/edge.h"
#include "transport/shm/private.h"

namespace hetcoll {
namespace {

// Of all ranks of a host together. Address space only, but valgrind refuses to map more than 32 GiB at once.
constexpr std::size_t kHeapBytes = std::size_t{24} << 30;
constexpr std::size_t kLeastHeapBytes = std::size_t{1} << 30;
constexpr std::size_t kMostRecycledBytes = std::size_t{256} << 10;

SlotStores Settle(SlotStores stores) {
  static const bool amd = cpu::IsAmd();
  return stores == SlotStores::kAuto && amd ? SlotStores::kClaimed : stores;
}

std::size_t HeapBytes(int local, std::size_t most) {
  const auto ranks = static_cast<std::size_t>(local);
  const std::size_t usual = std::max(kLeastHeapBytes, kHeapBytes / ranks);
  return std::min(usual, most / ranks) / 4096 * 4096;
}

}  // namespace

StorePolicy::StorePolicy(SlotStores stores)
    : stores_(Settle(stores)), around_left_(stores == SlotStores::kStreaming ? 1 : 0) {
  constexpr std::size_t kLeastString = 4096;  // from 1 to 8 KiB it makes no difference
  if (claims() && FastStrings()) least_string_ = kLeastString;
}

std::size_t StorePolicy::Window(std::size_t total, std::size_t capacity, bool back) const {
  constexpr std::size_t kKiB = 1024;
  if (!claims()) return back ? std::min(capacity, 512 * kKiB) : capacity;
  return std::min(capacity, std::clamp(4 * total, 64 * kKiB, (back ? 1024 : 256) * kKiB));
}

void StorePolicy::Copy(std::byte* slot, const std::byte* data, std::size_t n) {
  constexpr int kSampleEvery = 4;
  constexpr int kStrikes = 4;  // a page fault or a lost time slice is slow as well, but not four times
  constexpr int kAroundFor = 1024;
  constexpr double kSlowNsPerByte = 0.2;  // 5 GB/s; a copy from memory into a shared cache does better
  constexpr double kClockNs = 100;
  constexpr std::size_t kSampleBytes = 2048;
  if (strings(n)) return CopyString(slot, data, n);
  if (around_left_ > 0 && n >= 512) {
    if (stores_ == SlotStores::kAuto) --around_left_;
    CopyBytes(slot, data, n, Sweep::kAround);
    return;
  }
  if (stores_ != SlotStores::kAuto || n < kSampleBytes || ++copies_ % kSampleEvery != 0) {
    CopyBytes(slot, data, n);
    return;
  }
  const std::int64_t start = NowNs();
  CopyBytes(slot, data, n);
  const double allowed = kClockNs + kSlowNsPerByte * static_cast<double>(n);
  slow_ = static_cast<double>(NowNs() - start) > allowed ? slow_ + 1 : 0;
  if (slow_ < kStrikes) return;
  slow_ = kStrikes - 1;  // the next sample decides
  around_left_ = kAroundFor;
}

ShmLayout::ShmLayout(int local, std::size_t ring, std::size_t most_heap)
    : local_size(local),
      ring_bytes(ring),
      recycled_bytes(std::min(kMostRecycledBytes, AlignUp(ring / 8, kLineBytes))),
      edge_bytes(sizeof(ShmCredit) + kLines * sizeof(ShmLine) + kRecycled * recycled_bytes + ring),
      heap_bytes(HeapBytes(local, most_heap)),
      total_bytes(HeapOffset(local)) {}

std::size_t ShmLayout::OwnerOffset(int local_rank) const {
  return sizeof(ShmDoorbell) * static_cast<std::size_t>(local_size) +
         sizeof(ShmOwner) * static_cast<std::size_t>(local_rank);
}

std::size_t ShmLayout::HeapOffset(int local_rank) const {
  return EdgeOffset(local_size, 0, 0) + heap_bytes * static_cast<std::size_t>(local_rank);
}

int ShmLayout::HeapOwner(std::size_t offset) const {
  if (offset < HeapOffset(0) || offset >= total_bytes) return -1;
  return static_cast<int>((offset - HeapOffset(0)) / heap_bytes);
}

std::size_t ShmLayout::EdgeOffset(int src, int dst, int channel) const {
  const std::size_t head = AlignUp(OwnerOffset(local_size), 4096);
  const auto index =
      (static_cast<std::size_t>(src) * static_cast<std::size_t>(local_size) + static_cast<std::size_t>(dst)) *
          kChannels +
      static_cast<std::size_t>(channel);
  return head + index * AlignUp(edge_bytes, 4096);
}

ShmSegment::ShmSegment(int fd, const ShmLayout& layout, const ShmOptions& options)
    : options_(options), layout_(layout) {
  void* at = mmap(nullptr, layout.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED) {
    throw Fault(FaultKind::kSystem, -1,
                "mapping " + std::to_string(layout.total_bytes) + " bytes of shared memory: " + std::strerror(errno));
  }
  base_ = {static_cast<std::byte*>(at), [n = layout.total_bytes](std::byte* p) { munmap(p, n); }};
  static_cast<void>(madvise(at, layout.total_bytes, MADV_DONTDUMP));  // mostly holes; a core file need not have them
}

ShmSegment::ShmSegment(std::shared_ptr<std::byte> base, const ShmLayout& layout, const ShmOptions& options)
    : options_(options), layout_(layout), base_(std::move(base)) {}

std::shared_ptr<ShmSegment> ShmSegment::Share() const {
  return std::shared_ptr<ShmSegment>(new ShmSegment(base_, layout_, options_));
}

ShmDoorbell& ShmSegment::doorbell(int local_rank) const { return reinterpret_cast<ShmDoorbell*>(base())[local_rank]; }

ShmOwner& ShmSegment::owner(int local_rank) const {
  return *reinterpret_cast<ShmOwner*>(base() + layout_.OwnerOffset(local_rank));
}

void ShmSegment::Introduce(int local_rank) {
  std::random_device random;
  *token_ = std::uint64_t{random()} << 32 | random();
  ShmOwner& mine = owner(local_rank);
  mine.token = *token_;
  mine.token_at = reinterpret_cast<std::uintptr_t>(token_.get());
  mine.pid.store(getpid(), std::memory_order_release);
}

std::array<LinkEnds, kChannels> MakeShm(const ShmSegment& segment, int me, int other, int peer) {
  const auto neighbour = std::make_shared<Neighbour>(segment, me, other);
  std::array<LinkEnds, kChannels> ends;
  for (int channel = 0; channel < kChannels; ++channel) {
    ends[static_cast<std::size_t>(channel)] = {MakeShmSend(segment, me, other, channel, neighbour),
                                               MakeShmRecv(segment, me, other, channel, peer, neighbour)};
  }
  return ends;
}

}  // namespace hetcoll
