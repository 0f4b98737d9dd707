// What comes after a kernel's source: the checks that its loads and stores call, and how the runtime finds and calls
// each kernel. The compiler appends one STANDIN_KERNEL(name) for each.
#pragma once

#undef __global__
#pragma GCC diagnostic ignored "-Wattributes"

const standin::Hooks* standin_hooks = nullptr;

// g++ calls these before each access (-fsanitize=kernel-address, without its inlined checks).
#define STANDIN_CHECK(size)                                                         \
  extern "C" STANDIN_OWN void __asan_load##size##_noabort(unsigned long address) {  \
    standin_hooks->access(address, size, 0);                                        \
  }                                                                                 \
  extern "C" STANDIN_OWN void __asan_store##size##_noabort(unsigned long address) { \
    standin_hooks->access(address, size, 1);                                        \
  }
STANDIN_CHECK(1)
STANDIN_CHECK(2)
STANDIN_CHECK(4)
STANDIN_CHECK(8)
STANDIN_CHECK(16)
extern "C" STANDIN_OWN void __asan_loadN_noabort(unsigned long address, unsigned long nbytes) {
  standin_hooks->access(address, nbytes, 0);
}
extern "C" STANDIN_OWN void __asan_storeN_noabort(unsigned long address, unsigned long nbytes) {
  standin_hooks->access(address, nbytes, 1);
}

namespace standin_shim {
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
  STANDIN_OWN static void call(void** arguments, indices<I...>) {
    (void)arguments;
    kernel(*static_cast<typename value<A>::type*>(arguments[I])...);
  }
  STANDIN_OWN static void run(void** arguments) { call(arguments, indices<__integer_pack(sizeof...(A))...>{}); }
  static constexpr standin::Kernel about = {sizeof...(A), sizes, alignments, &run};
};

STANDIN_OWN void bind(const standin::Hooks* hooks) { standin_hooks = hooks; }
}  // namespace standin_shim

#define STANDIN_EXPORT extern "C" __attribute__((visibility("default")))
#define STANDIN_KERNEL(name)                                  \
  STANDIN_EXPORT const standin::Kernel standin_kernel_##name; \
  const standin::Kernel standin_kernel_##name = standin_shim::described<&name>::about;
// A name expression (nvrtcAddNameExpression), under a name of its own.
#define STANDIN_EXPRESSION(lowered, ...)                         \
  STANDIN_EXPORT void lowered() {}                               \
  STANDIN_EXPORT const standin::Kernel standin_kernel_##lowered; \
  const standin::Kernel standin_kernel_##lowered = standin_shim::described<&__VA_ARGS__>::about;

STANDIN_EXPORT const standin::Image standin_image;
const standin::Image standin_image = {STANDIN_VENDOR, STANDIN_IMAGE_ARCH, &standin_shim::bind};
