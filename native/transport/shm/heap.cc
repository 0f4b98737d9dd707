#include "transport/shm/heap.h"

#include <sys/mman.h>

#include <iterator>

#include "transport/shm/pages.h"

namespace hetcoll {
namespace {

std::size_t Pages(std::size_t nbytes) { return nbytes == 0 ? kPage : (nbytes + kPage - 1) / kPage * kPage; }

}  // namespace

Heap::Heap(std::shared_ptr<ShmSegment> segment, int local_rank)
    : segment_(std::move(segment)),
      base_(segment_->base() + segment_->layout().HeapOffset(local_rank)),
      capacity_(segment_->layout().heap_bytes),
      holes_{{0, capacity_}} {}

std::byte* Heap::Allocate(std::size_t nbytes) {
  if (nbytes > capacity_) return nullptr;
  const std::size_t need = Pages(nbytes);
  const std::lock_guard lock(mutex_);
  for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
    if (hole->second < need) continue;
    const auto [offset, length] = *hole;
    holes_.erase(hole);
    if (length > need) holes_.emplace(offset + need, length - need);
    return base_ + offset;
  }
  return nullptr;
}

std::size_t Heap::used() {
  const std::lock_guard lock(mutex_);
  std::size_t free = 0;
  for (const auto& [offset, length] : holes_) free += length;
  return capacity_ - free;
}

void Heap::Free(std::byte* at, std::size_t nbytes) {
  if (birthplace_.left()) return;  // the memory is the parent's, who still uses it
  std::size_t length = Pages(nbytes);
  // The pages come back as zeroes when they are touched again. Where the kernel refuses, they only stay in use.
  static_cast<void>(madvise(at, length, MADV_REMOVE));
  auto offset = static_cast<std::size_t>(at - base_);
  const std::lock_guard lock(mutex_);
  auto next = holes_.lower_bound(offset);
  if (next != holes_.end() && next->first == offset + length) {
    length += next->second;
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += length;
      return;
    }
  }
  holes_.emplace(offset, length);
}

}  // namespace hetcoll
