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
  Bytes out(n);
  for (std::size_t i = 0; i < n; i += sizeof(std::uint64_t)) {
    const std::uint64_t word = Hash(i * 31 + seed) * std::uint64_t{0x9e3779b97f4a7c15u};
    std::memcpy(out.data() + i, &word, n - i < sizeof word ? n - i : sizeof word);
  }
  return out;
}

inline bool Same(const Bytes& a, const Bytes& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

}  // namespace hetcoll::testing
