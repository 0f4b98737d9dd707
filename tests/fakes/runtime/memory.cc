#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "settings.h"

namespace fake {
namespace {

constexpr std::size_t kGuard = 65536;     // on either side, so that a stray access hits it
constexpr std::size_t kAlignment = 256;   // of every allocation, as cuMemAlloc's
constexpr std::size_t kPoison = 1 << 20;  // so many bytes of fresh memory are not zero

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

std::size_t page() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

struct Handle {  // what a process gives another to open its memory
  char vendor[8];
  std::int32_t process;
  std::int32_t fd;
  std::uint64_t id;
  std::uint64_t size;
  std::uint64_t offset;  // of the first byte in the file
  std::uint64_t mapped;
  char unused[16];
};
static_assert(sizeof(Handle) == kHandleBytes);

std::string file_name(std::uint64_t id) {
  return std::string("fake-") + kVendor.name + "-" + std::to_string(getpid()) + "-" + std::to_string(id);
}

// Reserves addresses around `mapped` bytes and puts the file (or fresh memory, fd -1) between them; 0 when refused.
std::uintptr_t map_between_guards(int fd, std::size_t mapped) {
  void* room = mmap(nullptr, mapped + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return 0;
  char* begin = static_cast<char*>(room) + kGuard;
  int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  if (mmap(begin, mapped, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED) {
    munmap(room, mapped + 2 * kGuard);
    return 0;
  }
  return reinterpret_cast<std::uintptr_t>(begin);
}

// Its addresses stay reserved: a use after this is a fault, never another allocation's data.
void unmap(std::uintptr_t map, std::size_t mapped) {
  mmap(reinterpret_cast<void*>(map), mapped, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// Pins nothing, but makes every page exist, as a driver's pinning does, or says that one cannot.
bool populate(std::uintptr_t base, std::size_t size) {
  std::uintptr_t begin = base / page() * page();
  std::size_t length = round_up(base + size, page()) - begin;
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14
  if (madvise(reinterpret_cast<void*>(begin), length, kPopulateWrite) == 0) return true;
  if (errno != EINVAL) return false;
  unsigned char resident = 0;
  for (std::size_t at = 0; at < length; at += page()) {
    if (mincore(reinterpret_cast<void*>(begin + at), page(), &resident) != 0) return false;
  }
  return true;
}

}  // namespace

Memory& Memory::instance() {
  static Memory* const memory = new Memory;
  return *memory;
}

const Block* Memory::holder(std::uintptr_t address) const {
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return nullptr;
  const Block& block = std::prev(after)->second;
  return address - block.base < block.size ? &block : nullptr;
}

Error Memory::allocate(Kind kind, int device, std::size_t size, unsigned flags, std::size_t capacity,
                       std::uintptr_t* base) {
  if (size == 0) return kInvalidValue;
  std::unique_lock lock(mutex_);
  Block block;
  block.kind = kind;
  block.device = device;
  block.flags = flags;
  block.size = size;
  bool counted = block.on_device();
  if (counted && (size > capacity || used_[device] > capacity - size)) return kOutOfMemory;
  block.id = next_id_++;
  block.mapped = round_up(size, page());
  if (kind == Kind::kDevice) {
    block.fd = memfd_create(file_name(block.id).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (block.fd < 0) return kOutOfMemory;
    if (ftruncate(block.fd, static_cast<off_t>(block.mapped)) != 0 ||
        fcntl(block.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
      close(block.fd);
      return kOutOfMemory;
    }
  }
  block.map = map_between_guards(block.fd, block.mapped);
  if (block.map == 0) {
    if (block.fd >= 0) close(block.fd);
    return kOutOfMemory;
  }
  // At the end of its pages, as near as alignment lets it be, so that running over the end meets the guard.
  block.base = block.map + block.mapped - round_up(size, kAlignment);
  if (block.base < block.map) block.base = block.map;
  std::memset(reinterpret_cast<void*>(block.base), 0xA5, size < kPoison ? size : kPoison);
  if (counted) used_[device] += size;
  *base = block.base;
  blocks_[block.base] = block;
  return kOk;
}

void Memory::drop(std::uintptr_t base) {
  auto found = blocks_.find(base);
  Block& block = found->second;
  if (block.map) unmap(block.map, block.mapped);
  if (block.fd >= 0) close(block.fd);
  if (block.on_device() && block.kind != Kind::kImported) used_[block.device] -= block.size;
  blocks_.erase(found);
  epoch_.fetch_add(1, std::memory_order_acq_rel);
}

Error Memory::release(std::uintptr_t base, Kind kind) {
  std::unique_lock lock(mutex_);
  auto found = blocks_.find(base);
  if (found == blocks_.end()) return kInvalidValue;
  bool device = kind == Kind::kDevice && found->second.on_device() && found->second.kind != Kind::kImported;
  if (found->second.kind != kind && !device) return kInvalidValue;
  drop(base);
  return kOk;
}

Error Memory::register_host(std::uintptr_t base, std::size_t size, int device, unsigned flags) {
  if (base == 0 || size == 0) return kInvalidValue;
  std::unique_lock lock(mutex_);
  auto after = blocks_.lower_bound(base + size);
  if (after != blocks_.begin()) {
    const Block& last = std::prev(after)->second;
    if (last.base + last.size > base) return kAlreadyRegistered;
  }
  if (!populate(base, size)) return kInvalidValue;
  Block block;
  block.base = base;
  block.size = size;
  block.kind = Kind::kRegistered;
  block.device = device;
  block.flags = flags;
  block.id = next_id_++;
  blocks_[base] = block;
  return kOk;
}

Error Memory::unregister_host(std::uintptr_t base) {
  std::unique_lock lock(mutex_);
  auto found = blocks_.find(base);
  if (found == blocks_.end() || found->second.kind != Kind::kRegistered) return kNotRegistered;
  drop(base);
  return kOk;
}

std::size_t Memory::used(int device) {
  std::unique_lock lock(mutex_);
  return used_[device];
}

Block Memory::find(std::uintptr_t address) {
  std::shared_lock lock(mutex_);
  const Block* block = holder(address);
  return block ? *block : Block{};
}

Error Memory::span(std::uintptr_t address, std::size_t size, Block* block) {
  *block = find(address);
  if (block->kind == Kind::kPageable) return kOk;
  return size <= block->base + block->size - address ? kOk : kInvalidValue;
}

Error Memory::seal(std::uintptr_t base) {
  std::unique_lock lock(mutex_);
  auto found = blocks_.find(base);
  if (found == blocks_.end() || found->second.kind != Kind::kDevice) return kInvalidValue;
  Block& block = found->second;
  if (mprotect(reinterpret_cast<void*>(block.map), block.mapped, PROT_NONE) != 0) return kNotSupported;
  block.sealed = true;
  return kOk;
}

void Memory::transfer(std::uintptr_t destination, std::uintptr_t source, std::size_t size) {
  const Block to = find(destination), from = find(source);
  if (!to.sealed && !from.sealed) {
    std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), size);
    return;
  }
  std::vector<char> bytes(size);
  bool whole = true;
  if (from.sealed) {
    whole = pread(from.fd, bytes.data(), size, static_cast<off_t>(source - from.map)) == static_cast<ssize_t>(size);
  } else {
    std::memcpy(bytes.data(), reinterpret_cast<const void*>(source), size);
  }
  if (to.sealed) {
    whole &= pwrite(to.fd, bytes.data(), size, static_cast<off_t>(destination - to.map)) == static_cast<ssize_t>(size);
  } else {
    std::memcpy(reinterpret_cast<void*>(destination), bytes.data(), size);
  }
  if (!whole) std::abort();
}

void Memory::clear(std::uintptr_t destination, std::size_t size) {
  const Block to = find(destination);
  bool worth = to.sealed || size >= 16 * page();
  if (to.kind == Kind::kDevice && worth &&
      fallocate(to.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(destination - to.map),
                static_cast<off_t>(size)) == 0) {
    return;
  }
  std::memset(reinterpret_cast<void*>(destination), 0, size);
}

Error Memory::export_handle(std::uintptr_t address, char out[kHandleBytes]) {
  std::shared_lock lock(mutex_);
  const Block* block = holder(address);
  if (!block || block->kind != Kind::kDevice) return kInvalidValue;
  Handle handle{};
  std::snprintf(handle.vendor, sizeof handle.vendor, "%s", kVendor.name);
  handle.process = getpid();
  handle.fd = block->fd;
  handle.id = block->id;
  handle.size = block->size;
  handle.offset = block->base - block->map;
  handle.mapped = block->mapped;
  std::memcpy(out, &handle, sizeof handle);
  return kOk;
}

Error Memory::import_handle(const char in[kHandleBytes], int device, std::uintptr_t* base) {
  Handle handle;
  std::memcpy(&handle, in, sizeof handle);
  if (std::strncmp(handle.vendor, kVendor.name, sizeof handle.vendor) != 0) return kInvalidValue;
  if (handle.process == getpid()) return kInvalidContext;  // a process cannot open its own
  std::unique_lock lock(mutex_);
  for (auto& [address, block] : blocks_) {
    if (block.kind == Kind::kImported && std::memcmp(block.origin, in, kHandleBytes) == 0) {
      ++block.references;
      *base = address;
      return kOk;
    }
  }
  std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.fd);
  std::string wanted = std::string("/memfd:fake-") + kVendor.name + "-" + std::to_string(handle.process) + "-" +
                       std::to_string(handle.id) + " ";
  char name[128] = {};
  if (readlink(path.c_str(), name, sizeof name - 1) < 0 || std::strncmp(name, wanted.c_str(), wanted.size()) != 0) {
    return kInvalidValue;  // it was freed, or its process ended
  }
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidValue;
  Block block;
  block.kind = Kind::kImported;
  block.device = device;
  block.size = handle.size;
  block.mapped = handle.mapped;
  block.map = map_between_guards(fd, handle.mapped);
  close(fd);
  if (block.map == 0) return kOutOfMemory;
  block.base = block.map + handle.offset;
  block.id = next_id_++;
  std::memcpy(block.origin, in, kHandleBytes);
  *base = block.base;
  blocks_[block.base] = block;
  return kOk;
}

Error Memory::close_imported(std::uintptr_t base) {
  std::unique_lock lock(mutex_);
  auto found = blocks_.find(base);
  if (found == blocks_.end() || found->second.kind != Kind::kImported) return kInvalidValue;
  if (--found->second.references == 0) drop(base);
  return kOk;
}

Error Memory::export_file(std::uintptr_t address, std::size_t size, int* fd) {
  std::shared_lock lock(mutex_);
  const Block* block = holder(address);
  if (!block || block->kind != Kind::kDevice || address % page() || size == 0 || size % page()) return kInvalidValue;
  if (size > block->map + block->mapped - address) return kInvalidValue;
  if (address != block->map) return kNotSupported;  // a memory file has no window that begins later
  *fd = fcntl(block->fd, F_DUPFD_CLOEXEC, 0);
  return *fd < 0 ? kNotSupported : kOk;
}

}  // namespace fake

// For tests.
extern "C" __attribute__((visibility("default"))) int fake_seal(std::uintptr_t base) {
  return fake::Memory::instance().seal(base);
}
