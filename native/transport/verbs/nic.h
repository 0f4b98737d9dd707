// One port of one RDMA device, and the user memory that is registered with it.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/copier.h"
#include "transport/transport.h"
#include "transport/verbs/api.h"

namespace hetcoll {

inline constexpr int kMaxNics = 16;

// What Python knows of a port. The protection domain and its device stay its own: it closes them after the engine.
struct NicInfo {
  std::string device;
  ibv::Pd* pd = nullptr;
  std::uint8_t port = 1;
  std::uint8_t gid_index = 0;
  std::array<std::uint8_t, 16> gid{};
  std::uint16_t lid = 0;
  std::uint32_t mtu = 1024;  // bytes, the port's active one
  bool ethernet = true;      // RoCE: addressed by GID; else InfiniBand
  std::uint8_t traffic_class = 0;
  std::uint8_t service_level = 0;
  std::uint8_t timeout = 16;  // 4.096 us * 2^timeout until a packet is sent again
  std::uint8_t retries = 7;
  std::uint8_t rnr_retries = 7;
  double gbps = 10;  // a first guess

  // "rxe0 port 1 GID ::ffff:10.77.0.1": for messages.
  std::string Name() const;
};

class ReadBack;

class Nic {
 public:
  Nic(const VerbsApi& api, NicInfo info, int index);
  ~Nic();
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  const VerbsApi& api() const { return api_; }
  const NicInfo& info() const { return info_; }
  int index() const { return index_; }
  ibv::Context& context() const { return *info_.pd->context; }
  ibv::CompChannel* channel() const { return channel_.get(); }

  // Becomes readable when a completion queue that was armed gets something. Of several threads that wait, any may take
  // the news: what follows a wait looks at the queues themselves.
  pollfd Poll() const { return {channel_->fd, POLLIN, 0}; }
  bool Drain();  // whether there was any

  // Made when first asked for.
  ReadBack& read_back();
  bool reads_back() const { return read_back_ != nullptr; }
  // The one so far may have failed, or never answer.
  void Renew(std::unique_ptr<ReadBack> read_back);

  [[noreturn]] void Fail(const std::string& what, int error) const;

 private:
  const VerbsApi& api_;
  NicInfo info_;
  int index_;
  VerbsOwned<ibv::CompChannel> channel_;
  std::unique_ptr<ReadBack> read_back_;
};

// User memory that NICs may read and write where it lies.
struct Region {
  std::uintptr_t address;
  std::size_t nbytes;
  std::uintptr_t seen_at;  // its first byte's address for NICs: another one where it is a dma-buf
  bool on_host;            // whether the processor can read it, too
  std::array<std::uint32_t, kMaxNics> lkey;
  std::array<std::uint32_t, kMaxNics> rkey;
  std::uint32_t nics = 0;  // bit i: the keys of NIC i are valid
  int uses = 0;            // frames that may have to be sent again from here, and messages that peers write here

  const std::byte* Seen(const std::byte* p) const { return p + (seen_at - address); }
};

struct RegionKey {
  int nic;
  std::uint32_t lkey;
  std::uint32_t rkey;
};

class Regions {
 public:
  // `seen_at` is the address that NICs have for memory of a device, which only they are to touch.
  int Add(std::uintptr_t address, std::size_t nbytes, const std::vector<RegionKey>& keys,
          std::optional<std::uintptr_t> seen_at = {});
  // False, and nothing happens, while the region is in use.
  bool Remove(int handle);
  // The region that holds all of these bytes and is known to all of `nics`, or null.
  Region* Find(const std::byte* data, std::size_t n, std::uint32_t nics);

  // What copies a device's memory for links whose messages may lie there or in the host's.
  std::shared_ptr<Copier> copier;

 private:
  int next_ = 1;
  std::map<int, std::unique_ptr<Region>> regions_;
  std::multimap<std::uintptr_t, Region*> by_address_;
  std::size_t longest_ = 0;  // no region reaches further than this behind its address
};

}  // namespace hetcoll
