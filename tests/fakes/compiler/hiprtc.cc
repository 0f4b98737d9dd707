// libhiprtc: hipRTC's functions over compile().
#define RTC(name) hiprtc##name
#define RTC_WORD "HIPRTC"
#define RTC_IMAGE hiprtcGetCode
#define RTC_IMAGE_SIZE hiprtcGetCodeSize
#define RTC_VENDOR "HIP"
#define RTC_MACRO "__HIPCC_RTC__"
#define RTC_ARCH "gfx900"
#include "rtc.inc.h"

extern "C" __attribute__((visibility("default"))) RtcResult hiprtcVersion(int* major, int* minor) {
  *major = 99;  // no hipRTC's, so that a cache of compiled kernels keeps the two apart
  *minor = 0;
  return kSuccess;
}
