// Every type, operation and instruction set against a scalar reference, over counts, alignments, aliasing and
// streaming. Prints a summary; exits with 1 when anything differed.

#include "kernels/kernels.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "devices/kernels/waits.h"
#include "kernels_reference.h"

using namespace hetcoll::reference;
using hetcoll::CopyBytes;
using hetcoll::CopyString;
using hetcoll::DType;
using hetcoll::FindKernels;
using hetcoll::ItemSize;
using hetcoll::KernelIsa;
using hetcoll::Kernels;
using hetcoll::ReduceOp;
using hetcoll::SetKernelIsa;
using hetcoll::Sweep;
using hetcoll::TakeBytes;

namespace {

long passed = 0, failed = 0;

#define CHECK(condition, ...)                                                      \
  do {                                                                             \
    if (condition) {                                                               \
      ++passed;                                                                    \
    } else if (++failed <= 20) {                                                   \
      std::printf("%s:%d: %s: %s: ", __FILE__, __LINE__, KernelIsa(), #condition); \
      std::printf(__VA_ARGS__);                                                    \
      std::printf("\n");                                                           \
    }                                                                              \
  } while (0)

constexpr unsigned char kCanary = 0xa5;

// The index of the first element that differs, -1 where a byte outside was written, `count` where all is well.
long FirstDifference(DType t, const Bytes& got, std::size_t offset, const Bytes& want, std::size_t count) {
  const std::size_t size = ItemSize(t);
  for (std::size_t i = 0; i < got.size(); ++i) {
    if ((i < offset || i >= offset + count * size) && got[i] != kCanary) return -1;
  }
  if (std::memcmp(&got[offset], want.data(), count * size) == 0) return static_cast<long>(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (!SameElement(t, &got[offset + i * size], &want[i * size])) return static_cast<long>(i);
  }
  return static_cast<long>(count);
}

// `data` at an offset, surrounded by canaries.
Bytes Framed(const unsigned char* data, std::size_t nbytes, std::size_t offset) {
  Bytes frame(offset + nbytes + 96, kCanary);
  if (nbytes != 0) std::memcpy(&frame[offset], data, nbytes);
  return frame;
}

// ---- Input: bit patterns of all kinds, and numbers that meet in a sum ----

Bytes Input(DType t, std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  Bytes data(count * ItemSize(t));
  for (auto& byte : data) byte = static_cast<unsigned char>(random());
  if (t == DType::kBool) {
    for (auto& byte : data) byte = random() % 2 ? byte : 0;
  } else if (!IsNarrow(t)) {
    WithType(t, [&]<class T>(T) {
      using Limits = std::numeric_limits<T>;
      const T special[] = {T{0},
                           static_cast<T>(-T{0}),
                           T{1},
                           Limits::max(),
                           Limits::lowest(),
                           Limits::min(),
                           Limits::denorm_min(),
                           Limits::infinity(),
                           static_cast<T>(-Limits::infinity()),
                           Limits::quiet_NaN(),
                           static_cast<T>(1.5)};
      for (std::size_t i = 0; i + sizeof(T) <= data.size(); i += sizeof(T)) {
        const auto pick = random() % 8;
        if (pick == 0) Put(&data[i], special[random() % std::size(special)]);
        if (pick >= 5) Put(&data[i], static_cast<T>(static_cast<T>(random() % 2000) / static_cast<T>(8)));
      }
    });
  }
  return data;
}

constexpr std::size_t kMost = 33000;  // of one byte: two groups of pages, and a rest

std::vector<std::size_t> Counts() {
  std::vector<std::size_t> counts;
  for (std::size_t i = 0; i <= 130; ++i) counts.push_back(i);
  counts.insert(counts.end(), {1000, 1024, 2049, kMost});
  return counts;
}

// ---- The tests ----

enum class Alias { kNone, kA, kB };
constexpr Sweep kSweeps[] = {Sweep::kPlain, Sweep::kAround, Sweep::kPages};

void TestReduce(DType t, ReduceOp op, const Kernels& kernels, const Bytes& a, const Bytes& b, const Bytes& want,
                std::size_t count, Alias alias, Sweep sweep, std::size_t offset) {
  const std::size_t nbytes = count * ItemSize(t);
  const std::size_t offset_b = (offset * 3 + 1) % 64;
  Bytes x = Framed(a.data(), nbytes, offset), y = Framed(b.data(), nbytes, offset_b);
  const Bytes x_before = x, y_before = y;
  unsigned char *pa = &x[offset], *pb = &y[offset_b];
  const std::size_t at = alias == Alias::kA ? offset : alias == Alias::kB ? offset_b : offset * 7 % 64;
  Bytes fresh(alias == Alias::kNone ? at + nbytes + 96 : 0, kCanary);
  Bytes& out = alias == Alias::kNone ? fresh : alias == Alias::kA ? x : y;
  const auto check = [&](const char* which, long where) {
    CHECK(where == static_cast<long>(count), "%s dtype %d op %d count %zu alias %d sweep %d offset %zu: element %ld",
          which, static_cast<int>(t), static_cast<int>(op), count, static_cast<int>(alias), static_cast<int>(sweep),
          offset, where);
  };
  kernels.reduce(&out[at], pa, pb, count, sweep);
  check("reduce", FirstDifference(t, out, at, want, count));
  CHECK(alias == Alias::kA || x == x_before, "reduce wrote to a");
  CHECK(alias == Alias::kB || y == y_before, "reduce wrote to b");

  x = x_before, y = y_before;
  if (alias == Alias::kNone) std::fill(fresh.begin(), fresh.end(), kCanary);
  const std::size_t at2 = (offset * 5 + 3) % 64;
  Bytes second(at2 + nbytes + 96, kCanary);
  kernels.reduce2(&out[at], &second[at2], pa, pb, count, sweep);
  check("reduce2", FirstDifference(t, out, at, want, count));
  check("reduce2, second", FirstDifference(t, second, at2, want, count));

  if (alias == Alias::kB) return;
  x = x_before, y = y_before;  // the second one may be b
  kernels.reduce2(&out[at], pb, pa, pb, count, sweep);
  check("reduce2, into b", FirstDifference(t, out, at, want, count));
  check("reduce2, b", FirstDifference(t, y, offset_b, want, count));
}

void TestScale(DType t, const Kernels& kernels, const Bytes& a) {
  for (unsigned divisor : {1u, 2u, 3u, 7u, 8u, 100u, 4097u, 16777217u, 3000000000u}) {
    const Bytes want = ReferenceScale(t, a, divisor);
    for (std::size_t count : Counts()) {
      const std::size_t offset = count % 64;
      Bytes x = Framed(a.data(), count * ItemSize(t), offset);
      kernels.scale(&x[offset], count, divisor);
      const long where = FirstDifference(t, x, offset, want, count);
      CHECK(where == static_cast<long>(count), "dtype %d divisor %u count %zu element %ld", static_cast<int>(t),
            divisor, count, where);
    }
  }
}

// The kernels that give one NaN, to the last bit.
void TestOneNan(DType t, const Bytes& a, const Bytes& b) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProd, ReduceOp::kMax, ReduceOp::kMin}) {
    const Kernels* kernels = FindKernels(t, op, true);
    CHECK((kernels != nullptr) == Supports(t, op), "dtype %d op %d", static_cast<int>(t), static_cast<int>(op));
    if (kernels == nullptr) continue;
    const Bytes want = WithOneNan(t, ReferenceReduce(t, op == ReduceOp::kAvg ? ReduceOp::kSum : op, a, b));
    for (std::size_t count : {std::size_t{1}, std::size_t{3}, std::size_t{77}, kMost}) {
      const std::size_t nbytes = count * ItemSize(t);
      for (Sweep sweep : kSweeps) {
        Bytes one(nbytes), first(nbytes), second(nbytes);
        kernels->reduce(one.data(), a.data(), b.data(), count, sweep);
        kernels->reduce2(first.data(), second.data(), a.data(), b.data(), count, sweep);
        for (const Bytes* got : {&one, &first, &second}) {
          CHECK(std::memcmp(got->data(), want.data(), nbytes) == 0, "dtype %d op %d count %zu sweep %d",
                static_cast<int>(t), static_cast<int>(op), count, static_cast<int>(sweep));
        }
      }
    }
  }
}

