// What a compiled kernel and the runtime know of each other. Also read by the compiler of kernels (compiler/shim.h),
// so it needs no header.
#pragma once

namespace fake {

struct ThreadView {  // of the thread that runs now
  unsigned thread[3], block[3], block_dim[3], grid_dim[3];
  unsigned warp_size;
  void* shared;  // dynamic shared memory of the block
};

struct Hooks {
  const ThreadView* (*view)();
  void (*access)(unsigned long address, unsigned long nbytes, int write);  // before every load and store
  unsigned (*barrier)(unsigned predicate);                                 // of the block; how many were not zero
  void (*warp_barrier)(unsigned long long lanes);                          // of those lanes
  unsigned long long* (*warp_slots)();                                     // a word a lane, to exchange values in
  void (*yield)();
  void (*trap)();
};

struct Kernel {  // exported as fake_kernel_<name>
  unsigned parameters;
  const unsigned* sizes;  // of each, bytes
  const unsigned* alignments;
  void (*call)(void** arguments);  // one thread's
};

struct Image {  // exported as fake_image
  char vendor[8];
  char arch[24];
  void (*bind)(const Hooks* hooks);
};

}  // namespace fake
