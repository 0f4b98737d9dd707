// What a repeated call runs: the key is what a call is, without its memory.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <utility>

#include "base/types.h"

namespace hetcoll {

namespace nb = nanobind;

struct CallKey {
  std::uint8_t collective;
  DType dtype;
  std::uint8_t op;
  std::int32_t root;
  std::size_t send_count;
  std::size_t recv_count;
  bool operator==(const CallKey&) const = default;
};

struct CallKeyHash {
  std::size_t operator()(const CallKey& k) const {
    std::uint64_t h = k.send_count * 0x9e3779b97f4a7c15u;
    h = (h ^ k.recv_count) * 0xff51afd7ed558ccdu;
    h ^= std::uint64_t{k.collective} | std::uint64_t(k.dtype) << 8 | std::uint64_t{k.op} << 16 |
         std::uint64_t(static_cast<std::uint32_t>(k.root)) << 24;
    h *= 0xc4ceb9fe1a85ec53u;
    return static_cast<std::size_t>(h ^ (h >> 32));
  }
};

// Least recently inserted entries go first once there are `kCapacity`: a job that calls with ever new sizes must not
// grow. A small direct-mapped table in front makes a hit cost a few nanoseconds.
template <class Value>
class CallCache {
 public:
#ifdef NB_FREE_THREADED
  using Found = std::shared_ptr<Value>;  // a share of its own, since another thread may insert at any time
#else
  using Found = const std::shared_ptr<Value>&;  // the GIL is the lock: it holds until another thread may run Python
#endif

  // Null where there is none.
  Found Find(const CallKey& key) {
    const nb::ft_lock_guard lock(mutex_);
    Slot& slot = front_[CallKeyHash{}(key) % front_.size()];
    if (slot.value && slot.key == key) return slot.value;
    const auto it = map_.find(key);
    if (it == map_.end()) return none_;
    slot = {key, it->second};
    return slot.value;
  }

  void Insert(const CallKey& key, std::shared_ptr<Value> value) {
    std::shared_ptr<Value> ended[3];  // what dies does so once the lock is free
    const nb::ft_lock_guard lock(mutex_);
    const auto [it, fresh] = map_.try_emplace(key, nullptr);
    ended[0] = std::exchange(it->second, std::move(value));
    if (!fresh) return;
    age_.push_back(key);
    if (age_.size() <= kCapacity) return;
    Slot& slot = front_[CallKeyHash{}(age_.front()) % front_.size()];
    if (slot.key == age_.front()) ended[1] = std::exchange(slot.value, nullptr);
    const auto oldest = map_.find(age_.front());
    ended[2] = std::move(oldest->second);
    map_.erase(oldest);
    age_.pop_front();
  }

 private:
  struct Slot {
    CallKey key{};
    std::shared_ptr<Value> value;
  };
  static constexpr std::size_t kCapacity = 1024;
  nb::ft_mutex mutex_;
  const std::shared_ptr<Value> none_;
  std::array<Slot, 64> front_;
  std::unordered_map<CallKey, std::shared_ptr<Value>, CallKeyHash> map_;
  std::list<CallKey> age_;
};

}  // namespace hetcoll