void TestType(DType t) {
  const Bytes a = Input(t, kMost, 1), b = Input(t, kMost, 2);
  for (int o = 0; o < hetcoll::kReduceOps; ++o) {
    const auto op = static_cast<ReduceOp>(o);
    const Kernels* kernels = FindKernels(t, op);
    CHECK((kernels != nullptr) == Supports(t, op), "dtype %d op %d", static_cast<int>(t), o);
    if (kernels == nullptr || op == ReduceOp::kAvg) continue;
    const Bytes want = ReferenceReduce(t, op, a, b);
    for (std::size_t count : Counts()) {
      for (Alias alias : {Alias::kNone, Alias::kA, Alias::kB}) {
        for (Sweep sweep : kSweeps) {
          if (sweep != Sweep::kPlain && count <= 130 && count % 64 > 1) continue;  // too short: the same path
          TestReduce(t, op, *kernels, a, b, want, count, alias, sweep, count % 3 == 0 ? 0 : (count * 5) % 64);
        }
      }
    }
  }
  TestOneNan(t, a, b);
  const Kernels* average = FindKernels(t, ReduceOp::kAvg);
  if (average != nullptr) {
    CHECK(average->reduce == FindKernels(t, ReduceOp::kSum)->reduce, "kAvg reduces as kSum");
    TestScale(t, *average, a);
  }
}

