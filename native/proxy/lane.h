// What goes through one link of one direction of a proxy's edge: messages, or a part of each. Moved by one thread.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proxy/proxy.h"
#include "transport/shm/slots.h"
#include "transport/transport.h"

namespace hetcoll {

// Of the messages in an edge's slots.
using PartsEnded = std::vector<std::atomic<unsigned>>;

class ProxyLane {
 public:
  // `ended` is shared by the lanes of the edge. `ahead`: the link makes use of what is announced before it is due.
  ProxyLane(int peer, int channel, const Slots& slots, std::shared_ptr<PartsEnded> ended, LinkEnds end, bool ahead)
      : peer_(peer), channel_(channel), slots_(slots), ended_(std::move(ended)), end_(std::move(end)), ahead_(ahead) {}

  void Expect() { posted_.fetch_add(1, std::memory_order_relaxed); }
  void Add(const ProxyPart& m) {
    if (left_) {
      through_.fetch_add(1, std::memory_order_release);
    } else {
      queue_.push_back(m);
    }
  }
  bool empty() const { return queue_.empty() && lent_.empty(); }

  // Moves what can move without waiting; true if anything did. Throws Fault.
  bool Move() { return outgoing_ ? MoveOut() : MoveIn(); }

  // Adds what to wait on; whether the GPU is waited for, which wakes nobody.
  bool AddPoll(std::vector<pollfd>& fds) const {
    if (left_) return false;
    // What was not offered to the link for want of the GPU's word is not offered yet where that has come since.
    const bool blocked = !queue_.empty() && !(outgoing_ ? offered_ : announced_ > 0);
    if (blocked && lent_.empty()) return true;
    if (outgoing_) {
      end_.send->AddPoll(fds);
    } else {
      end_.recv->AddPoll(fds);
    }
    return blocked || (!outgoing_ && ahead_ && announced_ < queue_.size());
  }

  // Streams that wait for this lane's words wait no more.
  void Release() {
    if (outgoing_) {
      slots_.ReleaseCredit();
    } else {
      slots_.ReleaseReady();
    }
  }

  // Nothing is moved from here on, and nobody waits for it.
  void Leave() {
    left_ = true;
    end_ = {};
    through_.fetch_add(queue_.size() + lent_.size(), std::memory_order_release);
    queue_.clear();
    lent_.clear();
    Release();
  }

  int peer() const { return peer_; }

  void Close() {
    if (end_.send != nullptr) end_.send->Finish();
    end_ = {};
  }

  bool idle() const { return posted_.load(std::memory_order_acquire) == through_.load(std::memory_order_acquire); }
  std::uint64_t moves() const { return moves_.load(std::memory_order_relaxed); }
  std::string Describe() const {
    if (idle()) return "";
    return std::string(outgoing_ ? "send to rank " : "receive from rank ") + std::to_string(peer_) + " on channel " +
           std::to_string(channel_) + ": " + std::to_string(posted_ - through_) +
           " messages or parts of them, the first at byte " + std::to_string(done_.load(std::memory_order_relaxed));
  }

 private:
  struct Lent {
    ProxyPart part;
    std::uint64_t end;  // bytes that were pushed until then
  };

  // Whether the other parts of its message are through as well, now that this one is. The next message comes to the
  // slot only after that.
  bool Last(const ProxyPart& m) {
    if (m.parts == 1) return true;
    std::atomic<unsigned>& ended = (*ended_)[slots_.Index(m.number)];
    if (ended.fetch_add(1, std::memory_order_acq_rel) + 1 < m.parts) return false;
    ended.store(0, std::memory_order_relaxed);
    return true;
  }

  std::byte* At(const ProxyPart& m) const { return slots_.At(m.number) + m.begin; }
  bool Ours(const ProxyPart& m) const { return outgoing_ ? slots_.Full(m.number) : slots_.Free(m.number); }

  // A NIC may read a slot until the peer has confirmed what it read there.
  bool MoveOut() {
    offered_ = !queue_.empty() && Ours(queue_.front());
    bool moved = offered_ && Push();
    if (lent_.empty()) return moved;
    if (!moved) end_.send->Keep();  // the slot is worth more than the copy
    const std::uint64_t back = pushed_ - end_.send->Lent();
    for (; !lent_.empty() && lent_.front().end <= back; lent_.pop_front(), moved = true) {
      const ProxyPart& first = lent_.front().part;
      if (Last(first)) slots_.Grant(first.number);
      through_.fetch_add(1, std::memory_order_release);
    }
    return moved;
  }

  bool Push() {
    const ProxyPart m = queue_.front();
    const std::size_t at = done_.load(std::memory_order_relaxed);
    const std::ptrdiff_t n = end_.send->Push({m.signature, m.nbytes, true}, at, At(m) + at, m.nbytes - at);
    if (n == kWouldBlock) return false;
    pushed_ += static_cast<std::uint64_t>(n);
    if (Step(at + static_cast<std::size_t>(n))) lent_.push_back({m, pushed_});
    return true;
  }

  bool MoveIn() {
    if (queue_.empty()) return false;
    for (; announced_ < queue_.size() && Ours(queue_[announced_]); ++announced_) {
      const ProxyPart& next = queue_[announced_];
      end_.recv->Announce({next.signature, next.nbytes}, At(next));
    }
    const ProxyPart m = queue_.front();
    if (announced_ == 0) return false;
    const std::size_t at = done_.load(std::memory_order_relaxed);
    const std::ptrdiff_t n = end_.recv->Pull({m.signature, m.nbytes}, at, At(m) + at, m.nbytes - at, false);
    if (n == kWouldBlock) return false;
    if (Step(at + static_cast<std::size_t>(n))) {
      if (Last(m)) slots_.Publish(m.number);
      --announced_;
      through_.fetch_add(1, std::memory_order_release);
    }
    return true;
  }

  // The first message is moved up to here; whether that is its end, and then it is the first no more.
  bool Step(std::size_t done) {
    moves_.fetch_add(1, std::memory_order_relaxed);
    const bool ends = done == queue_.front().nbytes;
    done_.store(ends ? 0 : done, std::memory_order_relaxed);
    if (ends) queue_.pop_front();
    return ends;
  }

  int peer_;
  int channel_;
  Slots slots_;
  std::shared_ptr<PartsEnded> ended_;
  LinkEnds end_;  // one of the two
  bool ahead_;
  bool outgoing_ = end_.send != nullptr;
  bool left_ = false;
  bool offered_ = false;  // whether the first message was, when Move was called last
  std::deque<ProxyPart> queue_;
  std::size_t announced_ = 0;         // of these, to the link: coming in
  std::deque<Lent> lent_;             // pushed, but perhaps still read: going out
  std::uint64_t pushed_ = 0;          // bytes
  std::atomic<std::size_t> done_{0};  // bytes of the first
  std::atomic<std::uint64_t> posted_{0};
  std::atomic<std::uint64_t> through_{0};
  std::atomic<std::uint64_t> moves_{0};
};

}  // namespace hetcoll
