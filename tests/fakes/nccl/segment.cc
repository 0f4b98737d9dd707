#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "settings.h"

namespace fake::nccl {
namespace {

constexpr char kMagic[8] = "fake";

std::string file_name(const Id& id) {
  return std::string("fake-nccl-") + kVendor.name + "-" + std::to_string(id.nonce);
}

struct Own {  // files of ids that this process made and has not joined yet
  std::mutex mutex;
  std::map<std::uint64_t, int> files;
};

Own& own() {
  static auto* const all = new Own;
  return *all;
}

int open_file(const Id& id) {
  std::string path = "/proc/" + std::to_string(id.process) + "/fd/" + std::to_string(id.fd);
  std::string wanted = "/memfd:" + file_name(id) + " ";
  char name[128] = {};
  if (readlink(path.c_str(), name, sizeof name - 1) < 0) return -1;
  if (std::strncmp(name, wanted.c_str(), wanted.size()) != 0) return -1;
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

}  // namespace

std::size_t Segment::bytes(int ranks) {
  auto n = static_cast<std::size_t>(ranks);
  return 64 + n * sizeof(Peer) + n * n * sizeof(Pair) + n * kChunk;
}

bool Segment::make(Id* id) {
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->magic, kMagic, sizeof kMagic);
  std::strncpy(id->vendor, kVendor.name, sizeof id->vendor - 1);
  id->process = getpid();
  if (getrandom(&id->nonce, sizeof id->nonce, 0) != sizeof id->nonce) return false;
  id->fd = memfd_create(file_name(*id).c_str(), MFD_CLOEXEC);
  if (id->fd < 0) return false;
  std::lock_guard lock(own().mutex);
  own().files[id->nonce] = id->fd;
  return true;
}

std::shared_ptr<Segment> Segment::join(const Id& id, int ranks) {
  if (std::memcmp(id.magic, kMagic, sizeof kMagic) != 0) return nullptr;
  if (std::strncmp(id.vendor, kVendor.name, sizeof id.vendor) != 0) return nullptr;
  int fd = open_file(id);
  if (fd < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (ftruncate(fd, static_cast<off_t>(bytes(ranks))) == 0) {
    memory = mmap(nullptr, bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  close(fd);
  if (memory == MAP_FAILED) return nullptr;
  auto* agreed = static_cast<std::atomic<std::int32_t>*>(memory);
  std::int32_t first = 0;
  agreed->compare_exchange_strong(first, ranks);
  std::shared_ptr<Segment> segment(new Segment(memory, ranks));
  return agreed->load() == ranks ? segment : nullptr;
}

Segment::~Segment() { munmap(memory_, bytes(ranks_)); }

// The id's file is closed once every rank has it open.
void forget(const Id& id) {
  std::lock_guard lock(own().mutex);
  auto found = own().files.find(id.nonce);
  if (found == own().files.end()) return;
  close(found->second);
  own().files.erase(found);
}

Pair& Segment::pair(int from, int to) const {
  auto* pairs = reinterpret_cast<Pair*>(memory_ + 64 + static_cast<std::size_t>(ranks_) * sizeof(Peer));
  return pairs[from * ranks_ + to];
}

unsigned char* Segment::chunk(int rank) const {
  auto n = static_cast<std::size_t>(ranks_);
  return memory_ + 64 + n * sizeof(Peer) + n * n * sizeof(Pair) + static_cast<std::size_t>(rank) * kChunk;
}

}  // namespace fake::nccl
