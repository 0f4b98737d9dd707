// The fixed-width integers of <cstdint>, which NVRTC and hipRTC lack.
#pragma once

#if defined(__CUDACC__) || defined(__HIP__)
namespace std {
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
}  // namespace std
#else
#include <cstdint>
#endif
