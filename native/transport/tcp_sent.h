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
// lie in their owner's memory until `Keep` copies what may still be asked for, which without checksums most often is
// next to nothing. What nobody can ask for is forgotten (`Forget`), at the latest when there is no room left. Where the
// receiver looks at checksums, it may ask for what they cover long after its kernel has acknowledged it, but not for
// the rest, which may be dropped out of the midst (`Drop`).
class SentBytes {
 public:
  std::uint64_t base() const { return base_; }
  std::uint64_t total() const { return total_; }
  bool lends() const { return lends_ > 0; }

  // Where n bytes may be put together, if there is room; `Took` says how many of them were sent.
  std::byte* Place(std::size_t n) {
    return block_ != nullptr && block_->used + n <= block_->size ? block_->bytes.get() + block_->used : nullptr;
  }
  void Took(std::size_t n) {
    if (!goes_on_) BeginOwn();
    block_->used += n;
    total_ += n;
  }
  // n bytes were sent from `data`, which stays as it is until `Keep`.
  void Lend(const std::byte* data, std::size_t n, bool checked = false);
  // n bytes were sent from `data`, which is copied.
  void Copy(const std::byte* data, std::size_t n);

  // Bytes up to `to` will never be asked for again.
  void Forget(std::uint64_t to);
  // Of what is lent and not checked, neither will bytes up to `acked`.
  void Drop(std::uint64_t acked);
  // Makes room for n bytes more.
  void MakeRoom(std::size_t n);
  // Nothing is lent any more.
  void Keep();

  // How many bytes of memory of its own hold what may be asked for.
  std::size_t kept() const;
  // Whether all bytes [from, to) are there.
  bool Holds(std::uint64_t from, std::uint64_t to) const;
  // Bytes from `at` on that lie side by side; none at the end of the stream, or where they were dropped.
  std::span<const std::byte> From(std::uint64_t at) const;

 private:
  // Holds bytes of one or more extents, and is given back with the last of them.
  struct Block {
    std::unique_ptr<std::byte[]> bytes;
    std::size_t size;
    std::size_t used = 0;
  };

  enum class Where : std::uint8_t { kOwn, kLent, kChecked, kNowhere };  // kChecked is lent, too

  // From `at` up to the next one's, or to the end of the stream.
  struct Extent {
    std::uint64_t at;
    const std::byte* data;         // null: nowhere
    std::shared_ptr<Block> block;  // in which it is, where it is kOwn
    Where where;

    bool lent() const { return where == Where::kLent || where == Where::kChecked; }
  };
  std::uint64_t End(std::size_t i) const { return i + 1 < extents_.size() ? extents_[i + 1].at : total_; }
  void BeginOwn();
  void Pass(std::size_t gone);
  void KeepExtent(const Extent& e, std::uint64_t end, std::vector<Extent>& kept);

  std::shared_ptr<Block> block_;  // the one that is filled now
  std::shared_ptr<Block> spare_;  // the one before
  bool goes_on_ = false;          // the last extent ends where that is filled to
  std::vector<Extent> extents_;
  std::size_t first_ = 0;  // of them; those before are gone
  std::size_t lends_ = 0;  // extents that are lent
  std::uint64_t base_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace hetcoll
