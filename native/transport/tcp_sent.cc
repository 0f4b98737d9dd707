#include "transport/tcp_sent.h"

#include <algorithm>
#include <cstring>

namespace hetcoll {
namespace {

constexpr std::size_t kFirstSize = std::size_t{16} << 10;  // stays in the L1 cache
constexpr std::size_t kLargeSize = std::size_t{1} << 20;   // what is larger is given back once it is empty

}  // namespace

void SentBytes::BeginOwn() {
  extents_.push_back({total_, nullptr, used_});
  ends_lent_ = false;
}

void SentBytes::Lend(const std::byte* data, std::size_t n) {
  if (n == 0) return;
  const bool goes_on = ends_lent_ && !extents_.empty() && extents_.back().lent + (total_ - extents_.back().at) == data;
  if (!goes_on) {
    extents_.push_back({total_, data, 0});
    ++lends_;
    ends_lent_ = true;
  }
  total_ += n;
}

void SentBytes::Copy(const std::byte* data, std::size_t n) {
  if (n == 0) return;
  if (Place(n) == nullptr) MakeRoom(n);
  std::memcpy(Place(n), data, n);
  Took(n);
}

void SentBytes::Forget(std::uint64_t acked) {
  if (acked <= base_) return;
  base_ = acked;
  std::size_t gone = 0;
  while (gone < extents_.size() && End(gone) <= acked) lends_ -= extents_[gone++].lent != nullptr;
  extents_.erase(extents_.begin(), extents_.begin() + static_cast<std::ptrdiff_t>(gone));
  if (extents_.empty()) {
    used_ = 0;
    ends_lent_ = true;
    if (size_ > kLargeSize) {
      bytes_.reset();
      size_ = 0;
    }
    return;
  }
  Extent& first = extents_.front();
  if (first.at >= acked) return;
  const std::size_t cut = acked - first.at;
  first.at = acked;
  if (first.lent != nullptr) {
    first.lent += cut;
  } else {
    first.place += cut;
  }
}

// Moves what is kept here to the front, in its order.
void SentBytes::Compact() {
  std::size_t used = 0;
  for (std::size_t i = 0; i < extents_.size(); ++i) {
    Extent& e = extents_[i];
    if (e.lent != nullptr) continue;
    const std::size_t n = End(i) - e.at;
    if (e.place != used) std::memmove(bytes_.get() + used, bytes_.get() + e.place, n);
    e.place = used;
    used += n;
  }
  used_ = used;
}

void SentBytes::Grow(std::size_t size) {
  if (size <= size_) return;
  std::unique_ptr<std::byte[]> larger(new std::byte[size]);
  if (used_ > 0) std::memcpy(larger.get(), bytes_.get(), used_);
  bytes_ = std::move(larger);
  size_ = size;
}

void SentBytes::MakeRoom(std::size_t n) {
  Compact();
  // Twice as much as is needed, or the next message would move all of it again.
  if (used_ + n > size_ / 2) Grow(std::max({kFirstSize, 2 * size_, 2 * (used_ + n)}));
}

void SentBytes::Keep() {
  if (lends_ == 0) return;
  Compact();
  const std::size_t all = total_ - extents_.front().at;
  Grow(all);
  std::size_t to = all;
  for (std::size_t i = extents_.size(); i-- > 0;) {  // from the last on, each moves towards the end or stays
    const Extent& e = extents_[i];
    const std::size_t n = End(i) - e.at;
    to -= n;
    const std::byte* from = e.lent != nullptr ? e.lent : bytes_.get() + e.place;
    if (n > 0) std::memmove(bytes_.get() + to, from, n);
  }
  extents_.resize(1);
  extents_.front().lent = nullptr;
  extents_.front().place = 0;
  used_ = all;
  lends_ = 0;
  ends_lent_ = false;
}

std::span<const std::byte> SentBytes::From(std::uint64_t at) const {
  for (std::size_t i = 0; i < extents_.size(); ++i) {
    const Extent& e = extents_[i];
    if (at < e.at || at >= End(i)) continue;
    const std::byte* begin = e.lent != nullptr ? e.lent : bytes_.get() + e.place;
    return {begin + (at - e.at), static_cast<std::size_t>(End(i) - at)};
  }
  return {};
}

}  // namespace hetcoll
