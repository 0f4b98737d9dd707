#include "base/cpu.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace hetcoll::cpu {

#ifdef __x86_64__
namespace {

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;

  explicit Leaf(unsigned number) { __get_cpuid_count(number, 0, &a, &b, &c, &d); }
};

constexpr unsigned Bit(int i) { return 1u << i; }

bool All(unsigned word, unsigned bits) { return (word & bits) == bits; }

// Which registers the operating system keeps for each thread.
bool Keeps(unsigned registers) {
  if (!All(Leaf(1).c, Bit(27))) return false;  // OSXSAVE: it says so at all
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return All(low, registers);
}

constexpr unsigned kYmm = Bit(1) | Bit(2), kZmm = kYmm | Bit(5) | Bit(6) | Bit(7);

}  // namespace

bool HasSse42AndPclmul() { return All(Leaf(1).c, Bit(20) | Bit(1)); }

bool HasAvx2() { return Keeps(kYmm) && All(Leaf(1).c, Bit(28) | Bit(29)) && All(Leaf(7).b, Bit(5)); }

bool HasAvx512() { return HasAvx2() && Keeps(kZmm) && All(Leaf(7).b, Bit(16) | Bit(17) | Bit(30) | Bit(31)); }

bool IsAmd() { return Leaf(0).b == signature_AMD_ebx; }
#else
bool HasSse42AndPclmul() { return false; }
bool HasAvx2() { return false; }
bool HasAvx512() { return false; }
bool IsAmd() { return false; }
#endif

}  // namespace hetcoll::cpu
