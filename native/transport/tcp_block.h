// How TCP cuts messages into blocks, and which of them carry a checksum. Both ends of a link come to the same answers
// by themselves, so nothing but the header and the checksum is sent.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/crc32c.h"
#include "transport/integrity.h"
#include "transport/transport.h"

namespace hetcoll {

struct BlockHeader {
  std::uint64_t signature;
  std::uint64_t total;   // of the message
  std::uint64_t offset;  // of this block in it
  std::uint32_t stamp;   // index of the block on this link
  std::uint32_t next;    // the stripe that will carry the block after this one
  // What follows is not sent where the link checks nothing.
  std::uint64_t right;  // so many bytes came right the other way, over this stripe, and are not asked for again
  std::uint32_t check;  // of what is before

  std::uint32_t Sum() const { return Crc32c(0, this, offsetof(BlockHeader, check)); }
  static constexpr std::size_t kPlain = 32;
  static constexpr std::size_t kChecked = 44;
};
static_assert(offsetof(BlockHeader, right) == BlockHeader::kPlain);
static_assert(offsetof(BlockHeader, check) + sizeof(BlockHeader::check) == BlockHeader::kChecked);

// Behind a checked block: of its header's check and its bytes.
using BlockCheck = std::uint32_t;

// Decides the length of blocks.
class Cutter {
 public:
  Cutter(Integrity integrity, std::size_t stripes) : integrity_(integrity), single_(stripes == 1) {}

  struct Cut {
    std::size_t length;
    bool checked;
  };

  // The block that begins where `rest` bytes are left of a message.
  Cut Next(std::size_t total, std::size_t rest) {
    if (integrity_ == Integrity::kOff) return {std::min(rest, single_ ? kWholeBlock : kStripeBlock), false};
    const std::size_t piece = std::min(rest, kPiece);
    if (integrity_ == Integrity::kAll || total <= kSmall) return {piece, piece > 0};
    if (unchecked_ >= kSampleOf * piece) {
      unchecked_ -= kSampleOf * piece;
      return {piece, true};
    }
    const std::size_t length = std::min(rest, single_ ? kSampledBlock : kStripeBlock);
    unchecked_ += length;
    return {length, false};
  }

  static constexpr std::size_t kPiece = std::size_t{64} << 10;  // at most, of what has one checksum: stays in the cache

 private:
  static constexpr std::size_t kStripeBlock = std::size_t{256} << 10;  // then it is another stripe's turn
  static constexpr std::size_t kWholeBlock = std::size_t{1} << 30;     // with one stripe there is no turn to take
  static constexpr std::size_t kSampledBlock = std::size_t{4} << 20;

  Integrity integrity_;
  bool single_;
  std::size_t unchecked_ = 0;  // bytes that went by, less those that checks were made for
};

// How far one end is in the sequence of blocks. Both ends of a link go through the same states.
struct Course {
  Course(Integrity integrity, std::size_t stripes)
      : cutter(integrity, stripes), size(integrity == Integrity::kOff ? BlockHeader::kPlain : BlockHeader::kChecked) {}

  void Begin(const Message& m, std::size_t at) {
    const Cutter::Cut cut = cutter.Next(m.total, m.total - at);
    begin = at;
    end = at + cut.length;
    checked = cut.checked;
    header_left = size;
    begun = true;
    ++stamp;
  }
  // The end of the block is reached.
  void Finish() {
    begun = false;
    stripe = header.next;
  }
  std::byte* HeaderRest() { return reinterpret_cast<std::byte*>(&header) + (size - header_left); }

  Cutter cutter;
  std::size_t size;  // of headers
  BlockHeader header{};
  std::size_t header_left = 0;
  std::size_t begin = 0;
  std::size_t end = 0;
  std::uint32_t stamp = 0;
  std::uint32_t stripe = 0;
  bool begun = false;
  bool checked = false;
};

}  // namespace hetcoll