// Every pair of codes of an 8-bit format, and all codes of a 16-bit one against some.
void TestAllCodes(DType t) {
  const std::size_t size = ItemSize(t);
  Bytes a(65536 * size), b(65536 * size), got(65536 * size);
  std::mt19937 random(3);
  for (unsigned i = 0; i < 65536; ++i) {
    PutCode(&a[i * size], size, size == 1 ? i >> 8 : i);
    PutCode(&b[i * size], size, size == 1 ? i & 255 : static_cast<unsigned>(random()) & 65535);
  }
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMax, ReduceOp::kMin}) {
    FindKernels(t, op)->reduce(got.data(), a.data(), b.data(), 65536, Sweep::kPlain);
    const Bytes want = ReferenceReduce(t, op, a, b);
    for (std::size_t i = 0; i < got.size(); i += size) {
      CHECK(SameElement(t, &got[i], &want[i]), "dtype %d op %d: %x with %x gave %x, not %x", static_cast<int>(t),
            static_cast<int>(op), GetCode(&a[i], size), GetCode(&b[i], size), GetCode(&got[i], size),
            GetCode(&want[i], size));
    }
  }
}

// The same bytes, and afterwards a word of each line of the source is zero, and nothing before or behind its lines.
void TestTake(const Bytes& source, std::size_t nbytes, std::size_t offset, bool stream) {
  const std::size_t lines = (nbytes + 63) / 64 * 64;
  Bytes memory(lines + 192, kCanary), out(offset + nbytes + 96, kCanary);
  unsigned char* slot = memory.data() + 64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
  std::memcpy(slot, source.data(), nbytes);
  TakeBytes(&out[offset], slot, nbytes, stream);
  bool right = std::memcmp(&out[offset], source.data(), nbytes) == 0;
  for (std::size_t i = 0; i < offset; ++i) right = right && out[i] == kCanary;
  for (std::size_t i = offset + nbytes; i < out.size(); ++i) right = right && out[i] == kCanary;
  for (unsigned char* p = memory.data(); p < slot; ++p) right = right && *p == kCanary;
  for (unsigned char* p = slot + lines; p < memory.data() + memory.size(); ++p) right = right && *p == kCanary;
  for (std::size_t i = 0; i < nbytes; i += 64) {
    for (std::size_t j = 0; j < 8; ++j) right = right && slot[i + j] == 0;
  }
  CHECK(right, "taking %zu bytes to %zu, stream %d", nbytes, offset, stream);
}

