// Prints the speed of the kernels, in 10^9 bytes of dst per second: kernels_bench [dtype [op [1]]] (their numbers; with
// 1 of those that give one NaN).
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/kernels.h"

using namespace hetcoll;

namespace {

constexpr const char* kDTypeNames[kDTypes] = {
    "int8",   "uint8", "int32", "uint32", "int64",     "uint64",     "float16",  "float32",  "float64", "bfloat16",
    "e4m3fn", "e5m2",  "int16", "uint16", "complex64", "complex128", "e4m3fnuz", "e5m2fnuz", "bool"};
constexpr const char* kOpNames[kReduceOps] = {"sum", "prod", "max",  "min", "avg", "land",
                                              "lor", "lxor", "band", "bor", "bxor"};

// Numbers near 1 in every format: subnormal operands are slow on some processors.
void Fill(DType dtype, std::vector<unsigned char>& data) {
  const std::size_t size = ItemSize(dtype);
  for (std::size_t i = 0; i + size <= data.size(); i += size) {
    std::memset(&data[i], static_cast<int>(i / size % 4), size);
    if (dtype == DType::kFloat32 || dtype == DType::kComplex64 || dtype == DType::kBfloat16) {
      for (std::size_t part = dtype == DType::kBfloat16 ? 2 : 4; part <= size; part += 4) data[i + part - 1] = 0x3f;
    } else if (dtype == DType::kFloat64 || dtype == DType::kComplex128) {
      for (std::size_t part = 8; part <= size; part += 8) data[i + part - 1] = 0x3f, data[i + part - 2] = 0xf0;
    } else if (dtype == DType::kBool) {
      data[i] &= 1;
    } else {
      data[i + size - 1] = 0x3a;
    }
  }
}

// Seconds of one call: the best of several batches, each long enough to time.
template <class Function>
double Time(Function f) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  long repeat = 1;
  for (int batch = 0; batch < 7;) {
    const auto start = Clock::now();
    for (long i = 0; i < repeat; ++i) f();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (seconds < 2e-4) {
      repeat *= 2;
      continue;
    }
    best = seconds / static_cast<double>(repeat) < best ? seconds / static_cast<double>(repeat) : best;
    ++batch;
  }
  return best;
}

struct Buffers {
  explicit Buffers(std::size_t nbytes) : dst(nbytes), dst2(nbytes), a(nbytes), b(nbytes) {}
  std::vector<unsigned char> dst, dst2, a, b;
};

void BenchPair(const char* isa, DType dtype, ReduceOp op, bool one_nan, std::vector<Buffers>& buffers) {
  const Kernels* kernels = FindKernels(dtype, op, one_nan);
  if (kernels == nullptr) return;
  std::printf("%-8s %-10s %-4s", isa, kDTypeNames[static_cast<int>(dtype)], kOpNames[static_cast<int>(op)]);
  for (Buffers& x : buffers) {
    const std::size_t nbytes = x.dst.size(), count = nbytes / ItemSize(dtype);
    Fill(dtype, x.a);
    Fill(dtype, x.b);
    const auto speed = [&](double seconds) { return static_cast<double>(nbytes) / seconds * 1e-9; };
    if (op == ReduceOp::kAvg) {
      x.dst = x.a;
      std::printf(
          "  %9zu: scale by 3 %5.1f, by 8 %5.1f", nbytes,
          speed(Time([&] { kernels->scale(x.dst.data(), count, 3), std::memcpy(x.dst.data(), x.a.data(), nbytes); })),
          speed(Time([&] { kernels->scale(x.dst.data(), count, 8), std::memcpy(x.dst.data(), x.a.data(), nbytes); })));
      continue;
    }
    std::printf("  %9zu: %5.1f", nbytes,
                speed(Time([&] { kernels->reduce(x.dst.data(), x.a.data(), x.b.data(), count, Sweep::kPlain); })));
    if (nbytes > 1 << 19) {
      std::printf(" streaming %5.1f",
                  speed(Time([&] { kernels->reduce(x.dst.data(), x.a.data(), x.b.data(), count, Sweep::kAround); })));
    }
    std::printf(" two %5.1f", speed(Time([&] {
                  kernels->reduce2(x.dst.data(), x.dst2.data(), x.a.data(), x.b.data(), count, Sweep::kPlain);
                })));
    std::memcpy(x.dst.data(), x.a.data(), nbytes);
    std::printf(" in place %5.1f",
                speed(Time([&] { kernels->reduce(x.dst.data(), x.dst.data(), x.b.data(), count, Sweep::kPlain); })));
  }
  Buffers& small = buffers[0];
  for (std::size_t count : {2, 31}) {
    if (op == ReduceOp::kAvg) break;
    const double seconds =
        Time([&] { kernels->reduce(small.dst.data(), small.a.data(), small.b.data(), count, Sweep::kPlain); });
    std::printf("  %zu elements %4.1f ns", count, seconds * 1e9);
  }
  std::printf("\n");
}

void BenchCopy(const char* isa) {
  for (std::size_t nbytes :
       {8ul, 64ul, 200ul, 512ul, 1024ul, 4096ul, 16384ul, 65536ul, 262144ul, 1ul << 20, 1ul << 26}) {
    Buffers x(nbytes);
    for (Sweep sweep : {Sweep::kPlain, Sweep::kAround, Sweep::kPages}) {
      constexpr const char* kNames[] = {"cached   ", "streaming", "by pages "};
      const double seconds = Time([&] { CopyBytes(x.dst.data(), x.a.data(), nbytes, sweep); });
      std::printf("%-8s copy %9zu %s %6.1f GB/s %9.1f ns\n", isa, nbytes, kNames[static_cast<int>(sweep)],
                  static_cast<double>(nbytes) / seconds * 1e-9, seconds * 1e9);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Buffers> buffers;
  for (std::size_t nbytes : {32ul << 10, 1ul << 20, 64ul << 20}) buffers.emplace_back(nbytes);
  for (const char* isa : {"avx512", "avx2", "baseline"}) {
    if (!SetKernelIsa(isa)) continue;
    for (int t = 0; t < kDTypes; ++t) {
      for (int o = 0; o < kReduceOps; ++o) {
        if ((argc > 1 && std::atoi(argv[1]) != t) || (argc > 2 && std::atoi(argv[2]) != o)) continue;
        BenchPair(isa, static_cast<DType>(t), static_cast<ReduceOp>(o), argc > 3, buffers);
      }
    }
    if (argc == 1) BenchCopy(isa);
  }
}
