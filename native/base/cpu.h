// What the processor offers. `__builtin_cpu_supports` needs a table of the compiler's own library, which that of zig,
// the compiler of the wheels, never fills in: everything is absent there.
#pragma once

namespace hetcoll::cpu {

bool HasSse42AndPclmul();
bool HasAvx2();    // and F16C, where the operating system keeps the wide registers
bool HasAvx512();  // and what HasAvx2 says; of AVX-512 F, BW, VL and DQ
bool IsAmd();

}  // namespace hetcoll::cpu
