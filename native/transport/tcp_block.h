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
  std::uint16_t next;    // the stripe that will carry the block after this one
  std::uint16_t most;    // and how long that is at most, in KiB
  // What follows is not sent where the link checks nothing.
  std::uint64_t right;  // so many bytes came right the other way, over this stripe, and are not asked for again
  std::uint64_t check;  // of what is before

  std::uint32_t Sum() const { return crc32c::kBestOfWords(this); }
  static constexpr std::size_t kPlain = 32;
  static constexpr std::size_t kChecked = 48;
};
static_assert(offsetof(BlockHeader, right) == BlockHeader::kPlain);
static_assert(offsetof(BlockHeader, check) == 8 * crc32c::kWords);
static_assert(offsetof(BlockHeader, check) + sizeof(BlockHeader::check) == BlockHeader::kChecked);

// Behind a checked block: of its header's check and its bytes. As everything that is sent it is of 16 bytes, or the
// kernels copy what comes behind it more slowly, by a twentieth: from and to places that are not aligned.
struct BlockCheck {
  std::uint64_t sum = 0;
  std::uint64_t nothing = 0;

  bool operator==(const BlockCheck&) const = default;
};
static_assert(BlockHeader::kPlain % 16 == 0 && BlockHeader::kChecked % 16 == 0 && sizeof(BlockCheck) == 16);

// Decides the length of blocks.
class Cutter {
 public:
  explicit Cutter(Integrity integrity)
      : integrity_(integrity), small_of_(integrity == Integrity::kAll ? 1 : kSmallOf) {}

  struct Cut {
    std::size_t length;
    bool checked;
  };

  // The block that begins where `rest` bytes are left of a message, with up to `most`.
  Cut Next(std::size_t total, std::size_t rest, std::size_t most) {
    most = std::min(rest, most);
    if (integrity_ == Integrity::kOff) return {most, false};
    if (total <= kSmall) {  // these go by often, so each step counts
      if (most == 0 || --until_small_ > 0) return {most, false};
      until_small_ = small_of_;
      return {most, true};
    }
    const std::size_t piece = std::min(most, kPiece);
    if (integrity_ == Integrity::kAll) return {piece, piece > 0};
    if (unchecked_ >= kSampleOf * piece) {
      unchecked_ -= kSampleOf * piece;
      return {piece, true};
    }
    const std::size_t length = std::min(most, kSampledBlock);
    unchecked_ += length;
    return {length, false};
  }

  static constexpr std::size_t kPiece = std::size_t{64} << 10;  // at most, of what has one checksum: stays in the cache

 private:
  static constexpr std::size_t kSampledBlock = std::size_t{4} << 20;

  Integrity integrity_;
  std::size_t small_of_;  // one of so many messages of up to kSmall bytes is checked
  std::size_t until_small_ = 1;
  std::size_t unchecked_ = 0;  // of others, bytes that went by, less those that checks were made for
};

// How far one end is in the sequence of blocks. Both ends of a link go through the same states.
struct Course {
  Course(Integrity integrity, std::size_t stripes)
      : cutter(integrity), size(integrity == Integrity::kOff ? BlockHeader::kPlain : BlockHeader::kChecked) {
    header.most = stripes == 1 ? UINT16_MAX : kMost;
  }

  void Begin(const Message& m, std::size_t at) {
    const Cutter::Cut cut = cutter.Next(m.total, m.total - at, std::size_t{header.most} << 10);
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

  // In KiB, what a stripe carries until it is another one's turn. With stripes of several cards, of which not all have
  // room, it gets less: a slow one is soon through with its last block. Else more, as a block costs a call at each end.
  static constexpr std::uint16_t kLeast = 16, kMost = 256;
  static std::uint16_t Longer(int most, bool all_have_room) {
    return static_cast<std::uint16_t>(all_have_room ? std::min<int>(most + 1, kMost) : std::max<int>(most / 2, kLeast));
  }

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
