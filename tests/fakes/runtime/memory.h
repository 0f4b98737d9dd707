// The memory that a fake driver knows: "device" memory is host memory in a file of its own (memfd), so that
// another process can map it (IPC), between pages that nobody may touch. An address is never used twice.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>

#include "errors.h"

namespace fake {

enum class Kind {
  kPageable,    // not the driver's
  kDevice,      // IPC and dma-buf work
  kPool,        // stream-ordered allocation: neither does
  kManaged,     //
  kPinned,      // the driver's own host memory
  kRegistered,  // the user's host memory
  kSignal,      // HIP's hipMallocSignalMemory
  kImported,    // another process's device memory
};

struct Block {
  std::uintptr_t base = 0;
  std::size_t size = 0;
  Kind kind = Kind::kPageable;
  int device = -1;  // of the memory, or of the context that registered it
  unsigned flags = 0;
  std::uint64_t id = 0;
  std::uintptr_t map = 0;  // where its pages begin
  std::size_t mapped = 0;
  int fd = -1;
  bool sealed = false;   // see Memory::seal
  int references = 1;    // of imported memory
  char origin[64] = {};  // of imported memory: its handle

  bool on_device() const {
    return kind == Kind::kDevice || kind == Kind::kPool || kind == Kind::kImported || kind == Kind::kManaged;
  }
};

constexpr std::size_t kHandleBytes = 64;

class Memory {
 public:
  static Memory& instance();

  // `capacity` bounds what the device's memory adds up to; host memory has none.
  Error allocate(Kind kind, int device, std::size_t size, unsigned flags, std::size_t capacity, std::uintptr_t* base);
  Error release(std::uintptr_t base, Kind kind);
  Error register_host(std::uintptr_t base, std::size_t size, int device, unsigned flags);
  Error unregister_host(std::uintptr_t base);
  std::size_t used(int device);

  // The block that holds `address`; kind kPageable when none does.
  Block find(std::uintptr_t address);
  // The block of [address, address + size), which must not run over its end.
  Error span(std::uintptr_t address, std::size_t size, Block* block);

  Error export_handle(std::uintptr_t address, char handle[kHandleBytes]);
  Error import_handle(const char handle[kHandleBytes], int device, std::uintptr_t* base);
  Error close_imported(std::uintptr_t base);
  Error export_file(std::uintptr_t address, std::size_t size, int* fd);

  // From now on whoever reads or writes the block at `base` by its address is killed, as on hosts that do not reach
  // their GPUs' memory; copies of the driver's and RDMA devices that have it registered still do.
  Error seal(std::uintptr_t base);
  // What a copy engine does, sealed or not.
  void transfer(std::uintptr_t destination, std::uintptr_t source, std::size_t size);
  // Writes zeros, sealed or not, as if by giving the pages back where it can: what nobody uses takes no time then.
  void clear(std::uintptr_t destination, std::size_t size);

  // Grows whenever a block goes, so that whoever remembers one knows to look again.
  static std::uint64_t epoch() { return epoch_.load(std::memory_order_acquire); }

 private:
  const Block* holder(std::uintptr_t address) const;
  void drop(std::uintptr_t base);

  std::shared_mutex mutex_;
  std::map<std::uintptr_t, Block> blocks_;
  std::map<int, std::size_t> used_;
  std::uint64_t next_id_ = 1;
  static inline std::atomic<std::uint64_t> epoch_{0};
};

}  // namespace fake
