// What went into a socket and may have to be sent again over the next one, should this one break.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace hetcoll {

// The end of one direction's stream: bytes [base, total) of it, counted from the first that was ever sent.
//
// Short messages are put together here and sent from here, which costs no copy more. Longer ones are only lent: they
// lie in their owner's memory until `Keep` copies what is not acknowledged by then, which most often is next to
// nothing. What the kernel has acknowledged is forgotten (`Forget`), at the latest when there is no room left.
class SentBytes {
 public:
  std::uint64_t base() const { return base_; }
  std::uint64_t total() const { return total_; }
  bool lends() const { return lends_ > 0; }

  // Where n bytes may be put together, if there is room; `Took` says how many of them were sent.
  std::byte* Place(std::size_t n) { return used_ + n <= size_ ? bytes_.get() + used_ : nullptr; }
  void Took(std::size_t n) {
    if (ends_lent_) BeginOwn();
    used_ += n;
    total_ += n;
  }
  // n bytes were sent from `data`, which stays as it is until `Keep`.
  void Lend(const std::byte* data, std::size_t n);
  // n bytes were sent from `data`, which is copied.
  void Copy(const std::byte* data, std::size_t n);

  // Bytes up to `acked` will never be asked for again.
  void Forget(std::uint64_t acked);
  // Makes room for n bytes more.
  void MakeRoom(std::size_t n);
  // Nothing is lent any more.
  void Keep();

  // Bytes from `at` on that lie side by side; none at the end of the stream.
  std::span<const std::byte> From(std::uint64_t at) const;

 private:
  // From `at` up to the next one's, or to the end of the stream.
  struct Extent {
    std::uint64_t at;
    const std::byte* lent;  // null: it is in `bytes_`
    std::size_t place;      // there
  };
  std::uint64_t End(std::size_t i) const { return i + 1 < extents_.size() ? extents_[i + 1].at : total_; }
  void BeginOwn();
  void Compact();
  void Grow(std::size_t size);

  std::unique_ptr<std::byte[]> bytes_;
  std::size_t size_ = 0;
  std::size_t used_ = 0;
  std::vector<Extent> extents_;
  std::size_t lends_ = 0;  // extents that are lent
  bool ends_lent_ = true;  // the last extent is; or there is none
  std::uint64_t base_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace hetcoll
