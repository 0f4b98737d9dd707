#include "transport/tcp_sent.h"

#include <algorithm>
#include <cstring>

namespace hetcoll {
namespace {

constexpr std::size_t kBlock = std::size_t{16} << 10;  // stays in the L1 cache

}  // namespace

void SentBytes::BeginOwn() {
  extents_.push_back({total_, block_->bytes.get() + block_->used, block_, Where::kOwn});
  goes_on_ = true;
}

// Between what is checked and what is not lies a header: an extent is one or the other.
void SentBytes::Lend(const std::byte* data, std::size_t n, bool checked) {
  if (n == 0) return;
  const bool follows =
      !extents_.empty() && extents_.back().lent() && extents_.back().data + (total_ - extents_.back().at) == data;
  if (!follows) {
    extents_.push_back({total_, data, nullptr, checked ? Where::kChecked : Where::kLent});
    ++lends_;
    goes_on_ = false;
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
  for (; first_ < gone; ++first_) {
    lends_ -= extents_[first_].lent();
    extents_[first_].block = nullptr;
  }
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
    goes_on_ = false;
    return;
  }
  Extent& first = extents_[first_];
  if (first.at >= to) return;
  if (first.data != nullptr) first.data += to - first.at;
  first.at = to;
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
    extents_[i] = {extents_[i].at, nullptr, nullptr, Where::kNowhere};
  }
}

void SentBytes::MakeRoom(std::size_t n) {
  goes_on_ = false;
  // A peer that checks what comes says what was right with what it sends next: the last bytes are needed until then.
  for (auto* each : {&block_, &spare_}) {
    if (each->use_count() != 1 || (*each)->size < n) continue;  // somebody may ask for what is in it
    (*each)->used = 0;
    if (each == &spare_) std::swap(block_, spare_);
    return;
  }
  spare_ = std::move(block_);
  const std::size_t size = std::max(kBlock, n);
  block_ = std::make_shared<Block>(std::unique_ptr<std::byte[]>(new std::byte[size]), size);
}

void SentBytes::KeepExtent(const Extent& e, std::uint64_t end, std::vector<Extent>& kept) {
  for (std::uint64_t at = e.at; at < end;) {
    if (Place(1) == nullptr) MakeRoom(1);
    const std::size_t n = std::min<std::size_t>(block_->size - block_->used, end - at);
    std::byte* to = Place(n);
    std::memcpy(to, e.data + (at - e.at), n);
    block_->used += n;
    kept.push_back({at, to, block_, Where::kOwn});
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
  goes_on_ = false;
}

std::size_t SentBytes::kept() const {
  std::size_t n = 0;
  for (std::size_t i = first_; i < extents_.size(); ++i) {
    if (extents_[i].where == Where::kOwn) n += End(i) - extents_[i].at;
  }
  return n;
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
    return {e.data + (at - e.at), static_cast<std::size_t>(End(i) - at)};
  }
  return {};
}

}  // namespace hetcoll