void TestCopy() {
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i <= 600; ++i) sizes.push_back(i);
  sizes.insert(sizes.end(), {4095, 4096, 4097, 65536, 100001, 1 << 20, (1 << 21) + 7});
  Bytes source(1 << 22);
  std::mt19937 random(4);
  for (auto& byte : source) byte = static_cast<unsigned char>(random());
  for (std::size_t nbytes : sizes) {
    for (std::size_t offset : {0, 1, 17, 63}) {
      for (Sweep sweep : kSweeps) {
        const bool stream = sweep == Sweep::kAround;
        const unsigned char* from = &source[(nbytes + offset * 3) % 64];
        const auto test = [&](const char* way, const auto& copy) {
          Bytes out(offset + nbytes + 96, kCanary);
          copy(&out[offset]);
          bool same = std::memcmp(&out[offset], from, nbytes) == 0;
          for (std::size_t i = 0; i < offset; ++i) same = same && out[i] == kCanary;
          for (std::size_t i = offset + nbytes; i < out.size(); ++i) same = same && out[i] == kCanary;
          CHECK(same, "%s of %zu bytes at %zu, sweep %d", way, nbytes, offset, static_cast<int>(sweep));
        };
        test("copy", [&](unsigned char* to) { CopyBytes(to, from, nbytes, sweep); });
        if (sweep == Sweep::kPlain) test("string copy", [&](unsigned char* to) { CopyString(to, from, nbytes); });
        if (sweep != Sweep::kPages) TestTake(source, nbytes, offset, stream);
      }
    }
  }
}

// Threads of a GPU's kernel that wait look at the host's memory one after another: all do so, and few at once.
void TestTurns() {
  constexpr unsigned kThreads = 1 << 15, kEvery = 64, kTurns = 32;
  std::vector<int> looked(kThreads);
  for (unsigned looks = 1; looks <= kEvery * kTurns; ++looks) {
    unsigned at_once = 0;
    for (unsigned thread = 0; thread < kThreads; ++thread) {
      const bool turn = hetcoll::IsTurn(thread, looks, kEvery, kTurns);
      looked[thread] += turn;
      at_once += turn;
    }
    CHECK(at_once == (looks % kEvery == 0 ? kThreads / kTurns : 0), "%u threads at look %u", at_once, looks);
  }
  CHECK(std::all_of(looked.begin(), looked.end(), [](int n) { return n == 1; }), "each thread once");
}

}  // namespace

int main() {
  TestTurns();
  CHECK(!SetKernelIsa("mmx"), "an unknown instruction set");
  CHECK(FindKernels(static_cast<DType>(hetcoll::kDTypes), ReduceOp::kSum) == nullptr, "an unknown type");
  CHECK(FindKernels(DType::kInt8, static_cast<ReduceOp>(hetcoll::kReduceOps)) == nullptr, "an unknown operation");
  CHECK(SetKernelIsa("baseline"), "every processor has it");
  int tested = 0;
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    if (!SetKernelIsa(isa)) continue;
    CHECK(std::strcmp(KernelIsa(), isa) == 0, "%s", isa);
    ++tested;
    for (int t = 0; t < hetcoll::kDTypes; ++t) {
      TestType(static_cast<DType>(t));
      if (IsNarrow(static_cast<DType>(t))) TestAllCodes(static_cast<DType>(t));
    }
    TestCopy();
  }
  std::printf("%ld passed, %ld failed, %d instruction sets\n", passed, failed, tested);
  return failed == 0 ? 0 : 1;
}
