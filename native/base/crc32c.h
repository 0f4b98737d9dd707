// CRC32C (Castagnoli's polynomial), as iSCSI, ext4 and NVMe use it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetcoll {

namespace crc32c {

using Function = std::uint32_t (*)(std::uint32_t, const void*, std::size_t);

std::uint32_t Table(std::uint32_t crc, const void* data, std::size_t n);
Function Hardware();  // null where there is none
extern const Function kBest;

// The checksum of kWords words: what headers are of.
inline constexpr std::size_t kWords = 5;
using OfWords = std::uint32_t (*)(const void*);
extern const OfWords kBestOfWords;

}  // namespace crc32c

// The checksum of what `crc` is the checksum of, with n bytes behind it; 0 is the checksum of nothing. In hardware
// where the processor has it.
inline std::uint32_t Crc32c(std::uint32_t crc, const void* data, std::size_t n) { return crc32c::kBest(crc, data, n); }

}  // namespace hetcoll
