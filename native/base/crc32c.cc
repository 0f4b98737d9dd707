#include "base/crc32c.h"

#include <array>
#include <cstring>

#include "base/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hetcoll::crc32c {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // bit i is the coefficient of x^(31-i)

constexpr std::uint32_t TimesX(std::uint32_t a) { return (a & 1) != 0 ? (a >> 1) ^ kPolynomial : a >> 1; }

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: what byte b leaves after k zero bytes.
constexpr Tables MakeTables() {
  Tables tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = TimesX(crc);
    tables[0][b] = crc;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t b = 0; b < 256; ++b) {
      const std::uint32_t before = tables[k - 1][b];
      tables[k][b] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}
constexpr Tables kTables = MakeTables();

// The same as a product in GF(2)[x] modulo the polynomial: x^n.
[[maybe_unused]] constexpr std::uint32_t PowerOfX(std::size_t n) {
  std::uint32_t a = std::uint32_t{1} << 31;
  for (std::size_t i = 0; i < n; ++i) a = TimesX(a);
  return a;
}

std::uint64_t Load(const std::byte* p) {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

#if defined(__x86_64__)

// The instruction takes three cycles and can start in each: three lanes, joined at the end of a turn.
constexpr std::size_t kLane = 1024;
static_assert(kLane % 8 == 0);
// The instruction multiplies by x^32 more than a product of reflected words is short of, by x: see Advance.
constexpr std::uint32_t kPastOne = PowerOfX(8 * kLane - 33);
constexpr std::uint32_t kPastTwo = PowerOfX(16 * kLane - 33);

// `crc` behind as many zero bytes as `power` stands for.
__attribute__((target("sse4.2,crc32,pclmul"))) std::uint32_t Advance(std::uint64_t crc, std::uint32_t power) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)),
                                               _mm_cvtsi32_si128(static_cast<int>(power)), 0);
  return static_cast<std::uint32_t>(_mm_crc32_u64(0, static_cast<unsigned long long>(_mm_cvtsi128_si64(product))));
}

__attribute__((target("sse4.2,crc32,pclmul"))) std::uint32_t Instructions(std::uint32_t start, const void* data,
                                                                          std::size_t n) {
  const auto* p = static_cast<const std::byte*>(data);
  std::uint64_t crc = ~start;
  for (; n >= 3 * kLane; n -= 3 * kLane, p += 3 * kLane) {
    std::uint64_t second = 0, third = 0;
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kLane; i += 8) {
      crc = _mm_crc32_u64(crc, Load(p + i));
      second = _mm_crc32_u64(second, Load(p + kLane + i));
      third = _mm_crc32_u64(third, Load(p + 2 * kLane + i));
    }
    crc = Advance(crc, kPastTwo) ^ Advance(second, kPastOne) ^ third;
  }
  for (; n >= 64; n -= 64, p += 64) {
#pragma GCC unroll 8
    for (std::size_t i = 0; i < 64; i += 8) crc = _mm_crc32_u64(crc, Load(p + i));
  }
  for (const std::byte* end = p + (n & ~std::size_t{7}); p != end; p += 8) crc = _mm_crc32_u64(crc, Load(p));
  auto rest = static_cast<std::uint32_t>(crc);
  for (n &= 7; n > 0; --n, ++p) rest = _mm_crc32_u8(rest, static_cast<unsigned char>(*p));
  return ~rest;
}

__attribute__((target("sse4.2,crc32"))) std::uint32_t WordInstructions(const void* data) {
  const auto* p = static_cast<const std::byte*>(data);
  std::uint64_t crc = ~std::uint32_t{0};
#pragma GCC unroll 5
  for (std::size_t i = 0; i < kWords; ++i) crc = _mm_crc32_u64(crc, Load(p + 8 * i));
  return ~static_cast<std::uint32_t>(crc);
}

bool HasInstructions() { return cpu::HasSse42AndPclmul(); }

#elif defined(__aarch64__)

__attribute__((target("+crc"))) std::uint32_t Instructions(std::uint32_t start, const void* data, std::size_t n) {
  const auto* p = static_cast<const std::byte*>(data);
  std::uint32_t crc = ~start;
  for (; n >= 8; n -= 8, p += 8) crc = __crc32cd(crc, Load(p));
  for (; n > 0; --n, ++p) crc = __crc32cb(crc, static_cast<std::uint8_t>(*p));
  return ~crc;
}

std::uint32_t WordInstructions(const void* data) { return Instructions(0, data, 8 * kWords); }

bool HasInstructions() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

#endif

}  // namespace

std::uint32_t Table(std::uint32_t start, const void* data, std::size_t n) {
  const auto* p = static_cast<const std::byte*>(data);
  std::uint32_t crc = ~start;
  const auto byte = [&](std::size_t table, std::uint64_t word) { return kTables[table][word & 0xff]; };
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; n >= 8; n -= 8, p += 8) {
    const std::uint64_t w = Load(p) ^ crc;
    crc = byte(7, w) ^ byte(6, w >> 8) ^ byte(5, w >> 16) ^ byte(4, w >> 24) ^ byte(3, w >> 32) ^ byte(2, w >> 40) ^
          byte(1, w >> 48) ^ byte(0, w >> 56);
  }
#endif
  for (; n > 0; --n, ++p) crc = (crc >> 8) ^ byte(0, crc ^ static_cast<std::uint8_t>(*p));
  return ~crc;
}

Function Hardware() {
#if defined(__x86_64__) || defined(__aarch64__)
  if (HasInstructions()) return Instructions;
#endif
  return nullptr;
}

// Chosen before anything is checked: asking each time cost as much as a header's checksum.
const Function kBest = Hardware() != nullptr ? Hardware() : Table;

namespace {

std::uint32_t WordTable(const void* data) { return Table(0, data, 8 * kWords); }

OfWords BestOfWords() {
#if defined(__x86_64__) || defined(__aarch64__)
  if (HasInstructions()) return WordInstructions;
#endif
  return WordTable;
}

}  // namespace

const OfWords kBestOfWords = BestOfWords();

}  // namespace hetcoll::crc32c
