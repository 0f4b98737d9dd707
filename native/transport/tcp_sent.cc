#include "transport/tcp_sent.h"

#include <algorithm>
#include <cstring>

namespace hetcoll {
namespace {

constexpr std::size_t kFirstSize = std::size_t{16} << 10;  // stays in the L1 cache
constexpr std::size_t kLargeSize = std::size_t{1} << 20;   // what is larger is given back once it is empty
constexpr std::size_t kBlock = std::size_t{64} << 10;      // holds what was lent: a checked piece fits
constexpr std::size_t kSpareBlocks = kLargeSize / kBlock;

}  // namespace

void SentBytes::BeginOwn() {
  extents_.push_back({total_, nullptr, used_, Where::kOwn});
  ends_lent_ = false;
}

// Between what is checked and what is not lies a header: an extent is one or the other.
void SentBytes::Lend(const std::byte* data, std::size_t n, bool checked) {
  if (n == 0) return;
  const bool goes_on = ends_lent_ && !extents_.empty() && extents_.back().lent() &&
                       extents_.back().data + (total_ - extents_.back().at) == data;
  if (!goes_on) {
    extents_.push_back({total_, data, 0, checked ? Where::kChecked : Where::kLent});
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

// The first extents are gone. They are taken out once they are many, since that moves those that are left.
void SentBytes::Pass(std::size_t gone) {
  std::size_t blocks = 0;
  for (; first_ < gone; ++first_) {
    lends_ -= extents_[first_].lent();
    blocks += extents_[first_].where == Where::kBlock;
  }
  for (std::size_t i = 0; i < blocks && spare_.size() < kSpareBlocks; ++i) spare_.push_back(std::move(blocks_[i]));
  blocks_.erase(blocks_.begin(), blocks_.begin() + static_cast<std::ptrdiff_t>(blocks));
  if (first_ * 2 < extents_.size()) return;
  extents_.erase(extents_.begin(), extents_.begin() + static_cast<std::ptrdiff_t>(first_));
  first_ = 0;
}

void SentBytes::Forget(std::uint64_t to) {
  if (to <= base_) return;
  base_ = to;
  std::size_t gone = first_;
  while (gone < extents_.size() && End(gone) <= to) ++gone;
  Pass(gone);
  if (extents_.empty()) {
    used_ = 0;
    ends_lent_ = true;
    if (size_ > kLargeSize) {
      bytes_.reset();
      size_ = 0;
    }
    return;
  }
  Extent& first = extents_[first_];
  if (first.at >= to) return;
  const std::size_t cut = to - first.at;
  first.at = to;
  if (first.data != nullptr) {
    first.data += cut;
  } else {
    first.place += cut;
  }
}

void SentBytes::Drop(std::uint64_t acked) {
  std::size_t left = lends_;
  for (std::size_t i = extents_.size(); left > 0 && i-- > first_;) {
    if (!extents_[i].lent()) continue;
    --left;
    if (extents_[i].where != Where::kLent || extents_[i].at >= acked) continue;
    if (End(i) > acked) {
      Extent rest = extents_[i];
      rest.data += acked - rest.at;
      rest.at = acked;
      extents_.insert(extents_.begin() + static_cast<std::ptrdiff_t>(i) + 1, rest);
    } else {
      --lends_;
    }
    extents_[i] = {extents_[i].at, nullptr, 0, Where::kNowhere};
  }
}

// Moves what is kept here to the front, in its order.
void SentBytes::Compact() {
  std::size_t used = 0;
  for (std::size_t i = first_; i < extents_.size(); ++i) {
    Extent& e = extents_[i];
    if (e.where != Where::kOwn) continue;
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

void SentBytes::KeepExtent(const Extent& e, std::uint64_t end, std::vector<Extent>& kept) {
  for (std::uint64_t at = e.at; at < end;) {
    const std::size_t n = std::min<std::size_t>(kBlock, end - at);
    if (spare_.empty()) spare_.emplace_back(new std::byte[kBlock]);
    blocks_.push_back(std::move(spare_.back()));
    spare_.pop_back();
    std::memcpy(blocks_.back().get(), e.data + (at - e.at), n);
    kept.push_back({at, blocks_.back().get(), 0, Where::kBlock});
    at += n;
  }
}

void SentBytes::Keep() {
  if (lends_ == 0) return;
  std::size_t from = extents_.size();
  for (std::size_t left = lends_; left > 0;) left -= extents_[--from].lent();
  std::vector<Extent> kept;
  for (std::size_t i = from; i < extents_.size(); ++i) {
    if (extents_[i].lent()) {
      KeepExtent(extents_[i], End(i), kept);
    } else {
      kept.push_back(extents_[i]);
    }
  }
  extents_.resize(from);
  extents_.insert(extents_.end(), kept.begin(), kept.end());
  lends_ = 0;
}

bool SentBytes::Holds(std::uint64_t from, std::uint64_t to) const {
  if (from < base_ || to > total_ || from > to) return false;
  for (std::size_t i = first_; from < to && i < extents_.size() && extents_[i].at < to; ++i) {
    if (extents_[i].where == Where::kNowhere && End(i) > from) return false;
  }
  return true;
}

std::span<const std::byte> SentBytes::From(std::uint64_t at) const {
  for (std::size_t i = first_; i < extents_.size(); ++i) {
    const Extent& e = extents_[i];
    if (at < e.at || at >= End(i)) continue;
    if (e.where == Where::kNowhere) return {};
    return {Bytes(e) + (at - e.at), static_cast<std::size_t>(End(i) - at)};
  }
  return {};
}

}  // namespace hetcoll
