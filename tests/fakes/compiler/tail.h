// What comes after a kernel's source: the checks that its loads and stores call, and how the runtime finds and calls
// each kernel. The compiler appends one FAKE_KERNEL(name) for each.
#pragma once

#undef __global__
#pragma GCC diagnostic ignored "-Wattributes"

const fake::Hooks* fake_hooks = nullptr;

// g++ calls these before each access (-fsanitize=kernel-address, without its inlined checks).
#define FAKE_CHECK(size)                                                         \
  extern "C" FAKE_OWN void __asan_load##size##_noabort(unsigned long address) {  \
    fake_hooks->access(address, size, 0);                                        \
  }                                                                                 \
  extern "C" FAKE_OWN void __asan_store##size##_noabort(unsigned long address) { \
    fake_hooks->access(address, size, 1);                                        \
  }
FAKE_CHECK(1)
FAKE_CHECK(2)
FAKE_CHECK(4)
FAKE_CHECK(8)
FAKE_CHECK(16)
extern "C" FAKE_OWN void __asan_loadN_noabort(unsigned long address, unsigned long nbytes) {
  fake_hooks->access(address, nbytes, 0);
}
extern "C" FAKE_OWN void __asan_storeN_noabort(unsigned long address, unsigned long nbytes) {
  fake_hooks->access(address, nbytes, 1);
}

namespace fake_shim {
template <class T>
struct value {
  using type = T;
};
template <class T>
struct value<const T> {
  using type = T;
};
template <unsigned...>
struct indices {};

template <auto kernel, class F = decltype(kernel)>
struct described;
template <class... A, void (*kernel)(A...)>
struct described<kernel, void (*)(A...)> {
  static constexpr unsigned sizes[sizeof...(A) + 1] = {sizeof(A)..., 0};
  static constexpr unsigned alignments[sizeof...(A) + 1] = {alignof(A)..., 0};
  template <unsigned... I>
  FAKE_OWN static void call(void** arguments, indices<I...>) {
    (void)arguments;
    kernel(*static_cast<typename value<A>::type*>(arguments[I])...);
  }
  FAKE_OWN static void run(void** arguments) { call(arguments, indices<__integer_pack(sizeof...(A))...>{}); }
  static constexpr fake::Kernel about = {sizeof...(A), sizes, alignments, &run};
};

FAKE_OWN void bind(const fake::Hooks* hooks) { fake_hooks = hooks; }
}  // namespace fake_shim

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))
#define FAKE_KERNEL(name)                                  \
  FAKE_EXPORT const fake::Kernel fake_kernel_##name; \
  const fake::Kernel fake_kernel_##name = fake_shim::described<&name>::about;
// A name expression (nvrtcAddNameExpression), under a name of its own.
#define FAKE_EXPRESSION(lowered, ...)                         \
  FAKE_EXPORT void lowered() {}                               \
  FAKE_EXPORT const fake::Kernel fake_kernel_##lowered; \
  const fake::Kernel fake_kernel_##lowered = fake_shim::described<&__VA_ARGS__>::about;

FAKE_EXPORT const fake::Image fake_image;
const fake::Image fake_image = {FAKE_VENDOR, FAKE_IMAGE_ARCH, &fake_shim::bind};
