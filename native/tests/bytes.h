// Buffers of tests, by words: under a sanitizer every access costs many instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace hetcoll::testing {

using Bytes = std::vector<std::byte>;

inline std::uint32_t Hash(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x7fb5d329728ea185u;
  x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44du;
  return static_cast<std::uint32_t>(x ^ (x >> 33));
}

// Each seed has its own, and no two words of one are likely to be the same.
inline Bytes Pattern(std::size_t n, unsigned seed) {
  const auto word = [seed](std::size_t i) { return Hash(i * 31 + seed) * std::uint64_t{0x9e3779b97f4a7c15u}; };
  Bytes out(n);
  std::size_t i = 0;
  for (; n - i >= sizeof(std::uint64_t); i += sizeof(std::uint64_t)) {
    const std::uint64_t whole = word(i);
    std::memcpy(out.data() + i, &whole, sizeof whole);  // a store: of a length that is known
  }
  const std::uint64_t rest = word(i);
  if (i < n) std::memcpy(out.data() + i, &rest, n - i);
  return out;
}

// The library's compares byte by byte.
inline bool operator==(const Bytes& a, const Bytes& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

}  // namespace hetcoll::testing
