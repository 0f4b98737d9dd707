#include "kernels/kernels.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <atomic>
#include <cstring>

#include "base/cpu.h"
#include "kernels/kernel_table.h"
#include "kernels/vectors.h"

namespace hetcoll {
namespace {

struct Isa {
  const char* name;
  const KernelTable& (*table)();
  bool (*present)();
};

// Best first. What counts as present is what CMakeLists.txt compiles the files with.
constexpr Isa kIsas[] = {
#ifdef HETCOLL_AVX
    {"avx512", avx512::Table, cpu::HasAvx512},
    {"avx2", avx2::Table, cpu::HasAvx2},
#endif
    {"baseline", baseline::Table, [] { return true; }},
};

const KernelTable* BestTable() {
  for (const Isa& isa : kIsas) {
    if (isa.present()) return &isa.table();
  }
  return &baseline::Table();
}

std::atomic<const KernelTable*>& Chosen() {
  static std::atomic<const KernelTable*> chosen{BestTable()};
  return chosen;
}

const KernelTable& Table() { return *Chosen().load(std::memory_order_relaxed); }

}  // namespace

const Kernels* FindKernels(DType dtype, ReduceOp op, bool one_nan) {
  const auto row = static_cast<unsigned>(dtype), column = static_cast<unsigned>(op);
  if (row >= kDTypes || column >= kReduceOps) return nullptr;
  const Kernels& settled = Table().one_nan[row][column];
  if (one_nan && settled.reduce != nullptr) return &settled;
  const Kernels& kernels = Table().entry[row][column];
  return kernels.reduce ? &kernels : nullptr;
}

const Codec* FindCodec(DType dtype, Format format) {
  const auto row = static_cast<unsigned>(dtype), column = static_cast<unsigned>(format);
  if (row >= kDTypes || column >= kFormats) return nullptr;
  const Codec& codec = Table().codec[row][column];
  return codec.round ? &codec : nullptr;
}

void CopyBytes(void* dst, const void* src, std::size_t nbytes, Sweep sweep) {
  auto* d = static_cast<char*>(dst);
  const auto* s = static_cast<const char*>(src);
  if (nbytes <= 64) return CopySmall(d, s, nbytes);
  Table().copy(d, s, nbytes, sweep);
}

void TakeBytes(void* dst, void* src, std::size_t nbytes, bool stream) {
  Table().take(static_cast<char*>(dst), static_cast<char*>(src), nbytes, stream);
}

// Sanitizers do not see what assembly touches.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void CopyString(void* dst, const void* src, std::size_t nbytes) {
  asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(nbytes) : : "memory");
}
#else
void CopyString(void* dst, const void* src, std::size_t nbytes) { CopyBytes(dst, src, nbytes); }
#endif

bool FastStrings() {
#ifdef __x86_64__
  constexpr unsigned kLeaf = 7, kErms = 1u << 9, kFsrm = 1u << 4;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(kLeaf, 0, &a, &b, &c, &d) != 0 && (b & kErms) != 0 && (d & kFsrm) != 0;
#else
  return false;
#endif
}

const char* KernelIsa() {
  for (const Isa& isa : kIsas) {
    if (&isa.table() == &Table()) return isa.name;
  }
  return "baseline";
}

bool SetKernelIsa(const char* name) {
  for (const Isa& isa : kIsas) {
    if (std::strcmp(isa.name, name) == 0 && isa.present()) {
      Chosen().store(&isa.table(), std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace hetcoll
